// Scales and zero points of channels, which a block of keys shares (KIVI).
//
// `Numbers` is Hooks::KeyNumbers or Hooks::ValueNumbers with kChannels: key_mod or value_mod is no
// more than
//
//   scale[c] * (value of the code - zero[c])        c: channel
//
// Kernels of few rows multiply Q by the scales of a block, and read the codes of its keys as they
// are:
//
//   q . k = (q * scale) . code - (q * scale) . zero
//
// Other rows are decoded, with the numbers of their block as vectors. Decoding int4 keys so, with
// int4 values of one scale a token and 64 channels, took 2.8 times as long as bf16 with 4 query
// heads a KV head when each key was multiplied by its scales, and takes 0.5 (8 requests of 4,096
// keys, D128; CPU time of one thread of a Xeon, cpu:avx512_bf16, by hand): 1.03 to 1.2 of the time
// of keys with a scale a token.
#pragma once
#include <fajit/cpu/codes/code_products.h>

namespace fajit {

// Whether a hook only decodes rows of Code, whose channels have scales; as kIsDecoding.
template <class Numbers, class Code>
constexpr bool decodes_channels() {
  if constexpr (Numbers::kChannels && !same<Code, latent_t>)
    return Numbers::kCodebook < 0 || same<Code, int4x2_t>;
  return false;
}
template <class Numbers, class Code>
constexpr bool kByChannel = decodes_channels<Numbers, Code>();
// Whether rows of Q can be multiplied with the codes themselves. In fp32, and as halves, the
// products of codes near their zero points would cancel.
template <class Numbers, class Code, class Q>
constexpr bool takes_folded() {
  if constexpr (kByChannel<Numbers, Code>)
    return kIsCode<Code> && Numbers::kCodebook < 0 &&
           !(Numbers::kZeros &&
             (same<Q, float> || (FAJIT_HALVES && same<Q, bfloat16_t> && same<Code, e4m3_t>)));
  return false;
}

// What products with codes know of rows without numbers of their own.
struct Unscaled {
  static constexpr int kGroups = 1, kCount = 0, kCodebook = -1;
  static constexpr bool kChannels = false, kZeros = false;
};

// numbers[0, Dim) = the scales that begin at the first offset, numbers[Room, Room + Dim) = the zero
// points at the second one, if there are any.
template <class Numbers, int Dim, int Room>
FAJIT_INLINE void load_channels(const Context& c, const int64_t* offsets, float* numbers) {
  using D = typename Numbers::Type;
  using S = typename ops::storage<D>::type;
  each_index<Numbers::kZeros ? 2 : 1>([&](auto i) __attribute__((always_inline)) {
    const fajit_tensor& t = c.tensor(Numbers::kTensors[i.value]);
    float* const to = numbers + i.value * Room;
    const int64_t stride = t.strides[Numbers::kChannelDims[i.value]];
    int d = 0;
    if (stride == 1 && t.ptr != nullptr) {
      using T = Choose<same<D, dt::f32>, float, Choose<same<D, dt::f16>, half_t, bfloat16_t>>;
      const S* const first = static_cast<const S*>(t.ptr) + offsets[i.value];
      for (; d + kLanes <= Dim; d += kLanes) store(to + d, Storage<T>::load(first + d));
    }
    for (; d < Dim; ++d) to[d] = static_cast<float>(ops::load<D>(t, offsets[i.value] + d * stride));
  });
}

// Whether a bit of x is set. gcc 12 makes about 200 instructions of a comparison of its lanes.
FAJIT_INLINE bool any_bits(vl x) {
  vi halves[2];
  __builtin_memcpy(halves, &x, sizeof x);
  return any((halves[0] | halves[1]) != 0);
}

// The blocks of a tile's keys: runs of keys with the same scales and zero points. All heads have
// the same ones: found for each head again, they took 0.2 of the time of decoding.
template <class Numbers, int Keys>
class Blocks {
  static constexpr int kSets = Numbers::kZeros ? 2 : 1;

 public:
  template <class KvRows>
  void find(const Context& c, int32_t b, int32_t kv_h, const KvRows& kv, int keys) {
    count = 0;
    vl first[kSets];
    bool starts = true;
    for (int n = 0; n < keys;) {
      vl at[kSets];
      offsets(c, b, kv_h, kv.positions(n, iota() + n < keys, keys - 1), at);
      if (starts)
        for (int i = 0; i < kSets; ++i) first[i] = vl{} + at[i][0];
      vl differ = at[0] ^ first[0];
      if constexpr (kSets == 2) differ |= at[1] ^ first[1];
      const int left = keys - n < kLanes ? keys - n : kLanes;
      int own = left;
      if (any_bits(differ))
        for (int i = left; i-- > 0;) own = differ[i] != 0 ? i : own;
      n += own;
      starts = own < left || n == keys;
      if (starts) ends[count++] = n;
    }
  }

