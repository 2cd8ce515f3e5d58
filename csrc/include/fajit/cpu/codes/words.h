// Products of a few bf16 rows with codes of 8 or 4 bits as words of 16 bits, on AVX2, for
// code_products.h.
//
// A row of Q, or of weights, becomes `unit` times integers of 16 bits. Codes become words: integers
// of 8 bits are extended, those of 4 bits looked up in a table. One instruction multiplies 16 words
// and adds pairs of products, where an FMA has 8 floats and each code is converted first. Decoding
// takes 0.95 (int8), 0.73 (int4) and 0.6 (nf4) of the time with 4 rows a key, 0.7, 0.84 and 0.38
// with one (head_dim 128, from L2, one thread of a Zen 3, each over bf16 in its run, by hand).
//
// The values of a codebook are words times 2^-13 of the largest, with an error of up to 2^-14 of
// it. Where that is more than 2^-10 of a value, what is left has words of its own, a second part
// of the products.
//
//   code_scores   S = Q K^T, lanes over head_dim, reduced for kLanes scores at a time
//   code_values   O += P V, lanes over head_dim_v: words of two keys are interleaved
//
// Dims are taken by blocks of 32, which for codes of 4 bits are the low or the high bits of 32
// bytes. Interleaving works within 128 bits, so that words of a block have the order `kEighths`.
#pragma once
#include <fajit/cpu/codes/integers.h>
#include <fajit/cpu/codes/numbers.h>
#include <fajit/cpu/vector/transpose.h>

namespace fajit {

#if FAJIT_AVX == 256
// Words of a codebook would cancel near zero points.
template <class Q, class Code, int Dim, class Numbers>
constexpr bool takes_words() {
  if constexpr (same<Q, bfloat16_t> && Numbers::kGroups > 0)
    return (same<Code, int8_t> && Numbers::kCodebook < 0 && Dim % 32 == 0) ||
           (same<Code, int4x2_t> && !(Numbers::kCodebook >= 0 && Numbers::kZeros) && Dim % 64 == 0);
  return false;
}

// sum + the products of a and b, in pairs. In one piece: gcc 12 makes all products of a row before
// it adds them, and spills them.
FAJIT_INLINE vi add_words(vi sum, vi a, vi b) {
  vi products;
  asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sum), "=&x"(products) : "x"(a), "xm"(b));
  return sum;
}

template <class Code>
class WordProducts {
  static constexpr bool kLooked = same<Code, int4x2_t>;

 public:
  static constexpr bool kTakes = true, kMayBeNan = false;
  static constexpr int kBlock = 32;  // dims
  // Where the dims of each eight words of a block are, in eights.
  static constexpr int kEighths[4] = {0, kLooked ? 2 : 1, kLooked ? 1 : 2, 3};

