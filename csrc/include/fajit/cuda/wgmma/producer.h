// The producer of a block: one warp starts the copies of the keys and values of an item's tiles by
// TMA, and for each group of consumers another warp loads its queries. Tiles are found by the warp
// that sends them, or under a mask by one of their own, which is ahead of it.
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

// The runs of an item as another warp finds them, with the functions of its walk.
template <class Ring>
class FoundRuns {
 public:
  // num_runs: of the block, before this item; counts on.
  FAJIT_DEV FoundRuns(const Ring& ring, uint32_t& num_runs) : ring_(ring), num_runs_(num_runs) {}

  FAJIT_DEV void start_runs() {
    run_ = next();
    last_ = run_.absent;
  }
  FAJIT_DEV int32_t found_begin() const { return last_ ? -1 : 0; }  // not where it begins
  FAJIT_DEV KvRun take_run() {
    if (last_) return {-1, -1, false};
    if (taken_) run_ = next();
    taken_ = true;
    last_ = run_.last;
    return {run_.tile.begin, run_.tile.end, run_.tile.full};
  }

 private:
  FAJIT_DEV TileRecord next() {
    ptx::wait(ring_.full_run(num_runs_), Ring::run_phase(num_runs_));
    const TileRecord run = ring_.template read_record<Records::kRuns>(num_runs_);
    if (ptx::lane_index() == 0) ptx::arrive(ring_.empty_run(num_runs_));
    ++num_runs_;
    return run;
  }

  const Ring& ring_;
  uint32_t& num_runs_;
  TileRecord run_{};
  bool taken_ = false, last_ = false;
};

template <class Config, class Hooks>
class Producer {
  using Parts = Ring<Config, Hooks>;
  using QLayout = typename Parts::QLayout;
  using VLayout = typename Parts::VLayout;
  using Keys = typename Parts::KeyChanges;
  using Values = typename Parts::ValueChanges;
  using Walk = typename Parts::Walk;
  static constexpr int kTileKv = Config::kTileKv;

 public:
  FAJIT_DEV Producer(const Params<Config, Hooks>& params, const Parts& ring)
      : params_(params), a_(params.args), ring_(ring), rows_(params.box_rows) {}

