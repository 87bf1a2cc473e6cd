#include "weights/weight_blocks.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/dtype.h"

namespace kvanta::weights {
namespace {

constexpr float kMaxInt4 = 15;

uint16_t ReadFp16Bits(const uint8_t* bytes) noexcept {
  uint16_t bits;
  std::memcpy(&bits, bytes, sizeof bits);
  return bits;
}

// Four values at a time: the search over ranges dominates the time to quantize a checkpoint.
using Four = float __attribute__((vector_size(16)));
using FourInts = int32_t __attribute__((vector_size(16)));

float Sum(Four v) noexcept {
  return (v[0] + v[1]) + (v[2] + v[3]);
}

// Codes of (x - offset) / scale, rounded to the nearest of 0 to 15.
Four Codes(Four x, float offset, float inverse_scale) noexcept {
  Four t = (x - offset) * inverse_scale + 0.5F;
  t = t > 0.0F ? t : Four{};
  t = t < kMaxInt4 + 0.5F ? t : Four{} + kMaxInt4;
  return __builtin_convertvector(__builtin_convertvector(t, FourInts), Four);
}

// Least-squares line through (code, value) for given codes.
struct Fit {
  float scale = 0;
  float offset = 0;
  float gain = -INFINITY;  // sum of squares minus squared error
};

// x: [kBlockWeights] values.
Fit FitRange(const Four* x, float offset, float inverse_scale) noexcept {
  Four codes{}, squares{}, products{}, values{};
  for (int i = 0; i < kBlockWeights / 4; ++i) {
    const Four q = Codes(x[i], offset, inverse_scale);
    codes += q;
    squares += q * q;
    products += q * x[i];
    values += x[i];
  }
  const float sum_q = Sum(codes), sum_qq = Sum(squares), sum_qx = Sum(products), sum_x = Sum(values);
  constexpr float count = kBlockWeights;
  const float determinant = count * sum_qq - sum_q * sum_q;
  if (!(determinant > 0)) return {};
  Fit fit;
  fit.scale = (count * sum_qx - sum_q * sum_x) / determinant;
  fit.offset = (sum_x - fit.scale * sum_q) / count;
  fit.gain = fit.scale * sum_qx + fit.offset * sum_x;
  return fit;
}

}  // namespace

WeightBlock ReadBlock(const uint8_t* bytes, BlockFormat format) noexcept {
  WeightBlock block;
  if (format == BlockFormat::kNone) return block;
  UnpackedBlock unpacked;
  Info(format).unpack(bytes, unpacked);
  block.scale = ReadFp16Bits(bytes);
  if (format == BlockFormat::kQ4_1) block.offset = ReadFp16Bits(bytes + 2);
  std::memcpy(block.codes, unpacked.codes, kBlockWeights);
  return block;
}

void DequantizeBlock(const WeightBlock& block, float* out) noexcept {
  const float scale = Fp16ToFloat(block.scale), offset = Fp16ToFloat(block.offset);
  for (int i = 0; i < kBlockWeights; ++i) out[i] = scale * static_cast<float>(block.codes[i]) + offset;
}

WeightBlock QuantizeInt8(const float* x, int n) noexcept {
  float largest = 0;
  for (int i = 0; i < n; ++i) largest = std::max(largest, std::abs(x[i]));
  WeightBlock block;
  block.scale = FloatToFp16(largest / 127);
  const float scale = Fp16ToFloat(block.scale);
  if (scale == 0 || !std::isfinite(scale)) return block;
  for (int i = 0; i < n; ++i) {
    block.codes[i] = static_cast<int8_t>(std::clamp(std::nearbyint(x[i] / scale), -127.0F, 127.0F));
  }
  return block;
}

WeightBlock QuantizeInt4(const float* x, int n) noexcept {
  const auto [low, high] = std::minmax_element(x, x + n);
  const float min = *low, range = *high - *low;
  // A partial block keeps its whole range: values beyond n would count in the sums.
  const bool whole = n == kBlockWeights;
  Four values[kBlockWeights / 4] = {};
  std::memcpy(values, x, static_cast<size_t>(n) * sizeof(float));
  for (Four& four : values) four -= min;  // small numbers, since their squares are compared
  Fit best{range / kMaxInt4, 0, -INFINITY};
  // A range slightly shorter or longer than that of the values often has a smaller error.
  for (int step = -2; whole && step <= 9; ++step) {
    const float inverse = (kMaxInt4 + 0.25F * static_cast<float>(step) - 1) / range;
    if (!std::isfinite(inverse)) break;
    const Fit fit = FitRange(values, 0, inverse);
    if (fit.gain > best.gain) best = fit;
  }
  // Rounding to the line found may allow a better line.
  for (int round = 0; whole && round < 2 && best.scale > 0; ++round) {
    const Fit fit = FitRange(values, best.offset, 1 / best.scale);
    if (fit.gain > best.gain) best = fit;
  }
  WeightBlock block;
  block.scale = FloatToFp16(best.scale);
  block.offset = FloatToFp16(min + best.offset);
  const float scale = Fp16ToFloat(block.scale);
  if (!(scale > 0) || !std::isfinite(scale)) return block;
  for (int i = 0; i < n; ++i) {
    const float code = std::nearbyint((x[i] - Fp16ToFloat(block.offset)) / scale);
    block.codes[i] = static_cast<int8_t>(std::clamp(code, 0.0F, kMaxInt4));
  }
  return block;
}

}  // namespace kvanta::weights
