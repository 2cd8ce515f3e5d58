// Products of a few bf16 rows with keys and values of 8 or 4 bits, whose codes are multiplied as
// they are, for few_row.h. On AVX-512:
//
//   code_scores   S = Q K^T, lanes over keys: words of four codes of 16 rows are transposed
//   code_values   O += P V, lanes over head_dim_v: the codes of four keys are interleaved, or
//                 converted key by key
//
// On AVX2 they are those of words.h. Scores take four codes of each word at once, and multiply them
// with four numbers of a row of Q in two parts, its sides. How is a class Products, IntegerProducts
// or HalfProducts:
//
//   of, unit            what a kernel knows of the codes; what a value is in units of the products
//   query               a row of Q as numbers that codes are multiplied with
//   weights, put        rows of weights, times weight_unit(), likewise; they are scaled together
//   kTakesTotals        whether `weights` takes the sums of their magnitudes
//   codes_of, operands  the codes of a word, and what is multiplied with either side
//   Sums                of products with a row; `settle` after kSteps words
//   kMostDims           products that may be added before they become floats
//   kMayBeNan           whether codes may be a NaN that products do not show (NanCodes)
//
// Products of a group of channels are multiplied by its scale before they are added, and zero
// points are products with sums of q.
#pragma once
#include <fajit/cpu/codes/halves.h>
#include <fajit/cpu/codes/integers.h>
#include <fajit/cpu/codes/numbers.h>
#include <fajit/cpu/codes/words.h>
#include <fajit/cpu/few_row_kernel.h>

