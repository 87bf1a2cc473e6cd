// W in blocks of 32 k with fp16 scales: 8 bits, 4 bits, 4 bits with offsets. The layout of a panel is that of
// block_weight.h.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "kernels/linear/cpu/packed_linear.h"
#include "kernels/linear/weight_blocks.h"
#include "kvanta/error.h"

namespace kvanta::kernels {
namespace {

enum class Blocks : uint8_t { kInt8, kInt4, kInt4Offset };

// Layout of a step.
struct StepLayout {
  int bits;
  bool has_offset;

  explicit StepLayout(Blocks kind) : bits(kind == Blocks::kInt8 ? 8 : 4), has_offset(kind == Blocks::kInt4Offset) {}

  int CodeOffset() const { return has_offset ? 0 : 1 << (bits - 1); }
  int64_t CodeBytes() const { return int64_t{kPanelColumns} * kBlockWeights * bits / 8; }
  int64_t Bytes() const { return CodeBytes() + int64_t{2} * kPanelColumns * (has_offset ? 2 : 1); }
  // Byte of weight k of a column, and the shift of its code in it.
  int64_t CodeByte(int k, int column) const {
    const int per_word = 32 / bits;  // codes in 4 bytes
    return (k / per_word * kPanelColumns + column) * 4 + k % 4;
  }
  int CodeShift(int k) const { return bits == 8 ? 0 : k % 8 / 4 * 4; }

  void Write(const WeightBlock& block, int column, uint8_t* step) const {
    for (int k = 0; k < kBlockWeights; ++k) {
      const auto code = static_cast<uint8_t>(block.codes[k] + CodeOffset());
      step[CodeByte(k, column)] |= static_cast<uint8_t>(code << CodeShift(k));
    }
    uint8_t* scales = step + CodeBytes();
    std::memcpy(scales + 2 * column, &block.scale, 2);
    if (has_offset) std::memcpy(scales + 2 * (kPanelColumns + column), &block.offset, 2);
  }

  WeightBlock Read(const uint8_t* step, int column) const {
    WeightBlock block;
    for (int k = 0; k < kBlockWeights; ++k) {
      const int code = step[CodeByte(k, column)] >> CodeShift(k) & ((1 << bits) - 1);
      block.codes[k] = static_cast<int8_t>(code - CodeOffset());
    }
    const uint8_t* scales = step + CodeBytes();
    std::memcpy(&block.scale, scales + 2 * column, 2);
    if (has_offset) std::memcpy(&block.offset, scales + 2 * (kPanelColumns + column), 2);
    return block;
  }
};

const WeightKernels& KernelsOf(Blocks kind, bool int16_activations, const LinearKernels& kernels) {
  switch (kind) {
    case Blocks::kInt8:
      return int16_activations ? kernels.int8_wide : kernels.int8;
    case Blocks::kInt4:
      return int16_activations ? kernels.int4_wide : kernels.int4;
    case Blocks::kInt4Offset:
      break;
  }
  return int16_activations ? kernels.int4_offset_wide : kernels.int4_offset;
}

bool IsKept(BlockFormat format, Blocks kind) {
  if (kind == Blocks::kInt8) return format == BlockFormat::kQ8_0;
  return format == BlockFormat::kQ4_0 || (kind == Blocks::kInt4Offset && format == BlockFormat::kQ4_1);
}

class BlockLinear final : public PackedLinear {
 public:
  BlockLinear(const std::shared_ptr<LinearContext>& context, std::span<const WeightView> stacked,
              std::span<const float> bias, Blocks kind, bool int16_activations)
      : PackedLinear(context, KernelsOf(kind, int16_activations, context->isa.linear), stacked, bias), kind_(kind) {
    const StepLayout layout(kind);
    std::atomic<bool> infinite = false;
    PackRows(stacked, [&](int column, const WeightView& view, int64_t index, float* row, uint8_t* panel) {
      const bool kept = IsKept(view.blocks, kind);
      const int64_t size = BlockBytes(view.blocks);
      const uint8_t* blocks = static_cast<const uint8_t*>(view.data) + index * Steps() * size;
      if (!kept) ReadWeightRow(view, index, row);
      for (int64_t step = 0; step < Steps(); ++step) {
        WeightBlock block;
        if (kept) {
          block = ReadBlock(blocks + step * size, view.blocks);
          if (view.blocks == BlockFormat::kQ4_0 && kind == Blocks::kInt4Offset) ToQ41(block);
        } else {
          block = Quantize(row + step * kBlockWeights, In() - step * kBlockWeights);
        }
        const float scale = Fp16ToFloat(block.scale), offset = Fp16ToFloat(block.offset);
        if (!std::isfinite(scale) || !std::isfinite(offset)) infinite = true;
        layout.Write(block, column, panel + step * layout.Bytes());
      }
    });
    if (infinite) {
      throw InputError("a block of weights has a scale or offset that is not finite in float16; use bf16 weights");
    }
  }

  void DequantizeRow(int64_t index, float* out) const noexcept override {
    const StepLayout layout(kind_);
    const uint8_t* panel = Panel(index / kPanelColumns);
    for (int64_t step = 0; step < Steps(); ++step) {
      float values[kBlockWeights];
      BlockValues(layout.Read(panel + step * layout.Bytes(), static_cast<int>(index % kPanelColumns)), values);
      const int64_t n = std::min<int64_t>(kBlockWeights, In() - step * kBlockWeights);
      std::memcpy(out + step * kBlockWeights, values, static_cast<size_t>(n) * sizeof(float));
    }
  }

  std::string_view Kind() const noexcept override { return kind_ == Blocks::kInt8 ? "int8" : "int4"; }

 private:
  // Converts Q4_0 to Q4_1 with the same values.
  static void ToQ41(WeightBlock& block) {
    block.offset = FloatToFp16(-8 * Fp16ToFloat(block.scale));
    for (int8_t& code : block.codes) code = static_cast<int8_t>(code + 8);
  }
  WeightBlock Quantize(const float* x, int64_t left) const {
    const int n = static_cast<int>(std::min<int64_t>(left, kBlockWeights));
    return kind_ == Blocks::kInt8 ? QuantizeInt8(x, n) : QuantizeInt4(x, n);
  }

  Blocks kind_;
};

}  // namespace

std::unique_ptr<Linear> MakeInt8Linear(const std::shared_ptr<LinearContext>& context,
                                       std::span<const WeightView> stacked, std::span<const float> bias,
                                       bool int16_activations) {
  return std::make_unique<BlockLinear>(context, stacked, bias, Blocks::kInt8, int16_activations);
}

std::unique_ptr<Linear> MakeInt4Linear(const std::shared_ptr<LinearContext>& context,
                                       std::span<const WeightView> stacked, std::span<const float> bias,
                                       bool int16_activations) {
  const bool symmetric = std::all_of(stacked.begin(), stacked.end(),
                                     [](const WeightView& view) { return view.blocks == BlockFormat::kQ4_0; });
  const Blocks kind = symmetric ? Blocks::kInt4 : Blocks::kInt4Offset;
  return std::make_unique<BlockLinear>(context, stacked, bias, kind, int16_activations);
}

}  // namespace kvanta::kernels
