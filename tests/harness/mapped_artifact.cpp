// A CUDA artifact without machine code, whose kernel takes three tensor maps: of q, k and v, with
// head_dim columns, q_stride[2] elements a row and kv_rows rows, in kv_requests requests. No device
// runs it: its image has only what the stand-in for the driver looks for.
//
// CHANGE is a statement on the launch `l` and the maps `m`.
#include <elf.h>
#include <fajit/abi.h>
#include <fajit/tensor_map.h>

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)

namespace {

struct Params {
  uint32_t before[3];
  alignas(64) fajit_tensor_map q;
  uint32_t between;
  alignas(64) fajit_tensor_map k, v;
  uint32_t after[5];
};

struct Image {
  Elf64_Ehdr header;
  char sections[24];
};

const Image kImage = {{{0x7f, 'E', 'L', 'F'}, 0, 190, 0, 0, 0, sizeof(Image), 0, 0, 0, 0, 0, 0, 0},
                      ".text.mapped_kernel"};
const fajit_kernel_entry kKernel = {"mapped_kernel", 128, 0, 1, 0};

fajit_tensor_map map_of(const void* base, const fajit_args& a) {
  const uint32_t dim = static_cast<uint32_t>(a.head_dim), rows = static_cast<uint32_t>(a.kv_rows);
  fajit_tensor_map map{};
  map.magic = FAJIT_TENSOR_MAP_MAGIC;
  map.base = base;
  map.rank = 3;
  map.sizes[0] = dim;
  map.sizes[1] = rows;
  map.sizes[2] = static_cast<uint32_t>(a.kv_requests);
  map.strides[0] = 2 * static_cast<uint64_t>(a.q_stride[2]);
  map.strides[1] = map.strides[0] * rows;
  map.box[0] = 64;
  map.box[1] = 128;
  map.box[2] = 1;
  map.element = 9;
  map.swizzle = 3;
  map.promotion = 2;
  return map;
}

}  // namespace

extern "C" const char* fajit_describe(void) {
  return R"({"abi_version": )" TEXT(FAJIT_ABI_VERSION) R"(, "key": "none", "layout": {}})";
}

extern "C" int fajit_plan_launch(const fajit_args* args, int kernel, fajit_launch* launch) {
  if (kernel != FAJIT_KERNEL_ATTENTION) return FAJIT_BAD_ARGS;
  fajit_launch& l = *launch;
  l.kernel = kKernel.name;
  l.block[0] = kKernel.threads;
  l.grid[0] = l.grid[1] = l.grid[2] = l.block[1] = l.block[2] = 1;
  l.shared_bytes = l.waits = 0;
  l.params_bytes = sizeof(Params);
  __builtin_memset(l.params, 0x11, sizeof(Params));
  Params& m = *reinterpret_cast<Params*>(l.params);
  m.q = map_of(args->q, *args);
  m.k = map_of(args->k, *args);
  m.v = map_of(args->v, *args);
  l.num_tensor_maps = 3;
  l.tensor_maps[0] = __builtin_offsetof(Params, q);
  l.tensor_maps[1] = __builtin_offsetof(Params, k);
  l.tensor_maps[2] = __builtin_offsetof(Params, v);
  CHANGE;
  return FAJIT_OK;
}

extern "C" fajit_device_code fajit_code(void) { return {&kImage, &kKernel, 1}; }

extern "C" int fajit_classify(const fajit_classify_args*) { return FAJIT_OK; }
