// Rows of keys or values that are stored as codes: on their way to the matrix units they land in
// shared memory as they are, and are widened to 16-bit rows there, by scale * (code - zero).
//
//   copies      codes of the next tiles, in rings of their own
//   widen       8 codes a lane -> 8 floats -> 16 bytes of a tile that ldmatrix reads
//
// The numbers of a row (`Hooks::KeyNumbers`, rendered by variants/lower/row_numbers.py) are read by
// one lane and wait in shared memory. A hook that does more than decode (RoPE, say) is run on each
// row instead, from the codes to the tile.
#pragma once
#include <fajit/context.h>
#include <fajit/cuda/ptx/bytes.h>
#include <fajit/cuda/ptx/copy.h>
#include <fajit/cuda/ptx/warp.h>
#include <fajit/cuda/tile/element.h>

namespace fajit::cuda {

// --- types of codes ----------------------------------------------------------------------------
//
// kBits: of a code. values<N>(): codes [first, first + 8) of a row of N as floats, for a `first`
// that is a multiple of 8. one<N>(): code i of a row of N.

// 2^23 + a byte, as a float, is exact; less 2^23 and what the byte is off by, it is the code.
constexpr float kTwo23 = 8388608.0f;
FAJIT_DEV float plus_two23(uint32_t word, int byte) {
  return __uint_as_float(ptx::pick_bytes(word, 0x4b000000, 0x7440 | byte));
}

struct Int8Codes {
  static constexpr int kBits = 8;
  template <int N>
  static FAJIT_DEV void values(float (&x)[8], const unsigned char* row, int first) {
    const uint2 words = *reinterpret_cast<const uint2*>(row + first);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      x[i] = plus_two23((i < 4 ? words.x : words.y) ^ 0x80808080, i % 4) - (kTwo23 + 128.0f);
  }
  template <int N>
  static FAJIT_DEV float one(const unsigned char* row, int i) {
    return static_cast<float>(static_cast<int8_t>(row[i]));
  }
};

// Codes -8 to 7, stored as 0 to 15. Byte i has number i in its lower half, and number i + N / 2.
struct Int4Codes {
  static constexpr int kBits = 4;
  template <int N>
  static FAJIT_DEV uint32_t bits(const unsigned char* row, int i) {
    return row[i < N / 2 ? i : i - N / 2] >> (i < N / 2 ? 0 : 4) & 0xf;
  }
  // bits() of 8 numbers, a byte each.
  template <int N>
  static FAJIT_DEV uint2 bits_of_8(const unsigned char* row, int first) {
    if constexpr (N % 16 == 0) {
      const bool upper = first >= N / 2;
      const uint2 words = *reinterpret_cast<const uint2*>(row + first - (upper ? N / 2 : 0));
      const int shift = upper ? 4 : 0;
      return uint2{words.x >> shift & 0x0f0f0f0f, words.y >> shift & 0x0f0f0f0f};
    } else {
      uint32_t words[2] = {0, 0};
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (first + i < N) words[i / 4] |= bits<N>(row, first + i) << i % 4 * 8;
      return uint2{words[0], words[1]};
    }
  }
  template <int N>
  static FAJIT_DEV void values(float (&x)[8], const unsigned char* row, int first) {
    const uint2 words = bits_of_8<N>(row, first);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      x[i] = plus_two23(i < 4 ? words.x : words.y, i % 4) - (kTwo23 + 8.0f);
  }
  template <int N>
  static FAJIT_DEV float one(const unsigned char* row, int i) {
    return static_cast<float>(static_cast<int32_t>(bits<N>(row, i)) - 8);
  }
};

// e5m2 is the upper byte of a half.
struct E5m2Codes {
  static constexpr int kBits = 8;
  template <int N>
  static FAJIT_DEV void values(float (&x)[8], const unsigned char* row, int first) {
    const uint2 words = *reinterpret_cast<const uint2*>(row + first);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      x[i] = ptx::half_to_float(ptx::pick_bytes(i < 4 ? words.x : words.y, 0, 0x4404 | i % 4 << 4));
  }
  template <int N>
  static FAJIT_DEV float one(const unsigned char* row, int i) {
    return ptx::half_to_float(uint32_t{row[i]} << 8);
  }
};

// e4m3 as a half has the same exponent, which stands for a 256th; 0x7f is NaN.
struct E4m3Codes {
  static constexpr int kBits = 8;
  template <int N>
  static FAJIT_DEV void values(float (&x)[8], const unsigned char* row, int first) {
    const uint2 words = *reinterpret_cast<const uint2*>(row + first);
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const uint32_t pair =
          halves(ptx::pick_bytes(i < 4 ? words.x : words.y, 0, i % 4 == 0 ? 0x1404 : 0x3424));
      x[i] = ptx::half_to_float(pair) * 256.0f;
      x[i + 1] = ptx::half_to_float(pair >> 16) * 256.0f;
    }
    // Bit 7 of a byte of these sums: whether its code is NaN.
    const uint32_t sums =
        ((words.x & 0x7f7f7f7f) + 0x01010101) | ((words.y & 0x7f7f7f7f) + 0x01010101);
    if ((sums & 0x80808080) == 0) return;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (is_nan((i < 4 ? words.x : words.y) >> i % 4 * 8)) x[i] = __uint_as_float(0x7fc00000);
  }
  template <int N>
  static FAJIT_DEV float one(const unsigned char* row, int i) {
    const uint32_t code = row[i];
    return is_nan(code) ? __uint_as_float(0x7fc00000)
                        : ptx::half_to_float(halves(code << 8)) * 256.0f;
  }

