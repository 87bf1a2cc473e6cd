#include "kernels/linear/cuda/panel_writer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/dtype.h"
#include "base/math.h"
#include "kernels/linear/linear.h"
#include "kvanta/error.h"

namespace kvanta::kernels::cuda {
namespace {

using weights::BlockFormat;
using weights::CodeType;
using weights::GroupScale;

// A GGUF file's blocks of a row.
const uint8_t* BlockAt(const RowSource& from, int64_t block) {
  return from.view->RowData(from.index) + block * weights::BlockBytes(from.view->blocks);
}

}  // namespace

std::optional<PanelKind> PanelKindOf(const weights::KernelFormat& format) noexcept {
  const bool f32 = format.scales == GroupScale::kF32;
  switch (format.codes) {
    case CodeType::kE4M3:
      return f32 ? PanelKind::kE4m3Groups : PanelKind::kMxfp8;
    case CodeType::kInt8:
      return PanelKind::kInt8Groups;
    case CodeType::kInt4:
      return PanelKind::kInt4Groups;
    case CodeType::kE2M1:
      return format.scales == GroupScale::kE8M0 ? PanelKind::kMxfp4 : PanelKind::kNvfp4;
    case CodeType::kNf4:
    case CodeType::kNone:
      break;
  }
  return std::nullopt;
}

bool KeepsBlocks(PanelKind kind, BlockFormat format) noexcept {
  switch (kind) {
    case PanelKind::kMxfp4:
      return format == BlockFormat::kMXFP4;
    case PanelKind::kBlocks4:
      return format == BlockFormat::kQ4_K;
    case PanelKind::kBlocks8:  // integer scales of 16 weights, integer offsets of 32
      return format != BlockFormat::kNone && format != BlockFormat::kNVFP4 && format != BlockFormat::kQ2_K;
    default:
      return false;
  }
}

std::string_view Name(PanelKind kind) noexcept {
  switch (kind) {
    case PanelKind::kBf16:
      break;
    case PanelKind::kF16:
      return "f16";
    case PanelKind::kInt8:
      return "int8";
    case PanelKind::kInt4:
      return "int4";
    case PanelKind::kE4m3Groups:
      return "E4M3";
    case PanelKind::kInt8Groups:
      return "INT8";
    case PanelKind::kInt4Groups:
      return "INT4";
    case PanelKind::kMxfp4:
      return "MXFP4";
    case PanelKind::kMxfp8:
      return "MXFP8";
    case PanelKind::kNvfp4:
      return "NVFP4";
    case PanelKind::kBlocks4:
      return "4-bit blocks";
    case PanelKind::kBlocks8:
      return "8-bit blocks";
  }
  return "bf16";
}

PanelWriter::PanelWriter(const Weight& weight) : weight_(weight) {
  for (int row = 0; row < kPanelRows; ++row) {
    for (int k = 0; k < kPanelChannels; ++k) offsets_[row][k] = FragmentOffsetOf(weight.kind, row, k);
  }
}

PanelWriter::Sections PanelWriter::BytesOfPanel() const noexcept {
  const PanelKind kind = weight_.kind;
  return {.codes = weight_.Units() * UnitBytesOf(kind).total,
          .scales = ScaleGroupsOf(weight_) * ScaleBytesOf(kind),
          .factors = FactorGroupsOf(weight_) * FactorBytesOf(kind)};
}

void PanelWriter::Write(const RowSource& from, int row, const Panel& to) {
  const PanelKind kind = weight_.kind;
  if (from.quantized != nullptr) return WriteQuantized(from, row, to);
  if (IsBlocks(kind)) return WriteUnpacked(from, row, to);
  if (kind == PanelKind::kMxfp4) return WriteMxfp4(from, row, to);
  const bool blocks = kind == PanelKind::kInt8 || kind == PanelKind::kInt4;
  const WeightType type = kind == PanelKind::kInt8 ? WeightType::kInt8 : WeightType::kInt4;
  if (blocks && kernels::KeepsBlocks(type, from.view->blocks)) return WriteStoredBlocks(from, row, to.codes);
  std::vector<float> values(static_cast<size_t>(weight_.in));
  weights::ReadWeightRow(*from.view, from.index, values.data());
  if (blocks) {
    WriteUnits(values.data(), row, to.codes);
  } else {
    WriteElements(values.data(), row, to.codes);
  }
}

void PanelWriter::CheckFinite() const {
  if (!non_finite_) return;
  throw InputError(ScaleBytesOf(weight_.kind) == 0
                       ? "a block of weights has a scale or offset that is not finite in float16; use bf16 weights"
                       : "a scale of quantized weights is not finite; use --dtype float32");
}

void PanelWriter::SetCode(int64_t channel, int row, uint8_t code, uint8_t* codes) const noexcept {
  const FragmentOffset offset = offsets_[row][channel % kPanelChannels];
  codes[channel / kPanelChannels * UnitBytesOf(weight_.kind).total + offset.byte] |=
      static_cast<uint8_t>(code << offset.bit);
}

void PanelWriter::SetFloat(float value, uint8_t* to) noexcept {
  if (!std::isfinite(value)) non_finite_ = true;
  std::memcpy(to, &value, sizeof value);
}

void PanelWriter::WriteElements(const float* x, int row, uint8_t* codes) const {
  for (int64_t k = 0; k < weight_.in; ++k) {
    const uint16_t code = weight_.kind == PanelKind::kBf16 ? FloatToBf16(x[k]) : FloatToFp16(x[k]);
    uint8_t* unit = codes + k / kPanelChannels * UnitBytesOf(weight_.kind).total;
    std::memcpy(unit + offsets_[row][k % kPanelChannels].byte, &code, sizeof(code));
  }
}

void PanelWriter::WriteStoredBlocks(const RowSource& from, int row, uint8_t* codes) {
  for (int64_t unit = 0; unit < weight_.Units(); ++unit) {
    const weights::WeightBlock block = weights::ReadBlock(BlockAt(from, unit), from.view->blocks);
    WriteBlock(block, row, codes + unit * UnitBytesOf(weight_.kind).total);
  }
}

void PanelWriter::WriteUnits(const float* x, int row, uint8_t* codes) {
  for (int64_t unit = 0; unit < weight_.Units(); ++unit) {
    const float* from = x + unit * kPanelChannels;
    const auto n = static_cast<int>(std::min<int64_t>(kPanelChannels, weight_.in - unit * kPanelChannels));
    WriteBlock(weight_.kind == PanelKind::kInt8 ? weights::QuantizeInt8(from, n) : weights::QuantizeInt4(from, n), row,
               codes + unit * UnitBytesOf(weight_.kind).total);
  }
}

void PanelWriter::WriteBlock(weights::WeightBlock block, int row, uint8_t* unit) {
  // Unsigned codes: 8-bit ones plus 128, which the kernel subtracts again; 4-bit ones from 0 on, with the shift moved
  // into the offset (8 times the scale is exact in fp16).
  const bool is_int4 = weight_.kind == PanelKind::kInt4;
  int offset = is_int4 ? 0 : 128;
  if (is_int4 && *std::min_element(block.codes, block.codes + weights::kBlockWeights) < 0) {
    offset = 8;
    block.offset = FloatToFp16(-8 * Fp16ToFloat(block.scale));
  }
  if (!std::isfinite(Fp16ToFloat(block.scale)) || !std::isfinite(Fp16ToFloat(block.offset))) non_finite_ = true;
  for (int k = 0; k < kPanelChannels; ++k) SetCode(k, row, static_cast<uint8_t>(block.codes[k] + offset), unit);
  uint8_t* scale = unit + ScaleOffset(weight_.kind, row);
  std::memcpy(scale, &block.scale, sizeof(block.scale));
  if (is_int4) std::memcpy(scale + 4, &block.offset, sizeof(block.offset));
}

// Blocks of integer codes with integer scales of 16 weights and offsets of 32.
void PanelWriter::WriteUnpacked(const RowSource& from, int row, const Panel& to) {
  const int64_t in_block = weights::BlockWeights(from.view->blocks),
                factor_weights = kPanelChannels << weight_.group_shift;
  weights::UnpackedBlock block;
  for (int64_t first = 0; first < weight_.in; first += in_block) {
    block = {};
    weights::Info(from.view->blocks).unpack(BlockAt(from, first / in_block), block);
    for (int64_t k = 0; k < in_block; ++k) SetCode(first + k, row, static_cast<uint8_t>(block.codes[k]), to.codes);
    for (int64_t sub = 0; sub < in_block; sub += kPanelChannels) {
      uint8_t* scales =
          to.scales + (first + sub) / kPanelChannels * ScaleBytesOf(weight_.kind) + row % 8 * 8 + row / 8 * 4;
      for (int64_t step = 0; step < 2; ++step) {
        scales[step] = static_cast<uint8_t>(static_cast<int8_t>(block.sub_scales[sub / 16 + step]));
      }
      scales[2] = static_cast<uint8_t>(block.sub_offsets[sub / 16]);
    }
    for (int64_t at = first; at < first + in_block; at += factor_weights) {
      uint8_t* factors = to.factors + at / factor_weights * FactorBytesOf(weight_.kind) + row % 8 * 16 + row / 8 * 4;
      SetFloat(block.scale, factors);
      SetFloat(block.offset, factors + 8);
    }
  }
}

// Blocks of a byte of scale and 16 of codes, the first 16 weights in the low halves.
void PanelWriter::WriteMxfp4(const RowSource& from, int row, const Panel& to) {
  for (int64_t unit = 0; unit < weight_.Units(); ++unit) {
    const uint8_t* block = BlockAt(from, unit);
    if (block[0] == 255) non_finite_ = true;
    to.scales[unit * ScaleBytesOf(weight_.kind) + row % 8 * 2 + row / 8] = block[0];
    for (int k = 0; k < kPanelChannels; ++k) {
      const auto code = static_cast<uint8_t>(k < 16 ? block[1 + k] & 15 : block[1 + k - 16] >> 4);
      SetCode(unit * kPanelChannels + k, row, code, to.codes);
    }
  }
}

void PanelWriter::WriteQuantized(const RowSource& from, int row, const Panel& to) {
  const weights::QuantizedWeight& weight = *from.quantized;
  const PanelKind kind = weight_.kind;
  const auto groups = static_cast<size_t>(weight.Groups());
  std::vector<uint8_t> codes(static_cast<size_t>(weight_.in)), zeros(groups), scale_codes(groups);
  std::vector<float> scales(groups);
  weight.ReadCodes(from.index, codes.data());
  for (int64_t k = 0; k < weight_.in; ++k) {
    const uint8_t code = codes[static_cast<size_t>(k)];
    SetCode(k, row, CodeBitsOf(kind) == 4 ? code & 15 : code, to.codes);
  }
  const int g = row % 8, half = row / 8;
  // The group of the checkpoint that the weights from channel `k` on belong to.
  const auto group_at = [&](int64_t k) { return static_cast<size_t>(k / weight.Format().group); };
  if (kind == PanelKind::kNvfp4) {
    weight.ReadScaleCodes(from.index, scale_codes.data());
    for (int64_t k = 0; k < weight_.in; k += 16) {
      uint8_t* at = to.scales + k / kPanelChannels * ScaleBytesOf(kind) + g * 4 + half * 2;
      at[k / 16 % 2] = scale_codes[group_at(k)];
    }
    return SetFloat(weight.TensorScale(), to.factors + g * 8 + half * 4);
  }
  if (kind == PanelKind::kMxfp4 || kind == PanelKind::kMxfp8) {
    weight.ReadScaleCodes(from.index, scale_codes.data());
    for (int64_t k = 0; k < weight_.in; k += kPanelChannels) {
      const uint8_t code = scale_codes[group_at(k)];
      if (code == 255) non_finite_ = true;
      to.scales[k / kPanelChannels * ScaleBytesOf(kind) + g * 2 + half] = code;
    }
    return;
  }
  weight.ReadScales(from.index, scales.data());
  if (kind == PanelKind::kInt4Groups) weight.ReadZeros(from.index, zeros.data());
  const int64_t group_weights = int64_t{kPanelChannels} << weight_.group_shift;
  for (int64_t k = 0; k < weight_.in; k += group_weights) {
    uint8_t* at = to.scales + k / group_weights * ScaleBytesOf(kind) + g * (ScaleBytesOf(kind) / 8) + half * 4;
    SetFloat(scales[group_at(k)], at);
    if (kind != PanelKind::kInt4Groups) continue;
    const uint16_t minus_zero = FloatToFp16(-1024.0F - static_cast<float>(zeros[group_at(k)]));
    std::memcpy(at + 8, &minus_zero, 2);
    std::memcpy(at + 10, &minus_zero, 2);
  }
}

}  // namespace kvanta::kernels::cuda
