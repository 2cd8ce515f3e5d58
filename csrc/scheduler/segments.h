// With levels of shared keys, which units see a request's rows: units of different levels are cut
// at different rows, so rows are merged in the common refinement of all.
#pragma once

#include <cstdint>
#include <vector>

#include "units.h"

namespace fajit::scheduler {

// A unit that sees a segment's rows, from row `first_row` of its own on.
struct Cover { int32_t unit, first_row; };

// Packed rows [row_begin, row_end) of a request and the units that see them, levels outer to inner,
// then the request's own: covers [first_cover, last_cover).
struct Segment {
  int32_t request, row_begin, row_end;
  int32_t first_cover, last_cover;
};

struct Segments {
  std::vector<Segment> segments;  // by request and row
  std::vector<Cover> covers;
};

// The refinement of all units. Units without keys, whose rows other units see, are marked
// `dropped`; units with rows that others see too are marked `shared`.
Segments make_segments(const Lengths& lengths, int32_t group_size, std::vector<Unit>& units);

}  // namespace fajit::scheduler