  // The numbers of a block, which has key kv_idx, of a head, as `load_channels` has them.
  template <int Dim, int Room>
  static FAJIT_INLINE void load(const Context& c, int32_t b, int32_t kv_h, int32_t kv_idx,
                                float* numbers) {
    vl at[kSets];
    int64_t first[kSets];
    offsets(c, b, kv_h, splat(kv_idx), at);
    for (int i = 0; i < kSets; ++i) first[i] = at[i][0];
    load_channels<Numbers, Dim, Room>(c, first, numbers);
  }

  int count = 0;
  int ends[Keys];

 private:
  static FAJIT_INLINE void offsets(const Context& c, int32_t b, int32_t kv_h, vi kv_idx,
                                   vl (&at)[kSets]) {
    each_index<kSets>([&](auto i) __attribute__((always_inline)) {
      at[i.value] = Numbers::template offset<i.value>(c, b, kv_h, kv_idx);
    });
  }
};

struct NoBlocks {
  int count = 0;
  template <class... Arguments>
  void find(const Arguments&...) {}
};
template <class Numbers, class Code, int Keys>
using BlocksOf = Choose<kByChannel<Numbers, Code>, Blocks<Numbers, Keys>, NoBlocks>;

// Prefetches the numbers of the block that has key kv_idx, of a head.
template <class Numbers, int Dim>
FAJIT_INLINE void fetch_channels(const Context& c, int32_t b, int32_t kv_h, int32_t kv_idx) {
  each_index<Numbers::kZeros ? 2 : 1>([&](auto i) __attribute__((always_inline)) {
    using S = typename ops::storage<typename Numbers::Type>::type;
    const vl at = Numbers::template offset<i.value>(c, b, kv_h, splat(kv_idx));
    prefetch_row<Dim* int{sizeof(S)}>(
        static_cast<const S*>(c.tensor(Numbers::kTensors[i.value]).ptr) + at[0]);
  });
}

// load_tile_numbers of all heads that run together, from that of the item on; those of the tile
// after it are prefetched. Those of channels are read later, by block: the blocks are found.
template <class Numbers, class Code, int Dim, int Keys, class KvRows, class Found>
FAJIT_INLINE void load_head_numbers(const Context& c, [[maybe_unused]] const fajit_work& w,
                                    [[maybe_unused]] int heads, const KvRows& kv,
                                    [[maybe_unused]] int keys, [[maybe_unused]] float* out,
                                    Found& blocks) {
  [[maybe_unused]] const int32_t b = w.request, kv_h = w.head_begin / c.group_size();
  blocks.find(c, b, kv_h, kv, keys);
  if constexpr (kByChannel<Numbers, Code>) {
    for (int j = 0; j < heads; ++j)
      fetch_channels<Numbers, Dim>(c, b, kv_h + j, kv.position(0) + Keys);
  } else if constexpr (kIsDecoding<Numbers, Code>) {
    for (int n = 0; n < keys; n += kLanes) {
      const vi kv_idx = kv.positions(n, iota() + n < keys, keys - 1);
      load_numbers<Numbers, Keys>(c, b, kv_h, heads, kv_idx, out + n);
      fetch_numbers<Numbers>(c, b, kv_h, kv_idx + Keys);
    }
  }
}

// dst[0, Dim) = the values of a row of Dim codes, rounded once to the matrix dtype; dst[Dim,
// Padded) = 0. numbers: as `load_channels` has them.
template <class Numbers, class Code, int Dim, int Padded, int Room, class Matrix>
FAJIT_INLINE void decode_channels(const Code* src, const float* numbers, const Table& table,
                                  Matrix* dst) {
  const auto decoded = [&](vf x, int d) __attribute__((always_inline)) {
    if constexpr (Numbers::kZeros) x -= load(numbers + Room + d);
    return x * load(numbers + d);
  };
  if constexpr (Dim % (2 * kPerElement<Code> * kLanes) == 0) {
#pragma GCC unroll 4
    for (int d = 0; d < Dim; d += 2 * kLanes) {
      const auto x = load_two<Code, Dim, (Numbers::kCodebook >= 0)>(src, d, table);
      store_two(dst + d, decoded(x.low, d), decoded(x.high, d + kLanes));
    }
  } else {
    alignas(64) float row[round_up(Dim, kLanes)];
    load_row<Code, Dim>(src, row);
    if constexpr (Numbers::kCodebook >= 0)
      for (int d = 0; d < Dim; ++d) row[d] = table.value(static_cast<int>(row[d]) + 8);
    for (int d = 0; d < Dim; d += kLanes) store(row + d, decoded(load(row + d), d));
    store_row<Matrix, Dim>(dst, row);
  }
  if constexpr (Dim < Padded) __builtin_memset(dst + Dim, 0, (Padded - Dim) * sizeof(Matrix));
}

// decode_channels of the keys or values of a tile, in order.
template <class Numbers, int Dim, int Keys, class KvRows>
class DecodedBlocks {
  static constexpr int kRoom = round_up(Dim, kLanes);

