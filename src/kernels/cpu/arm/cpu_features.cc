#include "kernels/cpu/arm/cpu_features.h"

#include <sys/auxv.h>

namespace kvanta::kernels {
namespace {

// HWCAP_ASIMDDP, HWCAP2_I8MM and HWCAP2_BF16 of Linux, which older headers lack.
constexpr unsigned long kDotprod = 1UL << 20;
constexpr unsigned long kI8mm = 1UL << 13;
constexpr unsigned long kBf16 = 1UL << 14;

CpuFeatures Detect() {
  const unsigned long second = getauxval(AT_HWCAP2);
  CpuFeatures features;
  features.dotprod = (getauxval(AT_HWCAP) & kDotprod) != 0;
  features.i8mm = features.dotprod && (second & kI8mm) != 0 && (second & kBf16) != 0;
  return features;
}

}  // namespace

const CpuFeatures& DetectCpuFeatures() {
  static const CpuFeatures features = Detect();
  return features;
}

}  // namespace kvanta::kernels
