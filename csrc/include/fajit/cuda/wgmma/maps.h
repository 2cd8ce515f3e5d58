// The tensor maps of K and V, made by the host for each launch.
#pragma once
#include <fajit/abi.h>
#include <fajit/cuda/params.h>
#include <fajit/cuda/tile/codes.h>
#include <fajit/cuda/tile/panel_layout.h>

namespace fajit::cuda {

constexpr int32_t greatest_divisor(int32_t a, int32_t b) {
  return b == 0 ? a : greatest_divisor(b, a % b);
}

// Rows of a box: those that a tile of keys and a page have in common, so that no box lies in two
// pages. The scheduler begins and cuts work at multiples of a tile's keys.
template <class Config>
int32_t box_rows(const fajit_args& a) {
  return Config::kPaged ? greatest_divisor(Config::kTileKv, a.page_size) : Config::kTileKv;
}

// Whether TMA can copy tiles of these keys and values.
template <class Config>
bool has_maps(const fajit_args& a) {
  return !Config::kPaged || (a.page_size > 0 && a.page_size % 8 == 0);
}

// Of K or V: a box is a panel of 64 columns, or of codes whole rows as they are, whose bytes are
// its columns.
template <class Config, class Codes>
fajit_tensor_map tensor_map(const fajit_args& a, const void* base, const int64_t (&stride)[3],
                            int32_t head_dim) {
  constexpr bool kCoded = Codes::kBits != 16;
  const int32_t columns = kCoded ? bytes_of<Codes>(head_dim) : head_dim;
  fajit_tensor_map map{};
  map.magic = FAJIT_TENSOR_MAP_MAGIC;
  map.base = base;
  map.rank = 4;
  map.element = kCoded ? 0 : Config::Element::kBfloat16 ? 9 : 6;
  map.swizzle = kCoded ? 0 : 3;
  map.promotion = 3;
  const int32_t sizes[3] = {a.kv_rows, a.num_kv_heads, a.kv_requests};
  map.sizes[0] = static_cast<uint32_t>(columns);
  map.box[0] = static_cast<uint16_t>(kCoded ? columns : kPanelColumns);
  for (int i = 0; i < 3; ++i) {
    const int64_t bytes = (kCoded ? 1 : 2) * stride[2 - i];
    // A dim that is broadcast, or has one index, has no stride; a map's are not 0.
    const bool one = bytes == 0 || sizes[i] < 2;
    map.sizes[i + 1] = one ? 1 : static_cast<uint32_t>(sizes[i]);
    map.strides[i] = one ? 16 : static_cast<uint64_t>(bytes);
    map.box[i + 1] = 1;
  }
  map.box[1] = static_cast<uint16_t>(box_rows<Config>(a));
  return map;
}

// Fills what kernels know of the storage of K and V.
template <class Config>
void describe_keys(const fajit_args& a, MapParams<true>& params) {
  using Stored = CodesOf<Config>;
  params.maps = {
      tensor_map<Config, typename Stored::Keys>(a, a.k, a.k_stride, Config::kHeadDim),
      tensor_map<Config, typename Stored::Values>(a, a.v, a.v_stride, Config::kHeadDimV)};
  params.box_rows = box_rows<Config>(a);
  params.num_boxes = Config::kTileKv / params.box_rows;
}

}  // namespace fajit::cuda
