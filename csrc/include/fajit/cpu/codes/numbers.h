// Scales and zero points of quantised keys or values, and the values of their codes.
//
// `Numbers` is Hooks::KeyNumbers or Hooks::ValueNumbers: key_mod or value_mod is no more than
//
//   scale[g] * (value of the code - zero[g])        g: group of channels
//
// with kGroups scales, then as many zero points, or none: kCount numbers a key and kv head. kGroups
// is 0 for other hooks, of which those with kChannels are in channels.h.
#pragma once
#include <fajit/context.h>
#include <fajit/cpu/hooks/hook_ops.h>
#include <fajit/cpu/microkernel.h>
#include <fajit/cpu/vector/bfloat16_words.h>
#include <fajit/cpu/vector/transpose.h>

namespace fajit {

// Whether a hook multiplies its row by one number and does no more.
template <class Numbers>
constexpr bool is_scale() {
  if constexpr (Numbers::kGroups == 1) return !Numbers::kZeros && Numbers::kCodebook < 0;
  return false;
}
template <class Numbers>
constexpr bool kIsScale = is_scale<Numbers>();
// Whether a hook only decodes rows of Code, which are no latent rows. A codebook is of codes of 4
// bits: other rows may have the same formula, but other indices.
template <class Numbers, class Code>
constexpr bool is_decoding() {
  if constexpr (Numbers::kGroups > 0 && !same<Code, latent_t>)
    return Numbers::kCodebook < 0 || same<Code, int4x2_t>;
  return false;
}
template <class Numbers, class Code>
constexpr bool kIsDecoding = is_decoding<Numbers, Code>();

// What a row of Q, or of weights, has beside the numbers that codes are multiplied with: their
// unit, and the sum of integers.
struct CodeRow {
  float unit;
  int32_t sum;
};
constexpr int kLeastGroup = 32;  // channels of a group whose products are added
// What rows with the largest magnitudes `largest`, one a lane, are multiplied with, and the units
// of the numbers that they become.
struct RowScales { vf factor, unit; };
// The bits of a magnitude, which as integers are in the order of the floats; NaN is the largest.
FAJIT_INLINE vi magnitude_bits(vf x) { return as_int(x) & 0x7fffffff; }
FAJIT_INLINE vi larger_bits(vi a, vi b) { return a > b ? a : b; }

constexpr int kVectorBytes = 4 * kLanes;
// How rows of Dim codes lie in vectors.
template <class Code, int Dim>
struct CodeVectors {
  static constexpr int kRowBytes = elements_of<Code>(Dim);
  static constexpr int kCount = (kRowBytes + kVectorBytes - 1) / kVectorBytes;
  static constexpr int kParts = kPerElement<Code>;  // codes of a byte
  static constexpr bool kHalf = kRowBytes == kVectorBytes / 2;

