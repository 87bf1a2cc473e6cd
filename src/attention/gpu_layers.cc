#include "attention/gpu_layers.h"

#include <fmt/format.h>

#include <bit>
#include <cmath>
#include <utility>

#include "attention/batch.h"
#include "formats/transform.h"
#include "kernels/attention/cuda/kernel_list.h"
#include "kvanta/error.h"

namespace kvanta::attention {
namespace {

using cache::PageKind;
using kernels::cuda::AppendParams;
using kernels::cuda::AttentionParams;
using kernels::cuda::CellPlace;
using kernels::cuda::FindAppend;
using kernels::cuda::FindAttend;

CellPlace PlaceOf(const formats::CellSections& sections, int64_t first, int64_t stride) {
  return {.first = first,
          .stride = stride,
          .codes = sections.codes,
          .block_scales = sections.block_scales,
          .block_offsets = sections.block_offsets,
          .token_scales = sections.token_scales,
          .token_offsets = sections.token_offsets,
          .channel_scales = sections.channel_scales,
          .channel_offsets = sections.channel_offsets};
}

// What a layer needs and no kernel does, or "".
std::string Missing(const formats::LayerScheme& scheme) {
  for (const formats::Format* format : {scheme.k.format, scheme.v.format}) {
    if (FindAppend(*format) < 0) return fmt::format("format {}", format->name);
  }
  if (FindAttend(scheme) < 0) {
    return fmt::format("k={},v={}", scheme.k.format->name, scheme.v.format->name);
  }
  return "";
}

}  // namespace

template <class T>
const T* GpuLayers::Upload(const std::vector<T>& values) {
  const size_t bytes = values.size() * sizeof(T);
  const Buffer& buffer = constants_.emplace_back(store_.device().Allocate(bytes));
  store_.device().CopyIn(buffer.data(), values.data(), bytes);
  return buffer.as<T>();
}

GpuLayer GpuLayers::Make(size_t index, kernels::cuda::AppendSums* sums, const std::string& gpu) {
  const formats::LayerScheme& scheme = store_.Layout().layers[index];
  const AttentionSpec& attention = config_.layers[index];
  const formats::LayerScales& scales = config_.scales[index];
  if (const std::string missing = Missing(scheme); !missing.empty()) {
    throw InputError(fmt::format("layer {}: {} has no kernel for {}; the CPU's backends have", index, gpu, missing));
  }
  GpuLayer layer;
  layer.exact_open = scheme.exact_open;
  layer.group = scheme.group;
  layer.attend_kernel = FindAttend(scheme);
  layer.cells.push_back(SideOf(index, true));
  if (!scheme.SharesCell()) layer.cells.push_back(SideOf(index, false));
  const bool has_unquantized = scheme.UnquantizedShape().head_dim != 0;
  if (has_unquantized) layer.cells.push_back(UnquantizedOf(index, layer.cells[0].side));
  for (GpuCell& cell : layer.cells) cell.side.sums = sums + (cell.side.is_key ? 0 : 1);

  const auto static_scales = [&](const formats::Side& side, const formats::SideScales& given) {
    return Upload(side.format->scaling.per_head ? given.scale : std::vector<float>(given.scale.size(), 1.0F));
  };
  AttentionParams& attend = layer.attend;
  const AppendParams& k = layer.cells[0].side;
  attend.key_dim = attention.KeyDim();
  attend.heads = attention.heads;
  attend.kv_heads = attention.kv_heads;
  attend.head_dim = attention.head_dim;
  attend.page_size = scheme.shape.tokens;
  attend.page_shift = std::countr_zero(static_cast<uint32_t>(scheme.shape.tokens));
  attend.sliding_window = attention.visibility.span;
  attend.softmax_scale = attention.softmax_scale;
  attend.softcap = attention.softcap;
  attend.exact_pages = scheme.exact_pages;
  attend.exact_sinks = scheme.exact_open ? scheme.sink_pages : 0;
  attend.k_hadamard = scheme.k.hadamard;
  attend.v_hadamard = scheme.v.hadamard;
  attend.hadamard_norm = k.hadamard_norm;
  attend.hadamard_block = k.hadamard_block;
  attend.k_mean = k.mean;
  attend.k_scale = static_scales(scheme.k, scales.k);
  attend.k_type = kernels::cuda::MakeKvTypeDesc(scheme.k.format->code, scheme.k.format->scaling);
  attend.quantized = k.quantized;
  attend.exact = k.exact;
  attend.k = k.cell;
  attend.exact_k = k.exact_cell;
  if (!scheme.SharesCell()) {
    const AppendParams& v = layer.cells[1].side;
    attend.v_scale = static_scales(scheme.v, scales.v);
    attend.v_type = kernels::cuda::MakeKvTypeDesc(scheme.v.format->code, scheme.v.format->scaling);
    attend.v = v.cell;
    attend.exact_v = v.exact_cell;
  }
  if (has_unquantized) {
    const AppendParams& plain = layer.cells.back().side;
    attend.unquantized_dim = plain.head_dim;
    attend.unquantized_kind = kernels::cuda::DecodeKindOf(scheme.plain->code);
    attend.outliers = plain.outliers;
    attend.plain = plain.cell;
    attend.exact_unquantized = plain.exact_cell;
  }
  return layer;
}

GpuCell GpuLayers::SideOf(size_t index, bool is_key) {
  const formats::LayerScheme& scheme = store_.Layout().layers[index];
  const formats::Side& side = is_key ? scheme.k : scheme.v;
  const formats::SideScales& scales = is_key ? config_.scales[index].k : config_.scales[index].v;
  const int block = formats::HadamardBlock(scheme.shape.head_dim);
  GpuCell cell;
  cell.kernel = FindAppend(*side.format);
  cell.exact_kernel = FindAppend(ExactFormat());
  AppendParams& append = cell.side;
  append.kv_heads = scheme.kv_heads;
  append.row_dim = scheme.shape.head_dim;
  append.head_dim = scheme.shape.head_dim;
  append.page_size = scheme.shape.tokens;
  append.is_key = is_key;
  append.hadamard = side.hadamard;
  append.hadamard_norm = static_cast<float>(1.0 / std::sqrt(static_cast<double>(block)));
  append.hadamard_block = block;
  if (side.mean) append.mean = Upload(scales.mean);
  if (side.outliers != 0) {
    append.outliers = Upload(std::vector<int32_t>(scales.outliers.begin(), scales.outliers.end()));
  }
  append.outlier_count = side.outliers;
  append.scale = Upload(scales.scale);
  append.quantized = {store_.Base(scheme.group, PageKind::kQuantized),
                      store_.RecordBytes(scheme.group, PageKind::kQuantized)};
  append.cell = PlaceOf(side.sections, is_key ? scheme.KCell(0) : scheme.VCell(0), scheme.HeadBytes());
  if (scheme.exact_open) {
    append.exact = {store_.Base(scheme.group, PageKind::kExact), store_.RecordBytes(scheme.group, PageKind::kExact)};
    append.exact_cell = PlaceOf(formats::Bf16Sections(scheme.shape),
                                is_key ? scheme.ExactKCell(0) : scheme.ExactVCell(0), scheme.ExactHeadBytes());
  }
  return cell;
}

// K's plain channels: of the same rows, in a cell of the same format in both records.
GpuCell GpuLayers::UnquantizedOf(size_t index, const AppendParams& k) const {
  const formats::LayerScheme& scheme = store_.Layout().layers[index];
  GpuCell cell;
  cell.kernel = cell.exact_kernel = FindAppend(*scheme.plain);
  if (scheme.SharesCell()) cell.first_channel = scheme.shape.head_dim;
  AppendParams& append = cell.side;
  append = k;
  append.is_unquantized = true;
  append.head_dim = scheme.UnquantizedShape().head_dim;
  append.hadamard = false;
  append.cell = PlaceOf(scheme.UnquantizedSections(), scheme.KUnquantized(0), scheme.HeadBytes());
  if (scheme.exact_open) {
    append.exact_cell = PlaceOf(scheme.UnquantizedSections(), scheme.ExactKUnquantized(0), scheme.ExactHeadBytes());
  }
  return cell;
}

}  // namespace kvanta::attention
