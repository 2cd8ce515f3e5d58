// The CUDA driver (libcuda.so.1), opened with dlopen at first use: nothing links against CUDA.
//
// Kernels are loaded and launched in the primary context of a device, which torch's runtime uses
// too. A thread's current context is as before after every call: a thread without one gets none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

namespace fajit::runtime {

// The types and values of cuda.h that are used here; tests compare them with the toolkit's header.
namespace cu {

using Result = int;  // CUresult
using Device = int;  // CUdevice
using Context = struct CUctx_st*;
using LoadedModule = struct CUmod_st*;
using Function = struct CUfunc_st*;
using Stream = struct CUstream_st*;

constexpr Result kSuccess = 0;
constexpr int kMaxDynamicSharedBytes = 8;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr int kCaptureModeRelaxed = 2;     // CU_STREAM_CAPTURE_MODE_RELAXED
constexpr int kCaptureStatusNone = 0;      // CU_STREAM_CAPTURE_STATUS_NONE

// CUlaunchAttribute, for attributes whose value is an int.
struct LaunchAttribute {
  int id;
  alignas(8) int value;
  char rest[60];
};
constexpr int kProgrammaticSerialization = 6;  // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_...

// CUlaunchConfig.
struct LaunchConfig {
  unsigned grid[3], block[3], dynamic_shared_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  unsigned num_attributes;
};

// CUtensorMap, aligned as in CUDA 13. Drivers ask for 64 bytes, the alignment in CUDA 12.
struct alignas(128) TensorMap { uint64_t words[16]; };
constexpr int kNoInterleave = 0;  // CU_TENSOR_MAP_INTERLEAVE_NONE
constexpr int kFillZeros = 0;     // CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE

// (member, symbol, parameters) of each function. A symbol's version is that of its parameters.
#define FAJIT_DRIVER_FUNCTIONS(FUNCTION)                                                     \
  FUNCTION(init, cuInit, (unsigned flags))                                                   \
  FUNCTION(get_version, cuDriverGetVersion, (int* version))                                  \
  FUNCTION(device, cuDeviceGet, (Device * device, int ordinal))                              \
  FUNCTION(retain, cuDevicePrimaryCtxRetain, (Context * context, Device device))             \
  FUNCTION(current, cuCtxGetCurrent, (Context * context))                                    \
  FUNCTION(push, cuCtxPushCurrent_v2, (Context context))                                     \
  FUNCTION(pop, cuCtxPopCurrent_v2, (Context * context))                                     \
  FUNCTION(load, cuModuleLoadData, (LoadedModule * module, const void* image))               \
  FUNCTION(unload, cuModuleUnload, (LoadedModule module))                                    \
  FUNCTION(function, cuModuleGetFunction,                                                    \
           (Function * function, LoadedModule module, const char* name))                     \
  FUNCTION(set_attribute, cuFuncSetAttribute, (Function function, int attribute, int value)) \
  FUNCTION(occupancy, cuOccupancyMaxActiveBlocksPerMultiprocessor,                           \
           (int* blocks, Function function, int threads, size_t dynamic_shared_bytes))       \
  FUNCTION(launch, cuLaunchKernelEx,                                                         \
           (const LaunchConfig* config, Function function, void** params, void** extra))     \
  FUNCTION(is_capturing, cuStreamIsCapturing, (Stream stream, int* status))                  \
  FUNCTION(exchange_capture_mode, cuThreadExchangeStreamCaptureMode, (int* mode))            \
  FUNCTION(error_name, cuGetErrorName, (Result error, const char** text))                    \
  FUNCTION(error_text, cuGetErrorString, (Result error, const char** text))

// Functions that only drivers for CUDA 12.0 and later have; null with older ones.
#define FAJIT_NEWER_DRIVER_FUNCTIONS(FUNCTION)                                              \
  FUNCTION(encode_tensor_map, cuTensorMapEncodeTiled,                                       \
           (TensorMap * map, int element, unsigned rank, void* base, const uint64_t* sizes, \
            const uint64_t* strides, const unsigned* box, const unsigned* element_strides,  \
            int interleave, int swizzle, int promotion, int fill))

#define FAJIT_DRIVER_TYPE(member, symbol, parameters) using symbol##_type = Result parameters;
FAJIT_DRIVER_FUNCTIONS(FAJIT_DRIVER_TYPE)
FAJIT_NEWER_DRIVER_FUNCTIONS(FAJIT_DRIVER_TYPE)
#undef FAJIT_DRIVER_TYPE

}  // namespace cu

// A failed call, or no driver. Becomes a LaunchError that names the artifact.
struct DriverError : std::runtime_error { using std::runtime_error::runtime_error; };

class Driver {
 public:
  // Opens the library and initialises the driver. Throws DriverError.
  explicit Driver(const std::string& library);
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

#define FAJIT_DRIVER_MEMBER(member, symbol, parameters) cu::symbol##_type* member = nullptr;
  FAJIT_DRIVER_FUNCTIONS(FAJIT_DRIVER_MEMBER)
  FAJIT_NEWER_DRIVER_FUNCTIONS(FAJIT_DRIVER_MEMBER)
#undef FAJIT_DRIVER_MEMBER

  // The CUDA version that the driver supports: 12040 for 12.4.
  int version() const { return version_; }
  // Whether launches may have tensor maps.
  bool encodes_tensor_maps() const { return encode_tensor_map != nullptr; }
  // Throws DriverError unless the call succeeded; `of` is the kernel or device that it was for.
  void check(cu::Result result, const char* call, const std::string& of) const;
  // The primary context of a device, retained for the life of the process. Throws DriverError.
  cu::Context primary_context(int device) const;

 private:
  int version_ = 0;
  mutable std::mutex mutex_;
  mutable std::map<int, cu::Context> contexts_;
};

// The driver of this process, opened at the first call that succeeds. Throws DriverError.
const Driver& driver();

// The CUDA version that this machine's driver supports, 12040 for 12.4; 0 without a driver. Does
// not initialise it: a process may fork afterwards.
int driver_version();

// For tests: the library that `driver` opens from now on, libcuda.so.1 if empty. Returns the
// previous one. Kernels that are loaded stay with the driver that loaded them.
std::string use_driver(const std::string& library);

// Makes a context current in this thread, if it is not, and restores the previous one.
class CurrentContext {
 public:
  CurrentContext(const Driver& driver, cu::Context context, const std::string& of);
  ~CurrentContext();
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

 private:
  const Driver& driver_;
  bool pushed_ = false;
};

// The capture mode of this thread (CUstreamCaptureMode): sets it, returns the previous one. In the
// relaxed mode, calls that allocate, load or query do not invalidate the captures of other threads.
// Throws DriverError.
int exchange_capture_mode(const Driver& driver, int mode);

// The relaxed capture mode in a scope.
class RelaxedCaptures {
 public:
  explicit RelaxedCaptures(const Driver& driver)
      : driver_(driver), previous_(exchange_capture_mode(driver, cu::kCaptureModeRelaxed)) {}
  ~RelaxedCaptures() { driver_.exchange_capture_mode(&previous_); }
  RelaxedCaptures(const RelaxedCaptures&) = delete;
  RelaxedCaptures& operator=(const RelaxedCaptures&) = delete;

 private:
  const Driver& driver_;
  int previous_;
};

}  // namespace fajit::runtime
