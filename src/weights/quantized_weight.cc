#include "weights/quantized_weight.h"

#include "formats/minifloat.h"

namespace kvanta::weights {
namespace {

constexpr int kStepWeights = 128;
constexpr int kStepColumns = 16;

constexpr bool AreE2m1(const FourBitValues& values) {
  for (uint8_t code = 0; code < 16; ++code) {
    if (values.of[code] != formats::E2m1::Decode(code)) return false;
  }
  return true;
}
static_assert(AreE2m1(kFp4Values));

int64_t StepBytes(const KernelFormat& format) noexcept {
  const int64_t groups = kStepWeights / format.group;
  const int64_t of_group = (format.scales == GroupScale::kF32 ? 4 : 1) + (HasZeroPoints(format.codes) ? 1 : 0);
  const int64_t of_column = kStepWeights * CodeBits(format.codes) / 8 + groups * of_group;
  return kStepColumns * (of_column + (format.scales == GroupScale::kE4M3 ? 4 : 0));
}

bool HasCodesAndScales(const KernelFormat& kernel, const QuantizedFormat& format) noexcept {
  return kernel.codes == format.codes && kernel.scales == format.scales;
}

}  // namespace

std::string_view Name(const QuantizedFormat& format) noexcept {
  for (const KernelFormat& kernel : kKernelFormats) {
    if (HasCodesAndScales(kernel, format)) return kernel.name;
  }
  return "none";
}

int FindKernelFormat(const QuantizedFormat& format, int64_t in) noexcept {
  for (int i = 0; i < kKernelFormatCount; ++i) {
    const KernelFormat& kernel = kKernelFormats[i];
    if (HasCodesAndScales(kernel, format) && (format.group % kernel.group == 0 || format.group >= in)) return i;
  }
  return -1;
}

int64_t QuantizedStepBytes(const QuantizedFormat& format, int64_t in) noexcept {
  const int found = FindKernelFormat(format, in);
  return found < 0 ? 0 : StepBytes(kKernelFormats[found]);
}

const FourBitValues& ValuesOf(CodeType type) noexcept {
  return type == CodeType::kNf4 ? kNf4Values : kFp4Values;
}

void QuantizedWeight::DequantizeRow(int64_t row, float* out) const {
  std::vector<uint8_t> codes(static_cast<size_t>(in_)), zeros(static_cast<size_t>(Groups()));
  std::vector<float> scales(static_cast<size_t>(Groups()));
  ReadCodes(row, codes.data());
  ReadScales(row, scales.data());
  if (HasZeroPoints(format_.codes)) ReadZeros(row, zeros.data());
  const auto value = [&](int64_t i) {
    const uint8_t code = codes[static_cast<size_t>(i)];
    switch (format_.codes) {
      case CodeType::kE4M3:
        return formats::E4m3::Decode(code);
      case CodeType::kInt8:
        return static_cast<float>(static_cast<int8_t>(code));
      case CodeType::kInt4:
        return static_cast<float>(int{code} - int{zeros[static_cast<size_t>(i / format_.group)]});
      case CodeType::kNf4:
      case CodeType::kE2M1:
      case CodeType::kNone:
        break;
    }
    return ValuesOf(format_.codes).of[code & 15];
  };
  for (int64_t i = 0; i < in_; ++i) {
    const int64_t column = order_.empty() ? i : order_[static_cast<size_t>(i)];
    out[column] = value(i) * scales[static_cast<size_t>(i / format_.group)];
  }
}

}  // namespace kvanta::weights
