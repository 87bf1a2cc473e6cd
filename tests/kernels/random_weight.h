// A quantized weight of random codes.
#pragma once

#include <algorithm>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "formats/minifloat.h"
#include "weights/quantized_weight.h"

namespace kvanta::kernels {

// Random codes; scales and zero points differ from group to group.
class RandomWeight final : public weights::QuantizedWeight {
 public:
  RandomWeight(int64_t out, int64_t in, weights::QuantizedFormat format, uint32_t seed, bool shuffled = false)
      : weights::QuantizedWeight(out, in, format) {
    std::mt19937 generator(seed);
    tensor_scale_ = 0.001F + 1e-6F * static_cast<float>(generator() % 1000);
    for (int64_t i = 0; i < out * in; ++i) codes_.push_back(RandomCode(generator()));
    for (int64_t i = 0; i < out * Groups(); ++i) {
      scales_.push_back(0.001F + 0.01F * static_cast<float>(generator() % 1000) / 1000);
      zeros_.push_back(static_cast<uint8_t>(generator() % 17));
      scale_codes_.push_back(static_cast<uint8_t>(format.scales == weights::GroupScale::kE8M0 ? 115 + generator() % 10
                                                                                              : generator() % 0x7f));
    }
    if (!shuffled) return;
    order_.resize(static_cast<size_t>(in));
    std::iota(order_.begin(), order_.end(), 0);
    for (size_t i = order_.size(); i > 1; --i) std::swap(order_[i - 1], order_[generator() % i]);
  }

  void ReadCodes(int64_t row, uint8_t* codes) const override { std::copy_n(&codes_[row * In()], In(), codes); }
  void ReadScales(int64_t row, float* scales) const override {
    for (int64_t group = 0; group < Groups(); ++group) {
      const int64_t at = row * Groups() + group;
      scales[group] = scales_[at];
      if (Format().scales == weights::GroupScale::kE8M0) scales[group] = formats::E8m0::Decode(scale_codes_[at]);
      if (Format().scales == weights::GroupScale::kE4M3)
        scales[group] = formats::E4m3::Decode(scale_codes_[at]) * tensor_scale_;
    }
  }
  void ReadZeros(int64_t row, uint8_t* zeros) const override { std::copy_n(&zeros_[row * Groups()], Groups(), zeros); }
  void ReadScaleCodes(int64_t row, uint8_t* codes) const override {
    std::copy_n(&scale_codes_[row * Groups()], Groups(), codes);
  }
  float TensorScale() const override { return tensor_scale_; }

  std::vector<uint8_t> codes_, zeros_, scale_codes_;
  std::vector<float> scales_;
  float tensor_scale_ = 1;

 private:
  uint8_t RandomCode(uint32_t random) const {
    const auto byte = static_cast<uint8_t>(random);
    if (Format().codes == weights::CodeType::kE4M3) return (byte & 0x7f) == 0x7f ? 0 : byte;
    return Format().codes == weights::CodeType::kInt8 ? byte : byte & 15;
  }
};

}  // namespace kvanta::kernels
