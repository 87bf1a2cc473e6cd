#include "models/blocks/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace kvanta::models {
namespace {

// base^(2i/dim) in f32, as torch computes `base ** (arange(0, dim, 2) / dim)`: the power of two rounded operands,
// rounded once.
std::vector<float> Powers(double base, int rotary_dim) {
  std::vector<float> powers(rotary_dim / 2);
  for (size_t i = 0; i < powers.size(); ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(rotary_dim);
    powers[i] = static_cast<float>(std::pow(static_cast<double>(static_cast<float>(base)), double{exponent}));
  }
  return powers;
}

std::vector<float> Inverse(std::vector<float> powers) {
  for (float& power : powers) power = 1.0F / power;
  return powers;
}

// Llama 3.1: frequencies of long waves are divided by the factor, of short ones kept, in between interpolated.
void ScaleLlama3(const RopeSpec& rope, std::vector<float>& inverse) {
  const auto length = static_cast<float>(rope.original_max_position);
  const auto low = static_cast<float>(rope.low_freq_factor);
  const auto factor = static_cast<float>(rope.factor);
  const auto low_wavelength =
      static_cast<float>(static_cast<double>(rope.original_max_position) / rope.low_freq_factor);
  const auto high_wavelength =
      static_cast<float>(static_cast<double>(rope.original_max_position) / rope.high_freq_factor);
  for (float& frequency : inverse) {
    const float wavelength = static_cast<float>(2 * std::numbers::pi) / frequency;
    if (wavelength < high_wavelength) continue;
    if (wavelength > low_wavelength || low_wavelength == high_wavelength) {
      frequency = frequency / factor;
      continue;
    }
    const float smooth = (length / wavelength - low) / static_cast<float>(rope.high_freq_factor - rope.low_freq_factor);
    frequency = (1.0F - smooth) * frequency / factor + smooth * frequency;
  }
}

// Channel whose wave makes `rotations` rotations within the original length (YaRN, arXiv:2309.00071, eq. 17).
double CorrectionChannel(const RopeSpec& rope, double rotations) {
  const auto length = static_cast<double>(rope.original_max_position);
  return rope.rotary_dim * std::log(length / (rotations * 2 * std::numbers::pi)) / (2 * std::log(rope.theta));
}

std::vector<float> YarnInverse(const RopeSpec& rope) {
  const int rotary_dim = rope.rotary_dim;
  double low = CorrectionChannel(rope, rope.beta_fast);
  double high = CorrectionChannel(rope, rope.beta_slow);
  if (rope.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, static_cast<double>(rotary_dim - 1));
  if (low == high) high += 0.001;  // as transformers: no division by zero
  std::vector<float> inverse = Powers(rope.theta, rotary_dim);
  const auto factor = static_cast<float>(rope.factor);
  for (size_t i = 0; i < inverse.size(); ++i) {
    const float linear = (static_cast<float>(i) - static_cast<float>(low)) / static_cast<float>(high - low);
    const float extrapolated = 1.0F - std::clamp(linear, 0.0F, 1.0F);
    const float power = inverse[i];
    inverse[i] = 1.0F / (factor * power) * (1.0F - extrapolated) + 1.0F / power * extrapolated;
  }
  return inverse;
}

// LongRoPE (arXiv:2402.13753): every frequency is divided by a factor of its own.
std::vector<float> LongRopeInverse(const RopeSpec& rope, int64_t positions) {
  const std::vector<float>& factors = UsesLongFactors(rope, positions) ? rope.long_factor : rope.short_factor;
  std::vector<float> inverse = Powers(rope.theta, rope.rotary_dim);
  for (size_t i = 0; i < inverse.size(); ++i) inverse[i] = 1.0F / (factors[i] * inverse[i]);
  return inverse;
}

float LongRopeAttentionScaling(const RopeSpec& rope, int64_t positions) {
  const double mscale = UsesLongFactors(rope, positions) ? rope.long_mscale : rope.short_mscale;
  if (mscale != 0) return static_cast<float>(mscale);
  if (rope.attention_factor != 0) return static_cast<float>(rope.attention_factor);
  if (rope.factor <= 1) return 1.0F;
  const double length = std::log(static_cast<double>(rope.original_max_position));
  return static_cast<float>(std::sqrt(1 + std::log(rope.factor) / length));
}

double YarnScale(double factor, double mscale) {
  return factor <= 1 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

float YarnAttentionScaling(const RopeSpec& rope) {
  if (rope.attention_factor != 0) return static_cast<float>(rope.attention_factor);
  if (rope.mscale != 0 && rope.mscale_all_dim != 0) {
    return static_cast<float>(YarnScale(rope.factor, rope.mscale) / YarnScale(rope.factor, rope.mscale_all_dim));
  }
  return static_cast<float>(YarnScale(rope.factor, 1));
}

// llama_4_scaling_beta's factor of the queries at `position`.
float QueryScale(const RopeSpec& rope, size_t position) {
  const auto length = static_cast<float>(rope.original_max_position);
  const auto beta = static_cast<float>(rope.llama_4_scaling_beta);
  return 1.0F + beta * std::log(1.0F + std::floor(static_cast<float>(position) / length));
}

}  // namespace

bool UsesLongFactors(const RopeSpec& rope, int64_t positions) {
  return rope.type == RopeType::kLongRope && positions > rope.original_max_position;
}

bool UsesLongFactors(const ModelConfig& config, int64_t positions) {
  return std::any_of(config.layer_specs.begin(), config.layer_specs.end(),
                     [&](const LayerSpec& layer) { return UsesLongFactors(layer.rope, positions); });
}

RopeFrequencies MakeRopeFrequencies(const RopeSpec& rope, int64_t positions) {
  RopeFrequencies result;
  switch (rope.type) {
    case RopeType::kDefault:
      result.inverse = Inverse(Powers(rope.theta, rope.rotary_dim));
      break;
    case RopeType::kLinear:
      result.inverse = Inverse(Powers(rope.theta, rope.rotary_dim));
      for (float& frequency : result.inverse) frequency /= static_cast<float>(rope.factor);
      break;
    case RopeType::kLlama3:
      result.inverse = Inverse(Powers(rope.theta, rope.rotary_dim));
      ScaleLlama3(rope, result.inverse);
      break;
    case RopeType::kYarn:
      result.inverse = YarnInverse(rope);
      result.attention_scaling = YarnAttentionScaling(rope);
      break;
    case RopeType::kProportional:
      result.inverse = Inverse(Powers(rope.theta, rope.rotary_dim));
      std::fill(result.inverse.begin() + rope.rotated_pairs, result.inverse.end(), 0.0F);
      for (float& frequency : result.inverse) frequency /= static_cast<float>(rope.factor);
      break;
    case RopeType::kLongRope:
      result.inverse = LongRopeInverse(rope, positions);
      result.attention_scaling = LongRopeAttentionScaling(rope, positions);
      break;
  }
  if (rope.reversed) {
    for (float& frequency : result.inverse) frequency = -frequency;
  }
  return result;
}

void FillRopeTable(const RopeFrequencies& frequencies, std::span<float> table) {
  const size_t half = frequencies.inverse.size();
  for (size_t row = 0; row * 2 * half < table.size(); ++row) {
    float* cos = table.data() + row * 2 * half;
    float* sin = cos + half;
    for (size_t i = 0; i < half; ++i) {
      // The angle is rounded to f32, as in transformers; its cosine and sine are then exact but for one rounding.
      const double angle = static_cast<float>(row) * frequencies.inverse[i];
      cos[i] = static_cast<float>(std::cos(angle)) * frequencies.attention_scaling;
      sin[i] = static_cast<float>(std::sin(angle)) * frequencies.attention_scaling;
    }
  }
}

void ScaleQueryTable(const RopeSpec& rope, std::span<float> table) {
  for (size_t i = 0; i < table.size(); ++i) table[i] *= QueryScale(rope, i / static_cast<size_t>(rope.rotary_dim));
}

std::vector<float> QueryScales(const ModelConfig& config, int64_t positions) {
  const AttentionTemperature& temperature = config.attn_temperature;
  const RopeSpec& rope = config.layer_specs.front().rope;
  std::vector<float> scales;
  for (int64_t position = 0; position < positions; ++position) {
    if (config.mla.log_query_scales) {
      scales.push_back(std::log(static_cast<float>(position + 1)));
    } else if (temperature.floor_scale != 0) {
      const int64_t steps = (position + 1) / temperature.floor_scale;  // whole ones
      scales.push_back(std::log1p(static_cast<float>(steps)) * static_cast<float>(temperature.attn_scale) + 1.0F);
    } else if (config.UsesMla() && rope.llama_4_scaling_beta != 0) {
      scales.push_back(QueryScale(rope, static_cast<size_t>(position)));
    }
  }
  return scales;
}

}  // namespace kvanta::models
