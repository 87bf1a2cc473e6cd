#include "kernels/linear/cuda/gpu_linear.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/dtype.h"
#include "base/math.h"
#include "kernels/linear/cpu/packed_linear.h"
#include "kernels/linear/cuda/fragment_layout.h"
#include "kvanta/error.h"
#include "weights/weight_blocks.h"

namespace kvanta::kernels {
namespace {

using cuda::kPanelChannels;
using cuda::kPanelRows;
using cuda::kRowTile;
using cuda::PanelKind;
using cuda::ProductTile;

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

// Type that keeps what the views store, where a GPU has one: blocks of 8 and 4 bits with fp16 scales, or elements. All
// other blocks become bf16.
WeightType KeptType(std::span<const weights::WeightView> stacked) {
  const auto all = [&](auto is_kept) { return std::ranges::all_of(stacked, is_kept); };
  for (const WeightType type : {WeightType::kInt8, WeightType::kInt4}) {
    if (all([type](const weights::WeightView& view) { return KeepsBlocks(type, view.blocks); })) return type;
  }
  const weights::WeightView& first = stacked.front();
  if (all([&](const weights::WeightView& view) {
        return view.blocks == weights::BlockFormat::kNone && view.dtype == first.dtype;
      })) {
    return WeightTypeOf(first.dtype);
  }
  return WeightType::kBf16;
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

// Packs rows of W into panel units.
class UnitWriter {
 public:
  UnitWriter(PanelKind kind, int64_t in) : kind_(kind), in_(in) {
    for (int row = 0; row < kPanelRows; ++row) {
      for (int k = 0; k < kPanelChannels; ++k) offsets_[row][k] = cuda::FragmentOffsetOf(kind, row, k);
    }
  }

  // `values`: workspace, f32 [in]. `panel`: the panel's bytes, initially zero.
  void Write(const StackedRow& from, int row, float* values, uint8_t* panel) {
    const bool blocks = kind_ == PanelKind::kInt8 || kind_ == PanelKind::kInt4;
    const WeightType type = kind_ == PanelKind::kInt8 ? WeightType::kInt8 : WeightType::kInt4;
    const bool as_stored = blocks && KeepsBlocks(type, from.view->blocks);
    if (!as_stored) weights::ReadWeightRow(*from.view, from.index, values);
    const int64_t units = CeilDiv(in_, kPanelChannels);
    for (int64_t unit = 0; unit < units; ++unit) {
      uint8_t* to = panel + unit * cuda::UnitBytesOf(kind_).total;
      const int n = static_cast<int>(std::min<int64_t>(kPanelChannels, in_ - unit * kPanelChannels));
      if (blocks) {
        WriteBlock(as_stored ? StoredBlock(from, unit) : Quantize(values + unit * kPanelChannels, n), row, to);
      } else {
        WriteElements(values + unit * kPanelChannels, n, row, to);
      }
    }
  }

  bool HasNonFinite() const noexcept { return non_finite_; }

 private:
  static weights::WeightBlock StoredBlock(const StackedRow& from, int64_t block) {
    const weights::WeightView& view = *from.view;
    return weights::ReadBlock(view.RowData(from.index) + block * weights::BlockBytes(view.blocks), view.blocks);
  }
  weights::WeightBlock Quantize(const float* x, int n) const {
    return kind_ == PanelKind::kInt8 ? weights::QuantizeInt8(x, n) : weights::QuantizeInt4(x, n);
  }

  void WriteElements(const float* x, int n, int row, uint8_t* unit) const {
    for (int k = 0; k < n; ++k) {
      const uint16_t code = kind_ == PanelKind::kBf16 ? FloatToBf16(x[k]) : FloatToFp16(x[k]);
      std::memcpy(unit + offsets_[row][k].byte, &code, sizeof(code));
    }
  }

  void WriteBlock(weights::WeightBlock block, int row, uint8_t* unit) {
    // Unsigned codes: 8-bit ones plus 128, which the kernel subtracts again; 4-bit ones from 0 on, with the shift moved
    // into the offset (8 times the scale is exact in fp16).
    int offset = kind_ == PanelKind::kInt8 ? 128 : 0;
    if (kind_ == PanelKind::kInt4 && *std::min_element(block.codes, block.codes + weights::kBlockWeights) < 0) {
      offset = 8;
      block.offset = FloatToFp16(-8 * Fp16ToFloat(block.scale));
    }
    if (!std::isfinite(Fp16ToFloat(block.scale)) || !std::isfinite(Fp16ToFloat(block.offset))) non_finite_ = true;
    for (int k = 0; k < kPanelChannels; ++k) {
      const cuda::FragmentOffset offset_in_unit = offsets_[row][k];
      unit[offset_in_unit.byte] |= static_cast<uint8_t>((block.codes[k] + offset) << offset_in_unit.bit);
    }
    uint8_t* scale = unit + cuda::ScaleOffset(kind_, row);
    std::memcpy(scale, &block.scale, sizeof(block.scale));
    if (kind_ == PanelKind::kInt4) std::memcpy(scale + 4, &block.offset, sizeof(block.offset));
  }

  PanelKind kind_;
  int64_t in_;
  cuda::FragmentOffset offsets_[kPanelRows][kPanelChannels];
  std::atomic<bool> non_finite_ = false;
};

}  // namespace

GpuLinear::GpuLinear(std::shared_ptr<GpuLinearContext> context, std::span<const weights::WeightView> stacked,
                     std::span<const float> bias, LinearKind kind)
    : context_(std::move(context)) {
  weights::CheckWeights(stacked, bias);
  weight_.in = stacked.front().in;
  for (const weights::WeightView& view : stacked) weight_.out += view.out;
  const WeightType type = kind.weights == WeightType::kStored ? KeptType(stacked) : kind.weights;
  weight_.kind = PanelKindOf(type);
  weight_.panels = type != WeightType::kF32;
  Device& device = context_->gpu->device();
  if (!bias.empty()) {
    bias_ = device.Allocate(bias.size_bytes());
    device.CopyIn(bias_.data(), bias.data(), bias.size_bytes());
    weight_.bias = bias_.as<float>();
  }
  if (weight_.panels) {
    PackPanels(stacked);
    ReserveRows();
  } else {
    PackUnquantized(stacked);
  }
  weight_.data = data_.data();
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

void GpuLinear::PackPanels(std::span<const weights::WeightView> stacked) {
  Device& device = context_->gpu->device();
  const int64_t panels = CeilDiv(weight_.out, kPanelRows);
  const int64_t panel_bytes = weight_.Units() * cuda::UnitBytesOf(weight_.kind).total;
  weight_bytes_ = panels * panel_bytes;
  // Allocate returns zeros: the padding panels are zero weights.
  data_ = device.Allocate(static_cast<size_t>(RoundUp(panels, cuda::kPanelMultiple) * panel_bytes));
  const int64_t panels_at_once = std::clamp<int64_t>(kUploadPieceBytes / panel_bytes, 1, panels);
  std::vector<uint8_t> piece(static_cast<size_t>(panels_at_once * panel_bytes));
  const auto workers = static_cast<size_t>(context_->threads->Threads());
  std::vector<float> values(workers * static_cast<size_t>(weight_.in));
  UnitWriter writer(weight_.kind, weight_.in);
  for (int64_t first = 0; first < panels; first += panels_at_once) {
    const int64_t count = std::min(panels_at_once, panels - first);
    std::fill(piece.begin(), piece.end(), uint8_t{0});
    auto pack = [&](int64_t panel, int worker) {
      for (int row = 0; row < kPanelRows; ++row) {
        const int64_t out = (first + panel) * kPanelRows + row;
        if (out >= weight_.out) break;
        writer.Write(FindRow(stacked, out), row, values.data() + worker * weight_.in,
                     piece.data() + panel * panel_bytes);
      }
    };
    context_->threads->ForEach(count, pack);
    device.CopyIn(data_.data() + first * panel_bytes, piece.data(), static_cast<size_t>(count * panel_bytes));
  }
  if (writer.HasNonFinite()) {
    throw InputError("a block of weights has a scale or offset that is not finite in float16; use bf16 weights");
  }
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

void GpuLinear::Forward(const float* x, int64_t rows, float* y, int64_t y_stride, RowArgmax* argmaxes) const noexcept {
  CudaContext& gpu = *context_->gpu;
  cuda::LinearOp op;
  op.weight = weight_;
  op.y_stride = y_stride;
  op.x = context_->Packed();
  const int64_t at_once = weight_.panels ? kRowBlock : rows;
  for (int64_t row = 0; row < rows; row += at_once) {
    op.rows = std::min(at_once, rows - row);
    op.y = y + row * y_stride;
    if (weight_.panels) {
      gpu.Run(cuda::PackOp{.x = x + row * weight_.in,
                           .x_stride = weight_.in,
                           .rows = op.rows,
                           .in = weight_.in,
                           .kind = weight_.kind,
                           .out = op.x});
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
  if (!weight_.panels) return "f32";
  switch (weight_.kind) {
    case PanelKind::kF16:
      return "f16";
    case PanelKind::kInt8:
      return "int8";
    case PanelKind::kInt4:
      return "int4";
    case PanelKind::kBf16:
      break;
  }
  return "bf16";
}

}  // namespace kvanta::kernels
