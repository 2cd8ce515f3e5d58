// mma, ldmatrix: instructions of the whole warp.
//
// Fragments, with g = lane / 4 and t = lane % 4 (PTX ISA, "Matrix fragments for mma"):
//   A 16 x 16: word i holds row g + 8 * (i & 1), columns 2t, 2t + 1 (+ 8 where i & 2)
//   A 16 x 8:  word i holds row g + 8 * i, columns 2t, 2t + 1
//   B  k x 8:  word i holds column g, rows 2t, 2t + 1 (+ 8 * i)
//   C 16 x 8:  value i is in row g + 8 * (i >> 1), column 2t + (i & 1)
//
// Products are exact in fp64, summed in fp64 in ascending k, and added to C; then rounded once to
// fp32.
#include "ops/host.h"
#include "ops/lanes.h"
#include "ptx/opcodes.h"

namespace fajit::emulator {
namespace {

float element(uint32_t word, int index, bool half) {
  const uint32_t bits = index != 0 ? word >> 16 : word & 0xffff;
  return half ? half_to_float(bits) : bf16_to_float(bits);
}

// d[16][8] = a[16][k] b[k][8] + c[16][8]
FAJIT_CLONES void multiply(const float (&a)[16][16], const float (&b)[16][8], float (&c)[16][8],
                           int k) {
  for (int row = 0; row < 16; ++row) {
    double sum[8] = {};
    for (int i = 0; i < k; ++i)
      for (int column = 0; column < 8; ++column)
        sum[column] += static_cast<double>(a[row][i]) * static_cast<double>(b[i][column]);
    for (int column = 0; column < 8; ++column)
      c[row][column] = static_cast<float>(sum[column] + static_cast<double>(c[row][column]));
  }
}

// list: the slots of D, A, B, C. mode: 1 for fp16 operands, 0 for bf16; count: k.
void multiply_accumulate(Warp& warp, const Insn& insn, uint32_t) {
  const uint32_t* list = warp.block->kernel().lists.data() + insn.list;
  const int k = insn.count, num_a = k / 4, num_b = k / 8;
  const bool half = insn.mode != 0;
  float a[16][16], b[16][8], c[16][8];
  for (int i = 0; i < num_a; ++i) {
    const uint32_t* words = warp.words(list[4 + i]);
    for (int l = 0; l < kLanes; ++l)
      for (int j = 0; j < 2; ++j)
        a[l / 4 + 8 * (i & 1)][2 * (l % 4) + 4 * (i & 2) + j] = element(words[l], j, half);
  }
  for (int i = 0; i < num_b; ++i) {
    const uint32_t* words = warp.words(list[4 + num_a + i]);
    for (int l = 0; l < kLanes; ++l)
      for (int j = 0; j < 2; ++j) b[2 * (l % 4) + 8 * i + j][l / 4] = element(words[l], j, half);
  }
  for (int i = 0; i < 4; ++i) {
    const uint32_t* words = warp.words(list[4 + num_a + num_b + i]);
    for (int l = 0; l < kLanes; ++l)
      c[l / 4 + 8 * (i >> 1)][2 * (l % 4) + (i & 1)] = bits_as<float>(words[l]);
  }
  multiply(a, b, c, k);
  for (int i = 0; i < 4; ++i) {
    uint32_t* words = warp.words(list[i]);
    for (int l = 0; l < kLanes; ++l)
      words[l] = bits_as<uint32_t>(canonical(c[l / 4 + 8 * (i >> 1)][2 * (l % 4) + (i & 1)]));
  }
}

// Lane 8 i + r holds the address of row r of matrix i; lane l receives elements 2 (l % 4), + 1 of
// row l / 4, or, transposed, column l / 4 of rows 2 (l % 4), + 1.
void load_matrices(Warp& warp, const Insn& insn, uint32_t) {
  Block& block = *warp.block;
  const uint32_t* list = block.kernel().lists.data() + insn.list;
  uint16_t rows[4][8][8];
  for (int i = 0; i < insn.count; ++i)
    for (int r = 0; r < 8; ++r) {
      const int lane = 8 * i + r;
      const uint64_t address = address_of(warp, insn, 1, lane);
      const uint8_t* from =
          block.shared_row(warp, lane, block.shared_offset(warp, lane, insn.space, address), 16);
      std::memcpy(rows[i][r], from, 16);
    }
  for (int i = 0; i < insn.count; ++i) {
    uint32_t* words = warp.words(list[i]);
    for (int l = 0; l < kLanes; ++l) {
      const int r = l / 4, c = 2 * (l % 4);
      words[l] = insn.mode == 0 ? rows[i][r][c] | static_cast<uint32_t>(rows[i][r][c + 1]) << 16
                                : rows[i][c][r] | static_cast<uint32_t>(rows[i][c + 1][r]) << 16;
    }
  }
}

void collective(Decoder& d) {
  if (!d.accept("sync") || !d.accept("aligned")) d.fail("expected .sync.aligned");
  d.insn.flow = Flow::rendezvous;
  d.insn.flags |= kCollective;
}

}  // namespace

void decode_mma(Decoder& d) {
  collective(d);
  const size_t k = d.expect_one({"m16n8k16", "m16n8k8"}) == 0 ? 16 : 8;
  if (!d.accept("row") || !d.accept("col")) d.fail("expected .row.col");
  const Type result = d.type(), a = d.type(), b = d.type(), accumulator = d.type();
  if (result != Type::f32 || accumulator != Type::f32 || a != b ||
      (a != Type::f16 && a != Type::bf16))
    d.fail("A and B must both be f16 or bf16, C and D f32");
  d.expect_operands(4);
  const size_t sizes[4] = {4, k / 4, k / 8, 4};
  std::vector<uint32_t> slots;
  for (size_t i = 0; i < 4; ++i) {
    const Operand& operand = d.operand(i);
    const bool vector = operand.kind == Operand::Kind::vector;
    const std::vector<Operand> elements = vector ? operand.elements : std::vector{operand};
    if (elements.size() != sizes[i])
      d.fail("operand " + std::to_string(i) + " has " + std::to_string(elements.size()) +
             " registers, not " + std::to_string(sizes[i]));
    for (const Operand& element : elements)
      slots.push_back(i == 0 ? d.destination(element, Type::f32)
                             : d.source(element, i == 3 ? Type::f32 : Type::b32));
  }
  d.insn.list = d.add_list(slots);
  d.insn.mode = a == Type::f16;
  d.insn.count = static_cast<uint8_t>(k);
  d.insn.exec = multiply_accumulate;
}

void decode_ldmatrix(Decoder& d) {
  collective(d);
  if (!d.accept("m8n8")) d.fail("expected .m8n8");
  const int count = d.expect_one({"x1", "x2", "x4"});
  d.insn.count = static_cast<uint8_t>(1 << count);
  d.insn.mode = d.accept("trans");
  d.insn.space = d.accept_one({"shared", "shared::cta"}) >= 0 ? Space::shared : Space::generic;
  if (d.type() != Type::b16) d.fail("expected .b16");
  d.expect_operands(2);
  std::vector<Operand> elements = d.operand(0).elements;
  if (d.operand(0).kind != Operand::Kind::vector) elements = {d.operand(0)};
  if (elements.size() != d.insn.count) d.fail("has another number of registers");
  std::vector<uint32_t> slots;
  for (const Operand& element : elements) slots.push_back(d.destination(element, Type::b32));
  d.insn.list = d.add_list(slots);
  d.address(1, 1);
  d.insn.exec = load_matrices;
}

}  // namespace fajit::emulator
