// A loaded artifact: its entry points, resolved once.
#pragma once

#include <fajit/abi.h>

#include <mutex>
#include <set>
#include <string>

namespace fajit::runtime {

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

  int attention(const fajit_args& args) const { return attention_(&args); }
  int merge(const fajit_args& args) const { return merge_(&args); }
  int classify(const fajit_classify_args& args) const { return classify_(&args); }

  // Whether this is a CUDA artifact. What follows is for those only. Such an artifact is opened on
  // a machine without a driver as well: only `load` and the launches need one.
  bool is_cuda() const { return plan_launch_ != nullptr; }
  // Loads the kernels on a device, once. Throws LaunchError. A launch under graph capture loads
  // nothing, so this comes before.
  void load(int device) const;
  int plan_launch(const fajit_args& args, int kernel, fajit_launch& launch) const {
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
  mutable std::mutex mutex_;
  mutable std::set<int> devices_;  // where the kernels are loaded
};

}  // namespace fajit::runtime
