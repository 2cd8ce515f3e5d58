// The one parameter of every kernel, by value: the argument block with its param tensors and scalars.
#pragma once
#include <fajit/context.h>

namespace fajit::cuda {

template <int kTensors, int kScalars>
struct Params {
  fajit_args args;
  fajit_tensor tensors[kTensors > 0 ? kTensors : 1];
  uint64_t scalars[kScalars > 0 ? kScalars : 1];

  FAJIT_FN Context context() const { return Context(&args, tensors, scalars); }
};

}  // namespace fajit::cuda
