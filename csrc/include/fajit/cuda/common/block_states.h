// A block mask's states (see fajit_tile_state) for the rows of a work item.
#pragma once
#include <fajit/context.h>
#include <fajit/cuda/ptx/device.h>

namespace fajit::cuda {

class BlockStates {
 public:
  // An item's rows are all in one q block.
  FAJIT_DEV BlockStates(const fajit_args& a, const fajit_work& item)
      : m_(a.block_mask),
        states_(m_.states + item.request * m_.strides[0] + item.head_begin * m_.strides[1] +
                item.row_begin / item.head_count / m_.q_block * m_.strides[2]) {}

  // The state of the block that holds a key.
  FAJIT_DEV int at(int32_t key) const { return states_[key / m_.kv_block * m_.strides[3]]; }

  // The state of all blocks that overlap keys [k0, k1): empty or full if all are, else partial.
  FAJIT_DEV int of(int32_t k0, int32_t k1) const {
    const int32_t last = (k1 - 1) / m_.kv_block;
    const int state = at(k0);
    for (int32_t block = k0 / m_.kv_block + 1; block <= last; ++block)
      if (states_[block * m_.strides[3]] != state) return FAJIT_TILE_PARTIAL;
    return state;
  }

 private:
  const fajit_block_mask& m_;
  const uint8_t* const states_;
};

}  // namespace fajit::cuda
