// The C interface of the emulator: no C++ type and no exception crosses it.
//
// Functions that may fail return null, or a text that the caller frees: fields, each followed by
// 0x1f. These are ("error", message), ("memory", message), or for a fault of the kernel ("fault",
// message, kind, kernel, source, block x, y, z, thread, address or nothing, allocation).
#pragma once

#include <cstdint>

#define FAJIT_EMULATOR_API extern "C" __attribute__((visibility("default")))

struct fajit_emulator_allocation {
  const char* name;
  uint64_t begin, bytes;
  int32_t writable, initialised, pending;
};

struct fajit_emulator_launch {
  const char* kernel;
  uint32_t grid[3], block[3];
  uint32_t shared_bytes;
  int32_t num_threads;  // 0: one per core
  const uint8_t* params;
  int64_t param_bytes;
  const fajit_emulator_allocation* allocations;
  int64_t num_allocations;
  uint64_t step_limit, seed;
  int32_t completion;  // of asynchronous operations: 0 late, 1 early, 2 at moments drawn from seed
  int32_t check_races, check_uninitialised;
  int32_t overlaps;  // the kernel before this one; it may write the allocations that are pending
};

FAJIT_EMULATOR_API char* fajit_emulator_open(const char* ptx, void** program);
FAJIT_EMULATOR_API void fajit_emulator_close(void* program);
FAJIT_EMULATOR_API void fajit_emulator_free(char* text);
FAJIT_EMULATOR_API char* fajit_emulator_run(void* program, const fajit_emulator_launch* launch);
FAJIT_EMULATOR_API char* fajit_emulator_opcodes();  // name, types, semantics, test vector of each
