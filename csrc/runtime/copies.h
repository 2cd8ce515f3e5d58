// Copies of many pieces of memory in one call, and of new rows into pages.
#pragma once

#include <cstdint>

namespace fajit::runtime {

// Copies `count` pieces of `piece_bytes` from sources[i] to destinations[i], in any order and by up
// to `num_threads` threads. No destination may overlap another piece.
// Throws LaunchError for several threads in a forked child: see fork_guard.h.
void copy_pieces(const int64_t* sources, const int64_t* destinations, int64_t count,
                 int64_t piece_bytes, int num_threads);

// Rows of new tokens and the pages that they go to, for keys or for values. Steps in bytes.
struct RowCopy {
  const char* source;
  char* destination;
  int64_t source_token, source_head;
  int64_t page, slot, head;
  int64_t row_bytes;
};

// Copies the rows of `num_tokens` tokens and `num_kv_heads` heads: token t goes to slot slots[t] of
// page pages[t]. If two tokens go to one slot, either of them is stored.
// Throws LaunchError for several threads in a forked child: see fork_guard.h.
void copy_rows(const RowCopy* copies, int num_copies, const int32_t* pages, const int32_t* slots,
               int64_t num_tokens, int64_t num_kv_heads, int num_threads);

}  // namespace fajit::runtime
