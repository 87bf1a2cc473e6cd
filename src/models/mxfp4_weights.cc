#include "models/mxfp4_weights.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "base/dtype.h"
#include "base/quote.h"
#include "kvanta/error.h"

namespace kvanta::models {
namespace {

constexpr int kMxfp4Block = 32, kMxfp4BlockBytes = kMxfp4Block / 2;
constexpr std::array kE2m1Values = {0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F};
constexpr int kE8m0Bias = 127;
constexpr int kMaxE8m0 = 252;  // 6 * 2^125 is finite

// bf16 of each code with each scale: [scale][code].
using Mxfp4Values = std::array<std::array<uint16_t, 16>, kMaxE8m0 + 1>;

Mxfp4Values MakeMxfp4Values() {
  Mxfp4Values values;
  for (int scale = 0; scale <= kMaxE8m0; ++scale) {
    for (int code = 0; code < 16; ++code) {
      const float magnitude = std::ldexp(kE2m1Values[static_cast<size_t>(code % 8)], scale - kE8m0Bias);
      values[static_cast<size_t>(scale)][static_cast<size_t>(code)] = FloatToBf16(code < 8 ? magnitude : -magnitude);
    }
  }
  return values;
}

std::span<const uint8_t> ReadMxfp4Bytes(WeightReader& reader, const std::string& name, std::span<const int64_t> shape) {
  const weights::TensorView& tensor = reader.Tensor(name, shape);
  if (tensor.dtype != "U8") {
    throw InputError(fmt::format("tensor {} is stored as {}; MXFP4 experts are U8", Quote(name), tensor.dtype));
  }
  return tensor.data;
}

}  // namespace

Mxfp4Tensor::Mxfp4Tensor(WeightReader& reader, const std::string& name, int64_t experts, int64_t out, int64_t in)
    : out_(out), row_blocks_(in / kMxfp4Block) {
  if (in % kMxfp4Block != 0) {
    throw InputError(fmt::format("tensor {}: MXFP4 has blocks of {} weights, but rows have {}", Quote(name + "_blocks"),
                                 kMxfp4Block, in));
  }
  codes_ = ReadMxfp4Bytes(reader, name + "_blocks", std::array{experts, out, row_blocks_, int64_t{kMxfp4BlockBytes}});
  scales_ = ReadMxfp4Bytes(reader, name + "_scales", std::array{experts, out, row_blocks_});
  const auto largest = std::max_element(scales_.begin(), scales_.end());
  if (*largest > kMaxE8m0) {
    throw InputError(fmt::format("tensor {}: scale {} (at {}) is not finite; the largest is {}",
                                 Quote(name + "_scales"), *largest, largest - scales_.begin(), kMaxE8m0));
  }
}

void Mxfp4Tensor::DecodeRow(int64_t expert, int64_t row, uint16_t* values) const noexcept {
  static const Mxfp4Values kValues = MakeMxfp4Values();
  const int64_t first = (expert * out_ + row) * row_blocks_;
  for (int64_t block = 0; block < row_blocks_; ++block) {
    const std::array<uint16_t, 16>& of_code = kValues[scales_[static_cast<size_t>(first + block)]];
    const uint8_t* codes = codes_.data() + (first + block) * kMxfp4BlockBytes;
    uint16_t* out = values + block * kMxfp4Block;
    for (int i = 0; i < kMxfp4BlockBytes; ++i) {
      out[2 * i] = of_code[codes[i] & 15];
      out[2 * i + 1] = of_code[codes[i] >> 4];
    }
  }
}

// The same codes in GGUF's order: after the scale, byte i holds the weights i and i + 16, low half first.
void Mxfp4Tensor::CopyRow(int64_t expert, int64_t row, uint8_t* blocks) const noexcept {
  const int64_t first = (expert * out_ + row) * row_blocks_;
  for (int64_t block = first; block < first + row_blocks_; ++block) {
    const uint8_t* codes = codes_.data() + block * kMxfp4BlockBytes;
    const auto code = [codes](int i) { return codes[i / 2] >> (i % 2 * 4) & 15; };
    *blocks++ = scales_[static_cast<size_t>(block)];
    for (int i = 0; i < kMxfp4BlockBytes; ++i) *blocks++ = static_cast<uint8_t>(code(i) | code(i + 16) << 4);
  }
}

}  // namespace kvanta::models
