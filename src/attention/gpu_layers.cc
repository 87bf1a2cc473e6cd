#include "attention/gpu_layers.h"

#include <fmt/format.h>

#include <bit>
#include <cmath>
#include <iterator>
#include <utility>

#include "attention/batch.h"
#include "formats/bit_allocation.h"
#include "formats/klt_levels.h"
#include "formats/transform.h"
#include "kernels/attention/cuda/kernel_list.h"
#include "kernels/linear/cuda/gpu_linear.h"
#include "kvanta/error.h"

namespace kvanta::attention {
namespace {

using cache::PageKind;
using kernels::cuda::AppendParams;
using kernels::cuda::AppendSides;
using kernels::cuda::AttentionParams;
using kernels::cuda::CellOffsets;
using kernels::cuda::FindAppend;
using kernels::cuda::FindAppendPair;
using kernels::cuda::FindAttend;

CellOffsets MakeOffsets(const formats::CellSections& sections, int64_t first_cell, int64_t head_stride) {
  return {.first_cell = first_cell,
          .head_stride = head_stride,
          .codes = sections.codes,
          .block_scales = sections.block_scales,
          .block_offsets = sections.block_offsets,
          .token_scales = sections.token_scales,
          .token_offsets = sections.token_offsets,
          .channel_scales = sections.channel_scales,
          .channel_offsets = sections.channel_offsets};
}

}  // namespace

void PackOutputs(const kernels::Linear* reader, int64_t rows, int64_t tiles_per_row, AttentionParams& params) noexcept {
  params.pack = kernels::PrepackParts(reader, params.out, rows);
  if (params.pack.packs || tiles_per_row == 0 || !params.CombinesTiles()) return;
  params.pack = kernels::Prepack(reader, params.out, rows);
  if (params.pack.packs) params.row_tiles = static_cast<int32_t>(tiles_per_row);
}

SideCounts CountsOf(const kernels::cuda::AppendSums& sums) noexcept {
  SideCounts counts;
  counts.values = sums.values;
  counts.saturated = sums.saturated;
  counts.nan = sums.nan;
  counts.blocks = sums.blocks;
  counts.zero_blocks = sums.zero_blocks;
  return counts;
}

std::string FindUnsupported(const formats::LayerScheme& scheme) {
  if (!scheme.ages.empty()) return fmt::format("precision by age or by pressure, {}", scheme.scheme.ToString());
  for (const formats::Format* format : {scheme.k.format, scheme.v.format}) {
    if (FindAppend(*format) < 0) return fmt::format("format {}", format->name);
    if (std::string padding = formats::DescribePadding(*format, scheme.shape.head_dim); !padding.empty()) {
      return fmt::format("padded rows ({})", padding);
    }
  }
  if (FindAttend(scheme) < 0) {
    return fmt::format("k={},v={}", scheme.k.format->name, scheme.v.format->name);
  }
  return "";
}

// Outlier channels and rotated channels of latents, in a third cell or in place of V's, are taken from rows as they
// are.
bool TransformsHeads(const GpuLayer& layer) noexcept {
  return layer.cells.size() == 2 && !layer.cells.back().params.is_key &&
         layer.attention.head_dim <= kernels::cuda::kMaxTransformedHead;
}

void AppendCells(const GpuLayer& layer, const AppendStep& step, kernels::CudaContext& gpu) noexcept {
  const bool closes = layer.exact_open && step.max_closed_slots != 0;
  // new_rows, closed_rows: whether they are written.
  const auto launch = [&](bool new_rows, bool closed_rows) {
    AppendSides sides{.sides = {}, .count = 0};
    if (new_rows && step.rows.q != nullptr) {
      sides.queries = {.q = step.rows.q,
                       .stride = step.rows.q_stride,
                       .rows = static_cast<int32_t>(step.rows.rows),
                       .heads = layer.attention.heads,
                       .head_dim = layer.attention.head_dim,
                       .transform = step.rows.q_transform};
    }
    const auto kernel_of = [&](const GpuCell& cell) {
      if (closed_rows && layer.pair_kernel >= 0) return layer.pair_kernel;
      return layer.exact_open && !closed_rows ? cell.exact_kernel : cell.kernel;
    };
    for (size_t i = 0; i < layer.cells.size(); ++i) {
      const GpuCell& cell = layer.cells[i];
      AppendParams& params = sides.sides[sides.count++] = cell.params;
      params.rows = (params.is_key ? step.rows.k : step.rows.v) + cell.first_channel;
      params.stride = step.rows.kv_stride;
      if (params.is_key) params.heads = step.rows.k_transform;
      params.to_exact = layer.exact_open;
      if (new_rows) {
        params.slot_mapping = step.slots;
        params.max_slots = step.max_slots;
      }
      if (closed_rows) {
        params.closed_mapping = step.closed_slots;
        params.max_closed_slots = step.max_closed_slots;
      }
      const bool has_next = i + 1 < layer.cells.size() && sides.count < std::ssize(sides.sides);
      if (has_next && kernel_of(layer.cells[i + 1]) == kernel_of(cell)) continue;
      gpu.Append(kernel_of(cell), sides);
      sides.count = 0;
      sides.queries = {};
    }
  };
  launch(true, closes && step.is_decode);
  if (closes && !step.is_decode) launch(false, true);
}

template <class T>
const T* GpuLayerBuilder::Upload(const std::vector<T>& values) {
  const size_t bytes = values.size() * sizeof(T);
  const Buffer& buffer = constants_.emplace_back(pool_.device().Allocate(bytes));
  pool_.device().CopyIn(buffer.data(), values.data(), bytes);
  return buffer.as<T>();
}

GpuLayer GpuLayerBuilder::Build(size_t index, kernels::cuda::AppendSums* sums, const std::string& gpu) {
  const formats::LayerScheme& scheme = pool_.Layout().layers[index];
  const AttentionSpec& spec = config_.layers[index];
  const formats::LayerScales& scales = config_.scales[index];
  if (const std::string missing = FindUnsupported(scheme); !missing.empty()) {
    throw InputError(fmt::format("layer {}: {} does not support {}; device cpu does", index, gpu, missing));
  }
  GpuLayer layer;
  layer.exact_open = scheme.exact_open;
  layer.slots = scheme.group;
  layer.attend_kernel = FindAttend(scheme);
  layer.cells.push_back(BuildSide(index, true));
  if (!scheme.SharesCell()) layer.cells.push_back(BuildSide(index, false));
  const bool has_unquantized = scheme.UnquantizedShape().head_dim != 0;
  if (has_unquantized) layer.cells.push_back(BuildUnquantized(index, layer.cells[0].params));
  if (layer.cells.size() == 2) layer.pair_kernel = FindAppendPair(*scheme.k.format, *scheme.v.format);
  for (GpuCell& cell : layer.cells) cell.params.sums = sums + (cell.params.is_key ? 0 : 1);

  const auto static_scales = [&](const formats::Side& side, const formats::SideScales& given) {
    return Upload(side.format->scaling.per_head ? given.scale : std::vector<float>(given.scale.size(), 1.0F));
  };
  AttentionParams& params = layer.attention;
  const AppendParams& k = layer.cells[0].params;
  params.key_dim = spec.KeyDim();
  params.heads = spec.heads;
  params.kv_heads = spec.kv_heads;
  params.head_dim = spec.head_dim;
  params.page_size = scheme.shape.tokens;
  params.page_shift = std::countr_zero(static_cast<uint32_t>(scheme.shape.tokens));
  params.visibility = spec.visibility;
  params.softmax_scale = spec.softmax_scale;
  params.softcap = spec.softcap;
  if (!spec.sinks.empty()) params.sinks = Upload(spec.sinks);
  params.exact_pages = ExactPagesOf(scheme);
  params.k_hadamard = scheme.k.hadamard;
  params.v_hadamard = scheme.v.hadamard;
  params.hadamard_norm = k.hadamard_norm;
  params.hadamard_block = k.hadamard_block;
  params.k_mean = k.mean;
  if (scheme.k.query) params.query_matrices = Upload(scales.k.query->query_matrices());
  params.k_scale = static_scales(scheme.k, scales.k);
  params.k_type = kernels::cuda::MakeKvTypeDesc(scheme.k.format->code, scheme.k.format->scaling);
  params.k_levels = k.levels;
  params.k_allocations = k.allocations;
  params.quantized = k.quantized;
  params.exact = k.exact;
  params.k = k.cell;
  params.exact_k = k.exact_cell;
  if (!scheme.SharesCell()) {
    const AppendParams& v = layer.cells[1].params;
    params.v_scale = static_scales(scheme.v, scales.v);
    params.v_type = kernels::cuda::MakeKvTypeDesc(scheme.v.format->code, scheme.v.format->scaling);
    params.v_levels = v.levels;
    params.v = v.cell;
    params.exact_v = v.exact_cell;
  }
  if (has_unquantized) {
    const AppendParams& unquantized = layer.cells.back().params;
    params.unquantized_dim = unquantized.head_dim;
    params.unquantized_decode = kernels::cuda::DecodeKindOf(scheme.unquantized_format->code);
    params.outliers = unquantized.outliers;
    params.unquantized = unquantized.cell;
    params.exact_unquantized = unquantized.exact_cell;
  }
  return layer;
}

GpuCell GpuLayerBuilder::BuildSide(size_t index, bool is_key) {
  const formats::LayerScheme& scheme = pool_.Layout().layers[index];
  const formats::Side& side = is_key ? scheme.k : scheme.v;
  const formats::SideScales& scales = is_key ? config_.scales[index].k : config_.scales[index].v;
  const int block = formats::HadamardBlock(scheme.shape.head_dim);
  GpuCell cell;
  cell.kernel = FindAppend(*side.format);
  cell.exact_kernel = FindAppend(ExactFormat());
  AppendParams& params = cell.params;
  params.kv_heads = scheme.kv_heads;
  params.row_dim = scheme.shape.head_dim;
  params.head_dim = scheme.shape.head_dim;
  params.page_size = scheme.shape.tokens;
  params.is_key = is_key;
  params.is_canonical = scheme.HasEntries();
  params.hadamard = side.hadamard;
  params.hadamard_norm = static_cast<float>(1.0 / std::sqrt(static_cast<double>(block)));
  params.hadamard_block = block;
  if (side.mean) params.mean = Upload(scales.mean);
  if (side.query) params.query_matrices = Upload(scales.query->key_matrices());
  if (side.outliers != 0) {
    params.outliers = Upload(std::vector<int32_t>(scales.outliers.begin(), scales.outliers.end()));
  }
  params.outlier_count = side.outliers;
  params.scale = Upload(scales.scale);
  if (formats::IsTrellis(side.format->code)) {
    params.levels = Upload(std::vector{formats::kTrellisLevels[side.format->code_bits - formats::kMinTrellisBits]});
  }
  if (formats::IsAllocated(side.format->code)) {
    params.levels = Upload(std::vector(std::begin(formats::kKltLevels.widths), std::end(formats::kKltLevels.widths)));
    params.allocations = Upload(scales.query->allocations());
  }
  params.quantized = {pool_.Base(scheme.group, PageKind::kQuantized),
                      pool_.RecordBytes(scheme.group, PageKind::kQuantized)};
  params.cell = MakeOffsets(side.sections, is_key ? scheme.KCell(0) : scheme.VCell(0), scheme.HeadBytes());
  if (scheme.exact_open) {
    params.exact = {pool_.Base(scheme.group, PageKind::kExact), pool_.RecordBytes(scheme.group, PageKind::kExact)};
    params.exact_cell = MakeOffsets(formats::Bf16Sections(scheme.shape),
                                    is_key ? scheme.ExactKCell(0) : scheme.ExactVCell(0), scheme.ExactHeadBytes());
  }
  return cell;
}

// K's unquantized channels: read from the same rows, in a cell of the same format in both records.
GpuCell GpuLayerBuilder::BuildUnquantized(size_t index, const AppendParams& k) const {
  const formats::LayerScheme& scheme = pool_.Layout().layers[index];
  GpuCell cell;
  cell.kernel = cell.exact_kernel = FindAppend(*scheme.unquantized_format);
  if (scheme.SharesCell()) cell.first_channel = scheme.shape.head_dim;
  AppendParams& params = cell.params;
  params = k;
  params.is_unquantized = true;
  params.head_dim = scheme.UnquantizedShape().head_dim;
  params.hadamard = false;
  params.query_matrices = nullptr;
  params.cell = MakeOffsets(scheme.UnquantizedSections(), scheme.KUnquantized(0), scheme.HeadBytes());
  if (scheme.exact_open) {
    params.exact_cell = MakeOffsets(scheme.UnquantizedSections(), scheme.ExactKUnquantized(0), scheme.ExactHeadBytes());
  }
  return cell;
}

}  // namespace kvanta::attention
