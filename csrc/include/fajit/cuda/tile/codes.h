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
#include <fajit/cuda/hooks/storage.h>
#include <fajit/cuda/ptx/bytes.h>
#include <fajit/cuda/ptx/copy.h>
#include <fajit/cuda/ptx/warp.h>
#include <fajit/cuda/tile/element.h>
#include <fajit/cuda/tile/row_layout.h>

namespace fajit::cuda {

// --- types of codes ----------------------------------------------------------------------------
//
// kBits: of a code. values<N>(): codes [first, first + 8) of a row of N as floats, for a `first`
// that is a multiple of 8. pairs<Element, N>(): the same as four words of two 16-bit values, which
// hold every code exactly. Both are wrong for infinities and NaN, and return a word in which a bit
// of kSpecial is set if there may be one. one<N>(): code i of a row of N, any code.
constexpr uint32_t kSpecial = 0x80808080;

// 2^23 + a byte, as a float, is exact; less 2^23 and what the byte is off by, it is the code.
constexpr float kTwo23 = 8388608.0f;
FAJIT_DEV float plus_two23(uint32_t word, int byte) {
  return __uint_as_float(ptx::pick_bytes(word, 0x4b000000, 0x7440 | byte));
}

// A constant in a register: prmt takes one immediate operand, which should be the order of bytes.
FAJIT_DEV uint32_t kept(uint32_t constant) {
  asm("" : "+r"(constant));
  return constant;
}
// Bytes i and i + 1 of a word, each below the byte `above`.
FAJIT_DEV uint32_t below(uint32_t word, int i, uint32_t above) {
  return ptx::pick_bytes(word, above, 0x4040 | i | (i + 1) << 8);
}
// Bytes i and i + 1 of a word, each above a zero byte.
FAJIT_DEV uint32_t raised(uint32_t word, int i) {
  return ptx::pick_bytes(word, 0, 0x0404 | i << 4 | (i + 1) << 12);
}
template <class Element>
FAJIT_DEV uint32_t pair_of(uint32_t bfloat16_bits, uint32_t float16_bits) {
  return (Element::kBfloat16 ? bfloat16_bits : float16_bits) * 0x10001;
}

struct Int8Codes {
  static constexpr int kBits = 8;
  // 0x43 above seven bits is 128 plus them, above 0x80 it is 256; 0x64 above a byte is 1024 plus
  // it.
  template <class Element, int N>
  static FAJIT_DEV uint32_t pairs(uint32_t (&y)[4], const unsigned char* row, int first) {
    const uint2 words = *reinterpret_cast<const uint2*>(row + first);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t word = i < 2 ? words.x : words.y;
      if constexpr (Element::kBfloat16) {
        const uint32_t t = below(word, i % 2 * 2, kept(0x43));
        y[i] = ptx::fma_pair<Element>(t & 0xff80ff80, 0xbf80bf80, t & 0xff7fff7f);
      } else {
        y[i] = ptx::fma_pair<Element>(below(word ^ 0x80808080, i % 2 * 2, kept(0x64)), 0x3c003c00,
                                      0xe480e480);
      }
    }
    return 0;
  }
  template <int N>
  static FAJIT_DEV uint32_t values(float (&x)[8], const unsigned char* row, int first) {
    const uint2 words = *reinterpret_cast<const uint2*>(row + first);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      x[i] = plus_two23((i < 4 ? words.x : words.y) ^ 0x80808080, i % 4) - (kTwo23 + 128.0f);
    return 0;
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
  template <class Element, int N>
  static FAJIT_DEV uint32_t pairs(uint32_t (&y)[4], const unsigned char* row, int first) {
    const uint2 words = bits_of_8<N>(row, first);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      y[i] = ptx::fma_pair<Element>(
          below(i < 2 ? words.x : words.y, i % 2 * 2, kept(Element::kBfloat16 ? 0x43 : 0x64)),
          pair_of<Element>(0x3f80, 0x3c00), pair_of<Element>(0xc308, 0xe408));
    return 0;
  }
  template <int N>
  static FAJIT_DEV uint32_t values(float (&x)[8], const unsigned char* row, int first) {
    const uint2 words = bits_of_8<N>(row, first);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      x[i] = plus_two23(i < 4 ? words.x : words.y, i % 4) - (kTwo23 + 8.0f);
    return 0;
  }
  template <int N>
  static FAJIT_DEV float one(const unsigned char* row, int i) {
    return static_cast<float>(static_cast<int32_t>(bits<N>(row, i)) - 8);
  }
};

// Floats of 8 bits are the upper bytes of halves, after a shift: kShift bits further down the same
// exponent stands for 2^-kDown times as much. From kLast on, magnitudes are infinite or NaN.
template <int kShift, int kDown, uint32_t kLast, float (*kToFloat)(uint8_t)>
struct FloatCodes {
  static constexpr int kBits = 8;
  template <class Element, int N>
  static FAJIT_DEV uint32_t pairs(uint32_t (&y)[4], const unsigned char* row, int first) {
    constexpr int kMore = Element::kBfloat16 ? kShift + 3 : kShift;  // bfloat16: 3 exponent bits
    constexpr uint32_t kMask = (0x7f00 >> kMore) * 0x10001;
    constexpr uint32_t kPower = Element::kBfloat16 ? (127 + 112 + kDown) << 7 : (15 + kDown) << 10;
    const uint2 words = *reinterpret_cast<const uint2*>(row + first);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t t = raised(i < 2 ? words.x : words.y, i % 2 * 2);
      y[i] = ptx::fma_pair<Element>((t & 0x80008000) | (t >> kMore & kMask), kPower * 0x10001,
                                    0x80008000);
    }
    return last_in(words);
  }
  template <int N>
  static FAJIT_DEV uint32_t values(float (&x)[8], const unsigned char* row, int first) {
    const uint2 words = *reinterpret_cast<const uint2*>(row + first);
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const uint32_t pair = halves(raised(i < 4 ? words.x : words.y, i % 4));
      x[i] = Float16::to_float(static_cast<uint16_t>(pair)) * kScale;
      x[i + 1] = Float16::to_float(static_cast<uint16_t>(pair >> 16)) * kScale;
    }
    return last_in(words);
  }
  template <int N>
  static FAJIT_DEV float one(const unsigned char* row, int i) {
    return kToFloat(row[i]);
  }

 private:
  static constexpr float kScale = static_cast<float>(1 << kDown);
  static FAJIT_DEV uint32_t halves(uint32_t pair) {
    return (pair & 0x80008000) | (pair >> kShift & (0x7f00 >> kShift) * 0x10001);
  }
  // Bit 7 of a byte: whether the magnitude of a code is kLast or more.
  static FAJIT_DEV uint32_t last_in(const uint2& words) {
    constexpr uint32_t kToBit7 = (0x80 - kLast) * 0x01010101;
    return ((words.x & 0x7f7f7f7f) + kToBit7) | ((words.y & 0x7f7f7f7f) + kToBit7);
  }
};
using E4m3Codes = FloatCodes<1, 8, 0x7f, ops::e4m3_to_float>;
using E5m2Codes = FloatCodes<0, 0, 0x7c, ops::e5m2_to_float>;

