// The peak rates of a machine: fused multiply-adds in fp32, bf16 dot products, reads of memory.
// Compiled by benchmarks/peak.py for the machine that it runs on. Every loop is a fixed amount of
// work that the caller times, so that it can be interleaved with a kernel.
#include <stddef.h>
#include <stdint.h>

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float vf __attribute__((vector_size(4 * kLanes)));
typedef int64_t vl __attribute__((vector_size(4 * kLanes), aligned(8)));

// Independent chains that hide the latency (4 to 6 cycles, two pipes), all in registers.
#define FAJIT_TWELVE(OP) OP(0) OP(1) OP(2) OP(3) OP(4) OP(5) OP(6) OP(7) OP(8) OP(9) OP(10) OP(11)
#if defined(__AVX512F__)
constexpr int kChains = 24;
#define FAJIT_CHAINS(OP) \
  FAJIT_TWELVE(OP)       \
  OP(12) OP(13) OP(14) OP(15) OP(16) OP(17) OP(18) OP(19) OP(20) OP(21) OP(22) OP(23)
#else
constexpr int kChains = 12;
#define FAJIT_CHAINS(OP) FAJIT_TWELVE(OP)
#endif

// Named variables, not an array: gcc 12 keeps an array of vectors in memory around asm.
#define FAJIT_START(i) vf x##i = vf{} + static_cast<float>(i);
#define FAJIT_SUM(i) sum += x##i;
#if defined(__AVX512F__)
#define FAJIT_FMA(i) asm volatile("vfmadd231ps %1, %2, %0" : "+v"(x##i) : "v"(a), "v"(b));
#elif defined(__FMA__)
#define FAJIT_FMA(i) asm volatile("vfmadd231ps %1, %2, %0" : "+x"(x##i) : "x"(a), "x"(b));
#else
#define FAJIT_FMA(i) \
  x##i += a * b;     \
  asm volatile("" : "+x"(x##i));
#endif
#define FAJIT_DOT(i) asm volatile("vdpbf16ps %1, %2, %0" : "+v"(x##i) : "v"(a), "v"(b));

// The loop of one thread: `steps` times OP on every chain.
#define FAJIT_LOOP(OP)                           \
  vf a = vf{} + 1.0f, b = vf{} + 1.0f, sum{};    \
  FAJIT_CHAINS(FAJIT_START)                      \
  for (int64_t step = 0; step < steps; ++step) { \
    FAJIT_CHAINS(OP)                             \
  }                                              \
  FAJIT_CHAINS(FAJIT_SUM)                        \
  result += sum[0]

extern "C" {

int lanes() { return kLanes; }
int chains() { return kChains; }

int has_bf16_dot() {
#if defined(__AVX512BF16__)
  return 1;
#else
  return 0;
#endif
}

// `steps` x chains x lanes fused multiply-adds on each thread.
float fma_fp32(int64_t steps, int num_threads) {
  float result = 0;
#pragma omp parallel num_threads(num_threads) reduction(+ : result)
  {
    FAJIT_LOOP(FAJIT_FMA);
  }
  return result;
}

// `steps` x chains x lanes x 2 multiply-adds of bf16 on each thread; none if the instruction set
// has no bf16 dot product.
float dot_bf16(int64_t steps, int num_threads) {
  float result = 0;
#if defined(__AVX512BF16__)
#pragma omp parallel num_threads(num_threads) reduction(+ : result)
  {
    FAJIT_LOOP(FAJIT_DOT);
  }
#else
  (void)steps;
  (void)num_threads;
#endif
  return result;
}

// `steps` x 4 products of AMX tiles (16 x 16 x 32 multiply-adds of bf16) on each thread. The
// process must have the system's permission to use tiles.
void tiles_bf16(int64_t steps, int num_threads) {
#if defined(__x86_64__)
#pragma omp parallel num_threads(num_threads)
  {
    alignas(64) uint8_t config[64] = {1};
    for (int i = 0; i < 8; ++i) {
      config[16 + 2 * i] = 64;
      config[48 + i] = 16;
    }
    asm volatile("ldtilecfg %0" ::"m"(config));
    for (int64_t step = 0; step < steps; ++step)
      asm volatile(
          "tdpbf16ps %tmm6, %tmm4, %tmm0\n\ttdpbf16ps %tmm7, %tmm4, %tmm1\n\t"
          "tdpbf16ps %tmm6, %tmm5, %tmm2\n\ttdpbf16ps %tmm7, %tmm5, %tmm3");
    asm volatile("tilerelease");
  }
#else
  (void)steps;
  (void)num_threads;
#endif
}

// Reads `count` 8-byte words once, each thread one contiguous part.
int64_t read_words(const int64_t* words, int64_t count, int num_threads) {
  int64_t result = 0;
  constexpr int kWords = kLanes / 2, kStep = 8 * kWords;
  const int64_t blocks = count / kStep;
#pragma omp parallel num_threads(num_threads) reduction(+ : result)
  {
    vl sum[8] = {};
#pragma omp for schedule(static) nowait
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t* from = words + block * kStep;
      for (int i = 0; i < 8; ++i) {
        sum[i] ^= *reinterpret_cast<const vl*>(from + i * kWords);
      }
    }
    for (int i = 0; i < 8; ++i) {
      for (int j = 0; j < kWords; ++j) result += sum[i][j];
    }
  }
  return result;
}

}  // extern "C"
