// wgmma: asynchronous products of a warpgroup; setmaxnreg.
//
// A wgmma multiplies 64 x 16 by 16 x n; each warp of the warpgroup computes 16 rows.
#include "ops/asynchronous/descriptor.h"
#include "ops/host.h"
#include "ops/products.h"
#include "ptx/opcodes.h"

namespace fajit::emulator {
namespace {

constexpr int kMostColumns = 256;

enum ProductMode : uint8_t { kHalf = 1, kTransposedA = 2, kTransposedB = 4, kNegative = 8 };

// Calls put(row, column, value) for the elements of an operand with so many rows. Returns the end
// of its chunks.
template <class Put>
const uint32_t* gather_operand(const uint8_t* shared, const uint32_t* chunks, int rows,
                               bool mn_major, bool half, Put put) {
  const int along = mn_major ? rows / 8 : 2;  // chunks of a column, or of a row
  for (int i = 0; i < 2 * rows; ++i) {
    uint16_t bits[8];
    float values[8];
    std::memcpy(bits, shared + chunks[i], kOperandChunk);
    for (int j = 0; j < 8; ++j) values[j] = to_element(bits[j], half);
    const int major = i / along, minor = i % along * 8;
    for (int j = 0; j < 8; ++j)
      put(mn_major ? minor + j : major, mn_major ? major : minor + j, values[j]);
  }
  return chunks + 2 * rows;
}

// list: the slots of D and, if they are in registers, of A.
FAJIT_CLONES void perform_wgmma(Warp& warp, const Insn& insn, const Product& product) {
  const uint32_t* list = warp.block->kernel().lists.data() + insn.list;
  const uint8_t* shared = warp.block->shared_memory();
  const uint32_t* chunks = product.chunks.data();
  const int n = 8 * insn.count;
  const bool half = (insn.mode & kHalf) != 0;
  float a[16][16], b[16][kMostColumns], c[16][kMostColumns];
  if (insn.slots[1] == kNoSlot) read_a(warp, list + n / 2, 4, half, a);
  else
    chunks = gather_operand(shared, chunks, 16, (insn.mode & kTransposedA) != 0, half,
                            [&](int row, int column, float value) { a[row][column] = value; });
  gather_operand(shared, chunks, n, (insn.mode & kTransposedB) != 0, half,
                 [&](int row, int column, float value) { b[column][row] = value; });
  if ((insn.mode & kNegative) != 0)
    for (auto& row : a)
      for (float& value : row) value = -value;
  if (product.accumulate) move_c<true>(warp, list, n / 2, c);
  else std::memset(c, 0, sizeof c);
  multiply_rows(a, b, c, n, 16);
  move_c<false>(warp, list, n / 2, c);
}

uint64_t descriptor_of(const Warp& warp, uint32_t slot, const char* name, bool mn_major,
                       uint32_t rows) {
  const uint64_t* bits = warp.longs(slot);
  for (int l = 1; l < kLanes; ++l)
    if (bits[l] != bits[0])
      warp.block->fault(warp, l, "warpgroup",
                        std::string("the lanes have different descriptors of ") + name);
  const std::string problem = descriptor_problem(bits[0], mn_major, rows);
  if (!problem.empty())
    warp.block->fault(warp, 0, "descriptor", std::string("of ") + name + ": " + problem);
  return bits[0];
}

// slots: none, the descriptors of A (or none) and B, scale-d; immediate: scale-d is negated.
void issue_wgmma(Warp& warp, const Insn& insn, uint32_t) {
  const uint32_t n = 8u * insn.count, row = warp.index % kGroupWarps * 16;
  const bool mn_major_a = (insn.mode & kTransposedA) != 0;
  const bool mn_major_b = (insn.mode & kTransposedB) != 0;
  const uint32_t scale = warp.predicate(insn.slots[3]) ^ (insn.immediate != 0 ? kAllLanes : 0);
  if (scale != 0 && scale != kAllLanes)
    warp.block->fault(warp, 0, "warpgroup", "the lanes have different values of scale-d");
  Product product;
  uint64_t a = 0;
  if (insn.slots[1] != kNoSlot) {
    a = descriptor_of(warp, insn.slots[1], "A", mn_major_a, 64);
    MatrixDescriptor(a, mn_major_a).add_chunks(row, row + 16, product.chunks);
  }
  const uint64_t b = descriptor_of(warp, insn.slots[2], "B", mn_major_b, n);
  MatrixDescriptor(b, mn_major_b).add_chunks(0, n, product.chunks);
  warp.block->execute_together(warp, {warp.current, scale != 0, a, b});
  product.perform = perform_wgmma;
  product.accumulate = scale != 0;
  warp.block->issue_product(warp, insn, std::move(product));
}

enum Control : uint8_t { kFence, kCommit, kWait };

void control_wgmma(Warp& warp, const Insn& insn, uint32_t) {
  warp.block->execute_together(warp, {warp.current, false, 0, 0});
  switch (insn.mode) {
    case kFence: ++warp.products.fences; break;
    case kCommit: ++warp.products.committed; break;
    default: warp.block->wait_products(warp, static_cast<uint64_t>(insn.immediate));
  }
}

void decode_product(Decoder& d) {
  int n = 8;
  while (n <= kMostColumns && !d.accept("m64n" + std::to_string(n) + "k16")) n += 8;
  if (n > kMostColumns) d.fail("expected a shape m64nNk16, N from 8 to 256 in steps of 8");
  d.insn.count = static_cast<uint8_t>(n / 8);
  d.insn.flags |= kProduct;
  const Type result = d.type(), a = d.type(), b = d.type();
  if (result != Type::f32 || a != b || (a != Type::f16 && a != Type::bf16))
    d.fail("A and B must both be f16 or bf16, D f32");
  const bool in_registers = d.operand(1).kind == Operand::Kind::vector;
  d.expect_operands(in_registers ? 7 : 8);
  std::vector<uint32_t> slots;
  d.add_registers(0, d.insn.count * 4u, Type::f32, true, slots);
  if (in_registers) d.add_registers(1, 4, Type::b32, false, slots);
  else d.insn.slots[1] = d.source(1, Type::b64);
  for (size_t i = 0; i < slots.size(); ++i)
    for (size_t j = 0; j < i && j < d.insn.count * 4u; ++j)
      if (slots[i] == slots[j]) d.fail("an accumulator is named twice");
  d.insn.list = d.add_list(slots);
  d.insn.slots[2] = d.source(2, Type::b64);
  d.insn.slots[3] = d.source(3, Type::pred);
  d.insn.immediate = d.operand(3).negated;
  uint8_t mode = a == Type::f16 ? kHalf : 0;
  const int64_t sign = d.literal(4, -1, 1) * d.literal(5, -1, 1);
  if (sign == 0) d.fail("the factor of A or of B is not 1 or -1");
  if (sign < 0) mode |= kNegative;
  if (!in_registers && d.literal(6, 0, 1) != 0) mode |= kTransposedA;
  if (d.literal(d.num_operands() - 1, 0, 1) != 0) mode |= kTransposedB;
  d.insn.mode = mode;
  d.insn.exec = issue_wgmma;
}

}  // namespace

void decode_wgmma(Decoder& d) {
  d.require_target(80, 90, true);
  decode_collective(d);
  if (d.accept("mma_async")) return decode_product(d);
  d.insn.mode = static_cast<uint8_t>(d.expect_one({"fence", "commit_group", "wait_group"}));
  d.expect_operands(d.insn.mode == kWait ? 1 : 0);
  if (d.insn.mode == kWait) d.insn.immediate = d.literal(0, 0, INT32_MAX);
  d.insn.exec = control_wgmma;
}

// The scheduler executes it. mode: 1 for .inc; immediate: the number of registers.
void decode_setmaxnreg(Decoder& d) {
  d.require_target(80, 90, true);
  decode_collective(d);
  d.insn.mode = static_cast<uint8_t>(d.expect_one({"dec", "inc"}));
  if (d.type() != Type::u32) d.fail("expected .u32");
  d.expect_operands(1);
  d.insn.immediate = d.literal(0, 24, 256);
  if (d.insn.immediate % 8 != 0) d.fail("the number of registers is not a multiple of 8");
  d.insn.flow = Flow::registers;
}

}  // namespace fajit::emulator
