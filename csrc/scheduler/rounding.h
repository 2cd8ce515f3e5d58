// Quotients and multiples, rounded up.
#pragma once

#include <cstdint>

namespace fajit::scheduler {

inline int32_t ceil_div(int64_t a, int64_t b) { return static_cast<int32_t>((a + b - 1) / b); }
inline int32_t round_up(int64_t a, int32_t b) { return ceil_div(a, b) * b; }

}  // namespace fajit::scheduler
