// The online softmax of the rows that a thread holds, in three parts: raise the base, rescale what
// was accumulated, weigh the scores. See `ThreadRows` for the rows.
#pragma once
#include <fajit/cuda/common/units.h>
#include <fajit/cuda/ptx/warp.h>
#include <fajit/types.h>

namespace fajit::cuda {

// Running base and sum of a thread's rows. The base is in the scores' units and the same in the
// four lanes that share a row; the sum is this lane's part until `finish`.
//
// The base is raised to the row's maximum only when that exceeds it by more than kSlack in base-2
// units: weights up to 2^8 are as exact as weights up to 1, and after the first tiles the
// accumulators are hardly ever rescaled, which costs a multiplication for each of them.
//
// A weight is 2^(s * exponent - base * exponent), where the product with the base is rounded. From
// `Units::far` on, 2^16 in base-2 units, that error exceeds 2^-9 of a weight, and from 2^29 on
// weights may overflow.
// kFar: there the base is subtracted from the scores before, in the branch that rescales. Kernels
// with a score_mod do so: it may return scores like -1e9, of keys to hide.
template <int kM, bool kFar>
struct OnlineSoftmax {
  static constexpr float kSlack = 8.0f;
  struct WholeRows {};  // a warp has all scores of its rows
  float top[2 * kM], sum[2 * kM];

  FAJIT_DEV OnlineSoftmax() {
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) {
      top[i] = -FAJIT_INF;
      sum[i] = 0.0f;
    }
  }

  // Turns scores into weights in place; rescales the accumulators where the base changes.
  // kShifted: the scores of row i lack shift[i], which differs between the lanes of a row.
  // join(best): where warps share rows, makes the maxima of a warp's scores those of all.
  template <bool kShifted, int kN, int kD, class Join = WholeRows>
  FAJIT_DEV void step(float (&s)[kM][kN][4], const float (&shift)[2 * kM], float (&o)[kM][kD][4],
                      const Units& units, Join join = {}) {
    static_assert(kFar || !kShifted, "shifts are terms of a score_mod");
    float best[2 * kM];
    if (raise<kShifted>(s, shift, best, units, join)) {
      rescale(best, o, units);
      if constexpr (kFar) subtract_far<kShifted>(s, shift, units);
    }
    weigh<kShifted>(s, shift, units);
  }

  // step() while a product that adds to the accumulators is in flight: returns whether they are to
  // be multiplied by `factor` after it.
  template <bool kShifted, int kN>
  FAJIT_DEV bool step_ahead(float (&s)[kM][kN][4], const float (&shift)[2 * kM],
                            float (&factor)[2 * kM], const Units& units) {
    static_assert(kFar || !kShifted, "shifts are terms of a score_mod");
    float best[2 * kM];
    const bool moves = raise<kShifted>(s, shift, best, units);
    if (moves) {
      rebase(best, factor, units);
      if constexpr (kFar) subtract_far<kShifted>(s, shift, units);
    }
    weigh<kShifted>(s, shift, units);
    return moves;
  }