  // The keys and values of all items, by one warp: the values of a tile after the keys of the next.
  FAJIT_DEV void send_tiles() {
    const Context c = params_.context();
    uint32_t num_runs = 0;
    for_each_item(a_, ring_, [&](const fajit_work& item) {
      auto walk = [&] {
        if constexpr (Parts::kRuns > 0) return FoundRuns<Parts>(ring_, num_runs);
        else return walk_of(c, item);
      }();
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

  // Finds the tiles of all items, by one warp.
  FAJIT_DEV void find_runs() const {
    const Context c = params_.context();
    uint32_t n = 0;
    for_each_item(a_, ring_, [&](const fajit_work& item) {
      const Walk walk = walk_of(c, item);
      walk.start_runs();
      bool last = false;
#pragma unroll 1
      for (; !last; ++n) {
        const KvRun run = walk.take_run();
        last = walk.found_begin() < 0;
        ptx::wait(ring_.empty_run(n), Parts::run_phase(n) ^ 1);
        if (ptx::lane_index() == 0) {
          ring_.template write_record<Records::kRuns>(
              n, {{run.begin, run.end, run.full}, last, !run.valid()});
          ptx::arrive(ring_.full_run(n));
        }
        __syncwarp();
      }
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
  FAJIT_DEV Walk walk_of(const Context& c, const fajit_work& item) const {
    return {c,
            params_.divisors,
            item,
            item.kv_begin,
            end_of_positions<Config>(a_, item),
            ring_.shared + Parts::kWalkBegin};
  }

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

  // Tells the changers which tile comes next, before its copies.
  FAJIT_DEV void describe([[maybe_unused]] const TileRecord& record) const {
    if constexpr (Parts::kChanges) {
      if (ptx::lane_index() == 0) {
        ring_.template write_record<Records::kLandings>(turn_, record);
        ptx::arrive(ring_.described(turn_));
      }
      __syncwarp();
    }
  }

  // Changers of keys hand on their record with the keys.
  FAJIT_DEV void send_keys(const TileRecord& record) const {
    describe(record);
    const uint32_t full = ring_.template copied<Keys>(turn_);
    ptx::wait(ring_.template unused<Keys>(turn_), Parts::phase(turn_) ^ 1);
    if (ptx::lane_index() == 0) {
      if constexpr (!Keys::kAny) ring_.write_record(turn_, record);
      ptx::arrive_for_copies(full, bytes_of<Keys>());
    }
    __syncwarp();
    copy<Keys>(Keys::kCoded ? ring_.template codes<Keys>(turn_) : ring_.keys(turn_), params_.maps.k,
               full, place_.first_row + record.tile.begin, place_.k_head, place_.k_request);
  }

  FAJIT_DEV void send_values(const KvTile& tile, uint32_t turn) {
    ptx::wait(ring_.template unused<Values>(turn), Parts::phase(turn) ^ 1);
    // Whether rows of the boxes are in the tensor, but no keys of the request. Changers clear those
    // that they change.
    const bool cuts = !Values::kAny && tile.end - tile.begin < kTileKv &&
                      (Config::kPaged || place_.first_row + tile.end < a_.kv_rows);
    const uint32_t barrier = cuts ? ring_.landed() : ring_.template copied<Values>(turn);
    if (ptx::lane_index() == 0) ptx::arrive_for_copies(barrier, bytes_of<Values>());
    __syncwarp();
    copy<Values>(Values::kCoded ? ring_.template codes<Values>(turn) : ring_.values(turn),
                 params_.maps.v, barrier, place_.first_row + tile.begin, place_.v_head,
                 place_.v_request);
    if (!cuts) return;
    ptx::wait(ring_.landed(), num_cut_++ & 1);
    clear_values(tile.end - tile.begin, turn);
    if (ptx::lane_index() == 0) ptx::arrive(ring_.full_values(turn));
  }

  template <class Side>
  static constexpr int bytes_of() {  // of a tile's boxes
    return Side::kCoded ? Side::kLandingBytes : Side::Layout::kBytes;
  }

  // Starts the copies of a tile's boxes. row: that of the tile's first key. Rows of codes are whole
  // in a box, one after the other.
  template <class Side>
  FAJIT_DEV void copy(uint32_t to, const fajit_tensor_map& map, uint32_t barrier, int32_t row,
                      int32_t head, int32_t request) const {
    using Layout = typename Side::Layout;
    constexpr int kPanels = Side::kCoded ? 1 : Layout::kPanels;
    constexpr int kRowBytes = Side::kCoded ? Side::kPitch : kPanelRowBytes;
    const int boxes = Config::kPaged ? params_.num_boxes : 1;
#pragma unroll 1
    for (int i = ptx::lane_index(); i < boxes * kPanels; i += 32) {
      const int panel = i % kPanels, first = i / kPanels * rows_;
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
      ptx::copy_box(to + panel * Layout::kPanelBytes + first * kRowBytes, &map, barrier,
                    panel * kPanelColumns, static_cast<int32_t>(at), head, outer);
    }
  }

  // Writes zeros to the rows of V from `first` on.
  FAJIT_DEV void clear_values(int first, uint32_t turn) const {
    unsigned char* const values =
        ring_.shared + Parts::kVBegin + turn % Parts::kStages * VLayout::kBytes;
    clear_rows<VLayout>(values, first, kTileKv);
    ptx::fence_async_proxy();
    __syncwarp();
  }

  // The record of an item without tiles.
  FAJIT_DEV void send_nothing() {
    const TileRecord nothing{{0, 0, false}, true, true};
    describe(nothing);
    ptx::wait(ring_.template unused<Keys>(turn_), Parts::phase(turn_) ^ 1);
    ptx::wait(ring_.template unused<Values>(turn_), Parts::phase(turn_) ^ 1);
    if (ptx::lane_index() == 0) {
      if constexpr (!Keys::kAny) ring_.write_record(turn_, nothing);
      ptx::arrive(ring_.template copied<Keys>(turn_));
      ptx::arrive(ring_.template copied<Values>(turn_));
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
