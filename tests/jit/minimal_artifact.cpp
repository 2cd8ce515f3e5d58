// The smallest artifact that implements the ABI. Its results show tests which arguments reached it:
// attention writes values made of the fields of each work item into the packed rows of the item;
// merge and classify do likewise.
#include <fajit/abi.h>
#include <omp.h>

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)

extern "C" const char* fajit_describe(void) {
  return R"({"abi_version": )" TEXT(FAJIT_ABI_VERSION) R"(, "key": ")" FAJIT_KEY
                                                       R"(", "layout": {}})";
}

static bool fits(const fajit_args* args) {
  return args->abi_version == FAJIT_ABI_VERSION && args->args_bytes == sizeof(fajit_args);
}

static void run_item(const fajit_args* args, const fajit_work& work, float shift) {
  for (int row = work.row_begin; row < work.row_end; ++row) {
    const int64_t head = work.head_begin + row % work.head_count;
    const int64_t q_row = args->q_row0[work.request] + row / work.head_count;
    const auto at = [&](const int64_t* stride) {
      return work.request * stride[0] + head * stride[1] + q_row * stride[2];
    };
    const float q = static_cast<const float*>(args->q)[at(args->q_stride)];
    const float value = args->scale * q + shift;
    if (work.partial >= 0) {
      const int64_t partial_row = work.partial + row - work.row_begin;
      for (int d = 0; d < args->head_dim_v; ++d) {
        args->partial_out[partial_row * args->head_dim_v + d] = value;
      }
      args->partial_lse[partial_row] = static_cast<float>(work.kv_end - work.kv_begin);
      continue;
    }
    float* out = static_cast<float*>(args->out) + at(args->out_stride);
    for (int d = 0; d < args->head_dim_v; ++d) out[d] = value;
    if (args->flags & FAJIT_WRITE_LSE) {
      args->lse[at(args->lse_stride)] = static_cast<float>(args->kv_len[work.request]);
    }
  }
}

// out[b, h, row, d] = scale * q[b, h, row, 0] + sum of the param tensors' first entries
//                     + first scalar as int64, if there is one.
extern "C" int fajit_attention(const fajit_args* args) {
  if (!fits(args)) return FAJIT_BAD_ABI;
  if (args->head_dim == 13) return FAJIT_BAD_ARGS;
  if (args->head_dim == 14) return FAJIT_OUT_OF_MEMORY;
  float shift = 0.0f;
  for (int i = 0; i < args->num_tensors; ++i) {
    shift += *static_cast<const float*>(args->tensors[i].ptr);
  }
  if (args->num_scalars > 0) shift += static_cast<float>(static_cast<int64_t>(args->scalars[0]));
  if (args->worker_indptr != nullptr) {
    // The first thread has no memory: others do its work.
    if (args->head_dim == 15 && omp_get_thread_num() == 0) return FAJIT_OUT_OF_MEMORY;
    const int32_t begin = args->worker_indptr[args->worker];
    const int32_t end = args->worker_indptr[args->worker + 1];
    for (;;) {
      const int32_t i =
          begin + __atomic_fetch_add(&args->cursors[args->worker], 1, __ATOMIC_RELAXED);
      if (i >= end) return FAJIT_OK;
      run_item(args, args->work[i], shift);
    }
  }
  for (int i = 0; i < args->num_work; ++i) run_item(args, args->work[i], shift);
  return FAJIT_OK;
}

// out = sum of the partial states.
extern "C" int fajit_merge(const fajit_args* args) {
  if (!fits(args)) return FAJIT_BAD_ABI;
  for (int i = 0; i < args->num_merge_work; ++i) {
    const fajit_merge_work& work = args->merge_work[i];
    const int64_t rows = work.row_end - work.row_begin;
    for (int row = work.row_begin; row < work.row_end; ++row) {
      const int64_t head = work.head_begin + row % work.head_count;
      const int64_t q_row = args->q_row0[work.request] + row / work.head_count;
      float* out = static_cast<float*>(args->out) + work.request * args->out_stride[0] +
                   head * args->out_stride[1] + q_row * args->out_stride[2];
      for (int d = 0; d < args->head_dim_v; ++d) {
        out[d] = 0.0f;
        for (int split = 0; split < work.num_splits; ++split) {
          const int64_t first = args->merge_sources != nullptr
                                    ? args->merge_sources[work.first_partial + split]
                                    : work.first_partial + split * rows;
          const int64_t partial = first + row - work.row_begin;
          out[d] += args->partial_out[partial * args->head_dim_v + d];
        }
      }
    }
  }
  return FAJIT_OK;
}

// A causal mask, tile by tile.
extern "C" int fajit_classify(const fajit_classify_args* args) {
  if (!fits(args->args)) return FAJIT_BAD_ABI;
  uint8_t* state = args->states;
  for (int q = args->q_begin; q < args->q_end; q += args->tile_q) {
    const int q_last = (q + args->tile_q < args->q_end ? q + args->tile_q : args->q_end) - 1;
    for (int k = args->kv_begin; k < args->kv_end; k += args->tile_kv) {
      const int k_last = (k + args->tile_kv < args->kv_end ? k + args->tile_kv : args->kv_end) - 1;
      *state++ = k > q_last ? FAJIT_TILE_EMPTY : k_last <= q ? FAJIT_TILE_FULL : FAJIT_TILE_PARTIAL;
    }
  }
  return FAJIT_OK;
}