  // The base of each row after these scores; whether that of one of the warp's rows changes or is
  // far.
  template <bool kShifted, int kN, class Join = WholeRows>
  FAJIT_DEV bool raise(const float (&s)[kM][kN][4], [[maybe_unused]] const float (&shift)[2 * kM],
                       float (&best)[2 * kM], const Units& units,
                       [[maybe_unused]] Join join = {}) const {
    constexpr bool kJoins = !same<Join, WholeRows>;
    bool moves = false;
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) {
      const int m = i / 2, first = i % 2 * 2;
      best[i] = kShifted ? s[m][0][first] : top[i];
#pragma unroll
      for (int n = 0; n < kN; ++n)
        best[i] = fmaxf(best[i], fmaxf(s[m][n][first], s[m][n][first + 1]));
      if constexpr (kShifted) best[i] += shift[i];
      best[i] = ptx::quad_max(best[i]);
      // At the first key of a row the difference to -inf is infinite. Without a key it is NaN:
      // false.
      if constexpr (!kJoins) {
        const bool grown = (best[i] - top[i]) * units.exponent > kSlack;
        if (!grown) best[i] = top[i];
        moves = moves || grown || (kFar && is_far(best[i], units));
      }
    }
    if constexpr (kJoins) {
      join(best);
#pragma unroll
      for (int i = 0; i < 2 * kM; ++i) {  // a function for both changes other kernels' code
        const bool grown = (best[i] - top[i]) * units.exponent > kSlack;
        if (!grown) best[i] = top[i];
        moves = moves || grown || (kFar && is_far(best[i], units));
      }
    }
    return __any_sync(ptx::kAllLanes, moves);
  }

  // Changes the bases, and the sums and accumulators with them.
  template <int kD>
  FAJIT_DEV void rescale(const float (&best)[2 * kM], float (&o)[kM][kD][4], const Units& units) {
    float factor[2 * kM];
    rebase(best, factor, units);
    multiply(o, factor);
  }
  // Changes the bases and the sums; factor: what the accumulators are to be multiplied by.
  FAJIT_DEV void rebase(const float (&best)[2 * kM], float (&factor)[2 * kM], const Units& units) {
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) {
      factor[i] = best[i] == top[i] ? 1.0f : ptx::exp2_approx((top[i] - best[i]) * units.exponent);
      top[i] = best[i];
      sum[i] *= factor[i];
    }
  }
  template <int kD>
  static FAJIT_DEV void multiply(float (&o)[kM][kD][4], const float (&factor)[2 * kM]) {
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) {
#pragma unroll
      for (int d = 0; d < kD; ++d) {
        o[i / 2][d][i % 2 * 2] *= factor[i];
        o[i / 2][d][i % 2 * 2 + 1] *= factor[i];
      }
    }
  }

  // Makes the scores of rows whose base is far relative to it. A row without a key so far, whose
  // base is -inf, has scores of -inf.
  template <bool kShifted, int kN>
  FAJIT_DEV void subtract_far(float (&s)[kM][kN][4], [[maybe_unused]] const float (&shift)[2 * kM],
                              const Units& units) const {
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) {
      if (!is_far(top[i], units)) continue;
      const float base = top[i] == -FAJIT_INF ? 0.0f : top[i];  // -inf - -inf would be NaN
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int j = i % 2 * 2; j < i % 2 * 2 + 2; ++j) {
          float& x = s[i / 2][n][j];
          if constexpr (kShifted) x += shift[i];
          x -= base;
        }
      }
    }
  }

  // Turns scores into weights and adds them to the sums.
  template <bool kShifted, int kN>
  FAJIT_DEV void weigh(float (&s)[kM][kN][4], [[maybe_unused]] const float (&shift)[2 * kM],
                       const Units& units) {
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) {
      const int m = i / 2, first = i % 2 * 2;
      // A row without a key so far: any finite base makes its weights 0.
      const bool none = kFar ? is_far(top[i], units) : top[i] == -FAJIT_INF;
      const float base = none ? 0.0f : (kShifted ? top[i] - shift[i] : top[i]) * units.exponent;
      float total = 0.0f;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int j = first; j < first + 2; ++j) {
          s[m][n][j] = ptx::exp2_approx(fmaf(s[m][n][j], units.exponent, -base));
          total += s[m][n][j];
        }
      }
      sum[i] += total;
    }
  }

  // Adds up the parts of the four lanes of each row.
  FAJIT_DEV void finish() {
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) sum[i] = ptx::quad_sum(sum[i]);
  }

  // A base in base-2 units. kFar: beyond 2^127 it is that, so that an lse is finite.
  static FAJIT_DEV float in_base2(float base, const Units& units) {
    const float value = base * units.exponent;
    return kFar ? fminf(fmaxf(value, -0x1p127f), 0x1p127f) : value;
  }

 private:
  static FAJIT_DEV bool is_far(float top, const Units& units) { return fabsf(top) >= units.far; }
};

}  // namespace fajit::cuda
