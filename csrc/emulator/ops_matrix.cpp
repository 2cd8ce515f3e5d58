// mma, ldmatrix, movmatrix: instructions of the whole warp.
//
// Fragments, with g = lane / 4 and t = lane % 4 (PTX ISA, "Matrix fragments for mma"):
//   A 16 x 16: word i holds row g + 8 * (i & 1), columns 2t, 2t + 1 (+ 8 where i & 2)
//   A 16 x 8:  word i holds row g + 8 * i, columns 2t, 2t + 1
//   B  k x 8:  word i holds column g, rows 2t, 2t + 1 (+ 8 * i)
//   C 16 x 8:  value i lies in row g + 8 * (i >> 1), column 2t + (i & 1)
// tf32 elements are one word each: A (i & 1 ? row g + 8 : g, column t + (i & 2 ? 4 : 0)), B row t + 4i.
//
// Products are exact in fp64, summed there in ascending k, and added to C; one rounding to fp32 ends it.
#include "clones.h"
#include "lanes.h"
#include "ops.h"

namespace fajit::emulator {
namespace {

enum Element : uint8_t { kHalf, kBf16, kTf32 };

float element(uint32_t word, int index, uint8_t kind) {
  if (kind == kTf32) return bits_as<float>(word & 0xffffe000u);
  const uint32_t bits = index != 0 ? word >> 16 : word & 0xffff;
  return kind == kHalf ? half_to_float(bits) : bf16_to_float(bits);
}

// d[16][8] = a[16][k] b[k][8] + c[16][8]
FAJIT_CLONES void multiply(const float (&a)[16][16], const float (&b)[16][8], float (&c)[16][8], int k) {
  for (int row = 0; row < 16; ++row) {
    double sum[8] = {};
    for (int i = 0; i < k; ++i)
      for (int column = 0; column < 8; ++column)
        sum[column] += static_cast<double>(a[row][i]) * static_cast<double>(b[i][column]);
    for (int column = 0; column < 8; ++column)
      c[row][column] = static_cast<float>(sum[column] + static_cast<double>(c[row][column]));
  }
}

// lists: D, A, B, C words in turn. mode: element kind; count: k; immediate: 1 if C and D are fp16.
void multiply_accumulate(Warp& warp, const Insn& insn, uint32_t) {
  const uint32_t* list = warp.block->kernel().lists.data() + insn.list;
  const int k = insn.count;
  const bool half = insn.immediate != 0, tf32 = insn.mode == kTf32;
  const int num_a = tf32 ? k / 2 : k / 4, num_b = tf32 ? k / 4 : k / 8, num_c = half ? 2 : 4;
  float a[16][16], b[16][8], c[16][8];
  for (int i = 0; i < num_a; ++i) {
    const uint32_t* words = warp.words(list[num_c + i]);
    for (int l = 0; l < kLanes; ++l) {
      const int g = l / 4, t = l % 4;
      if (tf32) {
        a[g + 8 * (i & 1)][t + (i & 2) * 2] = element(words[l], 0, insn.mode);
      } else {
        const int row = g + 8 * (i & 1), column = 2 * t + (i & 2) * 4;
        a[row][column] = element(words[l], 0, insn.mode);
        a[row][column + 1] = element(words[l], 1, insn.mode);
      }
    }
  }
  for (int i = 0; i < num_b; ++i) {
    const uint32_t* words = warp.words(list[num_c + num_a + i]);
    for (int l = 0; l < kLanes; ++l) {
      const int g = l / 4, t = l % 4;
      if (tf32) {
        b[t + 4 * i][g] = element(words[l], 0, insn.mode);
      } else {
        b[2 * t + 8 * i][g] = element(words[l], 0, insn.mode);
        b[2 * t + 8 * i + 1][g] = element(words[l], 1, insn.mode);
      }
    }
  }
  const uint32_t* sources = list + num_c + num_a + num_b;
  for (int i = 0; i < 4; ++i) {
    const uint32_t* words = warp.words(sources[half ? i / 2 : i]);
    for (int l = 0; l < kLanes; ++l)
      c[l / 4 + 8 * (i >> 1)][2 * (l % 4) + (i & 1)] =
          half ? element(words[l], i & 1, kHalf) : bits_as<float>(words[l]);
  }
  multiply(a, b, c, k);
  for (int i = 0; i < 4; ++i) {
    uint32_t* words = warp.words(list[half ? i / 2 : i]);
    for (int l = 0; l < kLanes; ++l) {
      const float value = c[l / 4 + 8 * (i >> 1)][2 * (l % 4) + (i & 1)];
      if (!half) {
        words[l] = value == value ? bits_as<uint32_t>(value) : 0x7fffffffu;
      } else if ((i & 1) == 0) {
        words[l] = float_to_half(value);
      } else {
        words[l] |= float_to_half(value) << 16;
      }
    }
  }
}

// Matrix i's row r lies where lane 8 i + r says; lane l receives elements 2 (l % 4), + 1 of row l / 4, or,
// transposed, column l / 4 of rows 2 (l % 4), + 1.
void load_matrices(Warp& warp, const Insn& insn, uint32_t) {
  Block& block = *warp.block;
  const uint32_t* list = block.kernel().lists.data() + insn.list;
  uint16_t rows[4][8][8];
  for (int i = 0; i < insn.count; ++i)
    for (int r = 0; r < 8; ++r) {
      const int lane = 8 * i + r;
      const uint64_t base = (insn.flags & kWideAddress) != 0 ? warp.longs(insn.slots[1])[lane]
                                                             : warp.words(insn.slots[1])[lane];
      const uint64_t address = base + static_cast<uint64_t>(insn.immediate);
      const bool generic = insn.space == Space::generic;
      if (generic && (address & kWindowMask) != kSharedWindow)
        block.fault_at(warp, lane, "out of bounds", "ldmatrix reads shared memory only", address);
      const uint8_t* from = block.shared_row(warp, lane, generic ? address - kSharedWindow : address, 16);
      std::memcpy(rows[i][r], from, 16);
    }
  for (int i = 0; i < insn.count; ++i) {
    uint32_t* words = warp.words(list[i]);
    for (int l = 0; l < kLanes; ++l) {
      const int r = l / 4, c = 2 * (l % 4);
      words[l] = insn.mode == 0
                     ? rows[i][r][c] | static_cast<uint32_t>(rows[i][r][c + 1]) << 16
                     : rows[i][c][r] | static_cast<uint32_t>(rows[i][c + 1][r]) << 16;
    }
  }
}

void transpose_matrix(Warp& warp, const Insn& insn, uint32_t) {
  uint32_t* d = warp.words(insn.slots[1]);
  const uint32_t* a = warp.words(insn.slots[2]);
  uint16_t matrix[8][8];
  for (int l = 0; l < kLanes; ++l) {
    matrix[l / 4][2 * (l % 4)] = static_cast<uint16_t>(a[l]);
    matrix[l / 4][2 * (l % 4) + 1] = static_cast<uint16_t>(a[l] >> 16);
  }
  for (int l = 0; l < kLanes; ++l)
    d[l] = matrix[2 * (l % 4)][l / 4] | static_cast<uint32_t>(matrix[2 * (l % 4) + 1][l / 4]) << 16;
}

void collective(Decoder& d) {
  if (!d.accept("sync") || !d.accept("aligned")) d.fail("expected .sync.aligned");
  d.insn.flow = Flow::rendezvous;
  d.insn.flags |= kCollective;
}

}  // namespace

void decode_mma(Decoder& d) {
  collective(d);
  const int shape = d.expect_one({"m16n8k16", "m16n8k8", "m16n8k4"});
  if (!d.accept("row") || !d.accept("col")) d.fail("expected .row.col");
  const Type result = d.type();
  uint8_t kind = kHalf;
  const bool tf32 = d.accept("tf32");
  if (tf32) {
    kind = kTf32;
    if (!d.accept("tf32")) d.fail("A and B have different types");
  } else {
    const Type a = d.type(), b = d.type();
    if (a != b || (a != Type::f16 && a != Type::bf16)) d.fail("A and B must both be f16 or bf16");
    kind = a == Type::f16 ? kHalf : kBf16;
  }
  const Type accumulator = d.type();
  if (result != accumulator || (result != Type::f32 && result != Type::f16))
    d.fail("C and D must both be f32 or f16");
  const int k = shape == 0 ? 16 : shape == 1 ? 8 : 4;
  if ((tf32 && k == 16) || (!tf32 && k == 4)) d.fail("no such shape for this type");
  const bool half = result == Type::f16;
  const size_t num_a = static_cast<size_t>(tf32 ? k / 2 : k / 4), num_b = static_cast<size_t>(tf32 ? k / 4 : k / 8);
  const size_t num_c = half ? 2 : 4;
  const size_t sizes[4] = {num_c, num_a, num_b, num_c};
  d.expect_operands(4);
  std::vector<uint32_t> slots;
  for (size_t i = 0; i < 4; ++i) {
    const Operand& vector = d.operand(i);
    std::vector<Operand> elements = vector.elements;
    if (vector.kind != Operand::Kind::vector) elements = {vector};
    if (elements.size() != sizes[i])
      d.fail("operand " + std::to_string(i) + " has " + std::to_string(elements.size()) + " registers, not " +
             std::to_string(sizes[i]));
    for (const Operand& element : elements)
      slots.push_back(i == 0 ? d.destination(element, Type::b32) : d.source(element, half || i == 1 || i == 2 ? Type::b32 : Type::f32));
  }
  d.insn.list = d.add_list(slots);
  d.insn.mode = kind;
  d.insn.count = static_cast<uint8_t>(k);
  d.insn.immediate = half;
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

void decode_movmatrix(Decoder& d) {
  collective(d);
  if (!d.accept("m8n8") || !d.accept("trans") || d.type() != Type::b16) d.fail("expected .m8n8.trans.b16");
  d.expect_operands(2);
  d.insn.slots[1] = d.destination(0, Type::b32);
  d.insn.slots[2] = d.source(1, Type::b32);
  d.insn.exec = transpose_matrix;
}

}  // namespace fajit::emulator
