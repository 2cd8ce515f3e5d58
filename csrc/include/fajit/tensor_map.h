// A tensor map for copies by the tensor memory accelerator (TMA), as plain data. On a device the
// driver encodes it (cuTensorMapEncodeTiled) before a launch; the emulator reads it as it is.
#pragma once
#include <stdint.h>

#define FAJIT_TENSOR_MAP_MAGIC 0x70616d74696a6166ull  // "fajitmap"

typedef struct fajit_tensor_map {
  uint64_t magic;
  const void* base;
  uint64_t strides[4];  // bytes, of dims 1 to rank - 1; dim 0 is contiguous
  uint32_t sizes[5];    // elements
  uint16_t box[5];      // elements
  uint8_t rank;
  uint8_t element;    // CUtensorMapDataType: 0 bytes, 6 fp16, 9 bf16
  uint8_t swizzle;    // CUtensorMapSwizzle: 0 none, 1 32 bytes, 2 64 bytes, 3 128 bytes
  uint8_t promotion;  // CUtensorMapL2promotion: 0 none, 2 128 bytes, 3 256 bytes
  uint8_t reserved[46];
} fajit_tensor_map;

#ifdef __cplusplus
static_assert(sizeof(fajit_tensor_map) == 128, "a tensor map of the driver has 128 bytes");
#endif