  template <class Numbers>
  static FAJIT_INLINE WordProducts of(const Context& c) {
    WordProducts products;
    if constexpr (kLooked && Numbers::kCodebook >= 0) {
      const Table table = Table::of<Numbers>(c);
      vf x[2] = {table(iota()), table(iota() + kLanes)};
      const float largest =
          as_float(reduce_max(larger_bits(magnitude_bits(x[0]), magnitude_bits(x[1]))));
      const bool is_zero = largest < 0x1p-126f;
      products.unit_ = is_zero ? 0.0f : largest;
      vi rest{};
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        x[i] = is_zero ? vf{} : x[i] / largest;
        const vi words = to_integers(x[i], splat(1 / kStep[0]));
        products.put_words(0, i, words);
        const vf left = x[i] - to_float(words) * kStep[0];
        products.put_words(1, i, to_integers(left, splat(1 / kStep[1])));
        rest |= abs(left) > abs(x[i]) * 0x1p-10f;
      }
      products.parts_ = any(rest) ? 2 : 1;
      products.steps_[0] = kStep[0], products.steps_[1] = kStep[1];
    } else if constexpr (kLooked) {
      products.put_words(0, 0, iota() - 8), products.put_words(0, 1, iota());
    }
    return products;
  }

  // The values of words of a part: unit() * step(part).
  FAJIT_INLINE int parts() const { return parts_; }
  FAJIT_INLINE float step(int part) const { return steps_[part]; }
  FAJIT_INLINE float unit() const { return unit_; }
  FAJIT_INLINE float weight_unit() const { return unit_; }
  // A row of Q as words, in the order of those of codes.
  template <int N>
  FAJIT_INLINE CodeRow query(const float* x, int8_t* words, int32_t* sums) const {
    alignas(32) int8_t row[2 * N];  // x may be the same memory
    const CodeRow of_row = integer_row<N>(x, sums, [&](int d, vi q) {
      store_words(row + 2 * (d / kBlock * kBlock + kEighths[d / kLanes % 4] * kLanes), q);
    });
    __builtin_memcpy(words, row, sizeof row);
    return of_row;
  }
  // Rows of N weights, in order, and kLanes of them, from n on; `sum` is of the integers. `total`:
  // of the magnitudes of a row. Sums of products with words of a codebook, up to 2^13, fit 32 bits
  // where those of weights fit 18: rows of which one weight is much larger than the others, which
  // need them most, have 15 bits, others at least 2^18 / N.
  static constexpr bool kTakesTotals = kLooked;
  template <int N>
  FAJIT_INLINE RowScales weights(vi largest, vf total) const {
    if (steps_[0] == 1) return integer_scales(largest);
    vf most = as_float(largest) / total * (0x1p18f - N);  // N: of roundings
    most = max(most, splat(0x1p18f / N - 1));             // also where the total is infinite
    return integer_scales(largest, most < kMostInteger ? most : splat(kMostInteger));
  }
  FAJIT_INLINE void put(vf x, vf factor, int8_t* row, int n, vi& sum) const {
    const vi q = to_integers(x, factor);
    store_words(row + 2 * n, q);
    sum += q;
  }

  // The words of dims [d, d + kBlock) of a row of Dim.
  template <int Dim>
  FAJIT_INLINE void load(int part, const Code* row, int d, vi (&x)[2]) const {
    if constexpr (kLooked) {
      const vq codes = block<Dim>(row, d);
      const vq low = ordered_bytes(low_[part], codes), high = ordered_bytes(high_[part], codes);
      x[0] = (vi)unpack_low_bytes(low, high), x[1] = (vi)unpack_high_bytes(low, high);
    } else {
      x[0] = extend(row + d), x[1] = extend(row + d + kBlock / 2);
    }
  }
  // Those of two rows, whose words are interleaved; dims as `dim_of` says.
  template <int Dim>
  FAJIT_INLINE void load_pair(int part, const Code* even, const Code* odd, int d,
                              vi (&x)[4]) const {
    vi a[2], b[2];
    load<Dim>(part, even, d, a), load<Dim>(part, odd, d, b);
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      x[2 * i] = (vi)unpack_low_words((vq)a[i], (vq)b[i]);
      x[2 * i + 1] = (vi)unpack_high_words((vq)a[i], (vq)b[i]);
    }
  }
  // The first dim, in a block, of the low (0) or high halves of vectors 2 i and 2 i + 1 of
  // load_pair.
  static constexpr int dim_of(int i, int half) { return kEighths[2 * i + half] * kLanes; }

 private:
  // The low 16 bits of each lane.
  static FAJIT_INLINE void store_words(int8_t* to, vi integers) {
    const vi order = (iota() & 1) != 0 ? splat(0x0d0c0908) : splat(0x05040100);
    const vi grouped = (vi)ordered_bytes((vq)integers, (vq)order);
    const vi packed = shuffle2(grouped, grouped, (iota() >> 1) * 4 + (iota() & 1));
    __builtin_memcpy(to, &packed, 2 * kLanes);
  }
  static FAJIT_INLINE vi extend(const Code* p) {
    vi x;
    asm("vpmovsxbw %1, %0" : "=x"(x) : "m"(*reinterpret_cast<const char (*)[16]>(p)));
    return x;
  }
  template <int Dim>
  static FAJIT_INLINE vq block(const Code* row, int d) {
    constexpr int half = Dim / 2;
    const vi bytes = fajit::load<vi>(row + d % half);
    return (vq)((d < half ? bytes : bytes >> 4) & 0x0f0f0f0f);
  }

  // Words of codes [8 i, 8 i + 8) of a part.
  FAJIT_INLINE void put_words(int part, int i, vi words) {
    int8_t bytes[2 * kLanes], *const low = reinterpret_cast<int8_t*>(&low_[part]),
                                     *const high = reinterpret_cast<int8_t*>(&high_[part]);
    store_words(bytes, words);
    for (int j = 0; j < kLanes; ++j)
      for (int at = i * kLanes + j; at < kVectorBytes; at += 16)
        low[at] = bytes[2 * j], high[at] = bytes[2 * j + 1];
  }

  // Of the parts of a codebook.
  static constexpr float kStep[2] = {0x1p-13f, 0x1p-27f};
  vq low_[2], high_[2];  // bytes of the words of codes, twice
  float unit_ = 1.0f, steps_[2] = {1.0f, 1.0f};
  int parts_ = 1;
};

