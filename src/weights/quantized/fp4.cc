// FP4 E2M1, two codes to a byte, the lower half first. NVFP4: scales of 16 weights in E4M3, and one of the tensor, by
// which compressed-tensors divides and ModelOpt multiplies. MXFP4: scales of 32 weights in E8M0, which DeepSeek V4
// calls "scale".
#include <fmt/format.h>

#include <algorithm>

#include "formats/minifloat.h"
#include "weights/quantized/quantized_weights.h"

namespace kvanta::weights {
namespace {

// Scale of a whole weight.
struct TensorFactor {
  float value = 1;
  bool divides = false;
};

class Fp4Weight final : public QuantizedWeight {
 public:
  Fp4Weight(const WeightSource& source, QuantizedFormat format, const uint8_t* codes, const uint8_t* scales,
            TensorFactor tensor)
      : QuantizedWeight(source.out, source.in, format), codes_(codes), scales_(scales), tensor_(tensor) {}

  void ReadCodes(int64_t row, uint8_t* codes) const override {
    const uint8_t* packed = codes_ + row * In() / 2;
    for (int64_t k = 0; k < In(); ++k) codes[k] = packed[k / 2] >> (k % 2 * 4) & 15;
  }
  void ReadScales(int64_t row, float* scales) const override {
    for (int64_t group = 0; group < Groups(); ++group) {
      const uint8_t code = scales_[row * Groups() + group];
      if (Format().scales == GroupScale::kE8M0) {
        scales[group] = formats::E8m0::Decode(code);
      } else {
        const float scale = formats::E4m3::Decode(code);
        scales[group] = tensor_.divides ? scale / tensor_.value : scale * tensor_.value;
      }
    }
  }
  void ReadScaleCodes(int64_t row, uint8_t* codes) const override {
    std::copy_n(scales_ + row * Groups(), Groups(), codes);
  }
  float TensorScale() const override { return tensor_.divides ? 1 / tensor_.value : tensor_.value; }

 private:
  const uint8_t* codes_;   // [out][in / 2]
  const uint8_t* scales_;  // [out][Groups()]
  TensorFactor tensor_;
};

TensorFactor ReadTensorFactor(ModuleTensors& tensors) {
  const bool divides = tensors.Find("weight_global_scale") != nullptr;
  const char* part = divides ? "weight_global_scale" : "weight_scale_2";
  const std::vector<float> values = tensors.Floats(part);
  if (values.size() != 1) tensors.Fail(part, fmt::format("has {} values; expected one", values.size()));
  return {values.front(), divides};
}

}  // namespace

std::unique_ptr<QuantizedWeight> ReadFp4(ModuleTensors& tensors, const WeightSource& source) {
  const char* scale_name = tensors.Find("scale") != nullptr ? "scale" : "weight_scale";
  const char* packed = tensors.Find("weight_packed") != nullptr ? "weight_packed" : "weight";
  const TensorView& weight = tensors.Get(packed, "U8|I8", {source.out, source.in / 2});
  const bool is_nvfp4 = tensors.Get(scale_name).dtype == "F8_E4M3";
  const QuantizedFormat format = is_nvfp4 ? QuantizedFormat{CodeType::kE2M1, GroupScale::kE4M3, 16}
                                          : QuantizedFormat{CodeType::kE2M1, GroupScale::kE8M0, 32};
  if (source.in % format.group != 0) {
    tensors.Fail(packed,
                 fmt::format("has {} inputs; expected a multiple of {}, which share a scale", source.in, format.group));
  }
  const TensorView& scales = tensors.Get(scale_name, "F8_E4M3|U8|F8_E8M0", {source.out, source.in / format.group});
  const uint8_t mask = is_nvfp4 ? 0x7f : 0xff;
  for (size_t i = 0; i < scales.data.size(); ++i) {
    if ((scales.data[i] & mask) == mask) tensors.Fail(scale_name, fmt::format("is NaN at index {}", i));
  }
  const TensorFactor factor = is_nvfp4 ? ReadTensorFactor(tensors) : TensorFactor{};
  return std::make_unique<Fp4Weight>(source, format, weight.data.data(), scales.data.data(), factor);
}

}  // namespace kvanta::weights
