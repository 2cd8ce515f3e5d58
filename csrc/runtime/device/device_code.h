// The kernels of one CUDA artifact, on the devices that have loaded them.
#pragma once

#include <fajit/abi.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device/driver.h"

namespace fajit::runtime {

// How many blocks of a kernel a multiprocessor holds at once: as planned, and as the driver says of
// the registers and the shared memory that the compiled kernel takes.
struct Residency {
  std::string kernel;
  int planned_blocks, blocks;
};

// Loads are thread safe; launches take no lock. What `load` has loaded is never unloaded: a graph
// may hold a kernel.
class DeviceCode {
 public:
  explicit DeviceCode(const fajit_device_code& code) : code_(code) {}

  // Loads the kernels into the primary context of a device, once, and sets their attributes.
  // Harmless beside another thread's capture. Throws DriverError.
  void load(int device);

  // Enqueues a kernel (its index among the artifact's) on a stream of a device, and loads it there
  // if that was not done and the stream is not being captured. Encodes the tensor maps of the
  // launch, in place. Throws DriverError.
  void launch(int kernel, fajit_launch& launch, int device, void* stream);

  // The residency of each kernel on a device that has loaded them; else empty.
  std::vector<Residency> residency(int device) const;

  // The residency of each kernel on any device. One that has not loaded them does so for this
  // question alone: no launch sees those kernels, which are unloaded at once. Throws DriverError.
  std::vector<Residency> probe(int device) const;

 private:
  // A list that only grows, so that launches read it without a lock.
  struct OnDevice {
    int device;
    const Driver* driver;
    cu::Context context;
    std::vector<cu::Function> functions;
    std::vector<int> blocks;
    const OnDevice* next;
  };

  const OnDevice* find(int device) const;
  // keep: whether the kernels stay loaded; else only `blocks` is valid.
  std::unique_ptr<OnDevice> loaded_on(int device, bool keep) const;
  std::vector<Residency> residency_of(const OnDevice& on) const;

  const fajit_device_code code_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<OnDevice>> all_;
  std::atomic<const OnDevice*> first_{nullptr};
};

}  // namespace fajit::runtime