// code_scores of code_products.h with such products.
template <class Numbers, int Dim, int NR, bool Several, int Keys, int QBytes, class Code,
          class KeyRows, class Fetch>
FAJIT_INLINE void code_scores(const WordProducts<Code>& products, KeyRows k, int count,
                              const float* numbers, const int8_t* q, const CodeRow* rows,
                              const int32_t* sums, int groups, float scale, float* s, int s_stride,
                              Fetch fetch) {
  constexpr int keys = kLanes / NR, block = WordProducts<Code>::kBlock;
  constexpr int channels = Dim / Numbers::kGroups;
  constexpr bool whole = Numbers::kGroups == 1;
  // Channels whose products fit 32 bits: with a codebook 64, others 512.
  constexpr int run = Numbers::kCodebook < 0 ? channels : channels % 64 == 0 ? 64 : block;
  alignas(32) vi kept[Several ? keys * (Dim / 16) : 1];
  const vi row_of = iota() / keys, key_of = iota() % keys;
  const auto multiply = [&](auto index) __attribute__((always_inline)) {
    constexpr int part = index.value;
    for (int n = 0; n < count; n += keys) {
#pragma GCC unroll 1
      for (int g = 0; g < (Several ? groups : 1); ++g) {
        const CodeRow* const of_group = rows + g * NR;
        vf total[kLanes] = {};
#pragma GCC unroll 8
        for (int i = 0; i < keys; ++i) {
          const int key = n + i < count ? n + i : count - 1;
          const Code* const row = k(key);
          if (g == 0 && part == 0) fetch();
#pragma GCC unroll 1
          for (int first = 0; first < Dim; first += run) {
            vi acc[NR] = {};
#pragma GCC unroll 4
            for (int d = first; d < first + run; d += block) {
              vi x[2];
              vi* const held = kept + (Several ? i * (Dim / 16) + d / 16 : 0);
              if (!Several || g == 0) products.template load<Dim>(part, row, d, x);
              else x[0] = held[0], x[1] = held[1];
              if (Several && g == 0) held[0] = x[0], held[1] = x[1];
#pragma GCC unroll 2
              for (int j = 0; j < 2; ++j)
#pragma GCC unroll 4
                for (int r = 0; r < NR; ++r)
                  acc[r] = add_words(
                      acc[r], x[j], load<vi>(q + (g * NR + r) * QBytes + 2 * d + j * kVectorBytes));
            }
#pragma GCC unroll 4
            for (int r = 0; r < NR; ++r) {
              // Each factor is about as large as rows or values are: others could overflow.
              vf x = to_float(acc[r]) * of_group[r].unit;
              if constexpr (!whole) x *= numbers[first / channels * Keys + key] * products.unit();
              total[r * keys + i] += x;
            }
          }
        }
        vf sum = reduce_columns(total, [](vf a, vf b) { return a + b; });
        // The numbers of the keys of each lane.
        const auto of_keys = [&](const float* from) __attribute__((always_inline)) {
          const vf x = load(from + n / kLanes * kLanes);
          return (vf)__builtin_shuffle((vi)x, key_of + n % kLanes);
        };
        if constexpr (Numbers::kZeros) {
#pragma GCC unroll 1
          for (int own = 0; own < Numbers::kGroups; ++own) {
            float of_row[NR];
#pragma GCC unroll 4
            for (int r = 0; r < NR; ++r) {
              int32_t integers = whole ? of_group[r].sum : 0;
              for (int d = whole ? Dim : own * channels; d < (own + 1) * channels; d += kLeastGroup)
                integers += sums[(g * NR + r) * (Dim / kLeastGroup) + d / kLeastGroup];
              of_row[r] = static_cast<float>(integers) * of_group[r].unit;
            }
            vf x{};
#pragma GCC unroll 4
            for (int r = 0; r < NR; ++r) x = row_of == r ? splat(of_row[r]) : x;
            x *= of_keys(numbers + (Numbers::kGroups + own) * Keys);
            sum -= whole ? x : x * of_keys(numbers + own * Keys);
          }
        }
        vf value_unit = splat(whole ? products.unit() : 1.0f);
        if constexpr (whole && Numbers::kCount > 0) value_unit *= of_keys(numbers);
        alignas(32) float lanes[kLanes];
        store(lanes, sum * value_unit * scale * products.step(part));
#pragma GCC unroll 4
        for (int r = 0; r < NR; ++r) {
          float* const to = s + (g * NR + r) * s_stride + n;
          if (part > 0)
            for (int i = 0; i < keys; ++i) lanes[r * keys + i] += to[i];
          __builtin_memcpy(to, lanes + r * keys, keys * sizeof(float));
        }
      }
    }
  };
  multiply(Index<0>{});
  if constexpr (Numbers::kCodebook >= 0)
    if (products.parts() > 1) multiply(Index<1>{});
}

