// Interval arithmetic: the functions of a mask's interval form. Kernels contain the form as the
// rendered `Hooks::classify` (variants/interval/cpp.py); csrc/interval interprets it, statement by
// statement.
//
// Every function returns bounds for all points of a box, which contain every value that a hook
// could compute there. Plain C++ without STL, torch or vector headers.
#pragma once
#include <fajit/interval/gather.h>
#include <fajit/interval/integer.h>
#include <fajit/interval/real.h>
