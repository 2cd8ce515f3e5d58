// A loaded artifact: its entry points, resolved once.
#pragma once

#include <fajit/abi.h>

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

 private:
  std::string path_;
  std::string description_;
  decltype(&fajit_attention) attention_;
  decltype(&fajit_merge) merge_;
  decltype(&fajit_classify) classify_;
};

}  // namespace fajit::runtime
