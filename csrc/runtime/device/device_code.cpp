#include "device/device_code.h"

#include "device/tensor_maps.h"

namespace fajit::runtime {
namespace {

// What a kernel may use without asking.
constexpr uint32_t kDefaultSharedBytes = 48 * 1024;

// The first CUDA version whose graphs have programmatic edges, which a captured launch that
// overlaps the one before it becomes. Older drivers get ordinary launches, captured or not.
constexpr int kProgrammaticEdges = 12030;

// A module, unloaded unless it is kept: a failed load, or a probe, leaves nothing on the device.
class NewModule {
 public:
  NewModule(const Driver& driver, const void* image, const char* of) : driver_(driver) {
    driver.check(driver.load(&module_, image), "cuModuleLoadData", of);
  }
  ~NewModule() {
    if (module_ != nullptr) driver_.unload(module_);
  }
  NewModule(const NewModule&) = delete;
  NewModule& operator=(const NewModule&) = delete;
  cu::LoadedModule get() const { return module_; }
  void keep() { module_ = nullptr; }

 private:
  const Driver& driver_;
  cu::LoadedModule module_ = nullptr;
};

}  // namespace

const DeviceCode::OnDevice* DeviceCode::find(int device) const {
  const OnDevice* at = first_.load(std::memory_order_acquire);
  while (at != nullptr && at->device != device) at = at->next;
  return at;
}

void DeviceCode::load(int device) {
  if (find(device) != nullptr) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (find(device) != nullptr) return;
  all_.push_back(loaded_on(device, /*keep=*/true));
  first_.store(all_.back().get(), std::memory_order_release);
}

std::unique_ptr<DeviceCode::OnDevice> DeviceCode::loaded_on(int device, bool keep) const {
  auto on = std::make_unique<OnDevice>();
  const Driver& cuda = driver();
  const RelaxedCaptures relaxed(cuda);
  on->device = device;
  on->driver = &cuda;
  on->context = cuda.primary_context(device);
  on->next = first_.load(std::memory_order_relaxed);
  const CurrentContext current(cuda, on->context, code_.kernels[0].name);
  NewModule module(cuda, code_.image, code_.kernels[0].name);
  for (int i = 0; i < code_.num_kernels; ++i) {
    const fajit_kernel_entry& kernel = code_.kernels[i];
    cu::Function function = nullptr;
    int blocks = 0;
    // Also a driver that loads lazily loads the kernel here, not at its first launch.
    cuda.check(cuda.function(&function, module.get(), kernel.name), "cuModuleGetFunction",
               kernel.name);
    if (kernel.shared_bytes > kDefaultSharedBytes) {
      cuda.check(cuda.set_attribute(function, cu::kMaxDynamicSharedBytes,
                                    static_cast<int>(kernel.shared_bytes)),
                 "cuFuncSetAttribute(MAX_DYNAMIC_SHARED_SIZE_BYTES)", kernel.name);
    }
    cuda.check(
        cuda.occupancy(&blocks, function, static_cast<int>(kernel.threads), kernel.shared_bytes),
        "cuOccupancyMaxActiveBlocksPerMultiprocessor", kernel.name);
    on->functions.push_back(function);
    on->blocks.push_back(blocks);
  }
  if (keep) module.keep();
  return on;
}

void DeviceCode::launch(int kernel, fajit_launch& launch, int device, void* stream) {
  const OnDevice* on = find(device);
  const auto queue = static_cast<cu::Stream>(stream);
  if (on == nullptr) {
    const Driver& cuda = driver();
    int status = cu::kCaptureStatusNone;
    // The default stream (null) cannot be captured.
    if (queue != nullptr) {
      // A stream belongs to a context, and a new thread has none.
      const RelaxedCaptures relaxed(cuda);
      const CurrentContext current(cuda, cuda.primary_context(device), launch.kernel);
      cuda.check(cuda.is_capturing(queue, &status), "cuStreamIsCapturing", launch.kernel);
    }
    if (status != cu::kCaptureStatusNone) {
      throw DriverError("launch of " + std::string(launch.kernel) +
                        ": the kernel is not loaded on this device, and nothing can be loaded "
                        "while a CUDA graph is captured; make the same call once before");
    }
    load(device);
    on = find(device);
  }
  const Driver& cuda = *on->driver;
  const CurrentContext current(cuda, on->context, launch.kernel);
  encode_tensor_maps(cuda, launch);
  void* params[] = {launch.params};
  cu::LaunchAttribute serialization{cu::kProgrammaticSerialization, 1, {}};
  const bool overlaps = launch.waits != 0 && cuda.version() >= kProgrammaticEdges;
  const cu::LaunchConfig config{{launch.grid[0], launch.grid[1], launch.grid[2]},
                                {launch.block[0], launch.block[1], launch.block[2]},
                                launch.shared_bytes,
                                queue,
                                &serialization,
                                overlaps ? 1u : 0u};
  cuda.check(cuda.launch(&config, on->functions[static_cast<size_t>(kernel)], params, nullptr),
             "cuLaunchKernelEx", launch.kernel);
}

std::vector<Residency> DeviceCode::residency(int device) const {
  const OnDevice* const on = find(device);
  return on != nullptr ? residency_of(*on) : std::vector<Residency>();
}

std::vector<Residency> DeviceCode::probe(int device) const {
  const OnDevice* const on = find(device);
  return residency_of(on != nullptr ? *on : *loaded_on(device, /*keep=*/false));
}

std::vector<Residency> DeviceCode::residency_of(const OnDevice& on) const {
  std::vector<Residency> found;
  for (int i = 0; i < code_.num_kernels; ++i) {
    const fajit_kernel_entry& kernel = code_.kernels[i];
    found.push_back(
        {kernel.name, static_cast<int>(kernel.min_blocks), on.blocks[static_cast<size_t>(i)]});
  }
  return found;
}

}  // namespace fajit::runtime
