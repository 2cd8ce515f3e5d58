// The part of DLPack 1.3 that reads a tensor from C. Members have the names of dlpack.h; a
// framework has its functions in a capsule, `Tensor.__dlpack_c_exchange_api__`.
#pragma once

#include <cstdint>

namespace fajit::dlpack {

constexpr uint32_t kMajorVersion = 1;
constexpr int32_t kDLCPU = 1;
constexpr const char* kCapsuleName = "dlpack_exchange_api";

struct DLDevice { int32_t device_type, device_id; };
struct DLDataType {
  uint8_t code, bits;
  uint16_t lanes;
};
struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;  // in entries
  uint64_t byte_offset;
};
struct DLPackExchangeAPI {
  uint32_t major, minor;
  DLPackExchangeAPI* prev_api;
  void* managed_tensor_functions[3];
  // Describes an object until control returns to the framework; -1 with an error set in Python. May
  // be null.
  int (*dltensor_from_py_object_no_sync)(void* py_object, DLTensor* out);
  void* current_work_stream;
};

}  // namespace fajit::dlpack