 private:
  // From codes in the upper bytes of halves.
  static FAJIT_DEV uint32_t halves(uint32_t pair) {
    return (pair & 0x80008000) | (pair >> 1 & 0x3f803f80);
  }
  static FAJIT_DEV bool is_nan(uint32_t code) { return (code & 0x7f) == 0x7f; }
};

// Keys or values that are no codes, beside ones that are.
template <class Element>
struct NoCodes {
  static constexpr int kBits = 16;
  template <int N>
  static FAJIT_DEV void values(float (&x)[8], const unsigned char* row, int first) {
    const uint4 words = *reinterpret_cast<const uint4*>(row + 2 * first);
    const uint32_t all[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 8; ++i)
      x[i] = Element::to_float(static_cast<uint16_t>(all[i / 2] >> i % 2 * 16));
  }
  template <int N>
  static FAJIT_DEV float one(const unsigned char* row, int i) {
    return Element::to_float(*reinterpret_cast<const uint16_t*>(row + 2 * i));
  }
};

// What a kernel's keys and values are stored as: Config::KeyCodes and ValueCodes, if it has them.
template <class Config, class = void>
struct CodesOf {
  static constexpr bool kAny = false;
  using Keys = NoCodes<typename Config::Element>;
  using Values = Keys;
};
template <class>
struct Exists {
  using Type = void;
};
template <class Config>
struct CodesOf<Config, typename Exists<typename Config::KeyCodes>::Type> {
  static constexpr bool kAny = true;
  using Keys = typename Config::KeyCodes;
  using Values = typename Config::ValueCodes;
};

// --- rows --------------------------------------------------------------------------------------

// Rows of HeadDim codes in shared memory, each at a multiple of 16 bytes.
template <class Codes, int HeadDim>
struct CodeRows {
  static constexpr int kBytes = (HeadDim * Codes::kBits + 7) / 8;
  static constexpr int kPitch = round_up(kBytes, 16);
  static constexpr int kChunks = kPitch / 16;
};

// One warp starts the copies of kRows rows of codes; lane r has the address of row r, which is
// valid also for rows that do not exist: nothing is read of those from `count` on.
template <class Rows, int kRows, bool kAligned, bool kReadOnce>
FAJIT_DEV void load_codes(unsigned char* to, int count, const unsigned char* own,
                          [[maybe_unused]] ptx::L2Policy<kReadOnce> policy) {
  constexpr int kSteps = (kRows * Rows::kChunks + 31) / 32;
  const int lane = ptx::lane_index();
#pragma unroll
  for (int j = 0; j < kSteps; ++j) {
    const int i = lane + 32 * j, r = i / Rows::kChunks, at = i % Rows::kChunks * 16;
    const unsigned char* const from = ptx::pointer_from_lane(own, r < kRows ? r : 0);
    if (r >= kRows || r >= count) continue;
    unsigned char* const here = to + r * Rows::kPitch + at;
    if constexpr (kAligned && ptx::kAsyncCopies) {
      ptx::copy_async(ptx::shared_address(here), from + at, 16, policy);
    } else if constexpr (kAligned) {
      *reinterpret_cast<uint4*>(here) = *reinterpret_cast<const uint4*>(from + at);
    } else {
      for (int b = 0; b < 16; ++b) here[b] = at + b < Rows::kBytes ? from[at + b] : 0;
    }
  }
}

// What a row hook reads and writes: a row of N codes, and its row of a tile.
template <class Codes, int N, class Element, class Layout>
struct WidenedRow {
  const unsigned char* codes;
  unsigned char* tile;
  int row;

  FAJIT_DEV float operator[](int i) const { return Codes::template one<N>(codes, i); }
  FAJIT_DEV void write(int i, float x) const {
    *reinterpret_cast<uint16_t*>(tile + Layout::element(row, i)) = round_to<Element>(x);
  }
};

// Of rows that are their codes, or that a hook decodes.
struct NoNumbers {
  static constexpr int kGroups = 0, kCount = 0, kCodebook = -1;
  static constexpr bool kZeros = false;
};

