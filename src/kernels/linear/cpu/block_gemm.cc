// W in blocks: packing into the panels of block_layout.h.
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "formats/minifloat.h"
#include "kernels/linear/cpu/packed_linear.h"
#include "kvanta/error.h"
#include "weights/weight_blocks.h"

namespace kvanta::kernels {
namespace {

using weights::BlockFormat;

constexpr uint32_t FourBytes(int byte) {
  return static_cast<uint32_t>(byte) * 0x01010101U;
}

// Writes columns of blocks into the steps of a panel, initially zero, and reads them back.
class PanelCodec {
 public:
  explicit PanelCodec(const BlockLayout& layout) : layout_(layout) {
    const int8_t* values = layout.table == CodeTable::kIq4 ? weights::kIq4Values : weights::kE2m1Values;
    for (int i = 15; i >= 0; --i) index_[static_cast<uint8_t>(values[i])] = static_cast<uint8_t>(i);
  }

  // The first `weights` of an unpacked block, at weight `k` of the column. False if a scale is not finite.
  bool Write(const weights::UnpackedBlock& block, int weights, int64_t k, int column, uint8_t* panel) const {
    uint8_t* step = panel + k / layout_.StepK() * layout_.StepBytes();
    const auto first = static_cast<int>(k % layout_.StepK()) / kBlockK;  // block of the step
    for (int i = 0; i < weights / kBlockK; ++i) {
      WriteCodes(block.codes + i * kBlockK, column, step + (first + i) * layout_.CodeBytes());
    }
    WriteScale(block.scale, column, step + layout_.Scales());
    if (layout_.has_offset) WriteScale(block.offset, column, step + layout_.Offsets());
    // As stored: values quantized here may exceed fp16.
    bool finite = std::isfinite(block.scale) && std::isfinite(ReadScale(column, step + layout_.Scales()));
    if (layout_.has_offset) finite = finite && std::isfinite(ReadScale(column, step + layout_.Offsets()));
    for (int sub = 0; sub < weights / layout_.sub; ++sub) {
      const int from = sub * layout_.sub / weights::kSubBlockWeights;
      finite = finite && std::isfinite(block.sub_scales[from]);
      WriteSubScale(block.sub_scales[from], block.sub_offsets[from], first * layout_.Subs() + sub, column, step);
    }
    return finite;
  }

  // Values of the column's block of 32 at weight `k`.
  void Read(const uint8_t* panel, int64_t k, int column, float* out) const {
    const uint8_t* step = panel + k / layout_.StepK() * layout_.StepBytes();
    const auto block = static_cast<int>(k % layout_.StepK()) / kBlockK;
    const uint8_t* codes = step + block * layout_.CodeBytes();
    const float scale = ReadScale(column, step + layout_.Scales());
    const float offset = layout_.has_offset ? ReadScale(column, step + layout_.Offsets()) : 0;
    for (int i = 0; i < kBlockK; ++i) {
      const SubScale sub = ReadSubScale(block * layout_.Subs() + i / layout_.sub, column, step);
      out[i] = scale * sub.scale * static_cast<float>(ReadCode(codes, i, column)) + offset * sub.offset;
    }
  }

 private:
  struct SubScale {
    float scale = 1, offset = 1;
  };

  // Quads of `bits` in a plane: quad q is at the field q % (8 / bits) of word q / (8 / bits).
  static void WritePlane(const uint32_t* quads, int shift, int bits, int column, uint8_t* plane) {
    const uint32_t mask = FourBytes((1 << bits) - 1);
    const int fields = 8 / bits;
    for (int word = 0; word < bits; ++word) {
      uint32_t packed = 0;
      for (int field = 0; field < fields; ++field) {
        packed |= (quads[word * fields + field] >> shift & mask) << (field * bits);
      }
      std::memcpy(plane + word * 64 + column * 4, &packed, sizeof packed);
    }
  }

  void WriteCodes(const int8_t* codes, int column, uint8_t* block) const {
    uint8_t bytes[kBlockK];
    if (layout_.table != CodeTable::kNone) {
      for (int i = 0; i < kBlockK; ++i) bytes[i] = index_[static_cast<uint8_t>(codes[i])];
    } else {
      for (int i = 0; i < kBlockK; ++i) bytes[i] = static_cast<uint8_t>(codes[i] + layout_.code_offset);
    }
    uint32_t quads[kBlockK / 4];
    std::memcpy(quads, bytes, sizeof quads);
    WritePlane(quads, 0, layout_.low_bits, column, block);
    if (layout_.high_bits != 0) {
      WritePlane(quads, layout_.low_bits, layout_.high_bits, column, block + layout_.low_bits * 64);
    }
  }

