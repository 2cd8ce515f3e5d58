// A loaded artifact: its entry points, resolved once.
#pragma once

#include <fajit/abi.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <set>
#include <string>

namespace fajit::runtime {

// Spans of time by which modules remember when they last ran, from 1 on.
int64_t begin_run_epoch();  // begins a new one; returns its number
inline std::atomic<int64_t> run_epoch{1};

// Loads `path` with RTLD_NOW | RTLD_LOCAL and resolves the entry points of abi.h. Never closed: an
// artifact may have worker threads of its OpenMP runtime inside it, and code of a live call.
// Throws LoadError where the file cannot be loaded, AbiError where it speaks another interface.
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

  // Marks it as run in the current epoch: calls do, and plans that will call it.
  // A write a span, not a call: threads of one call share the line.
  void note_run() const {
    const int64_t now = run_epoch.load(std::memory_order_relaxed);
    if (last_run() != now) last_run_.store(now, std::memory_order_relaxed);
  }
  // The epoch in which it last ran or was launched, as data too, or planned with; 0 before.
  int64_t last_run() const { return last_run_.load(std::memory_order_relaxed); }

  // Whether this is a CUDA artifact. What follows is for those only. Such an artifact is opened on
  // a machine without a driver as well: only `load` and the launches need one.
  bool is_cuda() const { return plan_launch_ != nullptr; }
  // Loads the kernels on a device, once. Throws LaunchError. A launch under graph capture loads
  // nothing, so this comes before.
  void load(int device) const;
  int plan_launch(const fajit_args& args, int kernel, fajit_launch& launch) const {
    note_run();
    return plan_launch_(&args, kernel, &launch);
  }
  // Why this thread's last call failed.
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
  mutable std::set<int> devices_;  // where the kernels are loaded
};

}  // namespace fajit::runtime
