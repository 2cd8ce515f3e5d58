// A plan's arrays in a block of device memory.
#pragma once

#include <fajit/abi.h>

#include <cstdint>

namespace fajit::runtime {

// Number of entries of each array; 0 if there is no such array.
struct PlanSizes {
  int64_t requests = 0, first_keys = 0, page_indptr = 0, row_requests = 0, row_tokens = 0;
  int64_t work[2] = {0, 0}, workers[2] = {0, 0};  // prefill, few-row; no workers: no lists
  int64_t merge_work = 0, merge_sources = 0;
};

// Immutable. `room`, the maximum number of entries, determines the sections; the entries that a
// plan does not fill are padding (request -1, no splits, requests without rows and keys).
class PlanBlock {
 public:
  PlanBlock() = default;
  explicit PlanBlock(const PlanSizes& room);

  int64_t bytes() const { return offsets_.bytes; }

  // Writes the arrays that a host argument block points to: all but a kind's work, `filled` entries
  // each; then the work of a kind.
  void write(char* block, const fajit_args& host, const PlanSizes& filled) const;
  void write_kind(int kind, char* block, const fajit_args& host) const;

  // Sets an argument block to the same arrays, with their padding, in device memory.
  void point(const char* block, fajit_args& args) const;
  void point_kind(int kind, const char* block, fajit_args& args) const;

 private:
  static constexpr int kPerRequest = 7;
  struct Offsets {
    int64_t per_request[kPerRequest], first_keys, page_indptr, row_request, row_token;
    int64_t work[2], worker_indptr[2], merge_work, merge_sources, bytes;
  };
  // The per-request arrays, in the order of their sections.
  static const int32_t* fajit_args::* const kRequestArrays[kPerRequest];

  PlanSizes room_;
  Offsets offsets_{};
};

}  // namespace fajit::runtime