 public:
  FAJIT_INLINE DecodedBlocks(const Context& c, int32_t b, int32_t kv_h, const KvRows& kv,
                             const Blocks<Numbers, Keys>& blocks)
      : c_(c), b_(b), kv_h_(kv_h), kv_(kv), next_(blocks.ends), table_(Table::of<Numbers>(c)) {}

  // The row of key n.
  template <int Padded, class Code, class Matrix>
  FAJIT_INLINE void decode(const Code* row, int n, Matrix* dst) {
    if (n >= end_) {
      end_ = *next_++;
      Blocks<Numbers, Keys>::template load<Dim, kRoom>(c_, b_, kv_h_, kv_.position(n), numbers_);
    }
    decode_channels<Numbers, Code, Dim, Padded, kRoom>(row, numbers_, table_, dst);
  }

 private:
  const Context& c_;
  const int32_t b_, kv_h_;
  const KvRows& kv_;
  const int* next_;  // end of the next block
  int end_ = 0;
  const Table table_;
  alignas(64) float numbers_[2 * kRoom];
};

// The `count` keys or values of a tile: dst[key * Padded].
template <class Numbers, int Dim, int Padded, int Keys, class Rows, class KvRows, class Matrix>
FAJIT_INLINE void decode_blocks(const Context& c, int32_t b, int32_t kv_h, const Rows& rows,
                                const KvRows& kv, const Blocks<Numbers, Keys>& blocks, int count,
                                Matrix* dst) {
  DecodedBlocks<Numbers, Dim, Keys, KvRows> decoded(c, b, kv_h, kv, blocks);
  for (int n = 0; n < count; ++n)
    decoded.template decode<Padded>(rows(n), n, dst + int64_t{n} * Padded);
}

// The scores of a tile's keys by q[row] times the scales of their blocks, in `folded`:
// matrix elements, or what `products` take, with `units`. multiply(n, count, to) puts those of keys
// [n, n + count) to `to`, before the zero points, which are subtracted here times `scale`. Results
// are s[row * stride + key]; `spare` is as large.
template <class Numbers, int Dim, int Rows, class Products, int Keys, class KvRows, class Matrix,
          class Multiply>
FAJIT_INLINE void fold_blocks(const Context& c, const Products& products, int32_t b, int32_t kv_h,
                              const KvRows& kv, const Blocks<Numbers, Keys>& blocks,
                              const Matrix* q, int rows, float scale, Matrix* folded,
                              CodeRow* units, float* s, float* spare, int stride,
                              Multiply multiply) {
  alignas(64) float numbers[2 * Dim], x[Dim];
  for (int block = 0, n = 0; block < blocks.count; n = blocks.ends[block++]) {
    Blocks<Numbers, Keys>::template load<Dim, Dim>(c, b, kv_h, kv.position(n), numbers);
    const int count = blocks.ends[block] - n;
    // Products write whole vectors of keys: the last one of a row must not reach the next row.
    float* const to = n % kLanes == 0 ? s + n : spare;
    float zeros[Rows];
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
      for (int d = 0; d < Dim; d += kLanes)
        store(x + d, Storage<Matrix>::load(q + r * Dim + d) * load(numbers + d));
      if constexpr (Products::kTakes) {
        units[r] =
            products.template query<Dim>(x, reinterpret_cast<int8_t*>(folded + r * Dim), nullptr);
      } else {
        // Zero points are multiplied with what the codes are: where a code is near its zero point,
        // what rounding has changed must cancel too.
        store_row<Matrix, Dim>(folded + r * Dim, x);
        if constexpr (Numbers::kZeros) load_row<Matrix, Dim>(folded + r * Dim, x);
      }
      vf zero{};
      if constexpr (Numbers::kZeros)
#pragma GCC unroll 4
        for (int d = 0; d < Dim; d += kLanes) zero += load(x + d) * load(numbers + Dim + d);
      zeros[r] = Numbers::kZeros ? reduce_add(zero) * scale : 0.0f;
    }
    multiply(n, count, to);
    for (int r = 0; r < rows; ++r) {
      float* const row = to + r * stride;
      if constexpr (Numbers::kZeros)
        for (int i = 0; i < count; i += kLanes) store(row + i, load(row + i) - zeros[r]);
      if (to == spare) __builtin_memcpy(s + r * stride + n, row, sizeof(float) * count);
    }
  }
}

}  // namespace fajit