  static int ReadPlane(const uint8_t* plane, int bits, int k, int column) {
    const int fields = 8 / bits, quad = k / 4;
    return plane[quad / fields * 64 + column * 4 + k % 4] >> (quad % fields * bits) & ((1 << bits) - 1);
  }
  int ReadCode(const uint8_t* block, int k, int column) const {
    int code = ReadPlane(block, layout_.low_bits, k, column);
    if (layout_.table == CodeTable::kIq4) return weights::kIq4Values[code];
    if (layout_.table == CodeTable::kE2m1) return weights::kE2m1Values[code];
    if (layout_.high_bits != 0) {
      code |= ReadPlane(block + layout_.low_bits * 64, layout_.high_bits, k, column) << layout_.low_bits;
    }
    return code - layout_.code_offset;
  }

  void WriteScale(float value, int column, uint8_t* scales) const {
    if (layout_.scale == ScaleType::kFp16) {
      const uint16_t bits = FloatToFp16(value);
      std::memcpy(scales + column * 2, &bits, sizeof bits);
    } else if (layout_.scale == ScaleType::kF32) {
      std::memcpy(scales + column * 4, &value, sizeof value);
    } else {  // 2^(e - 128); NaN, which Write() reports, has no exponent
      scales[column] = value >= 0x1p-127F ? static_cast<uint8_t>(std::ilogb(value) + 128) : uint8_t{0};
    }
  }
  float ReadScale(int column, const uint8_t* scales) const {
    if (layout_.scale == ScaleType::kFp16) {
      uint16_t bits;
      std::memcpy(&bits, scales + column * 2, sizeof bits);
      return Fp16ToFloat(bits);
    }
    if (layout_.scale == ScaleType::kE8M0) return std::ldexp(1.0F, scales[column] - 128);
    float value;
    std::memcpy(&value, scales + column * 4, sizeof value);
    return value;
  }

  void WriteSubScale(float scale, float offset, int sub, int column, uint8_t* step) const {
    if (layout_.sub_scale == SubScaleType::kNone) return;
    uint8_t& at = step[layout_.SubScales() + sub * kPanelColumns + column];
    switch (layout_.sub_scale) {
      case SubScaleType::kNone:
        return;
      case SubScaleType::kInt8:
        at = static_cast<uint8_t>(static_cast<int8_t>(scale));
        return;
      case SubScaleType::kUint8:
        at = static_cast<uint8_t>(scale);
        step[layout_.SubOffsets() + sub * kPanelColumns + column] = static_cast<uint8_t>(offset);
        return;
      case SubScaleType::kTwoUint4:
        at = static_cast<uint8_t>(static_cast<int>(scale) | static_cast<int>(offset) << 4);
        return;
      case SubScaleType::kE4M3:
        at = formats::E4m3::Encode(scale);
        return;
    }
  }
  SubScale ReadSubScale(int sub, int column, const uint8_t* step) const {
    if (layout_.sub_scale == SubScaleType::kNone) return {};
    const uint8_t at = step[layout_.SubScales() + sub * kPanelColumns + column];
    switch (layout_.sub_scale) {
      case SubScaleType::kNone:
        break;
      case SubScaleType::kInt8:
        return {static_cast<float>(static_cast<int8_t>(at)), 1};
      case SubScaleType::kUint8:
        return {static_cast<float>(at), static_cast<float>(step[layout_.SubOffsets() + sub * kPanelColumns + column])};
      case SubScaleType::kTwoUint4:
        return {static_cast<float>(at & 15), static_cast<float>(at >> 4)};
      case SubScaleType::kE4M3:
        return {formats::E4m3::Decode(at), 1};
    }
    return {};
  }

  const BlockLayout& layout_;
  uint8_t index_[256] = {};  // index of a table's value
};

// Converts a block quantized here, or read from Q4_0 for a format with offsets.
weights::UnpackedBlock ToUnpacked(const weights::WeightBlock& block) {
  weights::UnpackedBlock unpacked;
  unpacked.scale = Fp16ToFloat(block.scale);
  unpacked.offset = Fp16ToFloat(block.offset);
  for (int sub = 0; sub < 2; ++sub) unpacked.sub_scales[sub] = unpacked.sub_offsets[sub] = 1;
  std::copy_n(block.codes, weights::kBlockWeights, unpacked.codes);
  return unpacked;
}

// Gives a block without an offset codes from 0 on, with the same values.
void AddOffset(weights::UnpackedBlock& block) {
  block.offset = -8 * block.scale;
  for (int i = 0; i < weights::kBlockWeights; ++i) block.codes[i] = static_cast<int8_t>(block.codes[i] + 8);
}

class BlockLinear final : public PackedLinear {
 public:
  // `kind`: for reports. Blocks of other formats than `stored`, and elements, are quantized to 8 or 4 bits.
  BlockLinear(const std::shared_ptr<LinearContext>& context, std::span<const weights::WeightView> stacked,
              std::span<const float> bias, BlockFormat stored, bool int16_activations, std::string_view kind)
      : PackedLinear(context, context->isa.linear.Of(stored, int16_activations), stacked, bias),
        codec_(LayoutOf(stored)),
        kind_(kind) {
    std::atomic<bool> infinite = false;
    PackWeightRows(
        stacked, [&](int column, const weights::WeightView& view, int64_t index, float* row, uint8_t* panel) {
          const bool written = Keeps(stored, view.blocks) ? WriteBlocks(stored, view, index, column, panel)
                                                          : WriteValues(stored, view, index, column, row, panel);
          if (!written) infinite = true;
        });
    if (infinite) {
      throw InputError(fmt::format(
          "{}: a block of weights has a scale or offset that is not finite (in float16, where it is quantized here); "
          "use bf16 weights",
          stacked.front().module.empty() ? "a linear layer" : stacked.front().module));
    }
  }

