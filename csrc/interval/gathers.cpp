#include "program.h"

namespace fajit::form {
namespace {

using namespace interval;

constexpr int kRank = FAJIT_MAX_RANK;  // the rank of every view

template <class T, class E>
Value read(const View& view, const Operation& operation, const Interval* at) {
  const Tables tables(view.tables, view.has_tables);
  Value out;
  if constexpr (std::is_same_v<T, Interval>) {
    const Interval top = {operation.numbers[3].whole, operation.numbers[4].whole};
    out.i = i_gather<E, kRank, kRank - 1>(view.tensor, tables, at, top);
  } else if constexpr (std::is_same_v<T, Tri>) {
    out.t = t_gather<E, kRank, kRank - 1>(view.tensor, tables, at);
  } else if constexpr (std::is_same_v<T, FInterval>) {
    out.f = f_gather<E, kRank, kRank - 1>(view.tensor, tables, at);
  } else {
    out.b = gather_bits<E, kRank, kRank - 1>(view.tensor, at);
  }
  return out;
}

template <class T, class E>
bool run_gather(const Operation& operation, Frame& frame) {
  View& view = frame.views[static_cast<size_t>(operation.view)];
  const size_t rank = operation.operands.size();
  const int64_t begin = rank > 0 ? frame.at(operation.operands[rank - 1]).i.lo : 0;
  const uint64_t hash = uint64_t(begin) * 0x9E3779B97F4A7C15u;
  View::Known& known = view.known[hash >> (64 - View::kKnownBits)];
  bool same = known.some;
  for (size_t d = 0; d < rank; ++d) {
    Interval& at = known.at[kRank - rank + d];
    const Interval x = frame.at(operation.operands[d]).i;
    same = same && at.lo == x.lo && at.hi == x.hi;
    at = x;
  }
  if (!same) known.value = read<T, E>(view, operation, known.at);
  known.some = true;
  frame.at(operation.result) = known.value;
  return true;
}

template <class E, bool Right>
bool run_search(const Operation& operation, Frame& frame) {
  const fajit_tensor& tensor = frame.context.tensor(static_cast<int>(operation.numbers[0].whole));
  frame.at(operation.result).i =
      i_searchsorted<E, Right>(tensor, frame.at(operation.operands[0]).i);
  return true;
}

// Calls f with the storage type of an integer dtype; null for other dtypes.
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
    return of_integers(dtype, [](auto e) { return &run_gather<Interval, decltype(e)>; });
  }
  if (name == "gather_bits") {
    return of_integers(dtype, [](auto e) { return &run_gather<Bits, decltype(e)>; });
  }
  if (name == "t_gather") return dtype == "bool" ? run_gather<Tri, Plain<uint8_t>> : nullptr;
  if (dtype == "float32") return run_gather<FInterval, Plain<float>>;
  if (dtype == "float64") return run_gather<FInterval, Plain<double>>;
  if (dtype == "float16") return run_gather<FInterval, Half>;
  return dtype == "bfloat16" ? run_gather<FInterval, BFloat> : nullptr;
}

Operation::Run searchsorted(const std::string& dtype, bool right) {
  return of_integers(dtype, [right](auto e) {
    return right ? &run_search<decltype(e), true> : &run_search<decltype(e), false>;
  });
}

}  // namespace fajit::form
