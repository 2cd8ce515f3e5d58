// A loaded PTX module, and launches of its kernels.
#pragma once
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "machine/machine.h"
#include "ptx/decoder.h"

namespace fajit::emulator {

class Program {
 public:
  explicit Program(const std::string& ptx);  // throws EmulatorError

  // Decoded at first use; throws EmulatorError for an unknown name or an instruction not in the
  // table.
  const Kernel& kernel(const std::string& name);

  struct Request {
    std::string kernel;
    uint32_t grid[3], block[3];
    uint32_t shared_bytes = 0;
    std::vector<uint8_t> params;
    std::vector<Allocation> allocations;
    bool overlaps = false;
    Options options;
    int num_threads = 0;  // host threads; 0: one per core
  };
  // Runs every block. Throws the Fault of the first block that has one.
  void run(Request request);

 private:
  Module module_;
  Symbols symbols_;
  std::vector<Allocation> variables_;  // .global and .const
  std::vector<std::unique_ptr<uint8_t[]>> storage_;
  std::unordered_map<std::string, std::unique_ptr<Kernel>> kernels_;
  std::mutex mutex_;
};

}  // namespace fajit::emulator