  void DequantizeRow(int64_t index, float* out) const noexcept override {
    const uint8_t* panel = Panel(index / kPanelColumns);
    for (int64_t k = 0; k < In(); k += weights::kBlockWeights) {
      float values[weights::kBlockWeights];
      codec_.Read(panel, k, static_cast<int>(index % kPanelColumns), values);
      const int64_t n = std::min<int64_t>(weights::kBlockWeights, In() - k);
      std::memcpy(out + k, values, static_cast<size_t>(n) * sizeof(float));
    }
  }

  std::string_view Kind() const noexcept override { return kind_; }

 private:
  static bool Keeps(BlockFormat stored, BlockFormat format) {
    if (format == BlockFormat::kNone) return false;
    return format == stored || (stored == BlockFormat::kQ4_1 && format == BlockFormat::kQ4_0);
  }

  bool WriteBlocks(BlockFormat stored, const weights::WeightView& view, int64_t index, int column,
                   uint8_t* panel) const {
    const weights::BlockFormatInfo& info = Info(view.blocks);
    const uint8_t* bytes = view.RowData(index);
    bool finite = true;
    for (int64_t k = 0; k < In(); k += info.weights, bytes += info.bytes) {
      weights::UnpackedBlock block;
      info.unpack(bytes, block);
      if (stored == BlockFormat::kQ4_1 && view.blocks == BlockFormat::kQ4_0) AddOffset(block);
      finite = codec_.Write(block, info.weights, k, column, panel) && finite;
    }
    return finite;
  }

  // row: buffer for f32 [in].
  bool WriteValues(BlockFormat stored, const weights::WeightView& view, int64_t index, int column, float* row,
                   uint8_t* panel) const {
    weights::ReadWeightRow(view, index, row);
    bool finite = true;
    for (int64_t k = 0; k < In(); k += weights::kBlockWeights) {
      const int n = static_cast<int>(std::min<int64_t>(In() - k, weights::kBlockWeights));
      const weights::WeightBlock block =
          stored == BlockFormat::kQ8_0 ? weights::QuantizeInt8(row + k, n) : weights::QuantizeInt4(row + k, n);
      finite = codec_.Write(ToUnpacked(block), weights::kBlockWeights, k, column, panel) && finite;
    }
    return finite;
  }

  PanelCodec codec_;
  std::string_view kind_;
};

}  // namespace

std::unique_ptr<Linear> MakeInt8Linear(const std::shared_ptr<LinearContext>& context,
                                       std::span<const weights::WeightView> stacked, std::span<const float> bias,
                                       bool int16_activations) {
  return std::make_unique<BlockLinear>(context, stacked, bias, BlockFormat::kQ8_0, int16_activations, "int8");
}

std::unique_ptr<Linear> MakeInt4Linear(const std::shared_ptr<LinearContext>& context,
                                       std::span<const weights::WeightView> stacked, std::span<const float> bias,
                                       bool int16_activations) {
  const bool symmetric =
      std::ranges::all_of(stacked, [](const weights::WeightView& view) { return view.blocks == BlockFormat::kQ4_0; });
  const BlockFormat stored = symmetric ? BlockFormat::kQ4_0 : BlockFormat::kQ4_1;
  return std::make_unique<BlockLinear>(context, stacked, bias, stored, int16_activations, "int4");
}

std::unique_ptr<Linear> MakeBlockLinear(const std::shared_ptr<LinearContext>& context,
                                        std::span<const weights::WeightView> stacked, std::span<const float> bias,
                                        bool int16_activations) {
  const BlockFormat format = stacked.front().blocks;
  return std::make_unique<BlockLinear>(context, stacked, bias, format, int16_activations, Name(format));
}

}  // namespace kvanta::kernels
