// Merges the states of disjoint key sets, row by row; for CPUs see csrc/runtime/merge_states.cpp.
//
//   lse = log(sum_i e^lse_i),  out = sum_i e^(lse_i - lse) out_i;  out = sum_i out_i where lse is
//   null.
//
// One warp per row, states in order, so that the result is deterministic. The out of a state whose
// lse is -inf is not read and may have any contents. A row that the mask excludes gets the first
// state as it is. out and lse may be the first state's own: each lane writes the entries that it
// has read.
//
// Arguments: `tensors` are the states' outs [d0, d1, d2, head_dim_v], then their lses [d0, d1, d2]
// with FAJIT_WRITE_LSE, then the mask [d0, d1, d2] of bytes, whose address is 0 if all rows are
// merged. The scalar is a Dtype, that of out. The strides of out and lse are those of d0, d1, d2.
#pragma once
#include <fajit/cuda/ptx/warp.h>
#include <fajit/cuda/tile/element.h>
#include <fajit/cuda/utility/entry.h>
#include <fajit/types.h>

namespace fajit::cuda {

struct MergeStates {
  static constexpr int kWarps = 4;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kMaxStates = 32;

  enum Dtype : int32_t { kFloat32, kBfloat16, kFloat16 };

  struct State {
    const float* out;
    const float* lse;
    int64_t out_stride[3], lse_stride[3];
  };
  struct Params {
    void* out;
    float* lse;
    const uint8_t* mask;
    int64_t out_stride[3], lse_stride[3], mask_stride[3];
    int32_t sizes[3];
    int32_t head_dim_v, num_states, num_rows, dtype;
    State states[kMaxStates];
  };

  static int fill(const fajit_args* a, Params& p, uint32_t& blocks) {
    const bool has_lse = (a->flags & FAJIT_WRITE_LSE) != 0;
    const int32_t tensors = a->num_tensors - 1;
    const int32_t count = has_lse ? tensors / 2 : tensors;
    if (count < 1 || count > kMaxStates || (has_lse && tensors != 2 * count) ||
        a->num_scalars != 1 || a->scalars[0] > kFloat16 || a->out == nullptr ||
        (has_lse && a->lse == nullptr))
      return FAJIT_BAD_ARGS;
    const fajit_tensor& mask = a->tensors[tensors];
    p.out = a->out;
    p.dtype = static_cast<int32_t>(a->scalars[0]);
    p.mask = static_cast<const uint8_t*>(mask.ptr);
    p.lse = has_lse ? a->lse : nullptr;
    int64_t rows = 1;
    for (int d = 0; d < 3; ++d) {
      p.sizes[d] = static_cast<int32_t>(a->tensors[0].sizes[d]);
      rows *= a->tensors[0].sizes[d];
      p.out_stride[d] = a->out_stride[d];
      p.lse_stride[d] = a->lse_stride[d];
      p.mask_stride[d] = mask.strides[d];
      for (int32_t i = 0; i < count; ++i) {
        p.states[i].out_stride[d] = a->tensors[i].strides[d];
        if (has_lse) p.states[i].lse_stride[d] = a->tensors[count + i].strides[d];
      }
    }
    if (rows > INT32_MAX) return FAJIT_BAD_ARGS;
    for (int32_t i = 0; i < count; ++i) {
      p.states[i].out = static_cast<const float*>(a->tensors[i].ptr);
      if (has_lse) p.states[i].lse = static_cast<const float*>(a->tensors[count + i].ptr);
    }
    p.head_dim_v = a->head_dim_v;
    p.num_states = count;
    p.num_rows = static_cast<int32_t>(rows);
    blocks = static_cast<uint32_t>((rows + kWarps - 1) / kWarps);
    return FAJIT_OK;
  }

  static FAJIT_DEV void run(const Params& p) {
    const int lane = ptx::lane_index();
    const int32_t row = static_cast<int32_t>(blockIdx.x) * kWarps + ptx::warp_index();
    if (row >= p.num_rows) return;
    const int32_t at[3] = {row / (p.sizes[1] * p.sizes[2]), row / p.sizes[2] % p.sizes[1],
                           row % p.sizes[2]};
    const int64_t out = offset(at, p.out_stride);
    const bool merged = p.mask == nullptr || p.mask[offset(at, p.mask_stride)] != 0;
    float* const merged_lse = p.lse + offset(at, p.lse_stride);
    if (!merged) {
      const State& first = p.states[0];
      const float* const in = first.out + offset(at, first.out_stride);
      for (int32_t d = lane; d < p.head_dim_v; d += 32) store(p, out + d, in[d]);
      if (lane == 0 && p.lse != nullptr) *merged_lse = first.lse[offset(at, first.lse_stride)];
      return;
    }
    if (p.lse == nullptr) {
      for (int32_t d = lane; d < p.head_dim_v; d += 32) {
        float sum = 0.0f;
        for (int32_t i = 0; i < p.num_states; ++i)
          sum += p.states[i].out[offset(at, p.states[i].out_stride) + d];
        store(p, out + d, sum);
      }
      return;
    }
    const float minus_inf = -__int_as_float(0x7f800000);
    float largest = minus_inf;
    for (int32_t i = 0; i < p.num_states; ++i) {
      const float lse = p.states[i].lse[offset(at, p.states[i].lse_stride)];
      if (!(lse <= largest)) largest = lse;  // keeps a NaN, which then reaches the result
    }
    if (largest == minus_inf) {
      for (int32_t d = lane; d < p.head_dim_v; d += 32) store(p, out + d, 0.0f);
      __syncwarp();
      if (lane == 0) *merged_lse = minus_inf;
      return;
    }
    float total = 0.0f;
    for (int32_t i = 0; i < p.num_states; ++i) {
      const float lse = p.states[i].lse[offset(at, p.states[i].lse_stride)];
      if (lse != minus_inf) total += ptx::exp2_approx((lse - largest) * kLog2e);
    }
    const float inverse = 1.0f / total;
    for (int32_t d = lane; d < p.head_dim_v; d += 32) {
      float sum = 0.0f;
      for (int32_t i = 0; i < p.num_states; ++i) {
        const float lse = p.states[i].lse[offset(at, p.states[i].lse_stride)];
        if (lse == minus_inf) continue;
        const float weight = ptx::exp2_approx((lse - largest) * kLog2e);
        sum += weight * p.states[i].out[offset(at, p.states[i].out_stride) + d];
      }
      store(p, out + d, sum * inverse);
    }
    __syncwarp();  // merged_lse may be the first state's, which all lanes read
    if (lane == 0) *merged_lse = largest + ptx::log2_approx(total) * kLn2;
  }

 private:
  static FAJIT_DEV void store(const Params& p, int64_t at, float x) {
    if (p.dtype == kFloat32) {
      static_cast<float*>(p.out)[at] = x;
    } else if (p.dtype == kFloat16) {
      static_cast<uint16_t*>(p.out)[at] = round_to<Float16>(x);
    } else {  // by integers: sm_75 has no conversion to bfloat16
      uint32_t bits;
      asm("mov.b32 %0, %1;" : "=r"(bits) : "f"(x));
      const uint32_t rounded = x == x ? bits + 0x7fff + (bits >> 16 & 1) : bits | 1u << 22;
      static_cast<uint16_t*>(p.out)[at] = static_cast<uint16_t>(rounded >> 16);
    }
  }

  static FAJIT_DEV int64_t offset(const int32_t (&at)[3], const int64_t (&stride)[3]) {
    return at[0] * stride[0] + at[1] * stride[1] + at[2] * stride[2];
  }
};

}  // namespace fajit::cuda
