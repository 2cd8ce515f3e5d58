#include "program.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <thread>

#include "ptx/ast.h"
#include "ptx/decoder.h"

namespace fajit::emulator {
namespace {

// What a device of any target launches.
constexpr uint32_t kMostBlocks[3] = {0x7fffffff, 65535, 65535};
constexpr uint32_t kMostThreads[3] = {1024, 1024, 64};

void check_sizes(const char* name, const char* of, const uint32_t (&sizes)[3],
                 const uint32_t (&most)[3]) {
  const auto text = [](const uint32_t (&n)[3]) {
    return std::to_string(n[0]) + " x " + std::to_string(n[1]) + " x " + std::to_string(n[2]);
  };
  for (int i = 0; i < 3; ++i) {
    if (sizes[i] < 1 || sizes[i] > most[i]) {
      throw EmulatorError("a " + std::string(name) + " of " + text(sizes) + " " + of +
                          "; from 1 x 1 x 1 to " + text(most) + " are possible");
    }
  }
}

}  // namespace

Program::Program(const std::string& ptx) : module_(parse(ptx)) {
  for (const Variable& variable : module_.variables) {
    if (variable.space != Space::global && variable.space != Space::constant) continue;
    const uint64_t align = std::max<uint64_t>(variable.align, 16);
    storage_.emplace_back(new uint8_t[variable.bytes + align]());
    uint64_t address = reinterpret_cast<uint64_t>(storage_.back().get());
    address = (address + align - 1) / align * align;
    std::copy(variable.initial.begin(), variable.initial.end(),
              reinterpret_cast<uint8_t*>(address));
    symbols_[variable.name] = address;
    Allocation allocation;
    allocation.name = (variable.space == Space::constant ? "constant " : "global ") + variable.name;
    allocation.begin = address;
    allocation.bytes = variable.bytes;
    allocation.writable = variable.space == Space::global;
    variables_.push_back(std::move(allocation));
  }
}

const Kernel& Program::kernel(const std::string& name) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::unique_ptr<Kernel>& kernel = kernels_[name];
  if (kernel != nullptr) return *kernel;
  for (const Entry& entry : module_.entries) {
    if (entry.name != name) continue;
    kernel = std::make_unique<Kernel>(Decoder(module_, entry, symbols_).decode());
    return *kernel;
  }
  std::string known;
  for (const Entry& entry : module_.entries) known += (known.empty() ? "" : ", ") + entry.name;
  throw EmulatorError("no kernel '" + name + "'; the program has " +
                      (known.empty() ? "none" : known));
}

void Program::run(Request request) {
  Launch launch;
  launch.kernel = &kernel(request.kernel);
  std::copy_n(request.grid, 3, launch.grid);
  std::copy_n(request.block, 3, launch.block);
  launch.dynamic_shared = request.shared_bytes;
  launch.overlaps = request.overlaps;
  launch.options = request.options;
  launch.params = std::move(request.params);
  check_sizes("grid", "blocks", launch.grid, kMostBlocks);
  check_sizes("block", "threads", launch.block, kMostThreads);
  const uint64_t threads = uint64_t{launch.block[0]} * launch.block[1] * launch.block[2];
  const uint64_t blocks = uint64_t{launch.grid[0]} * launch.grid[1] * launch.grid[2];
  if (threads > kMostThreads[0])
    throw EmulatorError("a block of " + std::to_string(threads) +
                        " threads; at most 1024 are possible");
  if (launch.params.size() < launch.kernel->param_bytes)
    throw EmulatorError("kernel " + request.kernel + " has " +
                        std::to_string(launch.kernel->param_bytes) + " bytes of parameters, " +
                        std::to_string(launch.params.size()) + " were given");
  for (const auto& [index, path] : module_.files) {
    if (launch.files.size() <= index) launch.files.resize(index + 1);
    launch.files[index] = path;
  }
  std::vector<Allocation> allocations = variables_;
  for (Allocation& allocation : request.allocations) allocations.push_back(std::move(allocation));
  const GlobalMemory memory(std::move(allocations));
  launch.memory = &memory;

  unsigned workers = request.num_threads > 0 ? static_cast<unsigned>(request.num_threads)
                                             : std::max(1u, std::thread::hardware_concurrency());
  workers = static_cast<unsigned>(std::min<uint64_t>(workers, std::max<uint64_t>(blocks, 1)));
  std::atomic<uint64_t> next{0}, first_fault{~0ull};
  std::mutex failures;
  std::exception_ptr failure;
  // Blocks before the first one that failed still run, so that the reported fault is deterministic.
  auto work = [&] {
    uint64_t index = 0;
    try {
      Block block(launch);
      for (;;) {
        index = next++;
        if (index >= blocks || index > first_fault) return;
        block.run(static_cast<uint32_t>(index % launch.grid[0]),
                  static_cast<uint32_t>(index / launch.grid[0] % launch.grid[1]),
                  static_cast<uint32_t>(index / launch.grid[0] / launch.grid[1]));
      }
    } catch (...) {
      const std::lock_guard<std::mutex> lock(failures);
      if (index < first_fault) {
        first_fault = index;
        failure = std::current_exception();
      }
    }
  };
  if (workers == 1) {
    work();
  } else {
    std::vector<std::thread> threads_of_host;
    for (unsigned i = 0; i < workers; ++i) threads_of_host.emplace_back(work);
    for (std::thread& thread : threads_of_host) thread.join();
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace fajit::emulator
