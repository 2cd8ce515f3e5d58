// What a hook may read besides its indices: params, lengths, packed positions.
#pragma once
#include <fajit/abi.h>
#include <fajit/function.h>

namespace fajit {

struct Context {
  const fajit_args* args = nullptr;
  // Apart from args, because a CUDA kernel has them among its parameters.
  const fajit_tensor* tensors = nullptr;
  const uint64_t* scalars = nullptr;
  // CUDA: what the variant's hooks compute from scalars alone, a Hooks::Uniforms.
  const void* uniforms = nullptr;
  // Rows of several requests share the keys of one: the request whose storage they lie in. Negative
  // where that is each row's own.
  int32_t kv_request = -1;

  Context() = default;
  FAJIT_FN explicit Context(const fajit_args* a) : args(a), tensors(a->tensors), scalars(a->scalars) {}
  FAJIT_FN Context(const fajit_args* a, const fajit_tensor* t, const uint64_t* s,
                   const void* u = nullptr)
      : args(a), tensors(t), scalars(s), uniforms(u) {}

  FAJIT_FN const fajit_tensor& tensor(int slot) const { return tensors[slot]; }

  // First element of a param tensor, typed by the caller: T is the storage dtype's C++ type.
  template <class T>
  FAJIT_FN const T* data(int slot) const {
    return static_cast<const T*>(tensors[slot].ptr);
  }
  FAJIT_FN int64_t size(int slot, int dim) const { return tensors[slot].sizes[dim]; }
  FAJIT_FN int64_t stride(int slot, int dim) const { return tensors[slot].strides[dim]; }

  template <class Uniforms>
  FAJIT_FN const Uniforms& uniform() const {
    return *static_cast<const Uniforms*>(uniforms);
  }

  FAJIT_FN int64_t scalar_i64(int slot) const { return static_cast<int64_t>(scalars[slot]); }
  FAJIT_FN double scalar_f64(int slot) const {
    double value;
    __builtin_memcpy(&value, &scalars[slot], sizeof(value));
    return value;
  }

  FAJIT_FN int32_t q_len(int32_t b) const { return args->q_len[b]; }
  FAJIT_FN int32_t kv_len(int32_t b) const { return args->kv_len[b]; }
  // Row of the packed q (fa.q_row) and physical slot of a key (fa.kv_slot).
  FAJIT_FN int64_t q_row(int32_t b, int64_t q_idx) const {
    return args->q_token0[b] + (q_idx - args->q_offset[b]);
  }
  FAJIT_FN int64_t kv_slot(int32_t b, int64_t kv_idx) const { return args->kv_token0[b] + kv_idx; }

  FAJIT_FN int32_t group_size() const { return args->num_q_heads / args->num_kv_heads; }
};

}  // namespace fajit
