// A reduction of a hook's short vector as a loop that is not unrolled: at most three copies of f.
#pragma once
#include <fajit/function.h>

namespace fajit {
namespace ops {

// Reduces f(0), ..., f(N - 1) from left to right. Two entries are read at a time: with four,
// compiling took twice as long, because kernels contain one loop for every score of a thread.
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
