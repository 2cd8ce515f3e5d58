// A replacement of the header that nvcc includes before every .cu, with only what our kernels use.
//
// nvcc passes `-include cuda_runtime.h` to each of its three passes over a source. The toolkit's
// header includes most of libstdc++ and costs 1.25 s per kernel (nvcc 13.0, measured); this one
// costs 0.05 s. Its folder is the first on the include path for the toolkits that it was tested
// with (flashattn_jit/jit/compilation/nvcc.py); other toolkits use their own header.
//
// Contents: the runtime's C interface, the index variables, and the declarations below, which are
// those of the toolkit's headers. A kernel that needs another intrinsic adds its line. Kernels are
// launched through the driver, not by <<<>>>.
#pragma once

#define __CUDA_INCLUDE_COMPILER_INTERNAL_HEADERS__
#include "builtin_types.h"
#include "crt/host_defines.h"
#include "cuda_runtime_api.h"
#include "device_launch_parameters.h"
#undef __CUDA_INCLUDE_COMPILER_INTERNAL_HEADERS__

extern "C" {

// The host stub of a device function calls it.
extern void exit(int) throw() __attribute__((__noreturn__));

#define FAJIT_INTRINSIC __device__ __device_builtin__
FAJIT_INTRINSIC void __syncthreads(void);
FAJIT_INTRINSIC float __int_as_float(int x);
FAJIT_INTRINSIC float __uint_as_float(unsigned int x);
FAJIT_INTRINSIC unsigned int __umulhi(unsigned int x, unsigned int y);
FAJIT_INTRINSIC long long __mul64hi(long long x, long long y);
FAJIT_INTRINSIC int __ffs(int x);
FAJIT_INTRINSIC size_t __nv_cvta_generic_to_shared_impl(const void* ptr);
#undef FAJIT_INTRINSIC

// Functions of host and device; those of the host are libm's.
#define FAJIT_MATH __host__ __device__ __device_builtin__
FAJIT_MATH float fabsf(float x) throw();
FAJIT_MATH float fmaf(float x, float y, float z) throw();
FAJIT_MATH float fminf(float x, float y) throw();
FAJIT_MATH float fmaxf(float x, float y) throw();
FAJIT_MATH float floorf(float x) throw();
FAJIT_MATH float ceilf(float x) throw();
FAJIT_MATH float truncf(float x) throw();
FAJIT_MATH float rintf(float x) throw();
FAJIT_MATH float sqrtf(float x) throw();
FAJIT_MATH float copysignf(float x, float y) throw();
FAJIT_MATH float fmodf(float x, float y) throw();
FAJIT_MATH float powf(float x, float y) throw();
FAJIT_MATH double fabs(double x) throw();
FAJIT_MATH double fma(double x, double y, double z) throw();
FAJIT_MATH double floor(double x) throw();
FAJIT_MATH double ceil(double x) throw();
FAJIT_MATH double trunc(double x) throw();
FAJIT_MATH double rint(double x) throw();
FAJIT_MATH double sqrt(double x) throw();
#undef FAJIT_MATH

}  // extern "C"

// Votes and shuffles among the lanes of a warp, as in sm_30_intrinsics.hpp.
#define FAJIT_INLINE __device__ inline __attribute__((always_inline))
FAJIT_INLINE void __syncwarp(unsigned mask = 0xffffffffu) {
  extern __device__ __device_builtin__ void __nvvm_bar_warp_sync(unsigned mask);
  __nvvm_bar_warp_sync(mask);
}
FAJIT_INLINE int __any_sync(unsigned mask, int predicate) {
  extern __device__ __device_builtin__ int __nvvm_vote_any_sync(unsigned mask, int predicate);
  return __nvvm_vote_any_sync(mask, predicate);
}
FAJIT_INLINE unsigned __ballot_sync(unsigned mask, int predicate) {
  extern __device__ __device_builtin__ unsigned __nvvm_vote_ballot_sync(unsigned mask,
                                                                        int predicate);
  return __nvvm_vote_ballot_sync(mask, predicate);
}

#define FAJIT_SHUFFLE(name, mode, Type, constraint, lanes, clamp)                               \
  FAJIT_INLINE Type name(unsigned mask, Type value, int lanes, int width = 32) {                \
    Type result;                                                                                \
    asm volatile("shfl.sync." mode ".b32 %0, %1, %2, %3, %4;"                                   \
                 : "=" constraint(result)                                                       \
                 : constraint(value), "r"(lanes), "r"(((32 - width) << 8) | clamp), "r"(mask)); \
    return result;                                                                              \
  }
#define FAJIT_SHUFFLES(name, mode, lanes, clamp)         \
  FAJIT_SHUFFLE(name, mode, int, "r", lanes, clamp)      \
  FAJIT_SHUFFLE(name, mode, unsigned, "r", lanes, clamp) \
  FAJIT_SHUFFLE(name, mode, float, "f", lanes, clamp)
FAJIT_SHUFFLES(__shfl_sync, "idx", lane, 31)
FAJIT_SHUFFLES(__shfl_xor_sync, "bfly", lanes, 31)
#undef FAJIT_SHUFFLES
#undef FAJIT_SHUFFLE

// Loads through the read-only cache. Volatile: the compiler may move other asm above the branch
// that guards it, and so read past the end of a row.
#define FAJIT_LDG(Type, Register, constraint, suffix)                                     \
  FAJIT_INLINE Type __ldg(const Type* ptr) {                                              \
    Register value;                                                                       \
    asm volatile("ld.global.nc." suffix " %0, [%1];" : "=" constraint(value) : "l"(ptr)); \
    return static_cast<Type>(value);                                                      \
  }
FAJIT_LDG(signed char, short, "h", "s8")
FAJIT_LDG(unsigned char, unsigned short, "h", "u8")
FAJIT_LDG(short, short, "h", "s16")
FAJIT_LDG(unsigned short, unsigned short, "h", "u16")
FAJIT_LDG(int, int, "r", "s32")
FAJIT_LDG(long long, long long, "l", "s64")
FAJIT_LDG(float, float, "f", "f32")
FAJIT_LDG(double, double, "d", "f64")
#undef FAJIT_LDG
#undef FAJIT_INLINE

// C++ overloads for host and device.
#define FAJIT_ORDER(Type)                                                              \
  __host__ __device__ inline __attribute__((always_inline)) Type min(Type a, Type b) { \
    return b < a ? b : a;                                                              \
  }                                                                                    \
  __host__ __device__ inline __attribute__((always_inline)) Type max(Type a, Type b) { \
    return a < b ? b : a;                                                              \
  }
FAJIT_ORDER(int)
FAJIT_ORDER(long)
#undef FAJIT_ORDER
