// Few rows of codes on AMX: up to `Most` of them by vectors, which multiply the codes as they are;
// tiles need a copy of all keys and values in bf16. Four rows and one of int4 in groups of 64
// channels took 0.42 of the time that they took with tiles and with vectors of bf16, those of int8
// 0.65 and 0.7 (8 requests of 4,096 keys, D128; one thread of a Xeon, by hand). Both kernels are
// compiled, which took 3.2 s instead of 2.3 for int8, 3.8 instead of 1.8 for int4.
#pragma once
#include <fajit/abi.h>
#include <fajit/context.h>
#include <fajit/cpu/few_row_kernel.h>
#include <fajit/cpu/scratch.h>
#include <fajit/types.h>

namespace fajit {

template <class Tiles, class Vectors, int Most>
class BothKernels {
 public:
  static constexpr int kMaxHeads = Tiles::kMaxHeads;
  using Session = typename Tiles::Session;

  BothKernels(const Context& c, Carver& carver) : vectors_(c, carver), tiles_(c, carver) {}
  void run_tile(const fajit_work* items, int heads, int32_t row0, int count,
                const fajit_work* next) {
    if (count <= Most) vectors_.run_tile(items, heads, row0, count, next);
    else tiles_.run_tile(items, heads, row0, count, next);
  }

 private:
  Vectors vectors_;
  Tiles tiles_;
};
template <class Config>
struct RowsOfVectors : Config {
  static constexpr int kTileQ = kFewRowGroup;
};
template <class Tiles, class Vectors, int Most>
using TilesOrVectors =
    Choose<Tiles::kOnTiles && Vectors::kOnlyCodes, BothKernels<Tiles, Vectors, Most>, Tiles>;

}  // namespace fajit
