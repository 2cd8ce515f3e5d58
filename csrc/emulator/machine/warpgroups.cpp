#include "machine/warpgroups.h"

#include <algorithm>

#include "machine/machine.h"

namespace fajit::emulator {
namespace {

constexpr uint32_t kRegisters = 65536, kMostRegisters = 256;  // of a multiprocessor, of a thread

}  // namespace

void Block::reset_warpgroups() {
  warpgroups_.assign((warps_.size() + kGroupWarps - 1) / kGroupWarps, Warpgroup{});
  free_registers_ = 0;
  const size_t registers = kernel().uses.empty() ? 0 : kernel().register_words / kLanes;
  for (Warp& warp : warps_) {
    warp.products.reset(registers);
    warp.register_count =
        std::min(kRegisters / (num_threads_ * kernel().min_blocks) / 8 * 8, kMostRegisters);
  }
}

void Block::execute_together(Warp& warp, const GroupEvent& event) {
  const uint32_t first = warp.index / kGroupWarps * kGroupWarps;
  if (first + kGroupWarps > warps_.size() || warps_[first + kGroupWarps - 1].existing != kAllLanes)
    fault(
        warp, 0, "warpgroup",
        "the warpgroup is incomplete: the block has " + std::to_string(num_threads_) + " threads");
  Warpgroup& group = warpgroups_[warp.index / kGroupWarps];
  uint32_t& executed = group.executed[warp.index % kGroupWarps];
  if (executed == group.events.size()) {
    group.events.push_back(event);
  } else if (const GroupEvent& other = group.events[executed]; !(other == event)) {
    fault(warp, 0, "warpgroup",
          other.pc != event.pc
              ? "another warp of the warpgroup executed the " + kernel().mnemonics[other.pc] +
                    " at " + source_of(other.pc) + " instead"
              : "another warp of the warpgroup executed it with another descriptor or scale-d");
  }
  ++executed;
  const uint32_t* counts = group.executed;
  if (std::all_of(counts, counts + kGroupWarps, [&](uint32_t n) { return n == counts[0]; })) {
    std::fill_n(group.executed, kGroupWarps, 0u);
    group.events.clear();
  }
}

void Block::check_warpgroups_at_end() {
  for (uint32_t i = 0; i < warps_.size(); ++i) {
    const Warpgroup& group = warpgroups_[i / kGroupWarps];
    const uint32_t executed = group.executed[i % kGroupWarps];
    if (executed == group.events.size()) continue;
    warps_[i].current = group.events[executed].pc;
    fault(warps_[i], 0, "warpgroup",
          "warp " + std::to_string(i) +
              " ended without executing it, which another warp of the warpgroup did");
  }
}

// Products

void Block::fault_held(const Warp& warp, uint32_t serial, const std::string& access) const {
  const std::vector<Product>& products = warp.products.in_flight;
  const Product& product = products[serial - products.front().serial];
  fault(warp, 0, "in flight",
        access + " of the wgmma at " + source_of(product.pc) +
            ", which may still be running: a wait is missing");
}

void Block::check_registers(Warp& warp) {
  WarpProducts& products = warp.products;
  const std::vector<uint32_t>& ends = kernel().uses_end;
  for (uint32_t i = warp.current == 0 ? 0 : ends[warp.current - 1]; i < ends[warp.current]; ++i) {
    const bool writes = (kernel().uses[i] & kWriteUse) != 0;
    HeldRegister& held = products.held[(kernel().uses[i] & ~kWriteUse) / kLanes];
    if (held.accumulating != 0)
      fault_held(warp, held.accumulating,
                 writes ? "a write of an accumulator" : "a read of an accumulator");
    if (writes && held.reading != 0) fault_held(warp, held.reading, "a write of an A register");
    held.accessed = products.fences;
    held.pc = warp.current;
  }
}

void Block::hold_registers(Warp& warp, const Insn& insn, uint32_t serial) {
  WarpProducts& products = warp.products;
  const uint32_t* slots = kernel().lists.data() + insn.list;
  const uint32_t accumulators = insn.count * 4u;
  const uint32_t all = accumulators + (insn.slots[1] == kNoSlot ? 4 : 0);
  if (products.fences == 0)
    fault(warp, 0, "fence", "no wgmma.fence before the first wgmma of the warp");
  // Products with the same accumulators are performed in order; others may not share registers.
  const uint32_t before = products.held[slots[0] / kLanes].accumulating;
  bool chained = before != 0;
  if (chained) {
    const Product& last = products.in_flight[before - products.in_flight.front().serial];
    const Insn& other = kernel().code[last.pc];
    chained = other.count == insn.count &&
              std::equal(slots, slots + accumulators, kernel().lists.data() + other.list);
  }
  for (uint32_t i = 0; i < all; ++i) {
    HeldRegister& held = products.held[slots[i] / kLanes];
    const bool accumulates = i < accumulators;
    if (held.accumulating != 0 && !(accumulates && chained))
      fault_held(warp, held.accumulating, "a use by another wgmma of an accumulator");
    if (accumulates && held.reading != 0)
      fault_held(warp, held.reading, "a write by another wgmma of an A register");
    if (held.accessed == products.fences)
      fault(warp, 0, "fence",
            std::string(accumulates ? "an accumulator" : "an A register") + " was accessed at " +
                source_of(held.pc) + ", and no wgmma.fence has been executed since");
    (accumulates ? held.accumulating : held.reading) = serial;
  }
}

void Block::issue_product(Warp& warp, const Insn& insn, Product product, const uint32_t* chunks) {
  WarpProducts& products = warp.products;
  product.pc = warp.current;
  product.serial = ++products.issued;
  product.group = products.committed;
  hold_registers(warp, insn, product.serial);
  for (uint32_t i = 0; i < product.num_chunks; ++i) {
    shared_inside(warp, 0, chunks[i], kOperandChunk, "a read by wgmma");
    if (!track_) continue;
    const Conflict conflict =
        history_.begin_async_read(warp.index, warp.current, chunks[i], kOperandChunk);
    if (conflict.kind != Conflict::Kind::none) report(warp, 0, conflict, "a read by wgmma");
  }
  // A delay of up to 1,023 instructions, with short and long ones equally likely.
  const Completion completion = launch_.options.completion;
  if (completion == Completion::random) product.due = products.steps + (1u << draw(11)) - 1;
  products.in_flight.push_back(product);
  products.chunks.insert(products.chunks.end(), chunks, chunks + product.num_chunks);
  products.drawing = completion == Completion::random;
  if (completion == Completion::early) perform_products(warp, products.in_flight.size());
}

// Performs those that have not been, up to the first `count` of those in flight.
void Block::perform_products(Warp& warp, size_t count) {
  WarpProducts& products = warp.products;
  if (products.performed >= count) return;
  const uint32_t* chunks = products.chunks.data();
  for (size_t i = 0; i < count; chunks += products.in_flight[i++].num_chunks) {
    const Product& product = products.in_flight[i];
    if (i >= products.performed) product.perform(warp, kernel().code[product.pc], product, chunks);
  }
  products.performed = count;
  products.drawing = products.drawing && count < products.in_flight.size();
}

void Block::step_products(Warp& warp) {
  WarpProducts& products = warp.products;
  ++products.steps;
  size_t count = products.performed;
  while (count < products.in_flight.size() && products.in_flight[count].due < products.steps)
    ++count;
  perform_products(warp, count);
}

void Block::wait_products(Warp& warp, uint64_t pending) {
  WarpProducts& products = warp.products;
  auto& in_flight = products.in_flight;
  const auto covered = std::find_if(
      in_flight.begin(), in_flight.end(),
      [&](const Product& product) { return product.group + pending >= products.committed; });
  const size_t count = static_cast<size_t>(covered - in_flight.begin());
  if (count == 0) return;
  perform_products(warp, count);
  size_t num_chunks = 0;
  for (size_t i = 0; i < count; ++i) {
    const Product& product = in_flight[i];
    for (uint32_t j = 0; track_ && j < product.num_chunks; ++j)
      history_.end_async_read(warp.index, product.pc, products.chunks[num_chunks + j],
                              kOperandChunk);
    num_chunks += product.num_chunks;
    const Insn& insn = kernel().code[product.pc];
    const uint32_t* slots = kernel().lists.data() + insn.list;
    for (uint32_t j = 0; j < insn.count * 4u + (insn.slots[1] == kNoSlot ? 4 : 0); ++j) {
      HeldRegister& held = products.held[slots[j] / kLanes];
      if (held.accumulating == product.serial) held.accumulating = 0;
      if (held.reading == product.serial) held.reading = 0;
    }
  }
  in_flight.erase(in_flight.begin(), covered);
  products.chunks.erase(products.chunks.begin(),
                        products.chunks.begin() + static_cast<ptrdiff_t>(num_chunks));
  products.performed -= count;
}

// Register counts

bool Block::set_register_count(Warp& warp, const Insn& insn) {
  const uint32_t count = static_cast<uint32_t>(insn.immediate);
  const bool increases = insn.mode != 0;
  if (increases ? count < warp.register_count : count > warp.register_count)
    fault(warp, 0, "registers",
          "to " + std::to_string(count) + " registers a thread, which has " +
              std::to_string(warp.register_count));
  const uint32_t change = increases ? count - warp.register_count : warp.register_count - count;
  if (increases && change * kLanes > free_registers_) return false;
  execute_together(warp, {warp.current});
  free_registers_ += (increases ? 0 - change : change) * kLanes;
  warp.register_count = count;
  if (increases) return true;
  for (Warp& other : warps_) {  // those that wait for registers try again
    for (int lane = 0; lane < kLanes; ++lane) {
      if (other.wait[lane] != Wait::registers) continue;
      other.wait[lane] = Wait::none;
      other.blocked &= ~(1u << lane);
    }
  }
  return true;
}

}  // namespace fajit::emulator