// code_values likewise, with the arguments of integer_values. `fetch()` issues the prefetches of
// two keys, in Dim / 32 parts.
template <class Numbers, int Dim, int NR, int Rows, int N, class Code, class ValueRows, class Fetch>
FAJIT_INLINE void code_values(const WordProducts<Code>& products, ValueRows v, int count,
                              const int8_t* p, const CodeRow* rows, const float* zeros, int groups,
                              float* o, Fetch fetch) {
  static_assert(N <= 256);  // sums fit 32 bits
  constexpr int block = WordProducts<Code>::kBlock, stride = 4 * N,
                channels = Dim / Numbers::kGroups;
  constexpr int pass = NR > 2 ? 2 : 4;  // vectors whose sums with NR rows are in registers
  alignas(32) vi words[N / 2 * 4];      // [pair of keys][vector]
  const auto multiply = [&](auto index) __attribute__((always_inline)) {
    constexpr int part = index.value;
#pragma GCC unroll 1
    for (int first = 0; first < Dim; first += block) {
      for (int n = 0; n < count; n += 2) {
        vi x[4];
        products.template load_pair<Dim>(part, v(n), v(n + 1 < count ? n + 1 : n), first, x);
        if (part == 0) fetch();
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) words[2 * n + j] = x[j];
      }
#pragma GCC unroll 1
      for (int g = 0; g < groups; ++g) {
        const int own = first / channels * Rows + g * NR;
        const int8_t* const weights = p + own * stride;
#pragma GCC unroll 1
        for (int begin = 0; begin < 4; begin += pass) {
          vi acc[NR][pass] = {};
          for (int n = 0; n < count; n += 2) {
#pragma GCC unroll 4
            for (int r = 0; r < NR; ++r) {
              int32_t two;
              __builtin_memcpy(&two, weights + r * stride + 2 * n, sizeof two);
#pragma GCC unroll 4
              for (int j = 0; j < pass; ++j)
                acc[r][j] = add_words(acc[r][j], splat(two), words[2 * n + begin + j]);
            }
          }
#pragma GCC unroll 4
          for (int r = 0; r < NR; ++r)
#pragma GCC unroll 2
            for (int j = 0; j < pass; j += 2)
#pragma GCC unroll 2
              for (int half = 0; half < 2; ++half) {
                const vi dims = shuffle2(acc[r][j], acc[r][j + 1],
                                         (iota() & 3) + (iota() >> 2) * kLanes + half * 4);
                const int at = WordProducts<Code>::dim_of((begin + j) / 2, half);
                float* const to = o + (g * NR + r) * Dim + first + at;
                vf x = load(to) + to_float(dims) * (rows[own + r].unit * products.step(part));
                if constexpr (Numbers::kZeros) x -= zeros[own + r];
                store(to, x);
              }
        }
      }
    }
  };
  multiply(Index<0>{});
  if constexpr (Numbers::kCodebook >= 0)
    if (products.parts() > 1) multiply(Index<1>{});
}
#else  // never called
template <class Q, class Code, int Dim, class Numbers>
constexpr bool takes_words() {
  return false;
}
template <class Code>
class WordProducts;
#endif

}  // namespace fajit