  // A vector of a row; half a vector, if a row has no more.
  static FAJIT_INLINE vi load_row(const Code* row, int vector) {
    if constexpr (kHalf) {
      vi x;
      asm("vmovdqu64 %1, %t0" : "=v"(x) : "m"(*reinterpret_cast<const char (*)[32]>(row)));
      return x;
    } else {
      return load<vi>(row + vector * kVectorBytes);
    }
  }
};

template <int N>
struct Index {
  static constexpr int value = N;
};
// f(Index<0>{}), ..., f(Index<N - 1>{}).
template <int N, class F>
FAJIT_INLINE void each_index(F f) {
  if constexpr (N > 0) {
    each_index<N - 1>(f);
    f(Index<N - 1>{});
  }
}

#if FAJIT_AVX
// The first `count` of kLanes entries of 32 or 16 bits; memory behind them is not read. With AVX2
// all kLanes of 16 bits.
template <class Vector>
FAJIT_INLINE Vector load_first(const void* p, [[maybe_unused]] int count) {
#if FAJIT_AVX == 512
  const auto mask = static_cast<unsigned short>((1u << count) - 1u);
  const auto& entries = *static_cast<const char (*)[sizeof(Vector)]>(p);
  Vector x;
  if constexpr (same<Vector, vi>)
    asm("vmovdqu32 %1, %0%{%2%}%{z%}" : "=v"(x) : "m"(entries), "Yk"(mask));
  else asm("vmovdqu16 %1, %t0%{%2%}%{z%}" : "=v"(x) : "m"(entries), "Yk"(mask));
  return x;
#else
  if constexpr (same<Vector, vi>) {
    const auto& entries = *static_cast<const char (*)[sizeof(Vector)]>(p);
    Vector x;
    asm("vpmaskmovd %1, %2, %0" : "=x"(x) : "m"(entries), "x"(iota() < count));
    return x;
  } else {
    return load<Vector>(p);
  }
#endif
}
#endif

// `entries` adjacent numbers of a param at each offset, transposed: those of entry e are written by
// put(e, vector). Rows are read once for all heads. Gathers, head by head, took 2.4 of the 9.5 ns
// that a key of 128 codes of 4 bits took (one row, one thread of a Zen 4, from L2, timed by hand).
template <class D, class Put>
FAJIT_INLINE bool load_entries(const fajit_tensor& t, vl offsets, int entries, Put put) {
#if FAJIT_AVX
  constexpr bool single = same<D, dt::f32>, half = same<D, dt::f16>;
  if constexpr (single || half || same<D, dt::bf16>) {
    using S = typename ops::storage<D>::type;
    if (!single && FAJIT_AVX < 512 && entries % kLanes) return false;  // no masked loads of 16 bits
    for (int first = 0; first < entries; first += kLanes) {
      const int count = entries - first < kLanes ? entries - first : kLanes;
      vi x[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        const S* const row = static_cast<const S*>(t.ptr) + offsets[i] + first;
        if constexpr (single) x[i] = load_first<vi>(row, count);
        else
          x[i] = (vi)(half ? half_to_float(load_first<vh>(row, count))
                           : bfloat16_to_float(load_first<vh>(row, count)));
      }
      transpose(x);
#pragma GCC unroll 16
      for (int e = 0; e < kLanes; ++e)
        if (e < count) put(first + e, (vf)x[e]);
    }
    return true;
  }
#endif
  return false;
}

// Numbers [i, i + kGroups) of keys kv_idx, where those of a key are adjacent, else false.
template <class Numbers, int i, int Keys>
FAJIT_INLINE bool load_rows(const Context& c, int32_t b, int32_t kv_h, int heads, vi kv_idx,
                            float* out) {
  if constexpr (Numbers::kByHead) {
    constexpr int groups = Numbers::kGroups, dim = Numbers::kHeadDims[i];
    const fajit_tensor& t = c.tensor(Numbers::kTensors[i]);
    if (t.ptr == nullptr || t.strides[dim] != groups || kv_h + heads > t.sizes[dim]) return false;
    if (groups > 1 && (t.strides[dim + 1] != 1 || t.sizes[dim + 1] != groups)) return false;
    return load_entries<typename Numbers::Type>(
        t, Numbers::template offset<i>(c, b, kv_h, kv_idx), heads * groups, [&](int e, vf x) {
          store(out + (e / groups * Numbers::kCount + i + e % groups) * Keys, x);
        });
  }
  return false;
}

// The numbers of keys kv_idx of heads [kv_h, kv_h + heads): number i of head j at
// out[(j * kCount + i) * Keys].
template <class Numbers, int Keys>
FAJIT_INLINE void load_numbers(const Context& c, int32_t b, int32_t kv_h, int heads, vi kv_idx,
                               float* out) {
  constexpr int groups = Numbers::kGroups;
  each_index<Numbers::kCount / groups>([&](auto set) __attribute__((always_inline)) {
    constexpr int first = set.value * groups;
    if (load_rows<Numbers, first, Keys>(c, b, kv_h, heads, kv_idx, out)) return;
    each_index<groups>([&](auto group) __attribute__((always_inline)) {
      constexpr int i = first + group.value;
      for (int j = 0; j < heads; ++j)
        store(out + (j * Numbers::kCount + i) * Keys,
              Numbers::template number<i>(c, b, kv_h + j, kv_idx));
    });
  });
}

// load_numbers of the `count` keys of a tile and one head.
template <class Numbers, int Keys, class KvRows>
FAJIT_INLINE void load_tile_numbers(const Context& c, int32_t b, int32_t kv_h, const KvRows& kv,
                                    int count, float* out) {
  for (int n = 0; n < count; n += kLanes)
    load_numbers<Numbers, Keys>(c, b, kv_h, 1, kv.positions(n, iota() + n < count, count - 1),
                                out + n);
}

// Prefetches what load_numbers will read for keys kv_idx, of the first head.
template <class Numbers>
FAJIT_INLINE void fetch_numbers(const Context& c, int32_t b, int32_t kv_h, vi kv_idx) {
  each_index<Numbers::kCount / Numbers::kGroups>([&](auto set) __attribute__((always_inline)) {
    constexpr int i = set.value * Numbers::kGroups;
    if constexpr (Numbers::kByHead) {
      using S = typename ops::storage<typename Numbers::Type>::type;
      const vl at = Numbers::template offset<i>(c, b, kv_h, kv_idx);
      const S* const first = static_cast<const S*>(c.tensor(Numbers::kTensors[i]).ptr);
      for (int lane = 0; lane < kLanes; ++lane)
        __builtin_prefetch(first + at[lane], 0, kPrefetchLocality);
    }
  });
}

// The values of 16 codes, by index.
class Table {
 public:
  Table() = default;  // of codes without a codebook: never read
  explicit FAJIT_INLINE Table(const fajit_tensor& t) {
    for (int i = 0; i < 16; ++i) {  // indices are clamped, as in hooks
      const int64_t at = i < t.sizes[0] ? i : t.sizes[0] - 1;
      values_[i] = t.ptr == nullptr ? 0.0f : static_cast<const float*>(t.ptr)[at * t.strides[0]];
    }
  }
  // That of the codebook of hooks, if they have one.
  template <class Numbers>
  static FAJIT_INLINE Table of(const Context& c) {
    if constexpr (Numbers::kGroups > 0 || Numbers::kChannels)
      if constexpr (Numbers::kCodebook >= 0) return Table(c.tensor(Numbers::kCodebook));
    return Table();
  }
  FAJIT_INLINE float value(int index) const { return values_[index]; }
  // Of the four lowest bits.
  FAJIT_INLINE vf operator()(vi index) const { return lookup16(values_, index); }
  // With it, and without masks in `lookup16`, nf4 in groups of 64 takes 0.85 of the time with 4
  // rows a key, 0.9 with one (AVX2, keys from L3, one thread of a Xeon, by hand; AVX-512 0.97).
  FAJIT_INLINE Table scaled(vf scale) const {
    Table to;
    for (int i = 0; i < 16; i += kLanes) store(to.values_ + i, load(values_ + i) * scale);
    return to;
  }
#if FAJIT_AVX == 512
  // The largest finite magnitude.
  FAJIT_INLINE float largest() const {
    const vf x = abs(load(values_));
    return reduce_max(x < kInf ? x : vf{});
  }
  // The values times `scale`, rounded to halves, twice.
  FAJIT_INLINE v32 halves(float scale) const {
    const vh once = float_to_half(load(values_) * scale);
    v32 twice;
    __builtin_memcpy(&twice, &once, sizeof once);
    __builtin_memcpy(reinterpret_cast<char*>(&twice) + sizeof once, &once, sizeof once);
    return twice;
  }
#endif
#if defined(__AVX512BF16__)
  // The values times `scale`, rounded to bf16, twice.
  FAJIT_INLINE v32 words(vf scale) const {
    const vf x = load(values_) * scale;
    v32 words;
    asm("vcvtne2ps2bf16 %1, %1, %0" : "=v"(words) : "v"(x));
    return words;
  }
#endif

