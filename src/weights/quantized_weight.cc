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

constexpr int CodeBits(CodeType type) noexcept {
  return type == CodeType::kE4M3 || type == CodeType::kInt8 ? 8 : 4;
}

// Groups that the kernels of a format have, the largest first.
std::span<const int> KernelGroups(const QuantizedFormat& format) noexcept {
  static constexpr int kRow[] = {128}, kInteger[] = {128, 32}, kNf4[] = {64}, kMx[] = {32}, kNv[] = {16};
  if (format.codes == CodeType::kE2M1) {
    if (format.scales == GroupScale::kE8M0) return kMx;
    return format.scales == GroupScale::kE4M3 ? std::span<const int>(kNv) : std::span<const int>();
  }
  if (format.codes == CodeType::kNone || format.scales != GroupScale::kF32) return {};
  if (format.codes == CodeType::kNf4) return kNf4;
  return format.codes == CodeType::kE4M3 ? std::span<const int>(kRow) : std::span<const int>(kInteger);
}

int64_t StepBytes(const QuantizedFormat& format, int group) noexcept {
  const int64_t groups = kStepWeights / group;
  int64_t of_group = format.scales == GroupScale::kF32 ? 4 : 1;
  if (format.codes == CodeType::kInt4) of_group += 1;
  const int64_t of_column = kStepWeights * CodeBits(format.codes) / 8 + groups * of_group;
  return kStepColumns * (of_column + (format.scales == GroupScale::kE4M3 ? 4 : 0));
}

}  // namespace

std::string_view Name(const QuantizedFormat& format) noexcept {
  switch (format.codes) {
    case CodeType::kE4M3:
      return "E4M3";
    case CodeType::kInt8:
      return "INT8";
    case CodeType::kInt4:
      return "INT4";
    case CodeType::kNf4:
      return "NF4";
    case CodeType::kE2M1:
      return format.scales == GroupScale::kE4M3 ? "NVFP4" : "MXFP4";
    case CodeType::kNone:
      break;
  }
  return "none";
}

int KernelGroup(const QuantizedFormat& format, int64_t in) noexcept {
  for (const int group : KernelGroups(format)) {
    if (format.group % group == 0 || format.group >= in) return group;
  }
  return 0;
}

int64_t QuantizedStepBytes(const QuantizedFormat& format, int64_t in) noexcept {
  const int group = KernelGroup(format, in);
  return group == 0 ? 0 : StepBytes(format, group);
}

const FourBitValues& ValuesOf(CodeType type) noexcept {
  return type == CodeType::kNf4 ? kNf4Values : kFp4Values;
}

void QuantizedWeight::DequantizeRow(int64_t row, float* out) const {
  std::vector<uint8_t> codes(static_cast<size_t>(in_)), zeros(static_cast<size_t>(Groups()));
  std::vector<float> scales(static_cast<size_t>(Groups()));
  ReadCodes(row, codes.data());
  ReadScales(row, scales.data());
  if (format_.codes == CodeType::kInt4) ReadZeros(row, zeros.data());
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
