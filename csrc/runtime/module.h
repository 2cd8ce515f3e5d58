// A loaded artifact: its entry points, resolved once.
#pragma once

#include <fajit/abi.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <set>
#include <string>

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
  // driver, `load` and launches do.
  bool is_cuda() const { return plan_launch_ != nullptr; }
  // Loads the kernels on a device, once. Throws LaunchError. Called before launches, because
  // kernels cannot be loaded during graph capture.
  void load(int device) const;
  int plan_launch(const fajit_args& args, int kernel, fajit_launch& launch) const {
    note_run();
    return plan_launch_(&args, kernel, &launch);
  }
  // The reason of this thread's last CUDA failure.
  std::string cuda_error() const;

 private:
  std::string path_;
  std::string description_;
  decltype(&fajit_attention) attention_;
  decltype(&fajit_merge) merge_;
  decltype(&fajit_classify) classify_;
  decltype(&fajit_load) load_ = nullptr;
  decltype(&fajit_plan_launch) plan_launch_ = nullptr;
  decltype(&fajit_cuda_error) cuda_error_ = nullptr;
  mutable std::atomic<int64_t> last_run_{0};
  mutable std::mutex mutex_;
  mutable std::set<int> devices_;  // devices on which the kernels are loaded
};

}  // namespace fajit::runtime