 private:
  alignas(64) float values_[16];
};

// Two vectors of a row, rounded.
FAJIT_INLINE void store_two(float* dst, vf low, vf high) {
  store(dst, low);
  store(dst + kLanes, high);
}
FAJIT_INLINE void store_two(bfloat16_t* dst, vf low, vf high) {
#if defined(__AVX512BF16__)
  vi words;
  asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(words) : "v"(high), "v"(low));
  store(dst, words);
#else
  Storage<bfloat16_t>::store(dst, low);
  Storage<bfloat16_t>::store(dst + kLanes, high);
#endif
}

// Whether decode_row takes whole vectors of a group of channels.
template <class Numbers, class Code, int Dim>
constexpr bool has_whole_groups() {
  if constexpr (Numbers::kGroups > 0)
    return Dim / Numbers::kGroups % (2 * kLanes) == 0 &&
           Dim % (2 * kPerElement<Code> * kLanes) == 0;
  return false;
}
template <class Numbers, class Code, int Dim>
constexpr bool kWholeGroups = has_whole_groups<Numbers, Code, Dim>();

// Whether values of DimV codes with the numbers of keys of Dim codes are their first dims, as those
// of latent rows are that no hook changes.
template <class Hooks, class K, class V, int Dim, int DimV>
constexpr bool may_be_keys() {
  using Keys = typename Hooks::KeyNumbers;
  using Values = typename Hooks::ValueNumbers;
  if constexpr (same<K, V> && same<K, latent_t>) return !Hooks::kKeyMod && !Hooks::kValueMod;
  else if constexpr (same<K, V> && !same<K, int4x2_t> && Keys::kGroups > 0 && Values::kGroups > 0)
    return Dim / Keys::kGroups == DimV / Values::kGroups && Keys::kZeros == Values::kZeros &&
           Keys::kCodebook < 0 && Values::kCodebook < 0;
  return false;
}
// Whether `count` keys have the same numbers as their values.
template <class Keys, class Values, int Stride>
FAJIT_INLINE bool same_numbers(const float* keys, const float* values, int count) {
  vi differ{};
  if constexpr (Values::kGroups > 0)
    for (int set = 0; set < Values::kCount / Values::kGroups; ++set)
      for (int g = 0; g < Values::kGroups; ++g)
        for (int n = 0; n < count; n += kLanes)
          differ |= load(keys + (set * Keys::kGroups + g) * Stride + n) !=
                    load(values + (set * Values::kGroups + g) * Stride + n);
  return !any(differ);
}

