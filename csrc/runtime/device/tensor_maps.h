// The tensor maps of a launch, from descriptions to what a device reads.
#pragma once

#include <fajit/abi.h>

#include "device/driver.h"

namespace fajit::runtime {

// Replaces each fajit_tensor_map in the params of a launch by the driver's encoding of it. Throws
// DriverError, which names the kernel and the map; the params are then of no use.
void encode_tensor_maps(const Driver& cuda, fajit_launch& launch);

}  // namespace fajit::runtime
