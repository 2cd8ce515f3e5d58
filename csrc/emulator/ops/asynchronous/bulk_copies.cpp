// cp.async.bulk: copies of boxes of tensors (.tensor) and of runs of bytes, and their groups.
#include "ops/lanes.h"
#include "ptx/opcodes.h"

namespace fajit::emulator {
namespace {

enum BulkMode : uint8_t { kStore = 1, kTensor = 2 };

constexpr size_t kAddresses = 3;  // in the list: of shared memory, of the tensor map or bytes,
                                  // of the mbarrier; then coordinates

// slots: size or none, cache policy or none. count: the rank.
void copy_bulk(Warp& warp, const Insn& insn, uint32_t mask) {
  Block& block = *warp.block;
  const uint32_t* list = block.kernel().lists.data() + insn.list;
  auto address = [&](size_t i, int l) { return listed_address(warp, list + kListed * i, l); };
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    if (insn.slots[1] != kNoSlot) check_policy(warp, insn.slots[1], l);
    const uint32_t shared = block.shared_offset(warp, l, Space::shared, address(0, l));
    const uint64_t global = address(1, l);
    Box box;
    uint32_t align = 128;
    if ((insn.mode & kTensor) != 0) {
      box = block.tensor_box(warp, l, global, insn.count);
      for (uint32_t d = 0; d < insn.count; ++d)
        box.at[d] = static_cast<int32_t>(warp.words(list[kListed * kAddresses + d])[l]);
    } else {
      align = 16;
      box.base = global;
      box.sizes[0] = box.box[0] = warp.words(insn.slots[0])[l];
      if (box.box[0] % 16 != 0)
        block.fault(warp, l, "copy", "a copy of " + std::to_string(box.box[0]) + " bytes");
    }
    if (shared % align != 0 || box.base % 16 != 0)
      block.fault_at(warp, l, "misaligned", "a bulk copy",
                     shared % align != 0 ? kSharedWindow + shared : box.base);
    if ((insn.mode & kStore) != 0) block.issue_store(warp, l, box, shared);
    else
      block.issue_load(warp, l, box, shared,
                       block.shared_offset(warp, l, Space::shared, address(2, l)));
  }
}

void commit_stores(Warp& warp, const Insn&, uint32_t mask) {
  warp.block->commit_stores(warp, mask);
}
void wait_stores(Warp& warp, const Insn& insn, uint32_t mask) {
  warp.block->wait_stores(warp, mask, static_cast<uint32_t>(insn.immediate));
}

}  // namespace

void decode_bulk_copy(Decoder& d) {
  d.require_target(80, 90);
  if (const int form = d.accept_one({"commit_group", "wait_group"}); form >= 0) {
    if (form == 1) d.accept("read");  // the writes of a store complete with its reads
    d.expect_operands(form == 1 ? 1 : 0);
    if (form == 1) d.insn.immediate = d.literal(0, 0, INT32_MAX);
    d.insn.exec = form == 0 ? commit_stores : wait_stores;
    return;
  }
  const bool tensor = d.accept("tensor");
  if (tensor) {
    d.insn.count = static_cast<uint8_t>(1 + d.expect_one({"1d", "2d", "3d", "4d", "5d"}));
    d.accept("tile");
  }
  const bool store = d.accept("bulk_group");
  if (!store && !d.accept("mbarrier::complete_tx::bytes"))
    d.fail("a copy completes an mbarrier or is of a .bulk_group");
  if (d.accept_one({"shared::cta", "shared::cluster"}) < 0 || !d.accept("global"))
    d.fail("copies are between global and shared memory");
  const bool policy = d.accept("L2::cache_hint");
  d.expect_operands((tensor ? 2 : 3) + (store ? 0 : 1) + (policy ? 1 : 0));
  const Operand& outside = d.operand(store ? 0 : 1);
  std::vector<uint32_t> list;
  d.list_address(d.operand(store ? 1 : 0), list);
  d.list_address(outside, list);
  d.list_address(d.operand(store ? 0 : tensor ? 2 : 3), list);
  const size_t coordinates = outside.elements.size() < 2 ? 0 : outside.elements[1].elements.size();
  if (coordinates != (tensor ? d.insn.count : 0u)) d.fail("has another number of coordinates");
  for (size_t i = 0; i < coordinates; ++i)
    list.push_back(d.source(outside.elements[1].elements[i], Type::s32));
  if (!tensor) d.insn.slots[0] = d.source(2, Type::u32);
  if (policy) d.insn.slots[1] = d.source(d.num_operands() - 1, Type::b64);
  d.insn.mode = static_cast<uint8_t>((store ? kStore : 0) | (tensor ? kTensor : 0));
  d.insn.list = d.add_list(list);
  d.insn.exec = copy_bulk;
}

}  // namespace fajit::emulator
