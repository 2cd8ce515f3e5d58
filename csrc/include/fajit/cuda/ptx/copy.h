// Loads and stores of shared memory, and copies from global to shared memory, 16 bytes per thread.
// Each function is one instruction.
#pragma once
#include <fajit/cuda/ptx/device.h>

namespace fajit::ptx {

// The address of an object in the shared memory window, for ldmatrix and cp.async.
FAJIT_DEV uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__nv_cvta_generic_to_shared_impl(p));
}

// Stores two addresses to shared memory, and loads one. The load is volatile, so it is not moved.
FAJIT_DEV void store_shared(uint32_t to, const void* first, const void* second) {
  asm volatile("st.shared.v2.u64 [%0], {%1, %2};" ::"r"(to), "l"(first), "l"(second) : "memory");
}
FAJIT_DEV const uint16_t* load_shared(uint32_t from) {
  const uint16_t* pointer;
  asm volatile("ld.shared.u64 %0, [%1];" : "=l"(pointer) : "r"(from) : "memory");
  return pointer;
}

// Stores and loads four words.
FAJIT_DEV void store_words(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}
FAJIT_DEV void load_words(uint32_t (&words)[4], uint32_t from) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(from)
               : "memory");
}

// Two adjacent words.
FAJIT_DEV void load_word_pair(int32_t (&words)[2], uint32_t from) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
               : "=r"(words[0]), "=r"(words[1])
               : "r"(from)
               : "memory");
}
FAJIT_DEV int32_t load_word(uint32_t from) {
  int32_t word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
  return word;
}
FAJIT_DEV void store_word(uint32_t to, int32_t word) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}

// The address that a copy writes to. ptxas of CUDA 13.0 may take it apart, into a register and a
// uniform register that it then never names: for sm_90 the copy is an illegal instruction. The
// builder compiles kernels with such copies once more with FAJIT_WHOLE_ADDRESSES: grids have one
// dim, which ptxas does not know, so the address has to be in one register.
FAJIT_DEV uint32_t copied_to(uint32_t address) {
#ifdef FAJIT_WHOLE_ADDRESSES
  return address ^ blockIdx.z;
#else
  return address;
#endif
}

// How the L2 keeps what copies read. Read once: it is evicted before other data.
template <bool kReadOnce>
struct L2Policy {};
template <>
struct L2Policy<true> {
  uint64_t bits = 0;
  FAJIT_DEV L2Policy() {
#if __CUDA_ARCH__ >= 800
    asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(bits));
#endif
  }
};

// Starts a copy of `bytes` (0 to 16) bytes, and fills the rest of the 16 with zeros. For 0, nothing
// is read.
FAJIT_DEV void copy_async(uint32_t to, const void* from, int bytes, L2Policy<false>) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(copied_to(to)), "l"(from),
               "r"(bytes)
               : "memory");
#endif
}
FAJIT_DEV void copy_async(uint32_t to, const void* from, int bytes, L2Policy<true> policy) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(copied_to(to)),
      "l"(from), "r"(bytes), "l"(policy.bits)
      : "memory");
#endif
}

// Commits this thread's copies as one group.
FAJIT_DEV void commit_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most the `kPending` latest groups of this thread are in flight. The data is
// visible to other threads after a barrier.
template <int kPending>
FAJIT_DEV void wait_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

}  // namespace fajit::ptx
