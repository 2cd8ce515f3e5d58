#include "device/plan_block.h"

#include <algorithm>
#include <cstring>

#include "launch/sections.h"

namespace fajit::runtime {
namespace {

// Writes `count` values to a section, then `padding` up to `size`, and zeroes the rest of its last
// 16 bytes, so that a block's bytes depend on its plan alone.
template <class T>
void put_all(char* block, int64_t begin, const T* values, int64_t count, int64_t size,
             const T& padding) {
  constexpr int64_t kBytes = sizeof(T);
  count = std::min(count, size);
  put_section(block, begin, values, count * kBytes);
  for (int64_t i = count; i < size; ++i) put_section(block, begin + i * kBytes, &padding, kBytes);
  const int64_t end = begin + size * kBytes;
  std::memset(block + end, 0, static_cast<size_t>(round_up(end, kSectionAlignment) - end));
}

template <class T>
const T* at(const char* block, int64_t begin) {
  return reinterpret_cast<const T*>(block + begin);
}

}  // namespace

const int32_t* fajit_args::* const PlanBlock::kRequestArrays[kPerRequest] = {
    &fajit_args::q_len,    &fajit_args::kv_len,   &fajit_args::q_row0,   &fajit_args::kv_row0,
    &fajit_args::q_offset, &fajit_args::q_token0, &fajit_args::kv_token0};

PlanBlock::PlanBlock(const PlanSizes& room) : room_(room) {
  constexpr int64_t kInt = sizeof(int32_t);
  Offsets& p = offsets_;
  SectionLayout sections;
  for (int64_t& section : p.per_request) section = sections.add(room.requests * kInt);
  p.first_keys = sections.add(room.first_keys * kInt);
  p.page_indptr = sections.add(room.page_indptr * kInt);
  p.row_request = sections.add(room.row_requests * kInt);
  p.row_token = sections.add(room.row_tokens * kInt);
  for (int kind = 0; kind < 2; ++kind) {
    p.work[kind] = sections.add(room.work[kind] * int64_t{sizeof(fajit_work)});
    const int64_t lists = room.workers[kind] > 0 ? room.workers[kind] + 1 : 0;
    p.worker_indptr[kind] = sections.add(lists * kInt);
  }
  p.merge_work = sections.add(room.merge_work * int64_t{sizeof(fajit_merge_work)});
  p.merge_sources = sections.add(room.merge_sources * kInt);
  p.bytes = sections.end();
}

void PlanBlock::write(char* block, const fajit_args& host, const PlanSizes& filled) const {
  const Offsets& p = offsets_;
  for (int i = 0; i < kPerRequest; ++i) {
    put_all(block, p.per_request[i], host.*kRequestArrays[i], filled.requests, room_.requests, 0);
  }
  put_all(block, p.first_keys, host.kv_first, filled.first_keys, room_.first_keys, 0);
  const int32_t pages = filled.page_indptr > 0 ? host.page_indptr[filled.page_indptr - 1] : 0;
  put_all(block, p.page_indptr, host.page_indptr, filled.page_indptr, room_.page_indptr, pages);
  put_all(block, p.row_request, host.row_request, filled.row_requests, room_.row_requests, 0);
  put_all(block, p.row_token, host.row_token, filled.row_tokens, room_.row_tokens, 0);
  const fajit_merge_work no_merge{-1, 0, 0, 0, 0, 0, 0, 0};
  put_all(block, p.merge_work, host.merge_work, filled.merge_work, room_.merge_work, no_merge);
  put_all(block, p.merge_sources, host.merge_sources, filled.merge_sources, room_.merge_sources, 0);
}

void PlanBlock::write_kind(int kind, char* block, const fajit_args& host) const {
  const fajit_work no_work{-1, 0, 0, 0, 0, 0, 0, -1};
  put_all(block, offsets_.work[kind], host.work, host.num_work, room_.work[kind], no_work);
  if (room_.workers[kind] == 0) return;
  const int64_t lists = room_.workers[kind] + 1;
  put_all(block, offsets_.worker_indptr[kind], host.worker_indptr, lists, lists, 0);
}

void PlanBlock::point(const char* block, fajit_args& args) const {
  const Offsets& p = offsets_;
  args.num_requests = static_cast<int32_t>(room_.requests);
  for (int i = 0; i < kPerRequest; ++i) {
    args.*kRequestArrays[i] = at<int32_t>(block, p.per_request[i]);
  }
  if (room_.first_keys > 0) args.kv_first = at<int32_t>(block, p.first_keys);
  if (room_.page_indptr > 0) args.page_indptr = at<int32_t>(block, p.page_indptr);
  if (room_.row_requests > 0) args.row_request = at<int32_t>(block, p.row_request);
  if (room_.row_tokens > 0) args.row_token = at<int32_t>(block, p.row_token);
  args.merge_work = at<fajit_merge_work>(block, p.merge_work);
  args.num_merge_work = static_cast<int32_t>(room_.merge_work);
  if (room_.merge_sources > 0) args.merge_sources = at<int32_t>(block, p.merge_sources);
}

void PlanBlock::point_kind(int kind, const char* block, fajit_args& args) const {
  args.work = at<fajit_work>(block, offsets_.work[kind]);
  args.num_work = static_cast<int32_t>(room_.work[kind]);
  if (room_.workers[kind] == 0) return;
  args.worker_indptr = at<int32_t>(block, offsets_.worker_indptr[kind]);
  args.num_workers = static_cast<int32_t>(room_.workers[kind]);
}

}  // namespace fajit::runtime
