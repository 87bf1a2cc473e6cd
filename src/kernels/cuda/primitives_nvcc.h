// What kernels are written in, as nvcc has it; tests/emulated/cuda_primitives.h has the same for any compiler. A unit
// includes one of the two before the kernels.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/cuda/vec.h"

#define KVANTA_DEVICE __device__ __forceinline__
#define KVANTA_UNROLL _Pragma("unroll")
#define KVANTA_PRAGMA(text) _Pragma(#text)
#define KVANTA_UNROLL_BY(count) KVANTA_PRAGMA(unroll(count))

namespace kvanta::kernels::cuda {

// ---- threads

KVANTA_DEVICE int ThreadIndex() {
  return static_cast<int>(threadIdx.x);
}
KVANTA_DEVICE int BlockIndex() {
  return static_cast<int>(blockIdx.x);
}
KVANTA_DEVICE int Blocks() {
  return static_cast<int>(gridDim.x);
}
KVANTA_DEVICE void SyncWarp() {
  __syncwarp();
}
KVANTA_DEVICE void SyncBlock() {
  __syncthreads();
}

template <class T>
KVANTA_DEVICE T ShuffleXor(T value, int mask) {
  return __shfl_xor_sync(0xffffffffU, value, mask);
}

KVANTA_DEVICE void AtomicAdd(int64_t* sum, int64_t value) {
  atomicAdd(reinterpret_cast<unsigned long long*>(sum), static_cast<unsigned long long>(value));
}

// ---- memory

// Global memory that the launch does not write, 16, 8 and 4 bytes, aligned so.
KVANTA_DEVICE Vec4 LoadVec4(const uint8_t* from) {
  const uint4 words = __ldg(reinterpret_cast<const uint4*>(from));
  return {{words.x, words.y, words.z, words.w}};
}
KVANTA_DEVICE Vec2 LoadVec2(const uint8_t* from) {
  const uint2 words = __ldg(reinterpret_cast<const uint2*>(from));
  return {{words.x, words.y}};
}
KVANTA_DEVICE uint32_t LoadWord(const uint8_t* from) {
  return __ldg(reinterpret_cast<const uint32_t*>(from));
}

// Likewise, of what no other block reads soon: it does not push anything out of the first-level cache.
KVANTA_DEVICE Vec4 LoadStreamed4(const uint8_t* from) {
  Vec4 words;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(words.word[0]), "=r"(words.word[1]), "=r"(words.word[2]), "=r"(words.word[3])
      : "l"(from));
  return words;
}
KVANTA_DEVICE Vec2 LoadStreamed2(const uint8_t* from) {
  Vec2 words;
  asm("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(words.word[0]), "=r"(words.word[1]) : "l"(from));
  return words;
}

enum class Access : uint8_t { kRead, kWrite };
// The block's dynamic shared memory from a byte offset on: `count` bytes of it, for one kind of access.
KVANTA_DEVICE uint8_t* Shared(int offset, int /*count*/, int /*alignment*/, Access /*access*/) {
  extern __shared__ __align__(16) uint8_t shared_memory[];
  return shared_memory + offset;
}
template <class T>
KVANTA_DEVICE T LoadShared(int offset) {
  return *reinterpret_cast<const T*>(Shared(offset, sizeof(T), alignof(T), Access::kRead));
}
template <class T>
KVANTA_DEVICE void StoreShared(int offset, T value) {
  *reinterpret_cast<T*>(Shared(offset, sizeof(T), alignof(T), Access::kWrite)) = value;
}

// A copy of 16 bytes to shared memory, both aligned so, that the thread does not wait for; those since the last commit
// are a group. What a thread has waited for its others see after a barrier.
KVANTA_DEVICE void CopyToShared16(int offset, const uint8_t* from) {
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(Shared(offset, 16, 16, Access::kWrite)));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"(to), "l"(from) : "memory");
}
KVANTA_DEVICE void CommitCopies() {
  asm volatile("cp.async.commit_group;" : : : "memory");
}
// Until at most kGroups of the newest groups are under way.
template <int kGroups>
KVANTA_DEVICE void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" : : "n"(kGroups) : "memory");
}

// ---- tensor cores: c += a b, 16 x 16 by 16 x 8, fragments as PTX gives them for mma.m16n8k16

KVANTA_DEVICE void MmaF16(float (&c)[4], const Vec4& a, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.word[0]), "r"(a.word[1]), "r"(a.word[2]), "r"(a.word[3]), "r"(b0), "r"(b1));
}
KVANTA_DEVICE void MmaBf16(float (&c)[4], const Vec4& a, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.word[0]), "r"(a.word[1]), "r"(a.word[2]), "r"(a.word[3]), "r"(b0), "r"(b1));
}

// ---- pairs of 16-bit floats in a word, the first in the low half

KVANTA_DEVICE uint32_t PermuteBytes(uint32_t low, uint32_t high, uint32_t selector) {
  return __byte_perm(low, high, selector);
}
KVANTA_DEVICE uint32_t PackF16(float first, float second) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}
KVANTA_DEVICE uint32_t PackBf16(float first, float second) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}
KVANTA_DEVICE float F16ToFloat(uint16_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
KVANTA_DEVICE uint32_t MultiplyF16(uint32_t x, uint32_t y) {
  uint32_t product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(x), "r"(y));
  return product;
}
KVANTA_DEVICE uint32_t MultiplyAddF16(uint32_t x, uint32_t y, uint32_t z) {
  uint32_t sum;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(x), "r"(y), "r"(z));
  return sum;
}
// The two low bytes as E4M3, where there is an instruction for it.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
inline constexpr bool kConvertsE4m3 = true;
KVANTA_DEVICE uint32_t E4m3ToF16(uint32_t bytes) {
  uint32_t pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<uint16_t>(bytes)));
  return pair;
}
#else
inline constexpr bool kConvertsE4m3 = false;
KVANTA_DEVICE uint32_t E4m3ToF16(uint32_t bytes) {
  return bytes;
}
#endif

KVANTA_DEVICE float Exp2(float x) {
  float y;
  asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
KVANTA_DEVICE float Tanh(float x) {
  return tanhf(x);
}
KVANTA_DEVICE float SquareRoot(float x) {
  return __fsqrt_rn(x);
}
KVANTA_DEVICE float MultiplyAdd(float x, float y, float z) {
  return __fmaf_rn(x, y, z);
}

}  // namespace kvanta::kernels::cuda
