// mma, ldmatrix, stmatrix: instructions of the whole warp.
#include "ops/host.h"
#include "ops/products.h"
#include "ptx/opcodes.h"

namespace fajit::emulator {
namespace {

// list: the slots of D, A, B, C. mode: 1 for fp16 operands, 0 for bf16; count: k.
// Word i of B's fragment holds column lane / 4, rows 2 (lane % 4), + 1 (+ 8 * i).
FAJIT_CLONES void multiply_accumulate(Warp& warp, const Insn& insn, uint32_t) {
  const uint32_t* list = warp.block->kernel().lists.data() + insn.list;
  const int k = insn.count, num_a = k / 4, num_b = k / 8;
  const bool half = insn.mode != 0;
  float a[16][16], b[16][8], c[16][8];
  read_a(warp, list + 4, num_a, half, a);
  for (int i = 0; i < num_b; ++i) {
    const uint32_t* words = warp.words(list[4 + num_a + i]);
    for (int l = 0; l < kLanes; ++l) {
      b[2 * (l % 4) + 8 * i][l / 4] = to_element(words[l] & 0xffff, half);
      b[2 * (l % 4) + 8 * i + 1][l / 4] = to_element(words[l] >> 16, half);
    }
  }
  move_c<true>(warp, list + 4 + num_a + num_b, 4, c);
  multiply_rows(a, b, c, 8, k);
  move_c<false>(warp, list, 4, c);
}

// Lane 8 i + r holds the address of row r of matrix i. Register i of lane l has elements 2 (l % 4),
// + 1 of row l / 4, or, transposed (mode), column l / 4 of rows 2 (l % 4), + 1. count: matrices;
// list: the slots.
template <bool kLoads> void move_matrices(Warp& warp, const Insn& insn, uint32_t) {
  Block& block = *warp.block;
  const uint32_t* list = block.kernel().lists.data() + insn.list;
  uint16_t rows[4][8][8];
  const auto for_rows = [&](auto body) {
    for (int i = 0; i < 8 * insn.count; ++i) {
      const uint64_t address = address_of(warp, insn, 1, i);
      body(rows[i / 8][i % 8],
           block.shared_at(warp, i, block.shared_offset(warp, i, insn.space, address), 16,
                           kLoads ? Access::read : Access::write, true));
    }
  };
  if (kLoads) for_rows([](uint16_t* row, const uint8_t* from) { std::memcpy(row, from, 16); });
  for (int i = 0; i < insn.count; ++i) {
    uint32_t* words = warp.words(list[i]);
    for (int l = 0; l < kLanes; ++l) {
      const int r = l / 4, c = 2 * (l % 4);
      uint16_t& low = insn.mode == 0 ? rows[i][r][c] : rows[i][c][r];
      uint16_t& high = insn.mode == 0 ? rows[i][r][c + 1] : rows[i][c + 1][r];
      if (kLoads) {
        words[l] = low | static_cast<uint32_t>(high) << 16;
      } else {
        low = static_cast<uint16_t>(words[l]);
        high = static_cast<uint16_t>(words[l] >> 16);
      }
    }
  }
  if (!kLoads) for_rows([](const uint16_t* row, uint8_t* to) { std::memcpy(to, row, 16); });
}

void decode_matrices(Decoder& d, bool is_load) {
  decode_collective(d);
  if (!d.accept("m8n8")) d.fail("expected .m8n8");
  const int count = d.expect_one({"x1", "x2", "x4"});
  d.insn.count = static_cast<uint8_t>(1 << count);
  d.insn.mode = d.accept("trans");
  d.insn.space = d.accept_one({"shared", "shared::cta"}) >= 0 ? Space::shared : Space::generic;
  if (d.type() != Type::b16) d.fail("expected .b16");
  d.expect_operands(2);
  std::vector<uint32_t> slots;
  d.add_registers(is_load ? 0 : 1, d.insn.count, Type::b32, is_load, slots);
  d.insn.list = d.add_list(slots);
  d.address(is_load ? 1 : 0, 1);
  d.insn.exec = is_load ? move_matrices<true> : move_matrices<false>;
}

}  // namespace

void decode_mma(Decoder& d) {
  decode_collective(d);
  const size_t k = d.expect_one({"m16n8k16", "m16n8k8"}) == 0 ? 16 : 8;
  if (!d.accept("row") || !d.accept("col")) d.fail("expected .row.col");
  const Type result = d.type(), a = d.type(), b = d.type(), accumulator = d.type();
  if (result != Type::f32 || accumulator != Type::f32 || a != b ||
      (a != Type::f16 && a != Type::bf16))
    d.fail("A and B must both be f16 or bf16, C and D f32");
  d.expect_operands(4);
  const size_t sizes[4] = {4, k / 4, k / 8, 4};
  std::vector<uint32_t> slots;
  for (size_t i = 0; i < 4; ++i)
    d.add_registers(i, sizes[i], i % 3 == 0 ? Type::f32 : Type::b32, i == 0, slots);
  d.insn.list = d.add_list(slots);
  d.insn.mode = a == Type::f16;
  d.insn.count = static_cast<uint8_t>(k);
  d.insn.exec = multiply_accumulate;
}

void decode_ldmatrix(Decoder& d) { decode_matrices(d, true); }

void decode_stmatrix(Decoder& d) {
  d.require_target(78, 90);
  decode_matrices(d, false);
}

}  // namespace fajit::emulator
