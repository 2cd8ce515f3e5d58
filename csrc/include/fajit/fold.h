// A reduction of a hook's short vector as a loop, whose body stays in the code three times at most.
#pragma once
#include <fajit/function.h>

namespace fajit {
namespace ops {

// f(0) joined with f(1), ..., f(N - 1), from left to right. Two entries are read at a time: four
// took twice the time to compile, and kernels hold one loop for every score of a thread.
template <int N, class Join, class F> FAJIT_FN auto fold(Join join, F f) {
  constexpr int kAhead = 1 + (N - 1) % 2;
  auto total = f(0);
  for (int i = 1; i < kAhead; ++i) total = join(total, f(i));
  FAJIT_ROLLED
  for (int i = kAhead; i < N; i += 2) total = join(join(total, f(i)), f(i + 1));
  return total;
}

}  // namespace ops
}  // namespace fajit
