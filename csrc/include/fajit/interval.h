// Interval arithmetic: what rendered `Hooks::classify` is written in (variants/bounds_lower.py).
//
// Every function answers for all points of a box at once and never leaves out a value that a hook
// could compute there. Plain C++ without STL, torch or vector headers. The numpy twin is
// flashattn_jit/variants/intervals.py: both give the same answer on every tile.
#pragma once
#include <fajit/interval_gather.h>
#include <fajit/interval_integer.h>
#include <fajit/interval_real.h>