// The values of the codes of dims [d, d + 2 kLanes) of a row of Dim.
template <class Code, int Dim, bool Looked>
FAJIT_INLINE TwoVectors load_two(const Code* src, int d, [[maybe_unused]] const Table& table) {
  if constexpr (Looked)
    return {table(load_bits<Dim>(src, d)), table(load_bits<Dim>(src, d + kLanes))};
  else return load_two_dims<Code, Dim>(src, d);
}

#if FAJIT_AVX
// decode_row of codes of e4m3 without zero points, or false where one is NaN or a scale is near the
// largest float. Without NaN a code is a half of 1/256 of its value, after a shift. With it and
// values packed during the products of keys, 8 rows of codes with scales of groups took 0.76 of the
// time on AMX, 16 latent rows 0.78; on AVX2 one latent row took 0.81 (least times of one thread).
template <int Groups, int Dim, int Keys, class Matrix>
FAJIT_INLINE bool decode_finite(const e4m3_t* src, const float* numbers, Matrix* dst) {
  constexpr int group = Dim / Groups;
  vi carry{};  // of 7 bits of all ones plus 1
#pragma GCC unroll 4
  for (int d = 0; d < Dim; d += 4 * kLanes) carry |= (load<vi>(src + d) & 0x7f7f7f7f) + 0x01010101;
  bool finite = !any((carry & int32_t(0x80808080)) != 0);
  for (int g = 0; g < Groups; ++g) finite &= __builtin_fabsf(numbers[g * Keys]) < 0x1p119f;
  if (__builtin_expect(!finite, false)) return false;
#pragma GCC unroll 1
  for (int g = 0; g < Groups; ++g) {
    const vf scale = splat(numbers[g * Keys] * 256.0f);
#pragma GCC unroll 4
    for (int d = g * group; d < (g + 1) * group; d += 2 * kLanes) {
      const TwoVectors x = widen_halves(small_float_halves<4>(src + d));
      store_two(dst + d, x.low * scale, x.high * scale);
    }
  }
  return true;
}
#endif

