#include "problem.h"

#include <algorithm>
#include <cstring>

#include "python_values.h"
#include "work_checks.h"

namespace py = pybind11;

namespace fajit::runtime {
namespace {

constexpr int kPerRequestArrays = 7;

// `count` int32, from an int (the same for all), a tuple or list, or an int32 buffer; messages call
// the count `count_name`.
void read_int32s(py::handle source, int32_t count, int32_t* out, const char* name,
                 const char* count_name = "num_requests") {
  if (PyLong_Check(source.ptr())) {
    std::fill_n(out, count, narrow(to_int64(source, name), name));
    return;
  }
  if (PyTuple_Check(source.ptr()) || PyList_Check(source.ptr())) {
    const Items items(source, name);
    if (items.size() != static_cast<size_t>(count)) {
      throw py::value_error(std::string(name) + " must have " + count_name + "=" +
                            std::to_string(count) + " entries, got " +
                            std::to_string(items.size()));
    }
    for (int32_t i = 0; i < count; ++i) out[i] = narrow(to_int64(items[i], name), name);
    return;
  }
  if (!PyObject_CheckBuffer(source.ptr())) {
    throw py::type_error(std::string(name) +
                         " must be an int, a tuple or list of ints, or an int32 buffer, got " +
                         Py_TYPE(source.ptr())->tp_name);
  }
  const py::buffer_info info = py::reinterpret_borrow<py::buffer>(source).request();
  if (info.ndim != 1 || info.itemsize != 4 || info.format != "i" || info.size != count ||
      (count > 1 && info.strides[0] != 4)) {
    throw py::value_error(std::string(name) + " must be a contiguous int32 buffer of " +
                          count_name + "=" + std::to_string(count) + " entries");
  }
  if (count > 0) std::memcpy(out, info.ptr, sizeof(int32_t) * static_cast<size_t>(count));
}

void require_not_negative(const int32_t* values, int32_t count, const char* name) {
  for (int32_t i = 0; i < count; ++i) {
    if (values[i] < 0) {
      throw py::value_error(std::string(name) + "[" + std::to_string(i) +
                            "]=" + std::to_string(values[i]) + " must not be negative");
    }
  }
}

BlockMaskLayout read_block_mask(py::handle source, const fajit_args& args) {
  const Items items(source, "block_mask");
  if (items.size() != 4) {
    throw py::value_error("block_mask must be (sizes, strides, q_block, kv_block)");
  }
  BlockMaskLayout layout;
  to_int64s(items[0], 4, layout.sizes.data(), "block_mask sizes");
  to_int64s(items[1], 4, layout.strides.data(), "block_mask strides");
  layout.q_block = narrow(to_int64(items[2], "q_block"), "q_block");
  layout.kv_block = narrow(to_int64(items[3], "kv_block"), "kv_block");
  if (layout.q_block < 1 || layout.kv_block < 1) {
    throw py::value_error("q_block and kv_block must be positive");
  }
  const int64_t needed[2] = {args.num_requests, args.num_q_heads};
  for (int i = 0; i < 4; ++i) {
    if (layout.sizes[i] < 0) throw py::value_error("block_mask sizes must not be negative");
    if (i < 2 && layout.strides[i] != 0 && layout.sizes[i] < needed[i]) {
      throw py::value_error(std::string("block_mask has ") + std::to_string(layout.sizes[i]) +
                            (i == 0 ? " requests, the problem " : " heads, the problem ") +
                            std::to_string(needed[i]) + ": a broadcast dim has stride 0");
    }
  }
  return layout;
}

}  // namespace

Problem::Problem(int32_t num_requests, int32_t num_q_heads, int32_t num_kv_heads, int32_t head_dim,
                 int32_t head_dim_v, py::handle q_len, py::handle kv_len, py::handle q_row0,
                 py::handle kv_row0, py::handle q_offset, py::handle q_token0, py::handle kv_token0,
                 py::handle q_stride, py::handle k_stride, py::handle v_stride,
                 py::handle out_stride, py::handle lse_stride, py::handle tensors,
                 const std::string& scalar_kinds, py::handle block_mask, py::handle page_indptr,
                 int32_t page_size, int32_t num_pages, py::handle row_request)
    : params_(tensors, scalar_kinds) {
  if (num_requests < 0) throw py::value_error("num_requests must not be negative");
  check_dims(num_q_heads, num_kv_heads, head_dim, head_dim_v);
  args_.abi_version = FAJIT_ABI_VERSION;
  args_.args_bytes = sizeof(fajit_args);
  args_.num_requests = num_requests;
  args_.num_q_heads = num_q_heads;
  args_.num_kv_heads = num_kv_heads;
  args_.head_dim = head_dim;
  args_.head_dim_v = head_dim_v;

  per_request_.resize(static_cast<size_t>(kPerRequestArrays) * static_cast<size_t>(num_requests));
  int32_t* next = per_request_.data();
  const auto take = [&](py::handle source, const char* name) {
    int32_t* const begin = next;
    read_int32s(source, num_requests, begin, name);
    next += num_requests;
    return begin;
  };
  args_.q_len = take(q_len, "q_len");
  args_.kv_len = take(kv_len, "kv_len");
  args_.q_row0 = take(q_row0, "q_row0");
  args_.kv_row0 = take(kv_row0, "kv_row0");
  args_.q_offset = take(q_offset, "q_offset");
  args_.q_token0 = take(q_token0.is_none() ? q_row0 : q_token0, "q_token0");
  args_.kv_token0 = take(kv_token0.is_none() ? kv_row0 : kv_token0, "kv_token0");
  require_not_negative(args_.q_len, num_requests, "q_len");
  require_not_negative(args_.kv_len, num_requests, "kv_len");
  require_not_negative(args_.q_row0, num_requests, "q_row0");
  require_not_negative(args_.kv_row0, num_requests, "kv_row0");

  to_int64s(q_stride, 3, args_.q_stride, "q_stride");
  to_int64s(k_stride, 3, args_.k_stride, "k_stride");
  to_int64s(v_stride, 3, args_.v_stride, "v_stride");
  to_int64s(out_stride, 3, args_.out_stride, "out_stride");
  to_int64s(lse_stride, 3, args_.lse_stride, "lse_stride");

  params_.fill_counts(args_);

  if (!block_mask.is_none()) {
    block_mask_ = read_block_mask(block_mask, args_);
    has_block_mask_ = true;
    std::copy(block_mask_.strides.begin(), block_mask_.strides.end(), args_.block_mask.strides);
    args_.block_mask.q_block = block_mask_.q_block;
    args_.block_mask.kv_block = block_mask_.kv_block;
  }
  args_.page_size = page_size;
  args_.num_pages = num_pages;
  if (!page_indptr.is_none()) read_pages(page_indptr);
  if (!row_request.is_none()) read_row_requests(row_request);
}

void Problem::read_pages(py::handle page_indptr) {
  require_positive(args_.page_size, "page_size");
  if (args_.num_pages < 0) throw py::value_error("num_pages must not be negative");
  const int32_t count = args_.num_requests;
  page_indptr_.resize(static_cast<size_t>(count) + 1);
  read_int32s(page_indptr, count + 1, page_indptr_.data(), "page_indptr", "num_requests + 1");
  require_not_negative(page_indptr_.data(), 1, "page_indptr");
  for (int32_t b = 0; b < count; ++b) {
    const size_t i = static_cast<size_t>(b);
    const int64_t pages = int64_t{page_indptr_[i + 1]} - page_indptr_[i];
    if (pages < 0) {
      throw py::value_error("page_indptr must not descend; request " + std::to_string(b) +
                            " has [" + std::to_string(page_indptr_[i]) + ", " +
                            std::to_string(page_indptr_[i + 1]) + "]");
    }
    if (args_.kv_len[b] > pages * args_.page_size) {
      throw py::value_error("kv_len[" + std::to_string(b) + "]=" + std::to_string(args_.kv_len[b]) +
                            " is longer than its " + std::to_string(pages) + " pages of " +
                            std::to_string(args_.page_size) + " slots");
    }
  }
  args_.page_indptr = page_indptr_.data();
}

void Problem::read_row_requests(py::handle row_request) {
  int64_t tokens = 0;
  for (int32_t b = 0; b < args_.num_requests; ++b) {
    tokens = std::max(tokens, int64_t{args_.q_row0[b]} + args_.q_len[b]);
  }
  row_request_.resize(static_cast<size_t>(tokens));
  read_int32s(row_request, narrow(tokens, "the number of packed tokens"), row_request_.data(),
              "row_request", "the number of packed tokens");
  for (const int32_t request : row_request_) {
    if (request < 0 || request >= args_.num_requests) {
      throw py::value_error("row_request has request " + std::to_string(request) +
                            " of num_requests=" + std::to_string(args_.num_requests));
    }
  }
  args_.row_request = row_request_.data();
}

}  // namespace fajit::runtime
