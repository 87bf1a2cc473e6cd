// FP8 E4M3: w = code * scale of its tensor, its channel (row) or its block (docs: the checkpoints of DeepSeek V3, whose
// "weight_scale_inv" is multiplied with, too, and V4, which calls it "scale"). MXFP8: scales of 32 weights in E8M0 (OCP
// Microscaling Formats 1.0).
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "base/math.h"
#include "formats/minifloat.h"
#include "weights/quantized/quantized_weights.h"

namespace kvanta::weights {
namespace {

// Rows and columns that share a scale.
struct Block {
  int64_t out = 0;
  int64_t in = 0;
};

class Fp8Weight final : public QuantizedWeight {
 public:
  Fp8Weight(const WeightSource& source, const uint8_t* codes, std::vector<float> scales, Block block)
      : QuantizedWeight(source.out, source.in, {CodeType::kE4M3, GroupScale::kF32, block.in}),
        codes_(codes),
        scales_(std::move(scales)),
        rows_of_block_(block.out) {}

  void ReadCodes(int64_t row, uint8_t* codes) const override { std::copy_n(codes_ + row * In(), In(), codes); }
  void ReadScales(int64_t row, float* scales) const override {
    std::copy_n(scales_.begin() + row / rows_of_block_ * Groups(), Groups(), scales);
  }

 private:
  const uint8_t* codes_;       // [out][in]
  std::vector<float> scales_;  // [out / rows_of_block_][Groups()]
  int64_t rows_of_block_;
};

class Mxfp8Weight final : public QuantizedWeight {
 public:
  static constexpr int64_t kGroup = 32;

  Mxfp8Weight(const WeightSource& source, const uint8_t* codes, const uint8_t* scales)
      : QuantizedWeight(source.out, source.in, {CodeType::kE4M3, GroupScale::kE8M0, kGroup}),
        codes_(codes),
        scales_(scales) {}

  void ReadCodes(int64_t row, uint8_t* codes) const override { std::copy_n(codes_ + row * In(), In(), codes); }
  void ReadScales(int64_t row, float* scales) const override {
    for (int64_t group = 0; group < Groups(); ++group) {
      scales[group] = formats::E8m0::Decode(scales_[row * Groups() + group]);
    }
  }
  void ReadScaleCodes(int64_t row, uint8_t* codes) const override {
    std::copy_n(scales_ + row * Groups(), Groups(), codes);
  }

 private:
  const uint8_t* codes_;   // [out][in]
  const uint8_t* scales_;  // [out][Groups()]
};

// The shape without sizes of 1 at its end, and with ModelOpt's ones between the blocks removed: [out / 128, 1, in /
// 128, 1] becomes [out / 128, in / 128].
std::vector<int64_t> ScaleShape(const TensorView& tensor) {
  std::vector<int64_t> shape = tensor.shape;
  if (shape.size() == 4 && shape[1] == 1 && shape[3] == 1) shape = {shape[0], shape[2]};
  if (shape.empty()) shape = {1};
  if (shape.size() == 1) shape.push_back(1);
  return shape;
}

Block FindBlock(ModuleTensors& tensors, std::string_view part, const WeightSource& source) {
  const TensorView& tensor = tensors.Get(part);
  const std::vector<int64_t> shape = ScaleShape(tensor);
  const auto [out, in] = std::pair(source.out, source.in);
  const auto& block = source.config.block;
  if (shape.size() == 2) {
    if (block[0] > 0 && shape[0] == CeilDiv(out, block[0]) && shape[1] == CeilDiv(in, block[1])) {
      return {block[0], block[1]};
    }
    if (shape[0] == 1 && shape[1] == 1) return {out, in};
    if (shape[0] == out && shape[1] >= 1 && in % shape[1] == 0) return {1, in / shape[1]};
  }
  std::string expected = fmt::format("[], [1], [{}] or [{}, 1]", out, out);
  if (block[0] > 0) {
    expected += fmt::format(", or [{}, {}] for blocks of {} x {}", CeilDiv(out, block[0]), CeilDiv(in, block[1]),
                            block[0], block[1]);
  }
  tensors.Fail(part, fmt::format("has shape {}; expected {}", ShapeText(tensor.shape), expected));
}

void CheckCodes(const ModuleTensors& tensors, const TensorView& weight, const WeightSource& source) {
  std::atomic<int64_t> bad_row = -1;
  auto check = [&](int64_t row, int) {
    const uint8_t* codes = weight.data.data() + row * source.in;
    bool is_nan = false;
    for (int64_t k = 0; k < source.in; ++k) is_nan |= (codes[k] & 0x7f) == 0x7f;
    if (is_nan) bad_row = row;
  };
  tensors.Threads().ForEach(source.out, check);
  if (bad_row >= 0) tensors.Fail("weight", fmt::format("has NaN in row {}", bad_row.load()));
}

// Bytes are exponents. F8_E8M0 is also a storage of the scales of larger blocks.
bool HasMxfp8Scales(const TensorView& scales, const WeightSource& source) {
  const bool is_group = scales.shape == std::vector<int64_t>{source.out, source.in / Mxfp8Weight::kGroup};
  return scales.dtype == "U8" || (scales.dtype == "F8_E8M0" && is_group);
}

std::unique_ptr<QuantizedWeight> ReadMxfp8(ModuleTensors& tensors, std::string_view part, const WeightSource& source,
                                           const TensorView& weight) {
  constexpr int64_t kGroup = Mxfp8Weight::kGroup;
  if (source.in % kGroup != 0) {
    tensors.Fail("weight", fmt::format("has {} inputs; expected a multiple of {}, which share a scale (MXFP8)",
                                       source.in, kGroup));
  }
  const TensorView& scales = tensors.Get(part, "U8|F8_E8M0", {source.out, source.in / kGroup});
  const auto nan = std::ranges::find(scales.data, uint8_t{255});
  if (nan != scales.data.end()) tensors.Fail(part, fmt::format("is NaN at index {}", nan - scales.data.begin()));
  return std::make_unique<Mxfp8Weight>(source, weight.data.data(), scales.data.data());
}

}  // namespace

std::unique_ptr<QuantizedWeight> ReadFp8(ModuleTensors& tensors, const WeightSource& source) {
  const TensorView& weight = tensors.Get("weight", "F8_E4M3", {source.out, source.in});
  const char* part = tensors.Find("weight_scale_inv") != nullptr ? "weight_scale_inv"
                     : tensors.Find("scale") != nullptr          ? "scale"
                                                                 : "weight_scale";
  CheckCodes(tensors, weight, source);
  if (HasMxfp8Scales(tensors.Get(part), source)) return ReadMxfp8(tensors, part, source, weight);
  const Block block = FindBlock(tensors, part, source);
  return std::make_unique<Fp8Weight>(source, weight.data.data(), tensors.Floats(part), block);
}

}  // namespace kvanta::weights
