// A stand-in for libcuda.so.1 with four devices. It records calls, refuses what a driver refuses
// (a call without a context, a handle of another device, shared memory that was not asked for, a
// load that would invalidate a capture) and fails where a test says so.
#include <stdint.h>
#include <string.h>

#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace {

constexpr int kDevices = 4;
constexpr int kRelaxed = 2;
constexpr uint32_t kFatBinary = 0xBA55ED50;
constexpr uint16_t kCudaMachine = 190;
constexpr int kVersion = 12080;

enum Result {
  kSuccess = 0,
  kInvalidValue = 1,
  kInvalidDevice = 101,
  kInvalidImage = 200,
  kInvalidContext = 201,
  kInvalidHandle = 400,
  kNotFound = 500,
  kCaptureUnsupported = 900,
};

struct Context { int device; } contexts[kDevices] = {{0}, {1}, {2}, {3}};
struct Module {
  Context* context;
  std::string image;
};
struct Function {
  Module* module;
  std::string name;
  int shared_bytes;
};

struct Attribute {
  int id;
  alignas(8) union {
    char bytes[64];
    int allowed;  // of kProgrammaticSerialization
  } value;
};
constexpr int kProgrammaticSerialization = 6;

struct Config {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  void* stream;
  Attribute* attributes;
  unsigned num_attributes;
};

std::mutex mutex;
std::vector<std::string> calls;
std::map<std::string, int> failures;  // results by function
std::deque<Module> modules;
std::deque<Function> functions;
int blocks = 1;
int version = kVersion;
bool captures_elsewhere = false;
void* captured_stream = nullptr;
size_t params_bytes = 0;

thread_local std::vector<Context*> stack;
thread_local int mode = 0;

Context* current() { return stack.empty() ? nullptr : stack.back(); }

std::string place() {
  return current() == nullptr ? " without context" : " on " + std::to_string(current()->device);
}

std::string number(long long value) { return " " + std::to_string(value); }

// " 64,8,2", or " -" for none.
template <class T> std::string numbers(const T* values, unsigned count) {
  std::string text = " ";
  for (unsigned i = 0; i < count; ++i) text += (i > 0 ? "," : "") + std::to_string(values[i]);
  return count > 0 ? text : " -";
}

// Records a call; the result is the one that a test set, or kSuccess.
int record(const char* function, const std::string& words) {
  const std::lock_guard<std::mutex> lock(mutex);
  calls.push_back(function + words);
  const auto found = failures.find(function);
  return found == failures.end() ? kSuccess : found->second;
}

}  // namespace

#define RECORD(words) \
  if (const int failed = record(__func__, words)) return failed

