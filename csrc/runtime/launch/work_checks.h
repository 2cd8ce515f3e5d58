// Checks of dims, and of work that would access rows, keys or partial states out of bounds.
#pragma once

#include <fajit/abi.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

namespace fajit::runtime {

[[noreturn]] inline void bad_item(const char* name, size_t index, const std::string& reason) {
  throw pybind11::value_error(std::string(name) + "[" + std::to_string(index) + "]: " + reason);
}

inline std::string range(const char* name, int64_t begin, int64_t end) {
  return std::string(name) + " [" + std::to_string(begin) + ", " + std::to_string(end) + ")";
}

inline void require_positive(int32_t value, const char* name) {
  if (value < 1) {
    throw pybind11::value_error(std::string(name) + "=" + std::to_string(value) +
                                " must be positive");
  }
}

inline void check_dims(int32_t num_q_heads, int32_t num_kv_heads, int32_t head_dim,
                       int32_t head_dim_v) {
  require_positive(num_q_heads, "num_q_heads");
  require_positive(num_kv_heads, "num_kv_heads");
  require_positive(head_dim, "head_dim");
  require_positive(head_dim_v, "head_dim_v");
  if (num_q_heads % num_kv_heads != 0) {
    throw pybind11::value_error("num_kv_heads=" + std::to_string(num_kv_heads) +
                                " does not divide num_q_heads=" + std::to_string(num_q_heads));
  }
}

// The fields that work and merge items share: request, heads of one kv head, packed rows.
template <class T>
void check_rows(const fajit_args& args, const T& item, const char* name, size_t index) {
  if (item.request < 0 || item.request >= args.num_requests) {
    bad_item(name, index,
             "request " + std::to_string(item.request) +
                 " of num_requests=" + std::to_string(args.num_requests));
  }
  const int64_t head_end = int64_t{item.head_begin} + item.head_count;
  if (item.head_begin < 0 || item.head_count < 1 || head_end > args.num_q_heads) {
    bad_item(name, index,
             range("heads", item.head_begin, head_end) +
                 " of num_q_heads=" + std::to_string(args.num_q_heads));
  }
  const int32_t group_size = args.num_q_heads / args.num_kv_heads;
  if (item.head_begin / group_size != (head_end - 1) / group_size) {
    bad_item(name, index,
             range("heads", item.head_begin, head_end) +
                 " are not of one kv head (group_size=" + std::to_string(group_size) + ")");
  }
  const int64_t packed_rows = int64_t{args.q_len[item.request]} * item.head_count;
  if (item.row_begin < 0 || item.row_end < item.row_begin || item.row_end > packed_rows) {
    bad_item(name, index,
             range("rows", item.row_begin, item.row_end) + " of " + std::to_string(packed_rows) +
                 " packed rows");
  }
}

inline void check_partial_rows(int64_t begin, int64_t end, int64_t partial_rows, const char* name,
                               size_t index) {
  if (begin < 0 || end > partial_rows) {
    bad_item(name, index,
             range("partial rows", begin, end) + " of " + std::to_string(partial_rows));
  }
}

inline void require(const void* address, const char* name) {
  if (address == nullptr) throw pybind11::value_error(std::string(name) + " has address 0");
}

}  // namespace fajit::runtime
