// The binary interface between the host library and a compiled artifact.
//
// Plain C: no torch, no Python, no STL. An artifact exports entry points (bottom of this file) that
// take a versioned, fixed-layout argument block. The host checks `fajit_describe()` at load and
// refuses an artifact whose `abi_version` differs. A CPU artifact runs its kernels by itself; a
// CUDA artifact holds machine code and the host functions that make launches of it, which the
// runtime loads and launches through the driver.
//
// Addressing. q, k, v and out are seen as [request, head, row, dim] with strides in elements and a
// contiguous last dim. A packed (varlen) tensor has request stride 0 and a first row per request
// (`q_row0`, `kv_row0`); a dense one has first rows 0. Row r of request b is at
//   ptr + b * stride[0] + head * stride[1] + (row0[b] + r) * stride[2].
//
// Work. The host plans a list of work items. The query rows of an item are *packed rows*: for heads
// [head_begin, head_begin + head_count) of one request, packed row p is
//   query row p / head_count, head head_begin + p % head_count,
// so a group of grouped-query heads shares every K and V tile that is loaded.
//
// Devices. A CUDA artifact takes the same block. Then q, k, v, out, lse, the partial states, the
// per-request arrays, the work lists, the page table and the data of param tensors are device
// memory; `tensors` and `scalars` themselves are host arrays that the launch copies into the
// kernel's parameters. Nothing is read, allocated or synchronised by a launch.
#pragma once
#include <stdint.h>

#define FAJIT_ABI_VERSION 6
#define FAJIT_MAX_RANK 8

