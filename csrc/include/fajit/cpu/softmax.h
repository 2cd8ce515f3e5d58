// Hooks, online softmax and weights of one vector of query rows over a tile of keys.
//
// Scores are s[key * stride + lane]. Two passes: the first applies hooks and the mask and finds the
// row maxima, the second turns scores into weights. Both process one column of kLanes rows, so
// hooks are instantiated twice (with and without the mask) for any width of the row block.
#pragma once
#include <fajit/context.h>
#include <fajit/cpu/microkernel.h>
#include <fajit/cpu/state.h>
#include <fajit/cpu/vector/fast_math.h>

namespace fajit {

// 2^x for x up to 8, -inf (gives 0) or NaN. Relative error, with rounding: fp32 1.8e-7;
// bf16 3.4e-6, a thousandth of its ulp. fp32 weights below 2^-100 are 0, so that their products
// with V are no denormal numbers, each of which takes 150 clocks: attention with a score that falls
// by 0.1 a key on both sides of the row took 7 times as long (fp32 products, AVX-512). Kernels of
// bf16 products hold `FlushDenormals`.
constexpr float kLeastExponent = -100.0f;
template <class Matrix>
FAJIT_INLINE vf weight_exp2(vf x) {
#if FAJIT_AVX == 512
  // vscalefps rounds the exponent down, so the polynomials are those of [0, 1). That of bf16 is 2
  // at 1, so that a score a rounding error below the maximum gets the same weight in fp32, which is
  // summed, as in bf16, which multiplies V: 1.
  vf r;  // x - floor(x), and 0 for -inf
  asm("vreduceps $9, %1, %0" : "=v"(r) : "v"(x));
  if constexpr (Dot<Matrix>::kPack == 2) {
    const vf p =
        math::poly(r, 0x1.bc31d8p-7f, 0x1.aa3fccp-5f, 0x1.ee5886p-3f, 0x1.62d51ap-1f, 1.0f);
    return math::scale2(p, x);
  } else {
    const vf p = math::poly(r, 0x1.e96912p-10f, 0x1.277c1cp-7f, 0x1.c91c10p-5f, 0x1.ebdb6ap-3f,
                            0x1.62e4bap-1f, 1.0f);
    constexpr int not_less = 5;  // also NaN
    const uint16_t normal = __builtin_ia32_cmpps512_mask(x, splat(kLeastExponent), not_less, -1, 4);
    vf weight;
    asm("vscalefps %2, %1, %0%{%3%}%{z%}" : "=v"(weight) : "v"(p), "v"(x), "Yk"(normal));
    return weight;
  }
#else
  const vf y = max(splat(kLeastExponent), x);
  const vf n = round_even(y);
  const vf r = y - n;
  vf p;
  if constexpr (Dot<Matrix>::kPack == 2) {
    p = math::poly(r, 0x1.3a057cp-7f, 0x1.c9fc74p-5f, 0x1.ec036ep-3f, 0x1.62e12cp-1f, 1.0f);
  } else {
    p = math::exp2_poly(r);
  }
  const vf scaled = as_float(as_int(p) + (to_int(n) << 23));
  return select(x < kLeastExponent, splat(0.0f), scaled);
#endif
}

// The weights of two keys as one word per lane: bf16, the first key in the low half.
FAJIT_INLINE vi pack_weights(vf first, vf second) {
#if defined(__AVX512BF16__)
  v32 both;
  asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(both) : "v"(second), "v"(first));
  const v32 interleave = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                          8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return (vi)__builtin_shuffle(both, interleave);
#else
  const vu lo = __builtin_convertvector(float_to_bfloat16(first), vu);
  const vu hi = __builtin_convertvector(float_to_bfloat16(second), vu);
  return (vi)(lo | (hi << 16));
#endif
}

// Whether scores are in natural units, as hooks take them. Other scores take a factor that includes
// log2(e): in few_row.h from the product, which gives base-2 units, in prefill.h when the row's
// maximum is subtracted. A score_mod may return up to the largest float, such as
// torch.finfo(...).min for a key to hide, so natural scores meet log2(e) after that as well.
template <class Hooks>
constexpr bool kNaturalUnits = Hooks::kScore || Hooks::kPointwise;
// Factors from the units of few_row.h's scores to base-2 and to natural ones.
template <class Hooks>
constexpr float kToBase2 = kNaturalUnits<Hooks> ? kLog2e : 1.0f;
template <class Hooks>
constexpr float kToNatural = kNaturalUnits<Hooks> ? 1.0f : kLn2;

// A row without a key so far has the base -inf: any finite one gives it weights of 0.
FAJIT_INLINE vf finite(vf base) { return select(base == -kInf, splat(0.0f), base); }

// The units of prefill.h's scores, for the scale of a call.
template <class Hooks>
struct ScoreUnits {
  float scale;
  // From products to scores: applied before the hooks; without hooks, when the maximum is
  // subtracted.
  FAJIT_INLINE float factor() const { return kNaturalUnits<Hooks> ? scale : scale * kLog2e; }
  // Whether all are multiplied before the mask: a scale below 0 would turn the -inf of a masked
  // score into +inf, and 0 into NaN.
  FAJIT_INLINE bool scaled_before() const { return !kNaturalUnits<Hooks> && !(factor() > 0.0f); }
  // Factors from scores as the maximum is subtracted.
  FAJIT_INLINE float to_base2() const {
    return kNaturalUnits<Hooks> ? kLog2e : scaled_before() ? 1.0f : factor();
  }
  FAJIT_INLINE float to_natural() const {
    return kNaturalUnits<Hooks> ? 1.0f : scale > 0.0f ? scale : kLn2;
  }
};

