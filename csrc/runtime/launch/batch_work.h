// The arguments of kernels for a batch's plan, checked: on the host, or in a block of device
// memory.
#pragma once

#include <fajit/abi.h>

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "../../scheduler/batch_plan.h"
#include "device/plan_block.h"
#include "launch/launch_values.h"

namespace fajit::runtime {

struct BatchShape {
  int32_t num_q_heads = 0, num_kv_heads = 0, head_dim = 0, head_dim_v = 0;
  int32_t key_block = 0, num_key_blocks = 0;  // 0: no key lists
};

// Immutable; calls with different strides share it. A plan that was made for other lengths or
// shapes is checked for everything that could make a kernel read or write outside its tensors:
// requests, heads of one kv head, rows, keys, partial rows and their sources.
//
// The device block. Without limits its sections are as long as the plan's arrays. With limits they
// have the maximum length within the limits, so offsets and sizes are the same for every plan, like
// everything else in a launch.
class BatchWork {
 public:
  BatchWork(std::shared_ptr<const scheduler::BatchPlan> plan,
            std::shared_ptr<const scheduler::Lengths> lengths, const std::array<bool, 2>& has_kind,
            const BatchShape& shape);

  // Whether work of a kind, or the merge, is launched.
  bool launches(int kind) const { return launches_[kind]; }
  bool merges() const { return sizes_.merge_work > 0; }
  const Accesses& accesses() const { return accesses_; }
  const scheduler::Lengths& lengths() const { return *lengths_; }
  // Predicted nanoseconds that all workers save compared with one; negative if unknown.
  double parallel_gain_ns() const;

  // Shapes, per-request arrays and merges, on the host; `fill_kind` adds the work of a kind.
  void fill(fajit_args& args) const;
  void fill_kind(int kind, fajit_args& args) const;
  // fill() and fill_kind() with the addresses of arrays in a device block.
  void point(const char* block, fajit_args& args) const;
  void point_kind(int kind, const char* block, fajit_args& args) const {
    block_.point_kind(kind, block, args);
  }

  int64_t block_bytes() const { return block_.bytes(); }
  void write_block(char* block) const;

 private:
  struct Sizes : PlanSizes {
    int64_t partial_rows;
    int32_t max_merge_rows;
  };
  bool is_paged() const { return lengths_->page_size > 0; }
  bool has_lists() const { return shape_.key_block > 0; }
  Sizes planned() const;                        // sizes of the plan's arrays
  Sizes with_room(const Sizes& planned) const;  // sizes of the block's sections
  void check_shape() const;
  bool is_of_these_lengths() const;
  void check_lists(int kind) const;
  void check_kind(int kind, const fajit_args& args);
  void check_merges(const fajit_args& args);

  std::shared_ptr<const scheduler::BatchPlan> plan_;
  std::shared_ptr<const scheduler::Lengths> lengths_;
  BatchShape shape_;
  std::array<bool, 2> launches_{};
  Sizes sizes_;
  PlanBlock block_;
  Accesses accesses_;
  bool has_first_keys_ = false;
};

}  // namespace fajit::runtime
