#include "launch/launch_values.h"

#include <string>

#include "launch/work_checks.h"

namespace py = pybind11;

namespace fajit::runtime {

void fill_values(const LaunchValues& values, const Params& params, const Accesses& accesses,
                 fajit_args& args) {
  params.fill(args);
  args.q = values.q;
  args.k = values.k;
  args.v = values.v;
  args.out = values.out;
  args.lse = static_cast<float*>(values.lse);
  args.scale = static_cast<float>(values.scale);
  args.num_threads = values.num_threads;
  args.block_mask.states = static_cast<const uint8_t*>(values.states);
  args.page_indices = static_cast<const int32_t*>(values.page_indices);
  args.key_blocks = static_cast<const int32_t*>(values.key_blocks);
  args.stream = values.stream;
  args.device = values.device;
  char* const space = static_cast<char*>(values.workspace);

  if (args.num_threads < 1) {
    throw py::value_error("num_threads=" + std::to_string(args.num_threads) + " must be positive");
  }
  if (accesses.queries) require(args.q, "q");
  if (accesses.keys) {
    require(args.k, "k");
    require(args.v, "v");
    if (accesses.states) require(args.block_mask.states, "states");
    if (accesses.pages) require(args.page_indices, "page_indices");
    if (accesses.key_lists) require(args.key_blocks, "key_blocks");
  }
  const bool writes_lse = (args.flags & FAJIT_WRITE_LSE) != 0;
  if (accesses.out) {
    require(args.out, "out");
    if (writes_lse) require(args.lse, "lse");
  }
  if (!writes_lse) args.lse = nullptr;
  if (accesses.workspace.bytes > 0) {
    require(space, "workspace");
    args.partial_out = reinterpret_cast<float*>(space);
    args.partial_lse = reinterpret_cast<float*>(space + accesses.workspace.lse_begin);
  }
}

int32_t checked_flags(int32_t flags) {
  if ((flags & ~(FAJIT_WRITE_LSE | FAJIT_PARTIAL)) != 0) {
    throw py::value_error("flags=" + std::to_string(flags) + " has unknown bits");
  }
  return flags;
}

}  // namespace fajit::runtime
