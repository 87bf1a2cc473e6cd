#include "kernels/linear/cuda/gpu_linear.h"

#include <algorithm>
#include <bit>
#include <vector>

#include "base/math.h"
#include "kernels/linear/cpu/packed_linear.h"
#include "kernels/linear/cuda/panel_writer.h"

namespace kvanta::kernels {
namespace {

using cuda::kPanelChannels;
using cuda::kPanelRows;
using cuda::kRowTile;
using cuda::PanelKind;
using cuda::PanelWriter;
using cuda::ProductTile;
using cuda::RowSource;

// Panels are packed and uploaded in pieces of about this size.
constexpr int64_t kUploadPieceBytes = int64_t{16} << 20;

PanelKind PanelKindOf(WeightType type) {
  switch (type) {
    case WeightType::kF16:
      return PanelKind::kF16;
    case WeightType::kInt8:
      return PanelKind::kInt8;
    case WeightType::kInt4:
      return PanelKind::kInt4;
    case WeightType::kBf16:
    case WeightType::kF32:
    case WeightType::kStored:
      break;
  }
  return PanelKind::kBf16;
}

// Panels that keep what the views store, where a GPU has such.
PanelKind StoredKind(std::span<const weights::WeightView> stacked) {
  const auto all = [&](auto is_kept) { return std::ranges::all_of(stacked, is_kept); };
  for (const WeightType type : {WeightType::kInt8, WeightType::kInt4}) {
    if (all([type](const weights::WeightView& view) { return KeepsBlocks(type, view.blocks); })) {
      return PanelKindOf(type);
    }
  }
  for (const PanelKind kind : {PanelKind::kMxfp4, PanelKind::kBlocks4, PanelKind::kBlocks8}) {
    if (all([kind](const weights::WeightView& view) { return cuda::KeepsBlocks(kind, view.blocks); })) return kind;
  }
  const DType dtype = stacked.front().dtype;
  const bool elements = all([dtype](const weights::WeightView& view) {
    return view.blocks == weights::BlockFormat::kNone && view.dtype == dtype;
  });
  return elements ? PanelKindOf(WeightTypeOf(dtype)) : PanelKind::kBf16;
}

// A row of stacked weights: its view, and its index in the view.
struct StackedRow {
  const weights::WeightView* view = nullptr;
  int64_t index = 0;
};
StackedRow FindRow(std::span<const weights::WeightView> stacked, int64_t index) {
  size_t view = 0;
  for (; index >= stacked[view].out; ++view) index -= stacked[view].out;
  return {&stacked[view], index};
}

}  // namespace

GpuLinear::GpuLinear(std::shared_ptr<GpuLinearContext> context, std::span<const weights::WeightView> stacked,
                     std::span<const float> bias, LinearKind kind)
    : context_(std::move(context)) {
  weights::CheckWeights(stacked, bias);
  weight_.in = stacked.front().in;
  for (const weights::WeightView& view : stacked) weight_.out += view.out;
  const bool stored = kind.weights == WeightType::kStored;
  weight_.kind = stored ? StoredKind(stacked) : PanelKindOf(kind.weights);
  const bool is_f32 = stored && stacked.front().blocks == weights::BlockFormat::kNone &&
                      std::ranges::all_of(stacked, [](const auto& view) { return view.dtype == DType::kF32; });
  weight_.panels = kind.weights != WeightType::kF32 && !is_f32;
  const bool large_blocks = std::ranges::all_of(
      stacked, [](const auto& view) { return weights::BlockWeights(view.blocks) == weights::kMaxBlockWeights; });
  if (cuda::IsBlocks(weight_.kind) && large_blocks) {
    weight_.group_shift = std::countr_zero(static_cast<uint32_t>(weights::kMaxBlockWeights / kPanelChannels));
  }
  UploadBias(bias);
  if (weight_.panels) {
    PackPanels([&](int64_t row) -> RowSource {
      const StackedRow from = FindRow(stacked, row);
      return {.view = from.view, .index = from.index};
    });
    ReserveRows();
  } else {
    PackUnquantized(stacked);
  }
  weight_.data = data_.data();
}

GpuLinear::GpuLinear(std::shared_ptr<GpuLinearContext> context, std::span<const weights::QuantizedView> stacked,
                     std::span<const float> bias, const weights::KernelFormat& format)
    : context_(std::move(context)) {
  weight_.in = stacked.front().weight->In();
  for (const weights::QuantizedView& view : stacked) weight_.out += view.weight->Out();
  weight_.kind = *cuda::PanelKindOf(format);
  weight_.group_shift = std::countr_zero(static_cast<uint32_t>(std::max(format.group / kPanelChannels, 1)));
  UploadBias(bias);
  PackPanels([&](int64_t row) -> RowSource {
    size_t view = 0;
    for (; row >= stacked[view].weight->Out(); ++view) row -= stacked[view].weight->Out();
    return {.quantized = stacked[view].weight, .index = row};
  });
  ReserveRows();
  weight_.data = data_.data();
}

void GpuLinear::UploadBias(std::span<const float> bias) {
  if (bias.empty()) return;
  Device& device = context_->gpu->device();
  bias_ = device.Allocate(bias.size_bytes());
  device.CopyIn(bias_.data(), bias.data(), bias.size_bytes());
  weight_.bias = bias_.as<float>();
}

void GpuLinear::PackUnquantized(std::span<const weights::WeightView> stacked) {
  Device& device = context_->gpu->device();
  const int64_t row_bytes = weight_.in * static_cast<int64_t>(sizeof(float));
  weight_bytes_ = weight_.out * row_bytes;
  data_ = device.Allocate(static_cast<size_t>(weight_bytes_));
  const int64_t rows_at_once = std::max<int64_t>(1, kUploadPieceBytes / row_bytes);
  std::vector<float> piece(static_cast<size_t>(std::min(rows_at_once, weight_.out) * weight_.in));
  for (int64_t first = 0; first < weight_.out; first += rows_at_once) {
    const int64_t rows = std::min(rows_at_once, weight_.out - first);
    auto read = [&](int64_t row, int) {
      const StackedRow from = FindRow(stacked, first + row);
      weights::ReadWeightRow(*from.view, from.index, piece.data() + row * weight_.in);
    };
    context_->threads->ForEach(rows, read);
    device.CopyIn(data_.data() + first * row_bytes, piece.data(), static_cast<size_t>(rows * row_bytes));
  }
}

void GpuLinear::PackPanels(const std::function<RowSource(int64_t row)>& row_of) {
  Device& device = context_->gpu->device();
  const int64_t panels = CeilDiv(weight_.out, kPanelRows), padded = RoundUp(panels, cuda::kPanelMultiple);
  PanelWriter writer(weight_);
  const PanelWriter::Sections bytes = writer.BytesOfPanel();
  weight_.scales_at = padded * bytes.codes;
  weight_.factors_at = weight_.scales_at + padded * bytes.scales;
  weight_bytes_ = panels * (bytes.codes + bytes.scales + bytes.factors);
  // Allocate returns zeros: the padding panels are zero weights.
  data_ = device.Allocate(static_cast<size_t>(weight_.factors_at + padded * bytes.factors));
  const int64_t panels_at_once = std::clamp<int64_t>(kUploadPieceBytes / bytes.codes, 1, panels);
  std::vector<uint8_t> codes(static_cast<size_t>(panels_at_once * bytes.codes));
  std::vector<uint8_t> scales(static_cast<size_t>(panels_at_once * bytes.scales));
  std::vector<uint8_t> factors(static_cast<size_t>(panels_at_once * bytes.factors));
  const auto upload = [&](const std::vector<uint8_t>& from, int64_t at, int64_t size) {
    if (size > 0) device.CopyIn(data_.data() + at, from.data(), static_cast<size_t>(size));
  };
  for (int64_t first = 0; first < panels; first += panels_at_once) {
    const int64_t count = std::min(panels_at_once, panels - first);
    for (std::vector<uint8_t>* section : {&codes, &scales, &factors}) {
      std::fill(section->begin(), section->end(), uint8_t{0});
    }
    auto pack = [&](int64_t panel, int) {
      const PanelWriter::Panel to{codes.data() + panel * bytes.codes, scales.data() + panel * bytes.scales,
                                  factors.data() + panel * bytes.factors};
      for (int row = 0; row < kPanelRows; ++row) {
        const int64_t out = (first + panel) * kPanelRows + row;
        if (out < weight_.out) writer.Write(row_of(out), row, to);
      }
    };
    context_->threads->ForEach(count, pack);
    upload(codes, first * bytes.codes, count * bytes.codes);
    upload(scales, weight_.scales_at + first * bytes.scales, count * bytes.scales);
    upload(factors, weight_.factors_at + first * bytes.factors, count * bytes.factors);
  }
  writer.CheckFinite();
}

void GpuLinear::ReserveRows() {
  Device& device = context_->gpu->device();
  const auto reserve = [&](Buffer& buffer, int64_t bytes) {
    if (buffer.bytes() < static_cast<size_t>(bytes)) buffer = device.Allocate(static_cast<size_t>(bytes));
  };
  const int64_t units = weight_.Units();
  reserve(context_->codes, kRowBlock * units * kPanelChannels * 2);
  reserve(context_->unit_sums, kRowBlock * units * static_cast<int64_t>(sizeof(float)));
  reserve(context_->factors, kRowBlock * static_cast<int64_t>(sizeof(float)));
  reserve(context_->gated_codes, (PacksParts() ? kMaxGatedRows : kMaxGatedWholeRows) * units * kPanelChannels * 2);
  reserve(context_->gated_unit_sums, kMaxGatedWholeRows * units * static_cast<int64_t>(sizeof(float)));
  reserve(context_->gated_factors, kMaxGatedRows * static_cast<int64_t>(sizeof(float)));
  reserve(context_->finished_blocks, sizeof(uint32_t));
}

// The tile does not affect results. Small tiles occupy all multiprocessors, large ones read x and W less often.
ProductTile GpuLinear::TileFor(int64_t rows) const noexcept {
  if (rows <= kRowTile) return ProductTile::k1x1;
  const auto occupies = [&](ProductTile tile) {
    const int64_t blocks =
        CeilDiv(weight_.out, int64_t{cuda::PanelsOf(tile)} * kPanelRows) * CeilDiv(rows, cuda::RowsOf(tile));
    return 2 * rows > cuda::RowsOf(tile) && 4 * blocks >= int64_t{3} * context_->gpu->Multiprocessors();
  };
  if (occupies(ProductTile::k8x16)) return ProductTile::k8x16;
  return occupies(ProductTile::k4x8) ? ProductTile::k4x8 : ProductTile::k2x4;
}

cuda::PackTarget GpuLinear::Prepack(const float* x, int64_t rows) const noexcept {
  return weight_.panels && rows <= kRowBlock ? Target(x, rows, context_->Packed()) : cuda::PackTarget{};
}

cuda::PackTarget GpuLinear::Target(const float* x, int64_t rows, const cuda::PackedRows& operands) const noexcept {
  context_->prepacked = {.reader = this, .x = x, .rows = rows, .operands = operands};
  return {.packs = true, .kind = weight_.kind, .out = operands};
}

cuda::PackTarget Prepack(const Linear* reader, const float* x, int64_t rows) noexcept {
  const auto* const linear = dynamic_cast<const GpuLinear*>(reader);
  return linear == nullptr ? cuda::PackTarget{} : linear->Prepack(x, rows);
}

cuda::PackTarget PrepackParts(const Linear* reader, const float* x, int64_t rows) noexcept {
  const auto* const linear = dynamic_cast<const GpuLinear*>(reader);
  return linear == nullptr || !linear->PacksParts() ? cuda::PackTarget{} : linear->Prepack(x, rows);
}

// Operands of up to kRowBlock rows, which are packed unless an operation did it.
cuda::PackedRows GpuLinear::Pack(const float* x, int64_t rows) const noexcept {
  const GpuLinearContext::Prepacked prepacked = context_->prepacked;
  const cuda::PackedRows own = context_->Packed();
  if (prepacked.reader == this && prepacked.x == x && prepacked.rows == rows) return prepacked.operands;
  context_->gpu->Run(
      cuda::PackOp{.x = x, .x_stride = weight_.in, .rows = rows, .in = weight_.in, .kind = weight_.kind, .out = own});
  return own;
}

bool GpuLinear::ForwardGated(const float* x, int64_t rows, const GatedForward& gated) const noexcept {
  const int64_t width = weight_.out / 2;
  const ProductTile tile = TileFor(rows);
  if (!weight_.panels || width % kPanelRows != 0 || rows > kMaxGatedRows || tile == ProductTile::k8x16) return false;
  cuda::LinearOp op{.weight = weight_, .tile = tile, .x = Pack(x, rows), .rows = rows};
  if (tile == ProductTile::k1x1) op.tile = ProductTile::k2x1;
  op.gated = {.width = width, .activation = gated.activation, .limit = gated.limit, .out = gated.out};
  const auto* const reader = dynamic_cast<const GpuLinear*>(gated.reader);
  if (reader != nullptr && reader->weight_.panels && (reader->PacksParts() || rows <= kMaxGatedWholeRows)) {
    op.gated.pack = reader->Target(gated.out, rows, context_->Gated());
    if (!reader->PacksParts()) op.gated.finished_blocks = context_->finished_blocks.as<uint32_t>();
  }
  context_->gpu->Run(op);
  return true;
}

void GpuLinear::Forward(const float* x, int64_t rows, float* y, int64_t y_stride, RowArgmax* argmaxes) const noexcept {
  CudaContext& gpu = *context_->gpu;
  cuda::LinearOp op;
  op.weight = weight_;
  op.y_stride = y_stride;
  const int64_t at_once = weight_.panels ? kRowBlock : rows;
  for (int64_t row = 0; row < rows; row += at_once) {
    op.rows = std::min(at_once, rows - row);
    op.y = y + row * y_stride;
    if (weight_.panels) {
      op.x = Pack(x + row * weight_.in, op.rows);
      op.tile = TileFor(op.rows);
    } else {
      op.x_f32 = x + row * weight_.in;
    }
    gpu.Run(op);
  }
  if (argmaxes == nullptr || rows == 0) return;
  gpu.Run(cuda::ArgmaxOp{.x = y, .stride = y_stride, .rows = rows, .width = weight_.out, .argmaxes = argmaxes});
}

void GpuLinear::DequantizeRow(int64_t index, float* out) const noexcept {
  context_->gpu->Run(cuda::EmbedOp{.table = weight_, .ids = nullptr, .id = index, .rows = 1, .out = out});
}

std::string_view GpuLinear::Kind() const noexcept {
  return weight_.panels ? Name(weight_.kind) : "f32";
}

}  // namespace kvanta::kernels
