// With levels of shared keys: the units that cover a request's rows. Units of different levels are
// cut at different rows, so rows are merged in their common refinement.
#pragma once

#include <cstdint>
#include <vector>

#include "units.h"

namespace fajit::scheduler {

// A unit that covers a segment's rows, which begin at the unit's row `first_row`.
struct Cover { int32_t unit, first_row; };

// Packed rows [row_begin, row_end) of a request and the units that cover them, levels outer to
// inner, then the request's own: covers [first_cover, last_cover).
struct Segment {
  int32_t request, row_begin, row_end;
  int32_t first_cover, last_cover;
};

struct Segments {
  std::vector<Segment> segments;  // sorted by request and row
  std::vector<Cover> covers;
};

// The refinement of all units. Units without keys whose rows other units cover are marked
// `dropped`; units with rows that others cover too are marked `shared`.
Segments make_segments(const Lengths& lengths, int32_t group_size, std::vector<Unit>& units);

}  // namespace fajit::scheduler