namespace fajit {

// Whether rows of Dim have groups of channels that these products take.
template <class Numbers, int Dim>
constexpr bool takes_groups() {
  if constexpr (Numbers::kGroups > 0) {
    constexpr int channels = Dim / Numbers::kGroups;  // no vector of codes may have parts of two
    return channels <= 512 && (Numbers::kGroups == 1 || channels % (4 * kLanes) == 0 ||
                               (channels % kLeastGroup == 0 && 4 * kLanes % channels == 0));
  }
  return false;
}

// Other rows: converted or decoded.
struct NoProducts {
  static constexpr bool kTakes = false;
  template <class Numbers>
  static FAJIT_INLINE NoProducts of(const Context&) {
    return {};
  }
};

#if FAJIT_AVX
// How rows of Dim codes, which hooks with Numbers decode, are multiplied with queries of Q, where
// they may be.
template <bool May, class Q, class Code, int Dim, class Numbers>
using CodeProducts = Choose<
    !May || !takes_groups<Numbers, Dim>(), NoProducts,
    Choose<takes_integers<Q, Code, Dim, Numbers>(), IntegerProducts<Code>,
           Choose<takes_halves<Q, Code, Dim, Numbers>(), HalfProducts<Code>,
                  Choose<takes_words<Q, Code, Dim, Numbers>(), WordProducts<Code>, NoProducts>>>>;

// few_scores for such rows, times the scales of keys. Lanes over dims would take a tree of
// exchanges for each sum. `q` has QBytes a row, `sums` those of `integer_row`; numbers: those of
// the tile's keys, Keys apart.
template <class Numbers, int Dim, int NR, bool Several, int Keys, int QBytes, class Products,
          class KeyRows, class Fetch>
FAJIT_INLINE void code_scores(const Products& products, KeyRows k, int count, const float* numbers,
                              const int8_t* q, const CodeRow* rows, const int32_t* sums, int groups,
                              float scale, float* s, int s_stride, Fetch fetch) {
  using Code = typename KeyRows::Element;
  using Vectors = CodeVectors<Code, Dim>;
  constexpr int words = Vectors::kRowBytes / 4, in_vector = words < kLanes ? words : kLanes;
  constexpr int chains = NR == 1 ? 2 : 1;  // products have a latency of four
  using Sums = typename Products::template Sums<chains>;
  // Words whose products are added before they become floats: of one group of channels.
  constexpr int channels = Dim / Numbers::kGroups, wide = channels / 4;
  constexpr bool whole = Numbers::kGroups == 1;
  constexpr int run = whole ? in_vector : wide < in_vector ? wide : in_vector;
  // Vectors that may be added, of a group that is the whole row.
  constexpr int fit = Products::kMostDims / (Vectors::kParts * 4 * in_vector);
  constexpr int most = fit < 1 ? 1 : fit < Vectors::kCount ? fit : Vectors::kCount;
  constexpr bool leaves_rest = Vectors::kCount % most != 0;
  alignas(64) int32_t kept[Several ? words * kLanes : 1];
  for (int n = 0; n < count; n += kLanes) {
    [[maybe_unused]] NanCodes nan;  // of all groups of rows
    const auto group = [&](int g, auto words_of) __attribute__((always_inline)) {
      const int8_t* const of_group = q + g * NR * QBytes;
      Sums acc[NR];
      vf total[NR] = {};
      // Adds the products of a group of channels, which begins at channel d.
      const auto finish = [&](int d) __attribute__((always_inline)) {
        const int own = whole ? 0 : d / channels;
        // Each factor is about as large as rows or values are: others could overflow.
        vf value_unit = splat(products.unit());
        if constexpr (Numbers::kCount > 0) value_unit *= load(numbers + own * Keys + n);
#pragma GCC unroll 4
        for (int r = 0; r < NR; ++r) {
          int32_t of_row = whole ? rows[g * NR + r].sum : 0;
          if constexpr (!whole)
#pragma GCC unroll 2
            for (int i = 0; i < run * 4 / kLeastGroup; ++i)
              of_row += sums[(g * NR + r) * (Dim / kLeastGroup) + d / kLeastGroup + i];
          vf x = acc[r].value(0, chains, of_row);
          if constexpr (Numbers::kZeros)
            x -= load(numbers + (Numbers::kGroups + own) * Keys + n) * static_cast<float>(of_row);
          total[r] += x * rows[g * NR + r].unit * value_unit;
          acc[r] = Sums();
        }
      };
#pragma GCC unroll 1
      for (int c = 0; c < Vectors::kCount; ++c) {
        vi x[kLanes];
        words_of(c, x);
        const int8_t* const at = of_group + Products::template at<Dim>(c * kVectorBytes, 0);
        each_index<Vectors::kParts>([&](auto part) __attribute__((always_inline)) {
#pragma GCC unroll 16
          for (int j = 0; j < in_vector; ++j) {
            const auto codes = products.operands(Products::template codes_of<part.value>(x[j]));
            if constexpr (Products::kMayBeNan)
              if (g == 0) nan.add(x[j]);
            // As many as keys, evenly: in a burst decoding took 1.2 times as long (by hand).
            constexpr int every = words >= kLanes ? words / kLanes : 1;
            if (g == 0 && part.value == 0 && j % every == 0) {
              fetch();
              if constexpr (words < kLanes) fetch();
            }
#pragma GCC unroll 4
            for (int r = 0; r < NR; ++r)
              each_index<2>([&](auto side) __attribute__((always_inline)) {
                acc[r].template add<side.value>(
                    j % chains, codes, at,
                    r * QBytes +
                        Products::template at<Dim>(part.value * (Dim / 2) + 4 * j, side.value));
              });
            if (Products::kSteps > 0 && (j + 1) % larger_of(Products::kSteps, 1) == 0)
#pragma GCC unroll 4
              for (int r = 0; r < NR; ++r) acc[r].settle();
            if (!whole && (j + 1) % run == 0)
              finish(part.value * (Dim / 2) + c * kVectorBytes + (j + 1 - run) * 4);
          }
        });
        if (whole && (c + 1) % most == 0) finish(0);
      }
      if constexpr (whole && leaves_rest) finish(0);
#pragma GCC unroll 4
      for (int r = 0; r < NR; ++r) {
        if constexpr (Products::kMayBeNan) total[r] += nan.value();
        store(s + (g * NR + r) * s_stride + n, total[r] * scale);
      }
    };
    const auto transposed = [&](int c, vi(&x)[kLanes]) __attribute__((always_inline)) {
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i)
        x[i] = Vectors::load_row(k(n + i < count ? n + i : count - 1), c);
      transpose(x);
    };
    if constexpr (!Several) {
      group(0, transposed);
    } else {
      group(0, [&](int c, vi(&x)[kLanes]) __attribute__((always_inline)) {
        transposed(c, x);
#pragma GCC unroll 16
        for (int j = 0; j < in_vector; ++j) store(kept + (c * kLanes + j) * kLanes, x[j]);
      });
#pragma GCC unroll 1
      for (int g = 1; g < groups; ++g)
        group(g, [&](int c, vi(&x)[kLanes]) __attribute__((always_inline)) {
#pragma GCC unroll 16
          for (int j = 0; j < in_vector; ++j) x[j] = load<vi>(kept + (c * kLanes + j) * kLanes);
        });
    }
  }
}

// How many groups of channels are reduced at once: a power of two.
template <int NR>
constexpr int groups_at_once(int groups) {
  int most = kLanes / NR;
  while (groups % most != 0) most /= 2;
  return most;
}

