#include "device/driver.h"

#include <dlfcn.h>

#include <atomic>
#include <utility>

namespace fajit::runtime {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";

std::mutex driver_mutex;
std::string driver_library;
std::atomic<const Driver*> opened_driver{nullptr};

}  // namespace

Driver::Driver(const std::string& library) {
  const std::string name = library.empty() ? kLibrary : library;
  void* const handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* const reason = dlerror();
    throw DriverError("there is no CUDA driver: " + std::string(reason ? reason : name));
  }
#define FAJIT_DRIVER_RESOLVE(member, symbol, parameters) \
  member = reinterpret_cast<cu::symbol##_type*>(dlsym(handle, #symbol));
#define FAJIT_DRIVER_REQUIRE(member, symbol, parameters)                                     \
  FAJIT_DRIVER_RESOLVE(member, symbol, parameters)                                           \
  if (member == nullptr) {                                                                   \
    throw DriverError("the CUDA driver " + name + " has no " #symbol ": update the driver"); \
  }
  FAJIT_DRIVER_FUNCTIONS(FAJIT_DRIVER_REQUIRE)
  FAJIT_NEWER_DRIVER_FUNCTIONS(FAJIT_DRIVER_RESOLVE)
#undef FAJIT_DRIVER_REQUIRE
#undef FAJIT_DRIVER_RESOLVE
  check(init(0), "cuInit", name);
  check(get_version(&version_), "cuDriverGetVersion", name);
}

void Driver::check(cu::Result result, const char* call, const std::string& of) const {
  if (result == cu::kSuccess) return;
  const char* text = nullptr;
  const char* symbol = nullptr;
  if (error_text(result, &text) != cu::kSuccess || text == nullptr) text = "unknown error";
  const bool named = error_name(result, &symbol) == cu::kSuccess && symbol != nullptr;
  throw DriverError(std::string(call) + " of " + of + ": " + text + " (" +
                    (named ? symbol : "error " + std::to_string(result)) + ")");
}

cu::Context Driver::primary_context(int device) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = contexts_.find(device);
  if (found != contexts_.end()) return found->second;
  const std::string of = "device " + std::to_string(device);
  cu::Device handle = 0;
  cu::Context context = nullptr;
  check(this->device(&handle, device), "cuDeviceGet", of);
  check(retain(&context, handle), "cuDevicePrimaryCtxRetain", of);
  contexts_.emplace(device, context);
  return context;
}

const Driver& driver() {
  if (const Driver* const opened = opened_driver.load(std::memory_order_acquire)) return *opened;
  const std::lock_guard<std::mutex> lock(driver_mutex);
  if (opened_driver.load(std::memory_order_relaxed) == nullptr) {
    opened_driver.store(new Driver(driver_library), std::memory_order_release);  // kept for ever
  }
  return *opened_driver.load(std::memory_order_relaxed);
}

int driver_version() {
  const std::lock_guard<std::mutex> lock(driver_mutex);
  const char* const name = driver_library.empty() ? kLibrary : driver_library.c_str();
  void* const handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return 0;
  const auto ask =
      reinterpret_cast<cu::cuDriverGetVersion_type*>(dlsym(handle, "cuDriverGetVersion"));
  int version = 0;
  return ask != nullptr && ask(&version) == cu::kSuccess ? version : 0;
}

std::string use_driver(const std::string& library) {
  const std::lock_guard<std::mutex> lock(driver_mutex);
  std::string previous = std::exchange(driver_library, library);
  opened_driver.store(nullptr, std::memory_order_release);
  return previous;
}

CurrentContext::CurrentContext(const Driver& driver, cu::Context context, const std::string& of)
    : driver_(driver) {
  cu::Context current = nullptr;
  driver_.check(driver_.current(&current), "cuCtxGetCurrent", of);
  if (current == context) return;
  driver_.check(driver_.push(context), "cuCtxPushCurrent", of);
  pushed_ = true;
}

CurrentContext::~CurrentContext() {
  cu::Context popped = nullptr;
  if (pushed_) driver_.pop(&popped);
}

int exchange_capture_mode(const Driver& driver, int mode) {
  driver.check(driver.exchange_capture_mode(&mode), "cuThreadExchangeStreamCaptureMode",
               "this thread");
  return mode;
}

}  // namespace fajit::runtime
