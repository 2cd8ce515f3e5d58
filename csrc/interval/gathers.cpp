#include "gathers.h"

#include <algorithm>

namespace fajit::form {
namespace {

using namespace interval;

constexpr int kRanks[] = {1, 2, FAJIT_MAX_RANK};

bool same(Interval x, Interval y) { return x.lo == y.lo && x.hi == y.hi; }

template <class T, class E, int Rank>
Lanes gather_lanes(const Operation& operation, Frame& frame, Lanes lanes) {
  View& view = frame.views[static_cast<size_t>(operation.view)];
  const Tables tables(view.tables, view.has_tables);
  Value* const out = frame.lanes(operation.result);
  const Value* in[Rank];
  for (int d = 0; d < Rank; ++d) in[d] = frame.lanes(operation.operands[static_cast<size_t>(d)]);
  each(lanes, [&](int lane) {
    Interval at[Rank];
    uint64_t hash = 0;
    for (int d = 0; d < Rank; ++d) {
      at[d] = in[d][lane].i;
      hash = (hash + uint64_t(at[d].lo) * 0x9E3779B97F4A7C15u + uint64_t(at[d].hi)) * 0xC2B2AE3D27D4EB4Fu;
    }
    View::Known& known = view.known[hash >> 32 & (View::kKnown - 1)];
    if (known.some && std::equal(at, at + Rank, known.at, same)) {
      out[lane] = known.value;
      return;
    }
    constexpr int kScan = Rank - 1;
    if constexpr (std::is_same_v<T, Interval>) {
      const Interval top = {operation.numbers[0].whole, operation.numbers[1].whole};
      out[lane].i = i_gather<E, Rank, kScan>(view.tensor, tables, at, top);
    } else if constexpr (std::is_same_v<T, Tri>) {
      out[lane].t = t_gather<E, Rank, kScan>(view.tensor, tables, at);
    } else if constexpr (std::is_same_v<T, FInterval>) {
      out[lane].f = f_gather<E, Rank, kScan>(view.tensor, tables, at);
    } else {
      out[lane].b = gather_bits<E, Rank, kScan>(view.tensor, at);
    }
    known.value = out[lane];
    known.some = true;
    std::copy_n(at, Rank, known.at);
  });
  return lanes;
}

template <class T, class E> Operation::Run of_rank(int rank) {
  if (rank == kRanks[0]) return gather_lanes<T, E, kRanks[0]>;
  return rank == kRanks[1] ? gather_lanes<T, E, kRanks[1]> : gather_lanes<T, E, kRanks[2]>;
}

template <class T> Operation::Run of_integers(const std::string& dtype, int rank) {
  if (dtype == "uint8") return of_rank<T, Plain<uint8_t>>(rank);
  if (dtype == "int8") return of_rank<T, Plain<int8_t>>(rank);
  if (dtype == "int16") return of_rank<T, Plain<int16_t>>(rank);
  if (dtype == "int32") return of_rank<T, Plain<int32_t>>(rank);
  return dtype == "int64" ? of_rank<T, Plain<int64_t>>(rank) : nullptr;
}

Operation::Run of_reals(const std::string& dtype, int rank) {
  if (dtype == "float32") return of_rank<FInterval, Plain<float>>(rank);
  if (dtype == "float64") return of_rank<FInterval, Plain<double>>(rank);
  if (dtype == "float16") return of_rank<FInterval, Half>(rank);
  return dtype == "bfloat16" ? of_rank<FInterval, BFloat>(rank) : nullptr;
}

template <class E, bool Right>
Lanes search_lanes(const Operation& operation, Frame& frame, Lanes lanes) {
  const fajit_tensor& tensor = frame.context.tensor(static_cast<int>(operation.numbers[0].whole));
  const Value* const in = frame.lanes(operation.operands[0]);
  Value* const out = frame.lanes(operation.result);
  each(lanes, [&](int lane) { out[lane].i = i_searchsorted<E, Right>(tensor, in[lane].i); });
  return lanes;
}

template <class E> Operation::Run search_in(bool right) {
  return right ? search_lanes<E, true> : search_lanes<E, false>;
}

}  // namespace

int compiled_rank(int rank) { return *std::lower_bound(kRanks, std::end(kRanks) - 1, rank); }

Operation::Run gather(const std::string& name, const std::string& dtype, int rank) {
  if (name == "i_gather") return of_integers<Interval>(dtype, rank);
  if (name == "gather_bits") return of_integers<Bits>(dtype, rank);
  if (name == "f_gather") return of_reals(dtype, rank);
  return dtype == "bool" ? of_rank<Tri, Plain<uint8_t>>(rank) : nullptr;
}

Operation::Run searchsorted(const std::string& dtype, bool right) {
  if (dtype == "uint8") return search_in<Plain<uint8_t>>(right);
  if (dtype == "int8") return search_in<Plain<int8_t>>(right);
  if (dtype == "int16") return search_in<Plain<int16_t>>(right);
  if (dtype == "int32") return search_in<Plain<int32_t>>(right);
  return dtype == "int64" ? search_in<Plain<int64_t>>(right) : nullptr;
}

}  // namespace fajit::form
