// Copies of boxes of a tensor by the tensor memory accelerator (TMA).
#pragma once
#include <fajit/cuda/ptx/device.h>

namespace fajit::ptx {

// Starts the copy of the box of a four-dimensional tensor that begins at these coordinates, the
// contiguous dim first; elements outside of the tensor are zeros. `barrier` counts its bytes. `map`
// is a kernel parameter, `to` a multiple of 128 bytes.
FAJIT_DEV void copy_box(uint32_t to, const void* map, uint32_t barrier, int32_t c0, int32_t c1,
                        int32_t c2, int32_t c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

}  // namespace fajit::ptx
