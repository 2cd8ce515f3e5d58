// Operations that read a param tensor, by name and dtype.
#pragma once

#include <string>

#include "batch.h"

namespace fajit::form {

// What a gather reads: kept by the program, made into a View for each call.
struct Gather {
  char kind;  // of its results
  int slot, table, dim, rank, compiled_rank;

  bool operator==(const Gather& other) const {
    return kind == other.kind && slot == other.slot && table == other.table && dim == other.dim;
  }
};

// The least rank of at least `rank` that gathers are compiled for.
int compiled_rank(int rank);

// i_gather, t_gather, f_gather or gather_bits for tensors of this dtype; null where there is none.
Operation::Run gather(const std::string& name, const std::string& dtype, int compiled_rank);

// i_searchsorted in tensors of this dtype; null where there is none. numbers: slot, right.
Operation::Run searchsorted(const std::string& dtype, bool right);

}  // namespace fajit::form