// dst[0, Dim) = the values of a row of Dim codes, rounded once to the matrix dtype; dst[Dim,
// Padded) = 0. numbers: those of the key, Keys apart.
template <class Numbers, class Code, int Dim, int Padded, int Keys, class Matrix>
FAJIT_INLINE void decode_row(const Code* src, const float* numbers, const Table& table,
                             Matrix* dst) {
  constexpr int group = Dim / (Numbers::kGroups > 0 ? Numbers::kGroups : 1);
  if constexpr (Dim < Padded) __builtin_memset(dst + Dim, 0, (Padded - Dim) * sizeof(Matrix));
  if constexpr (kWholeGroups<Numbers, Code, Dim>) {
#if FAJIT_AVX
    if constexpr (same<Code, e4m3_t> && !Numbers::kZeros && Dim % (4 * kLanes) == 0)
      if (decode_finite<Numbers::kGroups, Dim, Keys>(src, numbers, dst)) return;
#endif
#pragma GCC unroll 1
    for (int g = 0; g < Numbers::kGroups; ++g) {
      const vf scale = splat(numbers[g * Keys]);
      const vf zero = Numbers::kZeros ? splat(numbers[(Numbers::kGroups + g) * Keys]) : vf{};
      // Of a codebook sixteen products instead of one for each channel.
      constexpr bool scales_table = Numbers::kCodebook >= 0 && !Numbers::kZeros;
#if defined(__AVX512BF16__)
      if constexpr (same<Matrix, bfloat16_t> && scales_table) {
        const v32 words = table.words(scale);
#pragma GCC unroll 4
        for (int d = g * group; d < (g + 1) * group; d += 32)
          store(dst + d, lookup_codes<Dim>(src, d, words));
        continue;
      }
#endif
      Table scaled;
      if constexpr (scales_table) scaled = table.scaled(scale);
#pragma GCC unroll 4
      for (int d = g * group; d < (g + 1) * group; d += 2 * kLanes) {
        TwoVectors x =
            load_two<Code, Dim, (Numbers::kCodebook >= 0)>(src, d, scales_table ? scaled : table);
        if constexpr (Numbers::kZeros) x.low -= zero, x.high -= zero;
        if constexpr (!scales_table) x.low *= scale, x.high *= scale;
        store_two(dst + d, x.low, x.high);
      }
    }
  } else {
    alignas(64) float row[round_up(Dim, kLanes)];
    load_row<Code, Dim>(src, row);
    for (int d = 0; d < Dim; ++d) {
      const int g = d / group;
      float x = row[d];
      if constexpr (Numbers::kCodebook >= 0) x = table.value(static_cast<int>(x) + 8);
      if constexpr (Numbers::kZeros) x -= numbers[(Numbers::kGroups + g) * Keys];
      row[d] = x * numbers[g * Keys];
    }
    store_row<Matrix, Dim>(dst, row);
  }
}

struct LatentNumbers {
  static constexpr int kGroups = kLatentGroups, kCount = kGroups, kCodebook = -1;
  static constexpr bool kZeros = false;
};
// dst[0, N) = the values of a latent row, rounded once to the matrix dtype.
template <int N, class Matrix>
FAJIT_INLINE void decode_latent(const latent_t* src, Matrix* dst) {
  float scales[kLatentGroups];
  __builtin_memcpy(scales, src + kLatentCodes, sizeof scales);
  decode_row<LatentNumbers, e4m3_t, kLatentCodes, kLatentCodes, 1>(
      reinterpret_cast<const e4m3_t*>(src), scales, Table(), dst);
  const auto* const rest = reinterpret_cast<const bfloat16_t*>(src + kLatentBytes);
  for (int d = 0; d < N - kLatentCodes; d += 2 * kLanes)
    store_two(dst + kLatentCodes + d, Storage<bfloat16_t>::load(rest + d),
              Storage<bfloat16_t>::load(rest + d + kLanes));
}

}  // namespace fajit
