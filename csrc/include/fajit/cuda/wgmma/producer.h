// The producer of a block: one warp finds the tiles of an item and starts the copies of their keys
// and values by TMA, and for each group of consumers another warp loads its queries.
//
// A tile is copied as boxes of 64 columns and as many rows as a page and a tile have in common,
// without pages a whole tile; each lane starts its own boxes. Boxes end at the tile's border, so
// the last tile of an item may hold rows that are none of its keys: of the next request, or of
// slots that were never written. Their scores are masked, but 0 times a NaN among such values would
// be NaN. Then the values are copied under a barrier of the producer's own, and it writes zeros
// over those rows before it hands the tile on. Rows beyond the tensor are zeros already.
#pragma once
#include <fajit/cuda/common/key_rows.h>
#include <fajit/cuda/params.h>
#include <fajit/cuda/ptx/tensor_copy.h>
#include <fajit/cuda/tile/load_rows.h>
#include <fajit/cuda/wgmma/ring.h>

namespace fajit::cuda {

template <class Config, class Hooks>
class Producer {
  using Parts = Ring<Config, Hooks>;
  using QLayout = typename Parts::QLayout;
  using KLayout = typename Parts::KLayout;
  using VLayout = typename Parts::VLayout;
  using Walk = typename Parts::Walk;
  static constexpr int kTileKv = Config::kTileKv;

 public:
  FAJIT_DEV Producer(const Params<Config, Hooks>& params, const Parts& ring)
      : params_(params), a_(params.args), ring_(ring), rows_(params.box_rows) {}

  // The keys and values of all items, by one warp: the values of a tile after the keys of the next.
  FAJIT_DEV void send_tiles() {
    const Context c = params_.context();
    for_each_item(a_, ring_, [&](const fajit_work& item) {
      const Walk walk(c, params_.divisors, item, item.kv_begin, end_of_positions<Config>(a_, item),
                      ring_.shared + Parts::kWalkBegin);
      place_ = place_of(item);
      walk.start_runs();
      if (walk.found_begin() < 0) {
        send_nothing();
        return;
      }
      KvTile before{0, 0, false};
#pragma unroll 1
      for (;;) {
        const KvRun run = walk.take_run();
        if (!run.valid()) break;
        const bool last_run = walk.found_begin() < 0;
        bool more = true;
#pragma unroll 1
        for (int32_t begin = run.begin; more; begin += kTileKv) {
          more = run.end - begin > kTileKv;
          const KvTile tile{begin, cut(begin, kTileKv, run.end), run.full};
          send_keys({tile, !more && last_run, false});
          if (before.valid()) send_values(before, turn_ - 1);
          before = tile;
          ++turn_;
        }
      }
      send_values(before, turn_ - 1);
    });
  }

  // The queries of a group of consumers for all items, by one warp.
  FAJIT_DEV void send_queries(int group) const {
    uint32_t n = 0;
    for_each_item(a_, ring_, [&](const fajit_work& item) {
      ptx::wait(ring_.empty_queries(group, n), Parts::query_phase(n) ^ 1);
      const int32_t first = item.row_begin + group * ptx::kGroupRows;
#pragma unroll 1
      for (int at = 0; at < ptx::kGroupRows; at += 32) {
        const int32_t p = min(first + at + ptx::lane_index(), item.row_end - 1);
        const PackedRow row = packed_row<false>(a_, item, p);
        const uint16_t* from =
            static_cast<const uint16_t*>(a_.q) + row_offset<false>(a_, item, row, a_.q_stride);
        load_rows<Config::kHeadDim, QLayout, 32, true>(ring_.shared + Parts::queries(n),
                                                       group * ptx::kGroupRows + at,
                                                       item.row_end - first - at, HeldRows{from});
      }
      ptx::arrive_after_copies(ring_.full_queries(group, n));
      ++n;
    });
    if (n > 0)  // its copies have ended
      ptx::wait(ring_.full_queries(group, n - 1), Parts::query_phase(n - 1));
  }

 private:
  // Where the keys of an item are: coordinates of the tensor maps (column, row, head, request or
  // page). A coordinate along a dim that is broadcast is 0.
  struct Place {
    int32_t first_row;  // that of position 0; 0 with pages
    int32_t pages;      // the first entry of the page table
    int32_t k_head, v_head, k_request, v_request;
    uint32_t last_box;  // with pages: position of the first row of the last box with a key
  };
  // Requests store all of their keys: those of cascades, which do not, have mixed rows.
  FAJIT_DEV Place place_of(const fajit_work& item) const {
    const int32_t head = item.head_begin / params_.context().group_size();
    Place place{};
    place.first_row = Config::kPaged ? 0 : a_.kv_row0[item.request];
    place.pages = Config::kPaged ? a_.page_indptr[item.request] : 0;
    place.k_head = a_.k_stride[1] == 0 ? 0 : head;
    place.v_head = a_.v_stride[1] == 0 ? 0 : head;
    place.k_request = a_.k_stride[0] == 0 ? 0 : item.request;
    place.v_request = a_.v_stride[0] == 0 ? 0 : item.request;
    if constexpr (Config::kPaged) place.last_box = (a_.kv_len[item.request] - 1) / rows_ * rows_;
    return place;
  }

