// Where and in which form the states of a work item are written.
#pragma once
#include <fajit/abi.h>
#include <fajit/function.h>

namespace fajit {

enum class Emit {
  kFinal,        // out in q's dtype, lse with the sink
  kUnfinalized,  // out in fp32, lse without the sink (FAJIT_PARTIAL)
  kSplit,        // partial_out, partial_lse
};

// `partial`: that of a fajit_work; -1 for a merge.
FAJIT_FN Emit emit_of(const fajit_args& a, int32_t partial) {
  if (partial >= 0) return Emit::kSplit;
  return (a.flags & FAJIT_PARTIAL) != 0 ? Emit::kUnfinalized : Emit::kFinal;
}

}  // namespace fajit
