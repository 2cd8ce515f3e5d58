// The values of one launch, and which of them the work needs.
#pragma once

#include <fajit/abi.h>
#include <pybind11/pybind11.h>

#include "launch/params.h"
#include "launch/sections.h"
#include "python_values.h"

namespace fajit::runtime {

// Unused addresses are null. tensors, scalars: addresses and numbers of the params, in a tuple or
// list each.
struct LaunchValues {
  void *q, *k, *v, *out, *lse;
  double scale;
  int num_threads;
  pybind11::handle tensors, scalars;
  void *workspace, *states, *page_indices, *key_blocks, *device_block, *stream;
  int device;
};

// What the work of a call reads and writes; other addresses may be 0.
struct Accesses {
  bool queries = false, keys = false, out = false;
  bool states = false, pages = false, key_lists = false;  // whether reading keys needs these
  WorkspaceLayout workspace;

  void add(const fajit_work& item) {
    const bool rows = item.row_end > item.row_begin;
    queries |= rows;
    keys |= rows && item.kv_end > item.kv_begin;
    out |= rows && item.partial < 0;
  }
  void add(const fajit_merge_work& item) { out |= item.row_end > item.row_begin; }
};

// Puts the values of a launch into an argument block. Throws if a needed address is 0.
void fill_values(const LaunchValues& values, const Params& params, const Accesses& accesses,
                 fajit_args& args);

// Returns `flags`; throws if unknown bits are set.
int32_t checked_flags(int32_t flags);

// Binds a method that takes the values of one launch.
template <class Call, class... Options, class Result>
void def_launch(pybind11::class_<Call, Options...>& call, const char* name,
                Result (Call::*method)(const LaunchValues&) const) {
  using pybind11::arg;
  using pybind11::handle;
  const pybind11::tuple none = pybind11::make_tuple();
  call.def(
      name,
      [method](const Call& self, handle q, handle k, handle v, handle out, handle lse, double scale,
               int num_threads, handle tensors, handle scalars, handle workspace, handle states,
               handle page_indices, handle key_blocks, handle device_block, handle stream,
               int device) {
        return (self.*method)({to_address(q), to_address(k), to_address(v), to_address(out),
                               to_address(lse), scale, num_threads, tensors, scalars,
                               to_address(workspace), to_address(states), to_address(page_indices),
                               to_address(key_blocks), to_address(device_block), to_address(stream),
                               device});
      },
      arg("q"), arg("k"), arg("v"), arg("out"), arg("lse"), arg("scale"), arg("num_threads"),
      arg("tensors") = none, arg("scalars") = none, arg("workspace") = 0, arg("states") = 0,
      arg("page_indices") = 0, arg("key_blocks") = 0, arg("device_block") = 0, arg("stream") = 0,
      arg("device") = 0);
}

}  // namespace fajit::runtime