// NR rows of N weights as numbers that codes of values are multiplied with, times their scales
// `numbers`: for each group of channels as many rows, Rows rows apart, the first in place of the
// weights. `zero_sums`: of weights times zero points. Rows and groups are reduced together: one
// after the other, whose reductions and divisions have long latencies, decoding codes of 4 bits in
// two groups took 1.15 times as long with 4 rows (Zen 5, from L2, by hand).
template <class Numbers, int NR, int Rows, int N, class Products>
FAJIT_INLINE void put_code_weights(const Products& products, float* rows, int vectors,
                                   const float* numbers, CodeRow* weights, float* zero_sums) {
  constexpr int sets = groups_at_once<NR>(Numbers::kGroups), count = sets * NR;
#pragma GCC unroll 1
  for (int first = Numbers::kGroups - sets; first >= 0; first -= sets) {
    vi largest[count] = {}, sums[count] = {};
    [[maybe_unused]] vf zeros[count] = {}, magnitudes[count] = {};
    const auto row_of = [&](int i) { return (first + i / NR) * Rows + i % NR; };
#pragma GCC unroll 16
    for (int i = count - 1; i >= 0; --i)  // the weights are overwritten last
      for (int n = 0; n < vectors * kLanes; n += kLanes) {
        const float* const own = numbers + (first + i / NR) * N + n;
        const vf x = load(rows + i % NR * N + n) * (load(own) * products.weight_unit());
        if constexpr (Numbers::kZeros) zeros[i] += x * load(own + Numbers::kGroups * N);
        largest[i] = larger_bits(largest[i], magnitude_bits(x));
        if constexpr (Products::kTakesTotals) magnitudes[i] += abs(x);
        store(rows + row_of(i) * N + n, x);
      }
    vf total{};
    if constexpr (Products::kTakesTotals)
      total = reduce_few(magnitudes, [](vf a, vf b) { return a + b; });
    const RowScales scales = products.template weights<N>(reduce_few(largest, larger_bits), total);
    float factors[kLanes], units[kLanes];
    store(factors, scales.factor), store(units, scales.unit);
#pragma GCC unroll 16
    for (int i = 0; i < count; ++i) {
      float* const row = rows + row_of(i) * N;
      const vf factor = splat(factors[lane_of(i)]);
      for (int n = 0; n < vectors * kLanes; n += kLanes)
        products.put(load(row + n), factor, reinterpret_cast<int8_t*>(row), n, sums[i]);
    }
    int32_t totals[kLanes];
    store(totals, reduce_few(sums, [](vi a, vi b) { return a + b; }));
    [[maybe_unused]] float of_zeros[kLanes];
    if constexpr (Numbers::kZeros)
      store(of_zeros, reduce_few(zeros, [](vf a, vf b) { return a + b; }));
#pragma GCC unroll 16
    for (int i = 0; i < count; ++i) {
      weights[row_of(i)] = {units[lane_of(i)], totals[lane_of(i)]};
      if constexpr (Numbers::kZeros) zero_sums[row_of(i)] = of_zeros[lane_of(i)];
    }
  }
}

// o[row][0, Dim) += sum over `count` keys of p[row] v for groups of NR rows, as integer_values and
// half_values. `fetch()` issues the prefetches of kFetchedKeys<Products> keys, in kValuePasses
// parts.
template <class Numbers, int Dim, int NR, int Rows, int N, class Code, class... Arguments>
FAJIT_INLINE void code_values(const IntegerProducts<Code>&, const Arguments&... arguments) {
  integer_values<Numbers, Dim, NR, Rows, N>(arguments...);
}
template <class Products>
constexpr int kFetchedKeys = 4;
template <class Products, int Dim, int NR>
constexpr int kValuePasses = 1;
template <class Code, int Dim, int NR>
constexpr int kValuePasses<IntegerProducts<Code>, Dim, NR> =
    CodeVectors<Code, Dim>::kCount * kKeyVectors<Code, Dim> / kPassVectors<Code, Dim, NR>;
#if FAJIT_AVX == 256
template <class Code>
constexpr int kFetchedKeys<WordProducts<Code>> = 2;
template <class Code, int Dim, int NR>
constexpr int kValuePasses<WordProducts<Code>, Dim, NR> = Dim / WordProducts<Code>::kBlock;
#endif
#if FAJIT_HALVES
template <class Numbers, int Dim, int NR, int Rows, int N, class Code, class ValueRows, class Fetch>
FAJIT_INLINE void code_values(const HalfProducts<Code>& products, ValueRows v, int count,
                              const int8_t* p, const CodeRow* rows, const float*, int groups,
                              float* o, Fetch fetch) {
  half_values<Numbers, Dim, NR, Rows, N>(products, v, count, p, rows, groups, o, fetch);
}
template <class Code>
constexpr int kFetchedKeys<HalfProducts<Code>> = 1;
template <class Code, int Dim, int NR>
constexpr int kValuePasses<HalfProducts<Code>, Dim, NR> = Dim / (32 * kHalfVectors<Dim, NR>);
#endif
#else  // never called
template <bool May, class Q, class Code, int Dim, class Numbers>
using CodeProducts = NoProducts;
template <class Numbers, int Dim, int NR, bool Several, int Keys, int QBytes, class... Arguments>
void code_scores(Arguments...);
template <class Numbers, int NR, int Rows, int N, class... Arguments>
void put_code_weights(Arguments...);
template <class Numbers, int Dim, int NR, int Rows, int N, class... Arguments>
void code_values(Arguments...);
template <class Products>
constexpr int kFetchedKeys = 1;
template <class Products, int Dim, int NR>
constexpr int kValuePasses = 1;
#endif

}  // namespace fajit
