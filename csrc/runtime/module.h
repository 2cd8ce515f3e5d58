// A loaded artifact: its entry points, resolved once.
#pragma once

#include <fajit/abi.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "device/device_code.h"

namespace fajit::runtime {

// Epochs, counted from 1, in which modules record when they last ran.
int64_t begin_run_epoch();  // begins a new one; returns its number
inline std::atomic<int64_t> run_epoch{1};

// Loads `path` with RTLD_NOW | RTLD_LOCAL and resolves the entry points of abi.h. Never closed:
// threads of the OpenMP runtime, or of a running call, may execute its code. Throws LoadError if
// the file cannot be loaded, AbiError if its ABI version or entry points differ.
class Module {
 public:
  explicit Module(const std::string& path);
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  const std::string& path() const { return path_; }
  const std::string& description() const { return description_; }

  // Of CPU artifacts alone.
  int attention(const fajit_args& args) const {
    note_run();
    return attention_(&args);
  }
  int merge(const fajit_args& args) const {
    note_run();
    return merge_(&args);
  }
  int classify(const fajit_classify_args& args) const { return classify_(&args); }

  // Marks the module as run in the current epoch; called by calls, and by plans that will call it.
  // Writes once per epoch, not per call, because threads of a call share the cache line.
  void note_run() const {
    const int64_t now = run_epoch.load(std::memory_order_relaxed);
    if (last_run() != now) last_run_.store(now, std::memory_order_relaxed);
  }
  // The epoch in which the module was last run, launched as data, or planned with; 0 if never.
  int64_t last_run() const { return last_run_.load(std::memory_order_relaxed); }

  // Whether this is a CUDA artifact; only these have the functions below. Opening one needs no
  // driver, `load` and `launch` do.
  bool is_cuda() const { return device_code_ != nullptr; }
  // Loads the kernels on a device, once. Throws LaunchError. Called before launches, because
  // kernels cannot be loaded during graph capture.
  void load(int device) const;
  // The residency of the kernels on a device that has loaded them; else empty.
  std::vector<Residency> residency(int device) const;
  // The residency of the kernels on any device, which loads nothing that stays. Throws LaunchError.
  std::vector<Residency> probe(int device) const;
  // Enqueues a kernel (a fajit_kernel) on args.stream of args.device. Throws LaunchError, which
  // names the kernel, its grid and the reason; and what check_status throws.
  void launch(const fajit_args& args, int kernel) const;
  int plan_launch(const fajit_args& args, int kernel, fajit_launch& launch) const {
    note_run();
    return plan_launch_(&args, kernel, &launch);
  }

 private:
  // `device_code_`; a DriverError in `use` of it becomes a LaunchError that names the device.
  template <class Use> auto loading(int device, Use use) const;

  std::string path_;
  std::string description_;
  decltype(&fajit_classify) classify_;
  decltype(&fajit_attention) attention_ = nullptr;
  decltype(&fajit_merge) merge_ = nullptr;
  decltype(&fajit_plan_launch) plan_launch_ = nullptr;
  std::unique_ptr<DeviceCode> device_code_;
  mutable std::atomic<int64_t> last_run_{0};
};

}  // namespace fajit::runtime