  FAJIT_DEV void send_keys(const TileRecord& record) const {
    const uint32_t full = ring_.full_keys(turn_);
    ptx::wait(ring_.empty_keys(turn_), Parts::phase(turn_) ^ 1);
    if (ptx::lane_index() == 0) {
      ring_.write_record(turn_, record);
      ptx::arrive_for_copies(full, KLayout::kBytes);
    }
    __syncwarp();
    copy<KLayout>(ring_.keys(turn_), params_.maps.k, full, place_.first_row + record.tile.begin,
                  place_.k_head, place_.k_request);
  }

  FAJIT_DEV void send_values(const KvTile& tile, uint32_t turn) {
    ptx::wait(ring_.empty_values(turn), Parts::phase(turn) ^ 1);
    // Whether rows of the boxes are in the tensor, but no keys of the request.
    const bool cuts = tile.end - tile.begin < kTileKv &&
                      (Config::kPaged || place_.first_row + tile.end < a_.kv_rows);
    const uint32_t barrier = cuts ? ring_.landed() : ring_.full_values(turn);
    if (ptx::lane_index() == 0) ptx::arrive_for_copies(barrier, VLayout::kBytes);
    __syncwarp();
    copy<VLayout>(ring_.values(turn), params_.maps.v, barrier, place_.first_row + tile.begin,
                  place_.v_head, place_.v_request);
    if (!cuts) return;
    ptx::wait(ring_.landed(), num_cut_++ & 1);
    clear_rows(tile.end - tile.begin, turn);
    if (ptx::lane_index() == 0) ptx::arrive(ring_.full_values(turn));
  }

  // Starts the copies of a tile's boxes. row: that of the tile's first key.
  template <class Layout>
  FAJIT_DEV void copy(uint32_t to, const fajit_tensor_map& map, uint32_t barrier, int32_t row,
                      int32_t head, int32_t request) const {
    const int boxes = Config::kPaged ? params_.num_boxes : 1;
#pragma unroll 1
    for (int i = ptx::lane_index(); i < boxes * Layout::kPanels; i += 32) {
      const int panel = i % Layout::kPanels, first = i / Layout::kPanels * rows_;
      // Unsigned: the last tile may reach past the largest position.
      uint32_t at = static_cast<uint32_t>(row) + static_cast<uint32_t>(first);
      int32_t outer = request;
      if constexpr (Config::kPaged) {
        at = at < place_.last_box ? at : place_.last_box;
        const int32_t page = divided(static_cast<int32_t>(at), params_.divisors.page_size);
        const int32_t index = __ldg(a_.page_indices + place_.pages + page);
        // An invalid page index must not give an invalid address.
        outer = index >= 0 && index < a_.num_pages ? index : 0;
        at -= static_cast<uint32_t>(page * a_.page_size);
      }
      ptx::copy_box(to + panel * Layout::kPanelBytes + first * kPanelRowBytes, &map, barrier,
                    panel * kPanelColumns, static_cast<int32_t>(at), head, outer);
    }
  }

  // Writes zeros to the rows of V from `first` on.
  FAJIT_DEV void clear_rows(int first, uint32_t turn) const {
    unsigned char* const values =
        ring_.shared + Parts::kVBegin + turn % Parts::kStages * VLayout::kBytes;
    constexpr int kChunks = VLayout::kPanels * 8;
#pragma unroll 1
    for (int i = first * kChunks + ptx::lane_index(); i < kTileKv * kChunks; i += 32)
      *reinterpret_cast<uint4*>(values + VLayout::offset(i / kChunks, i % kChunks)) =
          uint4{0, 0, 0, 0};
    ptx::fence_async_proxy();
    __syncwarp();
  }

  // The record of an item without tiles.
  FAJIT_DEV void send_nothing() {
    ptx::wait(ring_.empty_keys(turn_), Parts::phase(turn_) ^ 1);
    ptx::wait(ring_.empty_values(turn_), Parts::phase(turn_) ^ 1);
    if (ptx::lane_index() == 0) {
      ring_.write_record(turn_, {{0, 0, false}, true, true});
      ptx::arrive(ring_.full_keys(turn_));
      ptx::arrive(ring_.full_values(turn_));
    }
    __syncwarp();
    ++turn_;
  }

  const Params<Config, Hooks>& params_;
  const fajit_args& a_;
  const Parts ring_;
  const int rows_;  // of a box
  Place place_{};
  uint32_t turn_ = 0, num_cut_ = 0;
};

}  // namespace fajit::cuda
