// A batch's plan, checked, as kernels take it: on the host, or in a block of device memory.
#pragma once

#include <fajit/abi.h>

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "../scheduler/batch_plan.h"
#include "sections.h"

namespace fajit::runtime {

struct BatchShape {
  int32_t num_q_heads = 0, num_kv_heads = 0, head_dim = 0, head_dim_v = 0;
  int32_t key_block = 0, num_key_blocks = 0;  // 0: no key lists
};

// Immutable once built; calls with other strides share it. A plan that was made of other lengths or
// shapes is checked for everything that could make a kernel read or write outside its tensors:
// requests, heads of one kv head, rows, keys, partial rows and their sources.
//
// The device block. Without limits its sections are as long as the plan's arrays. With limits they
// are as long as any plan's within the limits, so places and sizes are the same for every plan, as
// is everything else in a launch; what a plan does not fill is padding (request -1, no splits,
// requests without rows and keys).
class BatchWork {
 public:
  BatchWork(std::shared_ptr<const scheduler::BatchPlan> plan,
            std::shared_ptr<const scheduler::Lengths> lengths, const std::array<bool, 2>& has_kind,
            const BatchShape& shape);

  // Whether the launch of a kind, or the merge, takes place.
  bool launches(int kind) const { return launches_[kind]; }
  bool merges() const { return sizes_.merge_work > 0; }
  const WorkspaceLayout& workspace() const { return workspace_; }
  bool reads_queries() const { return reads_queries_; }
  bool reads_keys() const { return reads_keys_; }
  bool writes_out() const { return writes_out_; }
  bool is_paged() const { return lengths_->page_size > 0; }
  bool has_lists() const { return shape_.key_block > 0; }
  // Nanoseconds that all workers save over one, as predicted; negative where nothing is known.
  double parallel_gain_ns() const;

  // Shapes, per-request arrays and merges, on the host; `fill_kind` adds the work of a kind.
  void fill(fajit_args& args) const;
  void fill_kind(int kind, fajit_args& args) const;
  // The same in a device block.
  void fill_on_device(const char* block, fajit_args& args) const;
  void fill_kind_on_device(int kind, const char* block, fajit_args& args) const;

  int64_t block_bytes() const { return sections_.bytes; }
  void write_block(char* block) const;

 private:
  struct Sizes {  // entries; under limits, the most
    int64_t requests, row_tokens, row_requests, work[2], workers[2], merge_work, merge_sources;
    int64_t partial_rows;
    int32_t max_merge_rows;
  };
  struct Sections {
    int64_t per_request[8], page_indptr, row_request, row_token, work[2], worker_indptr[2];
    int64_t merge_work, merge_sources, bytes;
  };
  Sizes sizes() const;
  Sections sections() const;
  void check_shape() const;
  bool is_of_these_lengths() const;
  void check_lists(int kind) const;
  void check_kind(int kind, const fajit_args& args);
  void check_merges(const fajit_args& args);

  std::shared_ptr<const scheduler::BatchPlan> plan_;
  std::shared_ptr<const scheduler::Lengths> lengths_;
  BatchShape shape_;
  std::array<bool, 2> launches_{};
  std::vector<int32_t> row_request_, row_token_;  // where limits allow groups and there are none
  Sizes sizes_;
  Sections sections_;
  WorkspaceLayout workspace_;
  bool has_first_keys_ = false;
  bool reads_queries_ = false, reads_keys_ = false, writes_out_ = false;
};

}  // namespace fajit::runtime
