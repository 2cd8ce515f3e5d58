// Context: what a hook may read besides its indices (params, lengths, packed positions).
#pragma once
#include <fajit/abi.h>
#include <fajit/function.h>

namespace fajit {

// Nothing that hooks read is written while a kernel runs, so loads use a GPU's read-only cache.
template <class T> FAJIT_FN T load_global(const T* p) {
#if defined(__CUDA_ARCH__)
  return __ldg(p);
#else
  return *p;
#endif
}
#if defined(__CUDACC__)
// `long` is not among __ldg's 64-bit types everywhere.
FAJIT_FN int64_t load_global(const int64_t* p) {
#if defined(__CUDA_ARCH__)
  return __ldg(reinterpret_cast<const long long*>(p));
#else
  return *p;
#endif
}
#endif

struct PairSquares;  // cpu/hooks/pair_squares.h

struct Context {
  const fajit_args* args = nullptr;
  // Not read through args: a CUDA kernel has them among its parameters.
  const fajit_tensor* tensors = nullptr;
  const uint64_t* scalars = nullptr;
  // CUDA: a Hooks::Uniforms, which holds what the variant's hooks compute from scalars alone.
  const void* uniforms = nullptr;
  // Where rows of several requests share keys: the request whose storage holds these keys. Negative
  // where each row reads the keys of its own request.
  int32_t kv_request = -1;
#if !defined(__CUDACC__)
  // Where hooks keep what they have read of params of rows and keys; null where each pair is read.
  PairSquares* squares = nullptr;
#endif

  Context() = default;
  FAJIT_FN explicit Context(const fajit_args* a)
      : args(a), tensors(a->tensors), scalars(a->scalars) {}
  FAJIT_FN Context(const fajit_args* a, const fajit_tensor* t, const uint64_t* s,
                   const void* u = nullptr)
      : args(a), tensors(t), scalars(s), uniforms(u) {}

  FAJIT_FN const fajit_tensor& tensor(int slot) const { return tensors[slot]; }
  FAJIT_FN int64_t size(int slot, int dim) const { return tensors[slot].sizes[dim]; }

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

  FAJIT_FN int32_t group_size() const { return args->num_q_heads / args->num_kv_heads; }
};

}  // namespace fajit
