#include "device/tensor_maps.h"

#include <fajit/tensor_map.h>

#include <algorithm>
#include <cstring>
#include <string>

namespace fajit::runtime {
namespace {

constexpr uint32_t kMostMaps = sizeof(fajit_launch::tensor_maps) / sizeof(uint32_t);
constexpr uint32_t kAlignment = 64;  // of maps among the parameters
constexpr unsigned kMostDims = 5;

static_assert(sizeof(fajit_tensor_map) == sizeof(cu::TensorMap), "encoded in place");

// "64 x 8 x 2".
template <class T> std::string by_dim(const T* values, unsigned count) {
  std::string text;
  for (unsigned i = 0; i < count; ++i) text += (i > 0 ? " x " : "") + std::to_string(values[i]);
  return text;
}

std::string name_of(uint32_t index, const fajit_launch& launch) {
  return "tensor map " + std::to_string(index) + " of " + launch.kernel;
}

std::string shape_of(const fajit_tensor_map& map) {
  const unsigned rank = std::clamp<unsigned>(map.rank, 1, kMostDims);
  return " (sizes " + by_dim(map.sizes, rank) + ", strides in bytes " +
         by_dim(map.strides, rank - 1) + ", box " + by_dim(map.box, rank) + ")";
}

bool is_inside(uint32_t offset, const fajit_launch& launch) {
  return offset % kAlignment == 0 && launch.params_bytes >= sizeof(cu::TensorMap) &&
         offset <= launch.params_bytes - sizeof(cu::TensorMap);
}

void encode(const Driver& cuda, uint32_t index, fajit_launch& launch) {
  const uint32_t offset = launch.tensor_maps[index];
  fajit_tensor_map map{};
  if (is_inside(offset, launch)) std::memcpy(&map, launch.params + offset, sizeof(map));
  if (map.magic != FAJIT_TENSOR_MAP_MAGIC) {
    throw DriverError(name_of(index, launch) + " is not described at byte " +
                      std::to_string(offset) + " of its parameters");
  }
  uint64_t sizes[kMostDims];
  unsigned box[kMostDims], element_strides[kMostDims];
  std::copy_n(map.sizes, kMostDims, sizes);
  std::copy_n(map.box, kMostDims, box);
  std::fill_n(element_strides, kMostDims, 1u);
  cu::TensorMap encoded;
  const cu::Result result = cuda.encode_tensor_map(
      &encoded, map.element, map.rank, const_cast<void*>(map.base), sizes, map.strides, box,
      element_strides, cu::kNoInterleave, map.swizzle, map.promotion, cu::kFillZeros);
  if (result != cu::kSuccess) {  // no text is made for a launch that succeeds
    cuda.check(result, "cuTensorMapEncodeTiled", name_of(index, launch) + shape_of(map));
  }
  std::memcpy(launch.params + offset, &encoded, sizeof(encoded));
}

}  // namespace

void encode_tensor_maps(const Driver& cuda, fajit_launch& launch) {
  if (launch.num_tensor_maps == 0) return;
  if (!cuda.encodes_tensor_maps()) {
    throw DriverError("launch of " + std::string(launch.kernel) + ": the driver supports CUDA " +
                      std::to_string(cuda.version() / 1000) + "." +
                      std::to_string(cuda.version() % 1000 / 10) +
                      " and has no cuTensorMapEncodeTiled, which the kernel's tensor maps need: "
                      "update it to one for CUDA 12.0 or newer (driver 525)");
  }
  if (launch.num_tensor_maps > kMostMaps) {
    throw DriverError("launch of " + std::string(launch.kernel) + ": " +
                      std::to_string(launch.num_tensor_maps) + " tensor maps, at most " +
                      std::to_string(kMostMaps));
  }
  for (uint32_t i = 0; i < launch.num_tensor_maps; ++i) encode(cuda, i, launch);
}

}  // namespace fajit::runtime
