// The one parameter of every kernel, by value: the argument block with its param tensors and
// scalars.
#pragma once
#include <fajit/context.h>
#include <fajit/cuda/common/key_rows.h>
#include <fajit/cuda/common/units.h>
#include <fajit/tensor_map.h>

namespace fajit::cuda {

// The tensor maps of K and V: (column, row, head, request or page).
struct KvMaps { fajit_tensor_map k, v; };

template <bool kTensorMaps>
struct MapParams {};
template <>
struct MapParams<true> {
  alignas(64) KvMaps maps;
};

template <class Config, class Hooks>
struct Params : MapParams<Config::kTensorMaps> {
  fajit_args args;
  fajit_tensor tensors[Config::kTensors > 0 ? Config::kTensors : 1];
  uint64_t scalars[Config::kScalars > 0 ? Config::kScalars : 1];
  typename Hooks::Uniforms uniforms;  // what the hooks compute from scalars and the scale
  Units units;
  KeyDivisors divisors;

  FAJIT_FN Context context() const { return Context(&args, tensors, scalars, &uniforms); }
};

}  // namespace fajit::cuda