extern "C" {

// --- what tests call -------------------------------------------------------------------------

void stand_in_reset() {
  const std::lock_guard<std::mutex> lock(mutex);
  calls.clear();
  failures.clear();
  blocks = 1;
  version = kVersion;
  captures_elsewhere = false;
  captured_stream = nullptr;
  stack.clear();
  mode = 0;
}

// The calls since the last time, one a line.
const char* stand_in_calls() {
  static thread_local std::string text;
  const std::lock_guard<std::mutex> lock(mutex);
  text.clear();
  for (const std::string& call : calls) text += call + "\n";
  calls.clear();
  return text.c_str();
}

void stand_in_fail(const char* function, int result) {
  const std::lock_guard<std::mutex> lock(mutex);
  failures[function] = result;
}

void stand_in_blocks(int value) { blocks = value; }
void stand_in_version(int value) { version = value; }
void stand_in_params(size_t bytes) { params_bytes = bytes; }  // that launches record
void stand_in_capture(void* stream, bool elsewhere) {
  captured_stream = stream;
  captures_elsewhere = elsewhere;
}
void stand_in_set_device(int device) { stack.assign(1, &contexts[device]); }
int stand_in_device() { return current() == nullptr ? -1 : current()->device; }
int stand_in_depth() { return static_cast<int>(stack.size()); }
int stand_in_mode() { return mode; }

// --- the driver ------------------------------------------------------------------------------

int cuInit(unsigned flags) {
  RECORD(number(flags));
  return kSuccess;
}

int cuDriverGetVersion(int* result) {
  RECORD("");
  *result = version;
  return kSuccess;
}

int cuDeviceGet(int* device, int ordinal) {
  RECORD(number(ordinal));
  if (ordinal < 0 || ordinal >= kDevices) return kInvalidDevice;
  *device = ordinal;
  return kSuccess;
}

int cuDevicePrimaryCtxRetain(Context** context, int device) {
  RECORD(number(device));
  *context = &contexts[device];
  return kSuccess;
}

int cuCtxGetCurrent(Context** context) {
  RECORD("");
  *context = current();
  return kSuccess;
}

int cuCtxPushCurrent_v2(Context* context) {
  RECORD(number(context->device));
  stack.push_back(context);
  return kSuccess;
}

int cuCtxPopCurrent_v2(Context** context) {
  RECORD(place());
  if (stack.empty()) return kInvalidContext;
  *context = stack.back();
  stack.pop_back();
  return kSuccess;
}

int cuModuleLoadData(Module** module, const void* image) {
  RECORD(place());
  if (current() == nullptr) return kInvalidContext;
  if (captures_elsewhere && mode != kRelaxed) return kCaptureUnsupported;
  // A cubin, whose section headers are at its end, or the header of a fat binary: magic, version,
  // bytes of the header, bytes of what follows.
  const char* const bytes = static_cast<const char*>(image);
  uint32_t magic;
  uint16_t header;
  uint64_t size;
  memcpy(&magic, bytes, 4);
  memcpy(&header, bytes + 6, 2);
  memcpy(&size, bytes + 8, 8);
  if (memcmp(bytes, "\177ELF", 4) == 0) {
    uint16_t each, count;
    memcpy(&size, bytes + 40, 8);
    memcpy(&each, bytes + 58, 2);
    memcpy(&count, bytes + 60, 2);
    size += each * count, header = 0;
  } else if (magic != kFatBinary) {
    return kInvalidImage;
  }
  const std::string content(bytes, header + size);
  const size_t elf = content.find("\177ELF");
  uint16_t machine = 0;
  if (elf != std::string::npos) memcpy(&machine, content.data() + elf + 18, 2);
  if (machine != kCudaMachine) return kInvalidImage;
  const std::lock_guard<std::mutex> lock(mutex);
  modules.push_back({current(), content});
  *module = &modules.back();
  return kSuccess;
}

int cuModuleUnload(Module* module) {
  RECORD(place());
  return current() == module->context ? kSuccess : kInvalidContext;
}

int cuModuleGetFunction(Function** function, Module* module, const char* name) {
  RECORD(std::string(" ") + name);
  if (current() != module->context) return kInvalidContext;
  if (module->image.find(std::string(".text.") + name) == std::string::npos) return kNotFound;
  const std::lock_guard<std::mutex> lock(mutex);
  functions.push_back({module, name, 48 * 1024});
  *function = &functions.back();
  return kSuccess;
}

int cuFuncSetAttribute(Function* function, int attribute, int value) {
  RECORD(" " + function->name + number(attribute) + number(value));
  if (attribute != 8) return kInvalidValue;
  function->shared_bytes = value;
  return kSuccess;
}

int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* result, Function* function, int threads,
                                                size_t shared_bytes) {
  RECORD(" " + function->name + number(threads) + number(static_cast<long long>(shared_bytes)));
  if (current() != function->module->context) return kInvalidContext;
  *result = blocks;
  return kSuccess;
}

