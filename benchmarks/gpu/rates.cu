// Kernels that each repeat one instruction, whose rates the model of machine code assumes, and one
// that reads memory. All have one signature: `out` gets two values a thread, the clocks that its
// loop took and a result, so that nothing is removed; `data` is read; `count` is the number of
// repetitions, or of 16-byte words to read.
#include <cstdint>

namespace {

constexpr int kChains = 8;  // independent results in flight
__device__ int thread_of_grid() { return blockIdx.x * blockDim.x + threadIdx.x; }

// The clocks since `begin`, and a result.
__device__ void finish(float* out, long long begin, float result) {
  out[2 * thread_of_grid()] = static_cast<float>(clock64() - begin);
  out[2 * thread_of_grid() + 1] = result;
}

// Repeats one instruction on numbers.
template <class Step> __device__ void repeat(float* out, const float* data, int count, Step step) {
  float x[kChains];
#pragma unroll
  for (int j = 0; j < kChains; ++j) x[j] = data[j];
  const long long begin = clock64();
#pragma unroll 16
  for (int i = 0; i < count; ++i)
#pragma unroll
    for (int j = 0; j < kChains; ++j) step(x[j]);
  float sum = 0;
#pragma unroll
  for (int j = 0; j < kChains; ++j) sum += x[j];
  finish(out, begin, sum);
}

}  // namespace

extern "C" __global__ void repeat_fma(float* out, const float* data, long long count) {
  const float a = data[0], b = data[1];
  repeat(out, data, static_cast<int>(count), [a, b](float& x) {
    asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(x) : "f"(a), "f"(b));
  });
}

extern "C" __global__ void repeat_exp(float* out, const float* data, long long count) {
  repeat(out, data, static_cast<int>(count), [](float& x) {
    asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
  });
}

extern "C" __global__ void repeat_mma(float* out, const float* data, long long count) {
  float x[kChains][4];
  uint32_t a[4], b[2];
#pragma unroll
  for (int j = 0; j < 4; ++j) a[j] = __float_as_uint(data[j]);
#pragma unroll
  for (int j = 0; j < 2; ++j) b[j] = __float_as_uint(data[4 + j]);
#pragma unroll
  for (int j = 0; j < kChains; ++j)
#pragma unroll
    for (int k = 0; k < 4; ++k) x[j][k] = data[k];
  const int repeats = static_cast<int>(count);
  const long long begin = clock64();
#pragma unroll 16
  for (int i = 0; i < repeats; ++i)
#pragma unroll
    for (int j = 0; j < kChains; ++j)
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
          "{%8,%9}, {%0,%1,%2,%3};"
          : "+f"(x[j][0]), "+f"(x[j][1]), "+f"(x[j][2]), "+f"(x[j][3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  float sum = 0;
#pragma unroll
  for (int j = 0; j < kChains; ++j)
#pragma unroll
    for (int k = 0; k < 4; ++k) sum += x[j][k];
  finish(out, begin, sum);
}

// Rows of 16 bytes, one a lane: no bank conflicts. data[8] is 0; the compiler, which does not know
// it, cannot take a load for the one before.
extern "C" __global__ void repeat_ldmatrix(float* out, const float* data, long long count) {
  __shared__ uint4 rows[128];
  const uint32_t zero = __float_as_uint(data[8]);
  rows[threadIdx.x] = make_uint4(zero, zero, zero, zero);
  __syncthreads();
  uint32_t at[kChains];
#pragma unroll
  for (int j = 0; j < kChains; ++j)
    at[j] = static_cast<uint32_t>(__cvta_generic_to_shared(rows + (threadIdx.x ^ j)));
  const int repeats = static_cast<int>(count);
  const long long begin = clock64();
#pragma unroll 16
  for (int i = 0; i < repeats; ++i)
#pragma unroll
    for (int j = 0; j < kChains; ++j) {
      uint32_t r[4];
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                   : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                   : "r"(at[j]));
      at[j] += r[0] | r[1] | r[2] | r[3];
    }
  uint32_t sum = 0;
#pragma unroll
  for (int j = 0; j < kChains; ++j) sum += at[j];
  finish(out, begin, __uint_as_float(sum));
}

extern "C" __global__ void read_words(float* out, const uint4* data, long long count) {
  constexpr int kLoads = 8;  // in flight to a thread
  const long long begin = clock64(), step = static_cast<long long>(gridDim.x) * blockDim.x;
  uint4 seen = make_uint4(0, 0, 0, 0);
  for (long long i = thread_of_grid(); i < count; i += kLoads * step) {
    uint4 words[kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; ++j)
      words[j] = i + j * step < count ? data[i + j * step] : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int j = 0; j < kLoads; ++j)
      seen = make_uint4(seen.x ^ words[j].x, seen.y ^ words[j].y, seen.z ^ words[j].z,
                        seen.w ^ words[j].w);
  }
  finish(out, begin, __uint_as_float(seen.x ^ seen.y ^ seen.z ^ seen.w));
}
