// Replacements of <type_traits>: rendered sources include no STL.
#pragma once

namespace fajit {

template <class A, class B> inline constexpr bool same = false;
template <class A> inline constexpr bool same<A, A> = true;

// A if `First`, else B.
template <bool First, class A, class B> struct choice { using type = A; };
template <class A, class B> struct choice<false, A, B> { using type = B; };
template <bool First, class A, class B> using Choose = typename choice<First, A, B>::type;

}  // namespace fajit
