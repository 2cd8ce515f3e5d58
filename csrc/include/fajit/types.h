// Replacements of <type_traits>, as rendered sources include no STL, and constants.
#pragma once

namespace fajit {

template <class A, class B> inline constexpr bool same = false;
template <class A> inline constexpr bool same<A, A> = true;

// A if `First`, else B.
template <bool First, class A, class B> struct choice { using type = A; };
template <class A, class B> struct choice<false, A, B> { using type = B; };
template <bool First, class A, class B> using Choose = typename choice<First, A, B>::type;

constexpr float kLog2e = 1.44269504f, kLn2 = 0.693147181f;

}  // namespace fajit
