// Checks of every entry point of an artifact: the layout of the argument block, and the dims that
// were compiled in.
#pragma once
#include <fajit/abi.h>

namespace fajit {

inline int check_layout(const fajit_args* a) {
  const bool same =
      a != nullptr && a->abi_version == FAJIT_ABI_VERSION && a->args_bytes == sizeof(fajit_args);
  return same ? FAJIT_OK : FAJIT_BAD_ABI;
}

template <class Config>
int check_args(const fajit_args* a) {
  if (const int status = check_layout(a)) return status;
  if (a->head_dim != Config::kHeadDim || a->head_dim_v != Config::kHeadDimV ||
      a->num_kv_heads < 1 || a->num_q_heads % a->num_kv_heads != 0)
    return FAJIT_BAD_ARGS;
  if ((a->flags & FAJIT_WRITE_LSE) != 0 && a->lse == nullptr) return FAJIT_BAD_ARGS;
  return FAJIT_OK;
}

}  // namespace fajit
