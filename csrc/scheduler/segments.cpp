#include "segments.h"

#include <algorithm>
#include <limits>

namespace fajit::scheduler {
namespace {

// Rows [row_begin, row_end) of a request that a unit covers; row r is row r - shift of the unit's
// entity.
struct Span { int32_t request, row_begin, row_end, unit, shift, order; };

// Adds the spans of a group's unit, one per request that has tokens in it.
void add_group_spans(const Lengths& l, int32_t group_size, int32_t index, const Unit& unit,
                     std::vector<Span>& spans) {
  const int32_t entity = unit.entity, order = entity - l.num_requests;
  const int32_t last = (unit.row_end - 1) / group_size;
  for (int32_t row = unit.row_begin / group_size; row <= last;) {
    const auto token_at = [&](int32_t r) {
      const size_t at = static_cast<size_t>(l.q_row0[static_cast<size_t>(entity)] + r);
      return l.row_token.empty() ? static_cast<int32_t>(at) : l.row_token[at];
    };
    const int32_t token = token_at(row);
    const int32_t b = l.row_request[static_cast<size_t>(token)];
    int32_t next = row + 1;
    while (next <= last && l.row_request[static_cast<size_t>(token_at(next))] == b) ++next;
    // The tokens of a request are consecutive in a group, so they have the same shift.
    const int32_t shift = (token - l.q_row0[static_cast<size_t>(b)] - row) * group_size;
    spans.push_back({b, std::max(unit.row_begin, row * group_size) + shift,
                     std::min(unit.row_end, next * group_size) + shift, index, shift, order});
    row = next;
  }
}

void add_segment(const std::vector<Unit>& units, const std::vector<Span>& active, int32_t begin,
                 int32_t end, Segments& out) {
  const Segment segment{active.front().request, begin, end, static_cast<int32_t>(out.covers.size()),
                        0};
  for (const Span& span : active) {
    const Unit& unit = units[static_cast<size_t>(span.unit)];
    if (!unit.dropped) out.covers.push_back({span.unit, begin - span.shift - unit.row_begin});
  }
  out.segments.push_back(segment);
  out.segments.back().last_cover = static_cast<int32_t>(out.covers.size());
}

}  // namespace

Segments make_segments(const Lengths& lengths, int32_t group_size, std::vector<Unit>& units) {
  std::vector<Span> spans;
  for (size_t i = 0; i < units.size(); ++i) {
    Unit& unit = units[i];
    const int32_t index = static_cast<int32_t>(i);
    const bool is_group = unit.entity >= lengths.num_requests;
    if (is_group && unit.extent.empty()) {
      unit.dropped = true;  // the requests' own units cover its rows
    } else if (is_group) {
      add_group_spans(lengths, group_size, index, unit, spans);
    } else {
      spans.push_back({unit.entity, unit.row_begin, unit.row_end, index, 0,
                       std::numeric_limits<int32_t>::max()});
    }
  }
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) {
    if (a.request != b.request) return a.request < b.request;
    if (a.row_begin != b.row_begin) return a.row_begin < b.row_begin;
    return a.order < b.order;
  });

  // The second pass omits the units that the first pass found unnecessary: those without keys whose
  // rows are all covered by other units. Rows without any keys keep one unit, which writes 0 and
  // -inf.
  Segments refined;
  for (int pass = 0; pass < 2; ++pass) {
    refined = {};
    std::vector<Span> active;
    for (size_t i = 0; i < spans.size();) {
      const int32_t request = spans[i].request;
      int32_t row = spans[i].row_begin;
      active.clear();
      while (true) {
        while (i < spans.size() && spans[i].request == request && spans[i].row_begin == row) {
          active.push_back(spans[i++]);
        }
        if (active.empty()) break;
        std::sort(active.begin(), active.end(),
                  [](const Span& a, const Span& b) { return a.order < b.order; });
        int32_t end = std::numeric_limits<int32_t>::max();
        for (const Span& span : active) end = std::min(end, span.row_end);
        if (i < spans.size() && spans[i].request == request) {
          end = std::min(end, spans[i].row_begin);
        }
        add_segment(units, active, row, end, refined);
        row = end;
        active.erase(std::remove_if(active.begin(), active.end(),
                                    [&](const Span& span) { return span.row_end == row; }),
                     active.end());
      }
    }
    if (pass == 1) break;
    std::vector<char> alone(units.size(), 0);
    for (const Segment& s : refined.segments) {
      if (s.last_cover - s.first_cover > 1) continue;
      alone[static_cast<size_t>(refined.covers[static_cast<size_t>(s.first_cover)].unit)] = 1;
    }
    bool any = false;
    for (size_t i = 0; i < units.size(); ++i) {
      if (units[i].dropped || !units[i].extent.empty() || alone[i]) continue;
      units[i].dropped = true;
      any = true;
    }
    if (!any) break;
  }
  for (const Segment& s : refined.segments) {
    if (s.last_cover - s.first_cover < 2) continue;
    for (int32_t c = s.first_cover; c < s.last_cover; ++c) {
      units[static_cast<size_t>(refined.covers[static_cast<size_t>(c)].unit)].shared = true;
    }
  }
  return refined;
}

}  // namespace fajit::scheduler
