// The smallest CUDA artifact that implements the ABI: attention adds 1 to `num_work` floats of q.
// SPILL is the number of floats that its kernel keeps live at once; CALLED makes it call a function
// that takes an array, which lies in local memory.
#include <fajit/abi.h>
#include <fajit/cuda/registration.h>

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)

struct Params {
  const float* q;
  float* out;
  int32_t count;
};

__device__ __forceinline__ float plus_one(float x) { return x + 1.0f; }

__device__ __noinline__ float pick(const float* array, int i) { return array[i % 64]; }

extern "C" __global__ void __launch_bounds__(128, 2)
    fajit_attention_kernel(const __grid_constant__ Params params) {
  __shared__ float row[128];
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  row[threadIdx.x] = i < params.count ? params.q[i] : 0.0f;
  __syncthreads();
#if defined(SPILL)
  float many[SPILL];
#pragma unroll
  for (int j = 0; j < SPILL; ++j) many[j] = params.q[j * i];
  __syncthreads();
#pragma unroll
  for (int j = 0; j < SPILL; ++j)
    row[threadIdx.x] += many[j] * row[j % 128] * many[(j * 7) % SPILL];
#endif
#if defined(CALLED)
  float array[64];
  for (int j = 0; j < 64; ++j) array[j] = params.q[j];
  row[threadIdx.x] += pick(array, params.count);
#endif
  if (i < params.count) params.out[i] = plus_one(row[threadIdx.x]);
}

extern "C" const char* fajit_describe(void) {
  return R"({"abi_version": )" TEXT(FAJIT_ABI_VERSION) R"(, "key": ")" FAJIT_KEY
                                                       R"(", "layout": {}})";
}

extern "C" int fajit_plan_launch(const fajit_args* args, int kernel, fajit_launch* launch) {
  if (kernel != FAJIT_KERNEL_ATTENTION) return FAJIT_BAD_ARGS;
  launch->kernel = "fajit_attention_kernel";
  launch->grid[0] = (args->num_work + 127) / 128;
  launch->block[0] = 128;
  launch->grid[1] = launch->grid[2] = launch->block[1] = launch->block[2] = 1;
  launch->shared_bytes = launch->waits = launch->num_tensor_maps = 0;
  launch->params_bytes = sizeof(Params);
  Params* params = reinterpret_cast<Params*>(launch->params);
  params->q = static_cast<const float*>(args->q);
  params->out = static_cast<float*>(args->out);
  params->count = args->num_work;
  return FAJIT_OK;
}

static const fajit_kernel_entry kKernel = {"fajit_attention_kernel", 128, 0, 2};

extern "C" fajit_device_code fajit_code(void) { return {fajit::cuda::device_image, &kKernel, 1}; }

extern "C" int fajit_classify(const fajit_classify_args*) { return FAJIT_OK; }
