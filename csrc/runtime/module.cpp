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
  attention_ = resolve<decltype(&fajit_attention)>(handle, "fajit_attention", path);
  merge_ = resolve<decltype(&fajit_merge)>(handle, "fajit_merge", path);
  classify_ = resolve<decltype(&fajit_classify)>(handle, "fajit_classify", path);
  if (dlsym(handle, "fajit_plan_launch") != nullptr) {
    load_ = resolve<decltype(&fajit_load)>(handle, "fajit_load", path);
    plan_launch_ = resolve<decltype(&fajit_plan_launch)>(handle, "fajit_plan_launch", path);
    cuda_error_ = resolve<decltype(&fajit_cuda_error)>(handle, "fajit_cuda_error", path);
  }
}

void Module::load(int device) const {
  if (!is_cuda()) throw std::invalid_argument("artifact " + path_ + " has no CUDA target");
  const std::lock_guard<std::mutex> lock(mutex_);
  if (devices_.count(device) > 0) return;
  const int status = load_(device);
  if (status == FAJIT_CUDA_ERROR) {
    throw LaunchError("the kernels of " + path_ + " cannot be loaded on device " +
                      std::to_string(device) + ": " + cuda_error());
  }
  check_status(status, "fajit_load", path_);
  devices_.insert(device);
}

std::string Module::cuda_error() const {
  const char* reason = cuda_error_ != nullptr ? cuda_error_() : nullptr;
  return reason != nullptr && *reason != 0 ? reason : "unknown reason";
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