// Keys or values that are no codes, beside ones that are.
template <class Element>
struct NoCodes {
  static constexpr int kBits = 16;
  template <class, int N>
  static FAJIT_DEV uint32_t pairs(uint32_t (&y)[4], const unsigned char* row, int first) {
    const uint4 words = *reinterpret_cast<const uint4*>(row + 2 * first);
    y[0] = words.x;
    y[1] = words.y;
    y[2] = words.z;
    y[3] = words.w;
    return 0;
  }
  template <int N>
  static FAJIT_DEV uint32_t values(float (&x)[8], const unsigned char* row, int first) {
    const uint4 words = *reinterpret_cast<const uint4*>(row + 2 * first);
    const uint32_t all[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 8; ++i)
      x[i] = Element::to_float(static_cast<uint16_t>(all[i / 2] >> i % 2 * 16));
    return 0;
  }
  template <int N>
  static FAJIT_DEV float one(const unsigned char* row, int i) {
    return Element::to_float(*reinterpret_cast<const uint16_t*>(row + 2 * i));
  }
};

// Rows of FlashMLA's fp8 cache: 512 codes of e4m3, 4 scales of 128 codes each (fp32), 64 values of
// bfloat16. Such a row has 576 values, and without those of bfloat16 512.
struct LatentCodes {
  static constexpr int kBits = 8, kCodes = 512, kGroup = 128;
  static constexpr int kRest = kCodes + kCodes / kGroup * 4;  // bytes before bfloat16
  template <class Element, int N>
  static FAJIT_DEV uint32_t pairs(uint32_t (&y)[4], const unsigned char* row, int first) {
    float x[8];
    const uint32_t special = values<N>(x, row, first);
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] = Element::pack(x[2 * i], x[2 * i + 1]);
    return special;
  }
  template <int N>
  static FAJIT_DEV uint32_t values(float (&x)[8], const unsigned char* row, int first) {
    if (N > kCodes && first >= kCodes)
      return NoCodes<Bfloat16>::values<N>(x, row + kRest, first - kCodes);
    const uint32_t special = E4m3Codes::values<N>(x, row, first);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] *= scale(row, first);
    return special;
  }
  template <int N>
  static FAJIT_DEV float one(const unsigned char* row, int i) {
    if (N > kCodes && i >= kCodes) return NoCodes<Bfloat16>::one<N>(row + kRest, i - kCodes);
    return E4m3Codes::one<N>(row, i) * scale(row, i);
  }

 private:
  static FAJIT_DEV float scale(const unsigned char* row, int i) {
    return *reinterpret_cast<const float*>(row + kCodes + i / kGroup * 4);
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

template <class Codes>
constexpr int bytes_of(int dims) {
  return (dims * Codes::kBits + 7) / 8;
}
template <>
constexpr int bytes_of<LatentCodes>(int dims) {
  return LatentCodes::kRest + (dims - LatentCodes::kCodes) * 2;
}

// Rows of HeadDim codes in shared memory, each at a multiple of 16 bytes.
template <class Codes, int HeadDim>
struct CodeRows {
  static constexpr int kBytes = bytes_of<Codes>(HeadDim);
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

// Turns kRows rows of codes into rows [first_row, first_row + kRows) of a tile, which begins at a
// multiple of 8; rows from `count` on and columns from HeadDim on become zeros. get(y, r, first): 8
// values of row r from column `first` on, two a word; both exist. It returns a word: see kSpecial.
// exact(y, r, first): the same of any codes, where floats of 8 bits may be infinite or NaN. Called
// by all lanes of a warp.
template <class Layout, int HeadDim, int kRows, class Get, class Exact>
FAJIT_DEV void widen(unsigned char* tile, int first_row, int count, Get get, Exact exact) {
  constexpr int kChunks = Layout::kDim / 8;
  // Columns in parts whose chunks divide a warp.
  constexpr int kWide = kChunks & -kChunks, kParts = kChunks / kWide, kStep = 32 / kWide;
  const int lane = ptx::lane_index();
  // Every step is the same number of rows further for all lanes, as in load_strided_rows. Some
  // steps are loaded before the first is stored, so that their latencies overlap.
  if constexpr (HeadDim == Layout::kDim && kChunks <= 32 && kRows % kStep == 0 &&
                (kParts == 1 ? kStep <= 8 : Layout::kInParts)) {
    if (count >= kRows) {
      constexpr int kSteps = kRows / kStep, kBatch = kSteps % 4 == 0 ? 4 : kSteps % 2 == 0 ? 2 : 1;
      const int r = lane / kWide, chunk = lane % kWide;
      uint32_t to[kParts];
#pragma unroll
      for (int p = 0; p < kParts; ++p)
        to[p] = compute_here(ptx::shared_address(tile) +
                             Layout::offset(first_row + r, chunk + p * kWide));
      uint32_t special = 0;
#pragma unroll
      for (int j = 0; j < kSteps; j += kBatch) {
        uint32_t y[kParts * kBatch][4];
#pragma unroll
        for (int i = 0; i < kParts * kBatch; ++i)
          special |= get(y[i], r + (j + i / kParts) * kStep, chunk * 8 + i % kParts * kWide * 8);
#pragma unroll
        for (int i = 0; i < kParts * kBatch; ++i)
          ptx::store_words(Layout::down(to[i % kParts], (j + i / kParts) * kStep), y[i][0], y[i][1],
                           y[i][2], y[i][3]);
      }
      if ((special & kSpecial) != 0) {
#pragma unroll 1
        for (int j = r; j < kRows; j += kStep) {
#pragma unroll 1
          for (int part = 0; part < kParts; ++part) {
            const int at = chunk + part * kWide;
            uint32_t y[4];
            exact(y, j, at * 8);
            *reinterpret_cast<uint4*>(tile + Layout::offset(first_row + j, at)) =
                uint4{y[0], y[1], y[2], y[3]};
          }
        }
      }
      return;
    }
  }
#pragma unroll 1
  for (int i = lane; i < round_up(kRows * kChunks, 32); i += 32) {
    const int r = min(i / kChunks, kRows - 1), first = i % kChunks * 8;
    const bool inside = r < count && first < HeadDim;
    uint32_t y[4] = {0, 0, 0, 0};
    if (count > 0) {
      const int row = inside ? r : 0, from = inside ? first : 0;
      if ((get(y, row, from) & kSpecial) != 0) exact(y, row, from);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (!inside) y[e] = 0;
      if (HeadDim % 8 != 0 && first + 2 * e + 1 >= HeadDim)
        y[e] = first + 2 * e < HeadDim ? y[e] & 0xffff : 0;
    }
    if (i < kRows * kChunks)
      *reinterpret_cast<uint4*>(tile + Layout::offset(first_row + r, i % kChunks)) =
          uint4{y[0], y[1], y[2], y[3]};
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

// What is done to the rows of codes that a warp has loaded: lane r loads the numbers of row r ahead
// (`load`), and hands them to the others when the row is due (`put`).
//
// kFolds: scales of whole groups are not applied here, but by the products: that of a group and a
// row is at numbers[group][row]. Else a row's numbers are one after the other.
template <class Codes, class Numbers, class Element, class Layout, int HeadDim, bool kHook,
          bool kFolds>
struct Widening {
  static constexpr int kGroups = Numbers::kGroups, kParts = kGroups > 0 ? kGroups : 1;
  // Groups whose chunks have one number each, and lookups of codes of 4 bits; others are the
  // hook's.
  static constexpr bool kLooksUp = Numbers::kCodebook >= 0;
  static constexpr bool kDecodes =
      kGroups > 0 && HeadDim % (8 * kParts) == 0 && (!kLooksUp || Codes::kBits == 4);
  static constexpr bool kFolded = kFolds && kDecodes && !Numbers::kZeros && !kLooksUp &&
                                  (kGroups == 1 || HeadDim % (16 * kParts) == 0);
  using Used = typename Select<kDecodes, Numbers, NoNumbers>::Type;
  static constexpr int kNumbers = Used::kCount;
  using Rows = CodeRows<Codes, HeadDim>;

  // The numbers of a lane's row, and its entry of the codebook.
  struct Held {
    float numbers[kNumbers > 0 ? kNumbers : 1];
    float entry;
  };
  // exists: whether the row does.
  static FAJIT_DEV Held load(const Context& c, int32_t request, int32_t kv_h, int32_t position,
                             bool exists) {
    Held held{};
    if (exists) load_from<0>(held, c, request, kv_h, position);
    if constexpr (Used::kCodebook >= 0) {
      const fajit_tensor& book = c.tensor(Used::kCodebook);
      // Tables of 16; a shorter one, of a user's hook, is read to its end.
      const int64_t entry = min(ptx::lane_index() % 16, static_cast<int>(book.sizes[0]) - 1);
      held.entry = static_cast<const float*>(book.ptr)[entry * book.strides[0]];
    }
    return held;
  }
  template <int kRows>
  static FAJIT_DEV void put(float* numbers, const Held& held) {
    const int lane = ptx::lane_index();
    if (kNumbers == 0 || lane >= kRows) return;
#pragma unroll
    for (int i = 0; i < kNumbers; ++i)
      numbers[kFolded ? i * kRows + lane : lane * kNumbers + i] = held.numbers[i];
  }

  // Rows [first_row, first_row + kRows) of a tile. hook(row, r): the row hook on row r.
  template <int kRows, class Hook>
  static FAJIT_DEV void run(unsigned char* tile, int first_row, const unsigned char* codes,
                            int count, const float* numbers, float entry, Hook hook) {
    if constexpr (kHook && !kDecodes) {
      for (int r = 0; r < kRows; ++r) {
        if (r < count)
          hook(WidenedRow<Codes, HeadDim, Element, Layout>{codes + r * Rows::kPitch, tile,
                                                           first_row + r},
               r);
        for (int i = ptx::lane_index() + (r < count ? HeadDim : 0); i < Layout::kDim; i += 32)
          *reinterpret_cast<uint16_t*>(tile + Layout::element(first_row + r, i)) = 0;
      }
    } else {
      const auto get = [&](uint32_t (&y)[4], int r, int first) -> uint32_t {
        const unsigned char* const row = codes + r * Rows::kPitch;
        if constexpr (kNumbers == 0 || kFolded) {
          return Codes::template pairs<Element, HeadDim>(y, row, first);
        } else {
          float x[8];
          const uint32_t special = values(x, row, first, entry);
          decode(y, x, first, numbers + r * kNumbers);
          return special;
        }
      };
      const auto exact = [&](uint32_t (&y)[4], int r, int first) {
        float x[8];
#pragma unroll
        for (int i = 0; i < 8; ++i)
          x[i] = Codes::template one<HeadDim>(codes + r * Rows::kPitch, first + i);
        decode(y, x, first, numbers + r * kNumbers);
      };
      widen<Layout, HeadDim, kRows>(tile, first_row, count, get, exact);
    }
    __syncwarp();
  }

 private:
  template <int i>
  static FAJIT_DEV void load_from(Held& held, const Context& c, int32_t request, int32_t kv_h,
                                  int32_t position) {
    if constexpr (i < kNumbers) {
      held.numbers[i] = Used::template number<i>(c, request, kv_h, position);
      load_from<i + 1>(held, c, request, kv_h, position);
    }
  }
  // 8 codes, or their entries of the codebook. entry: that of the lane.
  static FAJIT_DEV uint32_t values(float (&x)[8], const unsigned char* row, int first,
                                   [[maybe_unused]] float entry) {
    if constexpr (Used::kCodebook >= 0) {
      const uint2 words = Codes::template bits_of_8<HeadDim>(row, first);
#pragma unroll
      for (int i = 0; i < 8; ++i)
        x[i] = ptx::from_lane(entry, (i < 4 ? words.x : words.y) >> i % 4 * 8 & 0xff);
      return 0;
    } else {
      return Codes::template values<HeadDim>(x, row, first);
    }
  }
  // The values of 8 codes: decoded in fp32 where the products do not, and rounded.
  static FAJIT_DEV void decode(uint32_t (&y)[4], float (&x)[8], [[maybe_unused]] int first,
                               [[maybe_unused]] const float* numbers) {
    if constexpr (kNumbers > 0 && !kFolded) {
      const float* const own = numbers + first * kGroups / HeadDim;
      const float scale = own[0], zero = Used::kZeros ? own[kGroups] : 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = (x[i] - zero) * scale;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] = Element::pack(x[2 * i], x[2 * i + 1]);
  }
};

}  // namespace fajit::cuda
