#include "copies.h"

#include <algorithm>
#include <cstring>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "host/fork_guard.h"

namespace fajit::runtime {
namespace {

// The least bytes of a thread, so that waking it is worth it.
constexpr int64_t kBytesPerThread = 512 * 1024;

// Pieces longer than this are cut, so that a few long ones occupy all threads.
constexpr int64_t kMostBytes = 256 * 1024;

// Stores go past the caches in calls of this many bytes and in pieces of this many: then what is
// copied does not stay in the caches anyway. 33 MB in pieces of 512 KB: 13.5 -> 18.5 GB/s (Sapphire
// Rapids, 2 cores); 8 MB, or pieces of 8 KB, were slower.
constexpr int64_t kStreamedBytes = 16 * 1024 * 1024, kStreamedPiece = 64 * 1024;

// memcpy whose stores go past the caches, so that no line of the destination is read first.
void stream(char* destination, const char* source, int64_t bytes) {
#if defined(__x86_64__)
  if (reinterpret_cast<uintptr_t>(destination) % 16 == 0) {
    const int64_t lines = bytes / 64 * 64;
    for (int64_t at = 0; at < lines; at += 64) {
      __m128i part[4];
      for (int i = 0; i < 4; ++i)
        part[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + at) + i);
      for (int i = 0; i < 4; ++i)
        _mm_stream_si128(reinterpret_cast<__m128i*>(destination + at) + i, part[i]);
    }
    std::memcpy(destination + lines, source + lines, static_cast<size_t>(bytes - lines));
    _mm_sfence();
    return;
  }
#endif
  std::memcpy(destination, source, static_cast<size_t>(bytes));
}

char* place_of(const RowCopy& copy, int64_t page, int64_t slot) {
  return copy.destination + page * copy.page + slot * copy.slot;
}

// Loads the lines of the next token's place while those of this one are written: 64 tokens of 4 KB
// to pages in memory take 21 us in place of 26 (Sapphire Rapids; two or four tokens ahead 22, 23).
void fetch(const char* next, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(next + at, 1);
}

}  // namespace

void copy_pieces(const int64_t* sources, const int64_t* destinations, int64_t count,
                 int64_t piece_bytes, int num_threads) {
  if (count <= 0 || piece_bytes <= 0) return;
  const int64_t cuts = (piece_bytes + kMostBytes - 1) / kMostBytes;
  const int64_t parts = count * cuts;
  const int64_t useful = std::min(parts, count * piece_bytes / kBytesPerThread);
  const int threads = static_cast<int>(std::clamp<int64_t>(useful, 1, num_threads));
  const bool streamed = piece_bytes >= kStreamedPiece && count * piece_bytes >= kStreamedBytes;
  if (threads > 1) before_parallel_region();
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t begin = part % cuts * kMostBytes;
    const int64_t bytes = std::min(kMostBytes, piece_bytes - begin);
    const auto* source = reinterpret_cast<const char*>(sources[part / cuts]);
    auto* destination = reinterpret_cast<char*>(destinations[part / cuts]);
    if (streamed) {
      stream(destination + begin, source + begin, bytes);
    } else {
      std::memcpy(destination + begin, source + begin, static_cast<size_t>(bytes));
    }
  }
}

void copy_rows(const RowCopy* copies, int num_copies, const int32_t* pages, const int32_t* slots,
               int64_t num_tokens, int64_t num_kv_heads, int num_threads) {
  int64_t bytes = 0;
  for (int i = 0; i < num_copies; ++i) bytes += num_tokens * num_kv_heads * copies[i].row_bytes;
  const int64_t useful = std::min(num_tokens, bytes / kBytesPerThread);
  const int threads = static_cast<int>(std::clamp<int64_t>(useful, 1, num_threads));
  if (threads > 1) before_parallel_region();
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t token = 0; token < num_tokens; ++token) {
    for (int i = 0; i < num_copies; ++i) {
      const RowCopy& copy = copies[i];
      const char* source = copy.source + token * copy.source_token;
      char* destination = place_of(copy, pages[token], slots[token]);
      const auto row = static_cast<size_t>(copy.row_bytes);
      if (copy.source_head == copy.row_bytes && copy.head == copy.row_bytes) {
        const int64_t all = num_kv_heads * copy.row_bytes;
        if (token + 1 < num_tokens) fetch(place_of(copy, pages[token + 1], slots[token + 1]), all);
        std::memcpy(destination, source, static_cast<size_t>(all));
        continue;
      }
      for (int64_t head = 0; head < num_kv_heads; ++head)
        std::memcpy(destination + head * copy.head, source + head * copy.source_head, row);
    }
  }
}

}  // namespace fajit::runtime