int cuLaunchKernelEx(const Config* config, Function* function, void** params, void** extra) {
  const Config& c = *config;
  std::string words = " " + function->name + place();
  for (const unsigned n :
       {c.grid_x, c.grid_y, c.grid_z, c.block_x, c.block_y, c.block_z, c.shared_bytes})
    words += number(n);
  words += number(reinterpret_cast<long long>(c.stream)) + " ";
  for (size_t i = 0; i < params_bytes; ++i) {
    constexpr char kDigits[] = "0123456789abcdef";
    const unsigned char byte = static_cast<const unsigned char*>(params[0])[i];
    words += {kDigits[byte >> 4], kDigits[byte & 15]};
  }
  for (unsigned i = 0; i < c.num_attributes; ++i)
    words += " attribute" + number(c.attributes[i].id) + number(c.attributes[i].value.allowed);
  RECORD(words);
  if (current() != function->module->context) return kInvalidHandle;
  if (extra != nullptr || static_cast<int>(c.shared_bytes) > function->shared_bytes)
    return kInvalidValue;
  for (unsigned i = 0; i < c.num_attributes; ++i)
    if (c.attributes[i].id != kProgrammaticSerialization) return kInvalidValue;
  return kSuccess;
}

#ifndef WITHOUT_TENSOR_MAPS
// A map that says which address it is of: "encoded!", the address, and bytes of 0xee.
int cuTensorMapEncodeTiled(void* map, int element, unsigned rank, void* base, const uint64_t* sizes,
                           const uint64_t* strides, const unsigned* box,
                           const unsigned* element_strides, int interleave, int swizzle,
                           int promotion, int fill) {
  if (rank < 1 || rank > 5 || reinterpret_cast<uintptr_t>(map) % 64 != 0) return kInvalidValue;
  RECORD(number(element) + number(reinterpret_cast<long long>(base)) + numbers(sizes, rank) +
         numbers(strides, rank - 1) + numbers(box, rank) + numbers(element_strides, rank) +
         number(interleave) + number(swizzle) + number(promotion) + number(fill));
  if (reinterpret_cast<uintptr_t>(base) % 16 != 0) return kInvalidValue;
  for (unsigned i = 0; i < rank; ++i) {
    const bool strided = i == 0 || (strides[i - 1] % 16 == 0 && strides[i - 1] < 1ull << 40);
    if (!strided || sizes[i] == 0 || box[i] == 0 || box[i] > 256) return kInvalidValue;
  }
  memset(map, 0xee, 128);
  memcpy(map, "encoded!", 8);
  memcpy(static_cast<char*>(map) + 8, &base, 8);
  return kSuccess;
}
#endif

int cuStreamIsCapturing(void* stream, int* status) {
  RECORD(number(reinterpret_cast<long long>(stream)));
  if (current() == nullptr) return kInvalidContext;
  *status = captured_stream != nullptr && stream == captured_stream ? 1 : 0;
  return kSuccess;
}

int cuThreadExchangeStreamCaptureMode(int* other) {
  RECORD(number(*other));
  const int previous = mode;
  mode = *other;
  *other = previous;
  return kSuccess;
}

int cuGetErrorName(int error, const char** text) {
  static const std::map<int, const char*> names = {
      {1, "CUDA_ERROR_INVALID_VALUE"},       {101, "CUDA_ERROR_INVALID_DEVICE"},
      {200, "CUDA_ERROR_INVALID_IMAGE"},     {201, "CUDA_ERROR_INVALID_CONTEXT"},
      {209, "CUDA_ERROR_NO_BINARY_FOR_GPU"}, {400, "CUDA_ERROR_INVALID_HANDLE"},
      {500, "CUDA_ERROR_NOT_FOUND"},         {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"}};
  const auto found = names.find(error);
  if (found == names.end()) return kInvalidValue;
  *text = found->second;
  return kSuccess;
}

#ifndef WITHOUT_ERROR_STRINGS
int cuGetErrorString(int error, const char** text) {
  const char* name;
  if (cuGetErrorName(error, &name)) return kInvalidValue;
  *text = "the words of an error";
  return kSuccess;
}
#endif

}  // extern "C"
