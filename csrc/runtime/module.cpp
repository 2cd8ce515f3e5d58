#include "module.h"

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <new>

#include "errors.h"

namespace fajit::runtime {
namespace {

template <class F>
F resolve(void* handle, const char* name, const std::string& path) {
  void* symbol = dlsym(handle, name);
  if (symbol == nullptr) throw AbiError("artifact " + path + " has no entry point " + name);
  return reinterpret_cast<F>(symbol);
}

// The integer after `"abi_version":` in an artifact's description; -1 if there is none.
long described_abi_version(const std::string& description) {
  static constexpr char kField[] = "\"abi_version\"";
  const size_t field = description.find(kField);
  if (field == std::string::npos) return -1;
  const size_t colon = description.find_first_not_of(" \t\n", field + sizeof(kField) - 1);
  if (colon == std::string::npos || description[colon] != ':') return -1;
  char* end = nullptr;
  const char* begin = description.c_str() + colon + 1;
  const long version = std::strtol(begin, &end, 10);
  return end == begin ? -1 : version;
}

std::string dims(const char* name, const uint32_t* n) {
  return std::string(name) + " (" + std::to_string(n[0]) + ", " + std::to_string(n[1]) + ", " +
         std::to_string(n[2]) + ")";
}

}  // namespace

Module::Module(const std::string& path) : path_(path) {
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* reason = dlerror();
    throw LoadError("cannot load artifact " + path + ": " + (reason ? reason : "unknown reason"));
  }
  const auto describe = resolve<decltype(&fajit_describe)>(handle, "fajit_describe", path);
  const char* description = describe();
  description_ = description ? description : "";
  const long version = described_abi_version(description_);
  if (version != FAJIT_ABI_VERSION) {
    throw AbiError("artifact " + path + " has abi_version " + std::to_string(version) +
                   ", this runtime needs " + std::to_string(FAJIT_ABI_VERSION) +
                   ": remove it from the kernel cache, or build it with this version");
  }
  classify_ = resolve<decltype(&fajit_classify)>(handle, "fajit_classify", path);
  if (dlsym(handle, "fajit_code") != nullptr) {
    const auto code = resolve<decltype(&fajit_code)>(handle, "fajit_code", path);
    plan_launch_ = resolve<decltype(&fajit_plan_launch)>(handle, "fajit_plan_launch", path);
    device_code_ = std::make_unique<DeviceCode>(code());
  } else {
    attention_ = resolve<decltype(&fajit_attention)>(handle, "fajit_attention", path);
    merge_ = resolve<decltype(&fajit_merge)>(handle, "fajit_merge", path);
  }
}

template <class Use> auto Module::loading(int device, Use use) const {
  if (!is_cuda()) throw std::invalid_argument("artifact " + path_ + " has no CUDA target");
  try {
    return use(*device_code_);
  } catch (const DriverError& error) {
    throw LaunchError("the kernels of " + path_ + " cannot be loaded on device " +
                      std::to_string(device) + ": " + error.what());
  }
}

void Module::load(int device) const {
  loading(device, [device](DeviceCode& code) { code.load(device); });
}

std::vector<Residency> Module::probe(int device) const {
  return loading(device, [device](DeviceCode& code) { return code.probe(device); });
}

std::vector<Residency> Module::residency(int device) const {
  return is_cuda() ? device_code_->residency(device) : std::vector<Residency>();
}

void Module::launch(const fajit_args& args, int kernel) const {
  fajit_launch launch;
  check_status(plan_launch(args, kernel, launch), "fajit_plan_launch", path_);
  if (launch.grid[0] == 0) return;
  try {
    device_code_->launch(kernel, launch, args.device, args.stream);
  } catch (const DriverError& error) {
    throw LaunchError(std::string(launch.kernel) + " with " + dims("grid", launch.grid) + ", " +
                      dims("block", launch.block) + " and " + std::to_string(launch.shared_bytes) +
                      " bytes of shared memory failed on device " + std::to_string(args.device) +
                      ": " + error.what() + "\n  artifact: " + path_);
  }
}

void check_status(int status, const char* entry, const std::string& path) {
  switch (status) {
    case FAJIT_OK: return;
    case FAJIT_OUT_OF_MEMORY: throw std::bad_alloc();
    case FAJIT_BAD_ABI:
      throw AbiError(std::string(entry) + " of artifact " + path +
                     " refused the argument block: it was compiled for another layout");
    case FAJIT_BAD_ARGS:
      throw std::invalid_argument(std::string(entry) + " of artifact " + path +
                                  " refused its arguments: dims, flags or pointers differ from "
                                  "what it was compiled for");
    default:
      throw AbiError(std::string(entry) + " of artifact " + path + " returned unknown status " +
                     std::to_string(status));
  }
}

int64_t begin_run_epoch() { return run_epoch.fetch_add(1, std::memory_order_relaxed) + 1; }

}  // namespace fajit::runtime
