#include <tuple>
#include <type_traits>

#include "program.h"

namespace fajit::form {
namespace {

template <class T>
constexpr char kind_of() {
  if (std::is_same_v<T, Interval>) return 'i';
  if (std::is_same_v<T, FInterval>) return 'f';
  if (std::is_same_v<T, Tri>) return 't';
  return std::is_same_v<T, interval::Bits> ? 'b' : '?';  // no type of a register
}

template <class T>
T& get(Value& value) {
  if constexpr (kind_of<T>() == 'i') return value.i;
  if constexpr (kind_of<T>() == 'f') return value.f;
  if constexpr (kind_of<T>() == 't') return value.t;
  if constexpr (kind_of<T>() == 'b') return value.b;
}

// Reads the arguments of a call from left to right.
struct Arguments {
  Frame& frame;
  const int* operands;
  const Number* numbers;

  template <class T>
  T take() {
    using Plain = std::decay_t<T>;
    if constexpr (std::is_same_v<Plain, Context>) {
      return frame.context;
    } else if constexpr (kind_of<Plain>() != '?') {
      return get<Plain>(frame.at(*operands++));
    } else if constexpr (std::is_same_v<Plain, double>) {
      return (numbers++)->real;
    } else {
      return static_cast<Plain>((numbers++)->whole);
    }
  }
};

template <auto F>
struct Call;
template <class R, class... A, R (*F)(A...)>
struct Call<F> {
  static bool run(const Operation& operation, Frame& frame) {
    [[maybe_unused]] Arguments all{frame, operation.operands.data(), operation.numbers.data()};
    const std::tuple<A...> arguments{all.template take<A>()...};  // braces: evaluated in order
    if constexpr (std::is_same_v<R, bool>) {
      return std::apply(F, arguments);
    } else {
      get<R>(frame.at(operation.result)) = std::apply(F, arguments);
      return true;
    }
  }

  static Function function() {
    Function made{run, "", "", kind_of<R>()};
    (describe<std::decay_t<A>>(made), ...);
    return made;
  }

  template <class T>
  static void describe(Function& made) {
    if (kind_of<T>() != '?') {
      made.operands += kind_of<T>();
    } else if (!std::is_same_v<T, Context>) {
      made.numbers += std::is_same_v<T, double> ? 'd' : 'n';
    }
  }
};

}  // namespace

const std::map<std::string, Function>& functions() {
  // clang-format off
#define FAJIT_F(name) {#name, Call<&interval::name>::function()}
  static const std::map<std::string, Function> table = {
      // integers
      FAJIT_F(i_point), FAJIT_F(i_top), FAJIT_F(i_hull), FAJIT_F(i_where), FAJIT_F(i_wrap),
      FAJIT_F(i_add), FAJIT_F(i_sub), FAJIT_F(i_mul), FAJIT_F(i_neg), FAJIT_F(i_scale),
      FAJIT_F(i_add_scaled), FAJIT_F(i_abs), FAJIT_F(i_sign), FAJIT_F(i_minimum),
      FAJIT_F(i_maximum), FAJIT_F(i_floordiv), FAJIT_F(i_truncdiv), FAJIT_F(i_remainder),
      FAJIT_F(i_fmod), FAJIT_F(i_and), FAJIT_F(i_or), FAJIT_F(i_xor), FAJIT_F(i_shl),
      FAJIT_F(i_shr), FAJIT_F(i_from_t), FAJIT_F(i_from_f), FAJIT_F(i_bit), FAJIT_F(bits_of),
      // of the call
      FAJIT_F(i_scalar), FAJIT_F(f_scalar), FAJIT_F(i_places), FAJIT_F(i_ranks), FAJIT_F(i_q_len),
      FAJIT_F(i_kv_len), FAJIT_F(i_q_row), FAJIT_F(i_kv_slot),
      // reals
      FAJIT_F(f_point), FAJIT_F(f_top), FAJIT_F(f_range), FAJIT_F(f_hull), FAJIT_F(f_where),
      FAJIT_F(f_round_to), FAJIT_F(f_from_i), FAJIT_F(f_from_t), FAJIT_F(f_add), FAJIT_F(f_sub),
      FAJIT_F(f_mul), FAJIT_F(f_div), FAJIT_F(f_neg), FAJIT_F(f_abs), FAJIT_F(f_sign),
      FAJIT_F(f_minimum), FAJIT_F(f_maximum), FAJIT_F(f_floordiv), FAJIT_F(f_remainder),
      FAJIT_F(f_floor), FAJIT_F(f_ceil), FAJIT_F(f_round), FAJIT_F(f_trunc), FAJIT_F(f_sqrt),
      FAJIT_F(f_exp), FAJIT_F(f_exp2), FAJIT_F(f_expm1), FAJIT_F(f_log), FAJIT_F(f_log2),
      FAJIT_F(f_log10), FAJIT_F(f_log1p), FAJIT_F(f_tanh), FAJIT_F(f_sinh), FAJIT_F(f_atan),
      FAJIT_F(f_erf), FAJIT_F(f_sigmoid), FAJIT_F(f_sum), FAJIT_F(f_tanh_approx),
      // conditions
      FAJIT_F(t_const), FAJIT_F(t_top), FAJIT_F(t_hull), FAJIT_F(t_where), FAJIT_F(t_not),
      FAJIT_F(t_and), FAJIT_F(t_or), FAJIT_F(t_xor), FAJIT_F(t_from_i), FAJIT_F(t_from_f),
      FAJIT_F(t_from_t), FAJIT_F(i_ge), FAJIT_F(i_gt), FAJIT_F(i_le), FAJIT_F(i_lt), FAJIT_F(i_eq),
      FAJIT_F(i_ne), FAJIT_F(f_ge), FAJIT_F(f_gt), FAJIT_F(f_le), FAJIT_F(f_lt), FAJIT_F(f_eq),
      FAJIT_F(f_ne), FAJIT_F(f_isnan), FAJIT_F(f_isinf),
      // whether a clause holds
      FAJIT_F(fits), FAJIT_F(differ), FAJIT_F(may), FAJIT_F(may_fail),
  };
#undef FAJIT_F
  // clang-format on
  return table;
}

}  // namespace fajit::form
