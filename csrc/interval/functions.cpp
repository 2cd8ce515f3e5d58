#include "functions.h"

#include <tuple>
#include <type_traits>

namespace fajit::form {
namespace {

using namespace interval;

template <class T> constexpr char kind_of = '\0';  // of a value in a register
template <> constexpr char kind_of<Interval> = 'i';
template <> constexpr char kind_of<FInterval> = 'f';
template <> constexpr char kind_of<Tri> = 't';
template <> constexpr char kind_of<Bits> = 'b';
template <> constexpr char kind_of<bool> = '?';

template <class T> T& get(Value& value) {
  if constexpr (std::is_same_v<T, Interval>) return value.i;
  if constexpr (std::is_same_v<T, FInterval>) return value.f;
  if constexpr (std::is_same_v<T, Tri>) return value.t;
  if constexpr (std::is_same_v<T, Bits>) return value.b;
}

template <class T> constexpr bool in_register = kind_of<T> != '\0' && !std::is_same_v<T, bool>;

// The arguments of one call, from left to right.
struct Arguments {
  Frame& frame;
  Value* const* operands;
  const Number* numbers;
  int lane;

  template <class T> decltype(auto) next() {
    using Plain = std::decay_t<T>;
    if constexpr (std::is_same_v<Plain, Context>) {
      return static_cast<const Context&>(frame.context);
    } else if constexpr (in_register<Plain>) {
      return get<Plain>((*operands++)[lane]);
    } else if constexpr (std::is_same_v<Plain, double>) {
      return double((numbers++)->real);
    } else {
      return static_cast<Plain>((numbers++)->whole);
    }
  }
};

// Adds an argument of type T to what is said of a function.
template <class T> void describe(Function& function) {
  if constexpr (in_register<T>) {
    function.operands += kind_of<T>;
  } else if constexpr (!std::is_same_v<T, Context>) {
    function.numbers += std::is_same_v<T, double> ? 'd' : 'n';
  }
}

// A call of F for each box of a set.
template <auto F> struct Call;
template <class R, class... A, R (*F)(A...)> struct Call<F> {
  static Lanes run(const Operation& operation, Frame& frame, Lanes lanes) {
    Value* operands[sizeof...(A) + 1];
    for (size_t i = 0; i < operation.operands.size(); ++i) {
      operands[i] = frame.lanes(operation.operands[i]);
    }
    Lanes stay = lanes;
    each(lanes, [&](int lane) {
      [[maybe_unused]] Arguments arguments{frame, operands, operation.numbers.data(), lane};
      const std::tuple<A...> taken{arguments.template next<A>()...};  // braces: in order
      if constexpr (std::is_same_v<R, bool>) {
        if (!std::apply(F, taken)) stay &= ~(Lanes{1} << lane);
      } else {
        get<R>(frame.lanes(operation.result)[lane]) = std::apply(F, taken);
      }
    });
    return stay;
  }

  static Function function() {
    Function made{run, "", "", kind_of<R>};
    (describe<std::decay_t<A>>(made), ...);
    return made;
  }
};

}  // namespace

const Functions& functions() {
#define FAJIT_NAMED(name) {#name, Call<&interval::name>::function()}
  static const Functions table = {
      // integers
      FAJIT_NAMED(i_point), FAJIT_NAMED(i_top), FAJIT_NAMED(i_hull), FAJIT_NAMED(i_where),
      FAJIT_NAMED(i_wrap), FAJIT_NAMED(i_add), FAJIT_NAMED(i_sub), FAJIT_NAMED(i_mul),
      FAJIT_NAMED(i_neg), FAJIT_NAMED(i_scale), FAJIT_NAMED(i_add_scaled), FAJIT_NAMED(i_abs),
      FAJIT_NAMED(i_sign), FAJIT_NAMED(i_minimum), FAJIT_NAMED(i_maximum), FAJIT_NAMED(i_floordiv),
      FAJIT_NAMED(i_truncdiv), FAJIT_NAMED(i_remainder), FAJIT_NAMED(i_fmod), FAJIT_NAMED(i_and),
      FAJIT_NAMED(i_or), FAJIT_NAMED(i_xor), FAJIT_NAMED(i_shl), FAJIT_NAMED(i_shr),
      FAJIT_NAMED(i_from_t), FAJIT_NAMED(i_from_f), FAJIT_NAMED(i_bit), FAJIT_NAMED(bits_of),
      // what a call has
      FAJIT_NAMED(i_scalar), FAJIT_NAMED(f_scalar), FAJIT_NAMED(i_places), FAJIT_NAMED(i_ranks),
      FAJIT_NAMED(i_q_len), FAJIT_NAMED(i_kv_len), FAJIT_NAMED(i_q_row), FAJIT_NAMED(i_kv_slot),
      // reals
      FAJIT_NAMED(f_point), FAJIT_NAMED(f_top), FAJIT_NAMED(f_range), FAJIT_NAMED(f_hull),
      FAJIT_NAMED(f_where), FAJIT_NAMED(f_round_to), FAJIT_NAMED(f_from_i), FAJIT_NAMED(f_from_t),
      FAJIT_NAMED(f_add), FAJIT_NAMED(f_sub), FAJIT_NAMED(f_mul), FAJIT_NAMED(f_div),
      FAJIT_NAMED(f_neg), FAJIT_NAMED(f_abs), FAJIT_NAMED(f_sign), FAJIT_NAMED(f_minimum),
      FAJIT_NAMED(f_maximum), FAJIT_NAMED(f_floordiv), FAJIT_NAMED(f_remainder),
      FAJIT_NAMED(f_floor), FAJIT_NAMED(f_ceil), FAJIT_NAMED(f_round), FAJIT_NAMED(f_trunc),
      FAJIT_NAMED(f_sqrt), FAJIT_NAMED(f_exp), FAJIT_NAMED(f_exp2), FAJIT_NAMED(f_expm1),
      FAJIT_NAMED(f_log), FAJIT_NAMED(f_log2), FAJIT_NAMED(f_log10), FAJIT_NAMED(f_log1p),
      FAJIT_NAMED(f_tanh), FAJIT_NAMED(f_sinh), FAJIT_NAMED(f_atan), FAJIT_NAMED(f_erf),
      FAJIT_NAMED(f_sigmoid), FAJIT_NAMED(f_sum),
      // conditions
      FAJIT_NAMED(t_const), FAJIT_NAMED(t_top), FAJIT_NAMED(t_hull), FAJIT_NAMED(t_where),
      FAJIT_NAMED(t_not), FAJIT_NAMED(t_and), FAJIT_NAMED(t_or), FAJIT_NAMED(t_xor),
      FAJIT_NAMED(t_from_i), FAJIT_NAMED(t_from_f), FAJIT_NAMED(t_from_t), FAJIT_NAMED(i_ge),
      FAJIT_NAMED(i_gt), FAJIT_NAMED(i_le), FAJIT_NAMED(i_lt), FAJIT_NAMED(i_eq),
      FAJIT_NAMED(i_ne), FAJIT_NAMED(f_ge), FAJIT_NAMED(f_gt), FAJIT_NAMED(f_le),
      FAJIT_NAMED(f_lt), FAJIT_NAMED(f_eq), FAJIT_NAMED(f_ne), FAJIT_NAMED(f_isnan),
      FAJIT_NAMED(f_isinf),
      // which boxes stay
      FAJIT_NAMED(fits), FAJIT_NAMED(differ), FAJIT_NAMED(may), FAJIT_NAMED(may_fail),
  };
#undef FAJIT_NAMED
  return table;
}

}  // namespace fajit::form
