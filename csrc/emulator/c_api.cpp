// The C interface of the emulator, which flashattn_jit/jit/emulator/programs.py calls.
#include "c_api.h"

#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <string>

#include "program.h"
#include "ptx/opcodes.h"

namespace fajit::emulator {
namespace {

constexpr char kBetween = '\x1f';  // separator of fields

// Returned if no memory is left for another message; not allocated by malloc.
char no_memory[] = "memory\x1fout of memory\x1f";

char* copy(const std::string& text) {
  char* result = static_cast<char*>(std::malloc(text.size() + 1));
  if (result == nullptr) return no_memory;
  std::memcpy(result, text.c_str(), text.size() + 1);
  return result;
}

std::string joined(std::initializer_list<std::string> fields) {
  std::string text;
  for (const std::string& field : fields) text += field + kBetween;
  return text;
}

std::string fault_fields(const Fault& fault) {
  const FaultInfo& info = fault.info;
  return joined({"fault", fault.message, info.kind, info.kernel, info.source,
                 std::to_string(info.block[0]), std::to_string(info.block[1]),
                 std::to_string(info.block[2]), std::to_string(info.linear_thread),
                 info.has_address ? std::to_string(info.address) : "", info.allocation});
}

// Calls `body` and returns its exception as fields, or null.
template <class Body> char* guarded(const Body& body) {
  try {
    try {
      body();
      return nullptr;
    } catch (const Fault& fault) {
      return copy(fault_fields(fault));
    } catch (const std::bad_alloc&) {
      return no_memory;
    } catch (const std::exception& error) {
      return copy(joined({"error", error.what()}));
    }
  } catch (...) {  // no memory for the message
    return no_memory;
  }
}

Program& program_of(void* program) { return *static_cast<Program*>(program); }

}  // namespace
}  // namespace fajit::emulator

using namespace fajit::emulator;

char* fajit_emulator_open(const char* ptx, void** program) {
  return guarded([&] { *program = new Program(ptx); });
}

void fajit_emulator_close(void* program) { delete static_cast<Program*>(program); }

void fajit_emulator_free(char* text) {
  if (text != no_memory) std::free(text);
}

char* fajit_emulator_run(void* program, const fajit_emulator_launch* launch) {
  return guarded([&] {
    Program::Request request;
    request.kernel = launch->kernel;
    for (int i = 0; i < 3; ++i) {
      request.grid[i] = launch->grid[i];
      request.block[i] = launch->block[i];
    }
    request.shared_bytes = launch->shared_bytes;
    request.params.assign(launch->params, launch->params + launch->param_bytes);
    for (int64_t i = 0; i < launch->num_allocations; ++i) {
      const fajit_emulator_allocation& given = launch->allocations[i];
      Allocation allocation;
      allocation.name = given.name;
      allocation.begin = given.begin;
      allocation.bytes = given.bytes;
      allocation.writable = given.writable != 0;
      allocation.pending = given.pending != 0;
      if (given.initialised == 0) allocation.written.reset(new uint8_t[given.bytes]());
      request.allocations.push_back(std::move(allocation));
    }
    request.options.completion = static_cast<Completion>(launch->completion);
    request.options.seed = launch->seed;
    request.options.check_races = launch->check_races != 0;
    request.options.check_uninitialised = launch->check_uninitialised != 0;
    request.options.step_limit = launch->step_limit;
    request.num_threads = launch->num_threads;
    request.overlaps = launch->overlaps != 0;
    program_of(program).run(std::move(request));
  });
}

char* fajit_emulator_opcodes() {
  std::string text;
  for (const OpcodeRow& row : opcode_table())
    text += joined({std::string(row.name), std::string(row.types), std::string(row.semantics),
                    std::string(row.vector)});
  return copy(text);
}
