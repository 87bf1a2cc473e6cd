// Device primitives of the kernels for nvcc; tests/emulated/cuda_primitives.h implements the same for any host
// compiler. A unit includes one of the two before the kernels.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/cuda/types.h"

#define KVANTA_DEVICE __device__ __forceinline__
#define KVANTA_DEVICE_CALL inline __device__ __noinline__  // registers apart from the caller's, one copy
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
// Waits for the launches before, whose results are visible then. A kernel's blocks may start when all of the launch
// before have left, which hides the time of a launch; not earlier, for loads of read-only memory (below) would then see
// old contents. On GPUs before sm_90 a kernel starts when those before it have ended.
KVANTA_DEVICE void WaitForPreviousLaunches() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" : : : "memory");
#endif
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

// True if `value` is true in any lane of the warp.
KVANTA_DEVICE bool AnyLane(bool value) {
  return __any_sync(0xffffffffU, value) != 0;
}

// True in all threads of the block if `value` is in any of them; a block barrier.
KVANTA_DEVICE bool AnyThread(bool value) {
  return __syncthreads_or(value ? 1 : 0) != 0;
}

KVANTA_DEVICE void AtomicAdd(int64_t* sum, int64_t value) {
  atomicAdd(reinterpret_cast<unsigned long long*>(sum), static_cast<unsigned long long>(value));
}

// Counts `count` blocks of the launch that arrive at a counter, which is 0 before and after. True, in all threads of
// the block, for the last one: it sees what the others wrote before (LoadFresh). A block barrier.
KVANTA_DEVICE bool IsLastToArrive(uint32_t* counter, int count) {
  __threadfence();
  SyncBlock();
  const bool is_last = AnyThread(ThreadIndex() == 0 && atomicInc(counter, static_cast<unsigned>(count - 1)) ==
                                                           static_cast<unsigned>(count - 1));
  __threadfence();
  return is_last;
}

// ---- memory

// Aligned loads of global memory that blocks of this launch have written: past the L1 cache, which may have older
// contents.
KVANTA_DEVICE Vec4 LoadFresh4(const float* from) {
  Vec4 vec;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(vec.word[0]), "=r"(vec.word[1]), "=r"(vec.word[2]), "=r"(vec.word[3])
               : "l"(from)
               : "memory");
  return vec;
}
KVANTA_DEVICE float LoadFresh(const float* from) {
  float value;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(value) : "l"(from) : "memory");
  return value;
}

// Aligned loads of 16, 8 and 4 bytes of global memory that is read-only during the launch.
KVANTA_DEVICE Vec4 LoadVec4(const uint8_t* from) {
  const uint4 vec = __ldg(reinterpret_cast<const uint4*>(from));
  return {{vec.x, vec.y, vec.z, vec.w}};
}
KVANTA_DEVICE Vec2 LoadVec2(const uint8_t* from) {
  const uint2 vec = __ldg(reinterpret_cast<const uint2*>(from));
  return {{vec.x, vec.y}};
}
KVANTA_DEVICE uint32_t LoadWord(const uint8_t* from) {
  return __ldg(reinterpret_cast<const uint32_t*>(from));
}

// The same for data without reuse by other blocks: not allocated in the L1 cache.
KVANTA_DEVICE Vec4 LoadStreamed4(const uint8_t* from) {
  Vec4 vec;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(vec.word[0]), "=r"(vec.word[1]), "=r"(vec.word[2]), "=r"(vec.word[3])
      : "l"(from));
  return vec;
}
KVANTA_DEVICE Vec2 LoadStreamed2(const uint8_t* from) {
  Vec2 vec;
  asm("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(vec.word[0]), "=r"(vec.word[1]) : "l"(from));
  return vec;
}

enum class Access : uint8_t { kRead, kWrite };
// `count` bytes of the block's dynamic shared memory at a byte offset, for one kind of access.
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

// Asynchronous copy of 16 aligned bytes to shared memory. Copies since the last commit form a group. Other threads see
// the data after a wait of the copying thread and a barrier.
KVANTA_DEVICE void CopyToShared16(int offset, const uint8_t* from) {
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(Shared(offset, 16, 16, Access::kWrite)));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"(to), "l"(from) : "memory");
}
KVANTA_DEVICE void CommitCopies() {
  asm volatile("cp.async.commit_group;" : : : "memory");
}
// Waits until at most the kGroups newest groups are in flight.
template <int kGroups>
KVANTA_DEVICE void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" : : "n"(kGroups) : "memory");
}

// ---- tensor cores: c += a b, 16 x 16 by 16 x 8, PTX fragments of mma.m16n8k16

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

// Transposes 8 x 8 values of 16 bits: lane (g, t) = (lane / 4, lane % 4) has row g's columns 2 t and 2 t + 1.
KVANTA_DEVICE uint32_t Transpose8x8(uint32_t pair) {
  uint32_t transposed;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
  return transposed;
}

// ---- pairs of 16-bit floats, the first in the low half of a word

// (word & mask) ^ flip in one instruction; the compiler takes two for two constants.
KVANTA_DEVICE uint32_t AndXor(uint32_t word, uint32_t mask, uint32_t flip) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(result) : "r"(word), "r"(mask), "r"(flip));
  return result;
}
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
// The two low bytes as E4M3; kConvertsE4m3: the GPU has an instruction for it.
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

// Results below 2^-126 are zero.
KVANTA_DEVICE float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
KVANTA_DEVICE float Tanh(float x) {
  return tanhf(x);
}
KVANTA_DEVICE float SquareRoot(float x) {
  return __fsqrt_rn(x);
}
KVANTA_DEVICE double SquareRoot(double x) {
  return __dsqrt_rn(x);
}
KVANTA_DEVICE float MultiplyAdd(float x, float y, float z) {
  return __fmaf_rn(x, y, z);
}

}  // namespace kvanta::kernels::cuda