// The largest of `top` and of s for keys [n0, n1). Four maxima, because each waits for the
// one before: with one, this pass took 11 % of the time of bf16 prefill on AMX tiles (D128, S4096,
// sampled by hand).
FAJIT_INLINE vf largest_score(const float* s, int stride, int n0, int n1, vf top) {
  constexpr int chains = 4;
  vf most[chains];
#pragma GCC unroll 4
  for (int i = 0; i < chains; ++i) most[i] = splat(-kInf);
  int n = n0;
#pragma GCC unroll 1
  for (; n + chains <= n1; n += chains)
#pragma GCC unroll 4
    for (int i = 0; i < chains; ++i) most[i] = max(most[i], load(s + int64_t{n + i} * stride));
#pragma GCC unroll 1
  for (; n < n1; ++n) most[0] = max(most[0], load(s + int64_t{n} * stride));
  return max(top, max(max(most[0], most[1]), max(most[2], most[3])));
}

// Pass 1 over keys [n0, n1): hooks, mask, row maxima (returned, at least `top`). The results are
// softmax scores, or pointwise weights. `keys[n]`: the hooks' values of key n.
// `scale` is not yet applied to the scores, and is applied to the results in natural units only; a
// mask then needs a positive scale (ensured by `Prefill::find_bases`).
template <class Hooks, bool Masked, class Rows, class Keys>
FAJIT_INLINE vf hook_scores(const Context& c, float* s, int stride, int n0, int n1,
                            const Rows& rows, const Keys& keys, vf row_scale, float scale, vf top) {
  if constexpr (!Hooks::kScore && !Hooks::kPointwise && !Masked)
    return largest_score(s, stride, n0, n1, top);
  vf last = top;  // two maxima in turn, because each waits for the latency of the one before
  for (int n = n0; n < n1; ++n) {
    vf x = load(s + int64_t{n} * stride);
    if constexpr (kNaturalUnits<Hooks>) x = x * scale;
    [[maybe_unused]] const auto& key = keys[n];
    if constexpr (Hooks::kScore) x = Hooks::score(c, x, rows, key);
    if constexpr (Hooks::kPointwise) {
      x = Hooks::pointwise(c, x);
      if constexpr (Hooks::kPointwiseScale) x = x * row_scale;
    }
    if constexpr (Masked) {
      const vf hidden = splat(Hooks::kPointwise ? 0.0f : -kInf);
      x = select(Hooks::mask(c, rows, key), x, hidden);
    }
    if constexpr (Hooks::kScore || Hooks::kPointwise || Masked) store(s + int64_t{n} * stride, x);
    const vf most = max(last, x);
    last = top;
    top = most;
  }
  return max(last, top);
}

// totals = totals * kept + sums, the first time (not `any`) only sums; then sums = 0.
FAJIT_INLINE void add_sums(float* sums, float* totals, vf kept, bool any) {
  const vf sum = load(sums);
  store(totals, any ? load(totals) * kept + sum : sum);
  store(sums, vf{});
}

// Sums of weights: as they were computed, and as they were rounded to the matrix dtype.
struct WeightSums { vf exact, rounded; };

// Which sums are computed.
enum class Sums { kExact, kRounded, kBoth };

// Pass 2 over keys [n0, n1): weights 2^((s - base) to_base2), or s itself for a pointwise
// normaliser, in the matrix dtype at p[(key / pack) * stride + lane]; returns their sums. n0 is a
// multiple of pack; an odd last key is paired with weight 0. The weights may overwrite the scores:
// p may be s.
template <class Matrix, class Hooks, Sums kSums>
FAJIT_INLINE WeightSums weigh(const float* s, int32_t* p, int stride, int n0, int n1, vf base,
                              float to_base2) {
  constexpr bool Pointwise = Hooks::kPointwise;
  constexpr bool kExact = !Pointwise && kSums != Sums::kRounded;
  constexpr bool kRounded = !Pointwise && kSums != Sums::kExact;
  static_assert(!kRounded || Dot<Matrix>::kPack == 2);
  const auto weight = [&](vf x) __attribute__((always_inline)) {
    if constexpr (Pointwise) return x;
    else return weight_exp2<Matrix>((x - base) * to_base2);
  };
  vf sum[2] = {}, rounded[2] = {};
  const auto put = [&](int n, vf x, vf y) __attribute__((always_inline)) {
    if constexpr (kExact) {
      sum[0] += x;
      sum[1] += y;
    }
    if constexpr (Dot<Matrix>::kPack == 2) {
      const vi words = pack_weights(x, y);
      store(p + int64_t{n / 2} * stride, words);
      if constexpr (kRounded) {
        rounded[0] += as_float(words << 16);
        rounded[1] += as_float(words & static_cast<int32_t>(0xffff0000));
      }
    } else {
      store(p + int64_t{n} * stride, x);
      if (n + 1 < n1) store(p + int64_t{n + 1} * stride, y);
    }
  };
  int n = n0;
  for (; n + 2 <= n1; n += 2)
    put(n, weight(load(s + int64_t{n} * stride)), weight(load(s + int64_t{n + 1} * stride)));
  if (n < n1) put(n, weight(load(s + int64_t{n} * stride)), vf{});
  return {sum[0] + sum[1], rounded[0] + rounded[1]};
}

}  // namespace fajit