#ifdef __cplusplus
extern "C" {
#endif

enum fajit_status {
  FAJIT_OK = 0,
  FAJIT_BAD_ABI = 1,        // abi_version or args_bytes differ from what was compiled
  FAJIT_BAD_ARGS = 2,       // dims differ from the compiled ones, or a required pointer is null
  FAJIT_OUT_OF_MEMORY = 3,  // per-thread scratch could not be allocated
};

enum fajit_flags {
  FAJIT_WRITE_LSE = 1,  // lse is written
  FAJIT_PARTIAL = 2,    // out is fp32 and unfinalised: before sink and output_mod
};

enum fajit_tile_state { FAJIT_TILE_EMPTY = 0, FAJIT_TILE_PARTIAL = 1, FAJIT_TILE_FULL = 2 };

// A param tensor of a variant. Dtype, rank and which strides are 0 or 1 are compiled in.
typedef struct fajit_tensor {
  const void* ptr;
  int64_t sizes[FAJIT_MAX_RANK];
  int64_t strides[FAJIT_MAX_RANK];  // elements
} fajit_tensor;

// With feature `sparse`, kv_begin and kv_end are positions in the key lists (see key_blocks).
typedef struct fajit_work {
  int32_t request;                 // negative: padding, nothing to do
  int32_t head_begin, head_count;  // query heads; all of one kv head
  int32_t row_begin, row_end;      // packed rows
  int32_t kv_begin, kv_end;        // logical key positions
  int32_t partial;                 // -1: final; else first row of its partial state
} fajit_work;

// Packed rows [row_begin, row_end) whose state is spread over `num_splits` partial states. The i-th
// starts at partial row first_partial + i * (row_end - row_begin); with merge_sources, at partial
// row merge_sources[first_partial + i]. No splits: padding, nothing to do.
typedef struct fajit_merge_work {
  int32_t request;
  int32_t head_begin, head_count;
  int32_t row_begin, row_end;
  int32_t first_partial, num_splits;
  int32_t reserved;
} fajit_merge_work;

// Block sparsity with FlexAttention's meaning: one fajit_tile_state byte a block. EMPTY blocks are
// not visited, FULL ones run no mask_mod, PARTIAL ones run it. Feature `block_mask` only; work
// items then never straddle a q block, and have head_count 1 unless the states are shared by all
// heads.
typedef struct fajit_block_mask {
  const uint8_t* states;
  int64_t strides[4];  // request, head, q block, kv block (0 where broadcast)
  int32_t q_block, kv_block;
} fajit_block_mask;

typedef struct fajit_args {
  uint32_t abi_version;
  uint32_t args_bytes;  // sizeof(fajit_args)

  const void* q;
  const void* k;
  const void* v;
  void* out;   // q's dtype; fp32 with FAJIT_PARTIAL
  float* lse;  // natural log; null unless FAJIT_WRITE_LSE
  // By request, head and row.
  int64_t q_stride[3], k_stride[3], v_stride[3], out_stride[3], lse_stride[3];

  int32_t num_requests, num_q_heads, num_kv_heads, head_dim, head_dim_v;
  int32_t flags;
  float scale;
  int32_t num_threads;  // of a merge, CPU

  // Per request, num_requests entries each.
  const int32_t* q_len;
  const int32_t* kv_len;
  const int32_t* q_row0;
  const int32_t* kv_row0;
  const int32_t* q_offset;   // q_idx = q_offset[b] + row
  const int32_t* q_token0;   // fa.q_row(b, q_idx) = q_token0[b] + row; dense: b * q rows
  const int32_t* kv_token0;  // fa.kv_slot(b, kv_idx) = kv_token0[b] + kv_idx; dense: b * kv rows

  const fajit_tensor* tensors;  // param tensors, then lo/hi tables (see the artifact's description)
  const uint64_t* scalars;      // int64 or double bits, as the variant declares
  int32_t num_tensors, num_scalars;

  const fajit_work* work;
  const fajit_merge_work* merge_work;
  int32_t num_work, num_merge_work;
  float* partial_out;  // [partial rows, head_dim_v]
  float* partial_lse;  // [partial rows]

  fajit_block_mask block_mask;

  // Feature `paged`: key j of request b lies in slot n % page_size of page
  // page_indices[page_indptr[b] + n / page_size], n = j - kv_first[b]; k_stride and v_stride are
  // then (page, head, slot).
  const int32_t* page_indptr;  // [num_requests + 1]
  const int32_t* page_indices;
  int32_t page_size, num_pages;  // num_pages: of k and v, for checks

  // Feature `mixed_rows`: the query rows of an item belong to several requests, which share its
  // keys. Row r of the item's request is entry e = q_row0[request] + r of row_token: packed token t
  // = row_token[e] (null: t = e) of request b = row_request[t], whose q_idx is q_offset[b] + t -
  // q_row0[b]. kv_len and the addresses of keys are those of the item's request; everything that
  // hooks see is of b. Requests that only hold shared keys come after those that have tokens, and
  // row_token begins with every token in order.
  const int32_t* row_request;

  // CUDA only.
  void* stream;  // cudaStream_t
  int32_t device;
  int32_t max_merge_rows;  // of one merge item

  // The work of each worker. With worker_indptr, worker w does items [worker_indptr[w],
  // worker_indptr[w + 1]) in order: on CUDA thread block w of num_workers, on CPUs one call for
  // list `worker`, which claims items through cursors[worker] (0 before the first call), so several
  // threads may process one list. Without worker_indptr, one call does all items (CPU), or each
  // item has its own thread block (CUDA).
  const int32_t* worker_indptr;  // [num_workers + 1]
  int32_t* cursors;              // [num_workers], CPU
  int32_t num_workers, worker;

  const int32_t* row_token;      // see row_request
  const int32_t* merge_sources;  // see fajit_merge_work
  // Logical position of the first key that a request's storage holds; null: 0. Keys from there on
  // lie at kv_row0, or in the first page.
  const int32_t* kv_first;

  // Feature `sparse`: key lists, one after another. Position p of the lists is the key at logical
  // position j = key_blocks[p / key_block] * key_block + p % key_block; there is no key where that
  // entry is negative or j >= kv_len. Hooks see j. Entries of a list may be in any order.
  const int32_t* key_blocks;
  int32_t key_block;
  int32_t num_key_blocks;  // for checks

  // Extents of k and v, which are the same for both, whatever the lengths of requests: a copy by
  // the tensor memory accelerator reads nothing beyond them. Rows: of one request (dense), of all
  // of them (packed), or slots of a page. Requests: 1 for packed rows, pages with `paged`. Unused
  // on CPUs.
  int32_t kv_rows, kv_requests;
} fajit_args;

// A kernel of a CUDA artifact.
typedef struct fajit_kernel_entry {
  const char* name;  // in the machine code and in the PTX
  uint32_t threads;
  uint32_t shared_bytes;  // dynamic
  uint32_t min_blocks;    // that a multiprocessor should hold at once, as planned
  uint32_t waits;         // 1: it waits for the kernel before it by itself, so it may overlap it
} fajit_kernel_entry;

// The machine code of a CUDA artifact, and its kernels in the order of fajit_kernel.
typedef struct fajit_device_code {
  const void* image;  // a fat binary, which holds the cubin of one architecture
  const fajit_kernel_entry* kernels;
  int32_t num_kernels;
} fajit_device_code;

// One kernel launch: what the runtime enqueues, and what the emulator runs instead of a device.
//
// Tensor maps lie in params, at multiples of 64 bytes: each is a fajit_tensor_map, which the
// runtime replaces by what the driver makes of it, for the device, and which the emulator reads.
typedef struct fajit_launch {
  const char* kernel;  // name in the PTX
  uint32_t grid[3], block[3];
  uint32_t shared_bytes;  // dynamic
  uint32_t params_bytes;
  uint32_t waits;  // of the kernel's entry
  uint32_t num_tensor_maps;
  uint32_t tensor_maps[4];                 // offsets in params
  alignas(64) unsigned char params[4096];  // the kernel's only parameter, by value
} fajit_launch;

// Classifies every tile of a grid for one request and heads [head_begin, head_end):
// states[i * num_kv_tiles + j] for q_idx in [q_begin + i*tile_q, ...) clipped at q_end, and
// kv_idx in [kv_begin + j*tile_kv, ...) clipped at kv_end.
typedef struct fajit_classify_args {
  const fajit_args* args;
  int32_t request, head_begin, head_end;
  int32_t q_begin, q_end, tile_q;
  int32_t kv_begin, kv_end, tile_kv;
  uint8_t* states;
} fajit_classify_args;

enum fajit_kernel { FAJIT_KERNEL_ATTENTION = 0, FAJIT_KERNEL_MERGE = 1 };

// Artifacts are compiled with hidden visibility; they export these names.
#pragma GCC visibility push(default)
int fajit_classify(const fajit_classify_args* args);
const char* fajit_describe(void);  // JSON: abi_version, key, layout
// CPU artifacts.
int fajit_attention(const fajit_args* args);
int fajit_merge(const fajit_args* args);
// CUDA artifacts; they need no driver.
fajit_device_code fajit_code(void);
int fajit_plan_launch(const fajit_args* args, int kernel, fajit_launch* launch);
#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif
