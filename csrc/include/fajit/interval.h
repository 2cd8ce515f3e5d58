// Interval arithmetic: what a mask's interval form is made of. Kernels have it compiled in, as
// rendered `Hooks::classify` (variants/interval/cpp.py); csrc/interval runs it statement by
// statement.
//
// Every function answers for all points of a box at once and never leaves out a value that a hook
// could compute there. Plain C++ without STL, torch or vector headers.
#pragma once
#include <fajit/interval_gather.h>
#include <fajit/interval_integer.h>
#include <fajit/interval_real.h>
