#include <algorithm>

#include "batch.h"

namespace fajit::form {
namespace {

using namespace interval;

constexpr int kRank = FAJIT_MAX_RANK;  // of every view

// What the elements at[0..rank) are, the scanned dim last.
template <class T, class E>
Value read(const View& view, const Operation& operation, const Interval* at, size_t rank) {
  const Tables tables(view.tables, view.has_tables);
  Interval all[kRank] = {};
  std::copy_n(at, rank, all + kRank - rank);
  Value out;
  if constexpr (std::is_same_v<T, Interval>) {
    const Interval top = {operation.numbers[3].whole, operation.numbers[4].whole};
    out.i = i_gather<E, kRank, kRank - 1>(view.tensor, tables, all, top);
  } else if constexpr (std::is_same_v<T, Tri>) {
    out.t = t_gather<E, kRank, kRank - 1>(view.tensor, tables, all);
  } else if constexpr (std::is_same_v<T, FInterval>) {
    out.f = f_gather<E, kRank, kRank - 1>(view.tensor, tables, all);
  } else {
    out.b = gather_bits<E, kRank, kRank - 1>(view.tensor, all);
  }
  return out;
}

template <class T, class E>
Lanes gather_lanes(const Operation& operation, Frame& frame, Lanes lanes) {
  View& view = frame.views[static_cast<size_t>(operation.view)];
  Value* const out = frame.lanes(operation.result);
  const size_t rank = operation.operands.size();
  const Value* in[kRank];
  for (size_t d = 0; d < rank; ++d) in[d] = frame.lanes(operation.operands[d]);
  each(lanes, [&](int lane) {
    uint64_t hash = 0;
    for (size_t d = 0; d < rank; ++d) {
      const Interval x = in[d][lane].i;
      hash = (hash + uint64_t(x.lo) * 0x9E3779B97F4A7C15u + uint64_t(x.hi)) * 0xC2B2AE3D27D4EB4Fu;
    }
    View::Known& known = view.known[hash >> 32 & (View::kKnown - 1)];
    bool same = known.some;
    for (size_t d = 0; d < rank && same; ++d) {
      same = known.at[d].lo == in[d][lane].i.lo && known.at[d].hi == in[d][lane].i.hi;
    }
    if (!same) {
      known.some = true;
      for (size_t d = 0; d < rank; ++d) known.at[d] = in[d][lane].i;
      known.value = read<T, E>(view, operation, known.at, rank);
    }
    out[lane] = known.value;
  });
  return lanes;
}

template <class E, bool Right>
Lanes search_lanes(const Operation& operation, Frame& frame, Lanes lanes) {
  const fajit_tensor& tensor = frame.context.tensor(static_cast<int>(operation.numbers[0].whole));
  const Value* const in = frame.lanes(operation.operands[0]);
  Value* const out = frame.lanes(operation.result);
  each(lanes, [&](int lane) { out[lane].i = i_searchsorted<E, Right>(tensor, in[lane].i); });
  return lanes;
}

// f(storage) for the storage of an integer dtype.
template <class F>
Operation::Run of_integers(const std::string& dtype, F f) {
  if (dtype == "uint8") return f(Plain<uint8_t>());
  if (dtype == "int8") return f(Plain<int8_t>());
  if (dtype == "int16") return f(Plain<int16_t>());
  if (dtype == "int32") return f(Plain<int32_t>());
  return dtype == "int64" ? f(Plain<int64_t>()) : nullptr;
}

}  // namespace

Operation::Run gather(const std::string& name, const std::string& dtype) {
  if (name == "i_gather") {
    return of_integers(dtype, [](auto e) { return &gather_lanes<Interval, decltype(e)>; });
  }
  if (name == "gather_bits") {
    return of_integers(dtype, [](auto e) { return &gather_lanes<Bits, decltype(e)>; });
  }
  if (name == "t_gather") return dtype == "bool" ? gather_lanes<Tri, Plain<uint8_t>> : nullptr;
  if (dtype == "float32") return gather_lanes<FInterval, Plain<float>>;
  if (dtype == "float64") return gather_lanes<FInterval, Plain<double>>;
  if (dtype == "float16") return gather_lanes<FInterval, Half>;
  return dtype == "bfloat16" ? gather_lanes<FInterval, BFloat> : nullptr;
}

Operation::Run searchsorted(const std::string& dtype, bool right) {
  return of_integers(dtype, [right](auto e) {
    return right ? &search_lanes<decltype(e), true> : &search_lanes<decltype(e), false>;
  });
}

}  // namespace fajit::form
