// What a hook may read besides its indices: params, lengths, packed positions.
#pragma once
#include <fajit/abi.h>

namespace fajit {

struct Context {
  const fajit_args* args;

  const fajit_tensor& tensor(int slot) const { return args->tensors[slot]; }

  // First element of a param tensor, typed by the caller: T is the storage dtype's C++ type.
  template <class T>
  const T* data(int slot) const {
    return static_cast<const T*>(args->tensors[slot].ptr);
  }
  int64_t size(int slot, int dim) const { return args->tensors[slot].sizes[dim]; }
  int64_t stride(int slot, int dim) const { return args->tensors[slot].strides[dim]; }

  int64_t scalar_i64(int slot) const { return static_cast<int64_t>(args->scalars[slot]); }
  double scalar_f64(int slot) const { return __builtin_bit_cast(double, args->scalars[slot]); }

  int32_t q_len(int32_t b) const { return args->q_len[b]; }
  int32_t kv_len(int32_t b) const { return args->kv_len[b]; }
  // Row of the packed q (fa.q_row) and physical slot of a key (fa.kv_slot).
  int64_t q_row(int32_t b, int64_t q_idx) const {
    return args->q_token0[b] + (q_idx - args->q_offset[b]);
  }
  int64_t kv_slot(int32_t b, int64_t kv_idx) const { return args->kv_token0[b] + kv_idx; }

  int32_t group_size() const { return args->num_q_heads / args->num_kv_heads; }
};

}  // namespace fajit