// Turns kRows rows of codes into rows [first_row, first_row + kRows) of a tile; rows from `count`
// on and columns from HeadDim on become zeros. numbers: Numbers::kCount of each row, scales first.
// entry: of the codebook, that of the lane. Called by all lanes of a warp.
template <class Codes, class Numbers, class Element, class Layout, int HeadDim, int kRows>
FAJIT_DEV void widen(unsigned char* tile, int first_row, const unsigned char* codes, int count,
                     [[maybe_unused]] const float* numbers, [[maybe_unused]] float entry) {
  using Rows = CodeRows<Codes, HeadDim>;
  constexpr int kChunks = Layout::kDim / 8, kSteps = (kRows * kChunks + 31) / 32;
  constexpr int kGroups = Numbers::kGroups > 0 ? Numbers::kGroups : 1;
  const int lane = ptx::lane_index();
  if (count <= 0) {  // row 0 does not exist
#pragma unroll 1
    for (int i = lane; i < kRows * kChunks; i += 32)
      *reinterpret_cast<uint4*>(tile + Layout::offset(first_row + i / kChunks, i % kChunks)) =
          uint4{0, 0, 0, 0};
    return;
  }
#pragma unroll 4
  for (int j = 0; j < kSteps; ++j) {
    const int i = lane + 32 * j, r = min(i / kChunks, kRows - 1), first = i % kChunks * 8;
    const bool inside = r < count && first < HeadDim;
    const int row = inside ? r : 0, from = inside ? first : 0;  // what is read in any case
    float x[8];
    if constexpr (Numbers::kCodebook >= 0) {
      const uint2 words = Codes::template bits_of_8<HeadDim>(codes + row * Rows::kPitch, from);
#pragma unroll
      for (int e = 0; e < 8; ++e)
        x[e] = ptx::from_lane(entry, (e < 4 ? words.x : words.y) >> e % 4 * 8 & 0xff);
    } else {
      Codes::template values<HeadDim>(x, codes + row * Rows::kPitch, from);
    }
    if constexpr (Numbers::kCount > 0) {
      const float* const own = numbers + row * Numbers::kCount + from * kGroups / HeadDim;
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if constexpr (Numbers::kZeros) x[e] -= own[kGroups];
        x[e] *= own[0];
      }
    }
    uint4 packed{0, 0, 0, 0};
    if (inside) {
      if constexpr (HeadDim % 8 != 0) {
#pragma unroll
        for (int e = 0; e < 8; ++e) x[e] = first + e < HeadDim ? x[e] : 0.0f;
      }
      packed = uint4{Element::pack(x[0], x[1]), Element::pack(x[2], x[3]),
                     Element::pack(x[4], x[5]), Element::pack(x[6], x[7])};
    }
    if (kRows * kChunks % 32 == 0 || i < kRows * kChunks)
      *reinterpret_cast<uint4*>(tile + Layout::offset(first_row + r, i % kChunks)) = packed;
  }
}

// --- a side of a tile --------------------------------------------------------------------------

template <bool kFirst, class A, class B>
struct Select {
  using Type = A;
};
template <class A, class B>
struct Select<false, A, B> {
  using Type = B;
};

// What is done to the rows of codes that a warp has loaded. position(r): the logical position of
// row r. numbers: scratch of the warp, kNumbers floats a row. hook(row, position): a row hook.
template <class Codes, class Numbers, class Element, class Layout, int HeadDim, bool kHook>
struct Widening {
  // Groups whose chunks of 8 have one number each; others are the hook's.
  static constexpr bool kDecodes = Numbers::kGroups > 0 && HeadDim % (8 * Numbers::kGroups) == 0;
  using Used = typename Select<kDecodes, Numbers, NoNumbers>::Type;
  static constexpr int kNumbers = Used::kCount;
  using Rows = CodeRows<Codes, HeadDim>;

  template <int kRows, class Position, class Hook>
  static FAJIT_DEV void run(const Context& c, unsigned char* tile, int first_row,
                            const unsigned char* codes, int count, float* numbers, int32_t request,
                            int32_t kv_h, Position position, Hook hook) {
    const int lane = ptx::lane_index();
    if constexpr (kHook && !kDecodes) {
      for (int r = 0; r < kRows; ++r) {
        if (r < count)
          hook(WidenedRow<Codes, HeadDim, Element, Layout>{codes + r * Rows::kPitch, tile,
                                                           first_row + r},
               position(r));
        for (int i = lane + (r < count ? HeadDim : 0); i < Layout::kDim; i += 32)
          *reinterpret_cast<uint16_t*>(tile + Layout::element(first_row + r, i)) = 0;
      }
    } else {
      if constexpr (kNumbers > 0) {
        if (lane < kRows && lane < count)
          store<0>(numbers + lane * kNumbers, c, request, kv_h, position(lane));
        __syncwarp();
      }
      float entry = 0.0f;
      if constexpr (Used::kCodebook >= 0)
        entry = static_cast<const float*>(
            c.tensor(Used::kCodebook).ptr)[lane % 16 * c.tensor(Used::kCodebook).strides[0]];
      widen<Codes, Used, Element, Layout, HeadDim, kRows>(tile, first_row, codes, count, numbers,
                                                          entry);
    }
    __syncwarp();
  }

 private:
  template <int i>
  static FAJIT_DEV void store(float* to, const Context& c, int32_t request, int32_t kv_h,
                              int32_t position) {
    if constexpr (i < kNumbers) {
      const float number = Used::template number<i>(c, request, kv_h, position);
      store<i + 1>(to, c, request, kv_h, position);  // all are loaded before one is awaited
      to[i] = number;
    }
  }
};

}  // namespace fajit::cuda
