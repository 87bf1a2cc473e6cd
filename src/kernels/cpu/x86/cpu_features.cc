#include "kernels/cpu/x86/cpu_features.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace kvanta::kernels {
namespace {

struct CpuidResult {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

CpuidResult Cpuid(uint32_t leaf, uint32_t subleaf) {
  CpuidResult r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

// XCR0: the extended register states that the operating system saves.
uint64_t EnabledStates() {
  uint32_t low = 0;
  uint32_t high = 0;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t{high} << 32) | low;
}

// Tile data is a state that Linux (5.16 and later) saves only for processes that requested it.
constexpr long kTileData = 18;

bool KernelSupportsTiles() {
  constexpr long kGetSupported = 0x1021;  // ARCH_GET_XCOMP_SUPP
  uint64_t states = 0;
  return syscall(SYS_arch_prctl, kGetSupported, &states) == 0 && (states >> kTileData & 1) != 0;
}

constexpr bool HasAll(uint64_t value, uint64_t mask) {
  return (value & mask) == mask;
}
constexpr uint32_t Bit(int i) {
  return uint32_t{1} << i;
}

CpuFeatures Detect() {
  const CpuidResult leaf1 = Cpuid(1, 0);
  if (!HasAll(leaf1.ecx, Bit(27))) return {};  // OSXSAVE
  const CpuidResult leaf7 = Cpuid(7, 0);
  const CpuidResult leaf7_1 = leaf7.eax >= 1 ? Cpuid(7, 1) : CpuidResult{};
  const uint64_t states = EnabledStates();
  constexpr uint64_t kYmmStates = 0x6;       // SSE, AVX
  constexpr uint64_t kZmmStates = 0xe6;      // SSE, AVX, opmask, upper halves of zmm0-15, zmm16-31
  constexpr uint64_t kTileStates = 0x60000;  // tile configuration, tile data
  CpuFeatures features;
  features.avx2 = HasAll(states, kYmmStates) && HasAll(leaf1.ecx, Bit(12) | Bit(28) | Bit(29)) &&  // FMA AVX F16C
                  HasAll(leaf7.ebx, Bit(5) | Bit(8));                                              // AVX2 BMI2
  features.avx512 = features.avx2 && HasAll(states, kZmmStates) &&
                    HasAll(leaf7.ebx, Bit(16) | Bit(17) | Bit(30) | Bit(31)) &&  // F DQ BW VL
                    HasAll(leaf7.ecx, Bit(1) | Bit(11));                         // VBMI VNNI
  features.avx512_bf16 = features.avx512 && HasAll(leaf7_1.eax, Bit(5));
  features.avx512_fp16 = features.avx512 && HasAll(leaf7.edx, Bit(23));
  features.amx = features.avx512_bf16 && HasAll(states, kTileStates) &&
                 HasAll(leaf7.edx, Bit(22) | Bit(24) | Bit(25)) &&  // BF16, TILE, INT8
                 KernelSupportsTiles();
  // "AuthenticAMD". Intel's Sapphire and Emerald Rapids take two cycles, and half of one for a multiply-add (measured:
  // ADR 0068). No CPUID bit says so.
  const CpuidResult vendor = Cpuid(0, 0);
  features.fast_avx512_bf16 = features.avx512_bf16 && vendor.ebx == 0x68747541 && vendor.edx == 0x69746e65;
  return features;
}

}  // namespace

const CpuFeatures& DetectCpuFeatures() {
  static const CpuFeatures features = Detect();
  return features;
}

bool RequestAmxPermission() {
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}

}  // namespace kvanta::kernels
