// What DLPack 1.3 defines for reading a tensor from C: the part of its ABI that is used here. A
// framework puts the functions into a capsule, `Tensor.__dlpack_c_exchange_api__`.
#pragma once

#include <cstdint>

namespace fajit::dlpack {

constexpr uint32_t kMajor = 1;
constexpr int32_t kHost = 1;  // a device type
constexpr const char* kCapsule = "dlpack_exchange_api";

struct Device { int32_t type, id; };
struct Dtype {
  uint8_t code, bits;
  uint16_t lanes;
};
struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  Dtype dtype;
  int64_t* shape;
  int64_t* strides;  // in entries
  uint64_t byte_offset;
};
struct ExchangeApi {
  uint32_t major, minor;
  ExchangeApi* older;
  void* unused[3];
  // Fills a description that is valid until control returns to the framework; -1 on an error,
  // which Python then has.
  int (*describe)(void* object, Tensor* out);
  void* stream;
};

}  // namespace fajit::dlpack
