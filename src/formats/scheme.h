// A scheme bound to a layer's shape: what the cache and the kernels use. KvScheme (public) names; this resolves.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "formats/cell.h"
#include "formats/transform.h"
#include "kvanta/kv_scheme.h"

namespace kvanta::formats {

// One side of one layer, resolved.
struct Side {
  const Format* format = nullptr;
  bool hadamard = false;
  bool mean = false;
  int outliers = 0;  // channels per head in a bf16 cell of their own, behind the side's; their codes are zero
  CellPlanes planes;

  // Whether its bytes depend on something calibrated (SideScales).
  bool UsesScales() const { return format->scaling.per_head || mean || outliers != 0; }
  bool operator==(const Side& other) const {
    return format == other.format && hadamard == other.hadamard && mean == other.mean && outliers == other.outliers;
  }
};

// One layer's cache: scheme, shape, and where its cells lie in the page record.
//
// Page record (one page of all layers): for each layer, for each KV head: K cell | K's outliers | V cell.
struct LayerScheme {
  KvScheme scheme;
  Side k;
  Side v;
  CellShape shape{};
  int kv_heads = 0;
  bool exact_open = false;   // own page read in bf16
  int exact_pages = 0;       // pages up to a query's own that it reads in bf16: 0, 1, 2
  int sink_pages = 0;        // first pages read in bf16 by everyone
  int64_t offset = 0;        // of this layer in the quantized page record
  int64_t bytes = 0;         // kv_heads * HeadBytes()
  int64_t exact_offset = 0;  // of this layer in the exact (bf16) page record; meaningful if exact_open
  int64_t exact_bytes = 0;   // kv_heads * ExactHeadBytes(); 0 unless exact_open

  int64_t HeadBytes() const { return k.planes.bytes + OutlierBytes() + v.planes.bytes; }
  int64_t KCell(int head) const { return offset + head * HeadBytes(); }
  int64_t KOutliers(int head) const { return KCell(head) + k.planes.bytes; }
  int64_t VCell(int head) const { return KOutliers(head) + OutlierBytes(); }
  // Cells of the exact record: [head][K, K's outliers, V], all in the bf16 cache layout.
  int64_t ExactHeadBytes() const { return 2 * ExactCellBytes() + OutlierBytes(); }
  int64_t ExactKCell(int head) const { return exact_offset + head * ExactHeadBytes(); }
  int64_t ExactKOutliers(int head) const { return ExactKCell(head) + ExactCellBytes(); }
  int64_t ExactVCell(int head) const { return ExactKOutliers(head) + OutlierBytes(); }
  // K's outliers are a bf16 cell [tokens][outliers], the same in both records.
  CellShape OutlierShape() const { return {.tokens = shape.tokens, .head_dim = k.outliers}; }
  int64_t ExactCellBytes() const { return Bf16Planes(shape).bytes; }
  int64_t OutlierBytes() const { return Bf16Planes(OutlierShape()).bytes; }
};

// All layers of a model: the layout of page records.
struct CacheLayout {
  std::vector<LayerScheme> layers;
  int page_size = 64;            // tokens per page
  int64_t page_bytes = 0;        // quantized record, all layers
  int64_t exact_page_bytes = 0;  // exact (bf16) record; 0 when no layer keeps exact pages
  bool UsesScales() const;       // some side of some layer does
  std::string Identity() const;  // everything that changes the bytes of a page, as text (for hashes and headers)
  // Index after the last layer of the run of layers from `first` on that have the same scheme and shape.
  size_t RunEnd(size_t first) const;
};

// Shape of one layer of a model.
struct LayerShape {
  int kv_heads;
  int head_dim;
};

// Resolves and lays out. Throws InputError when a layer's shape cannot take its scheme.
CacheLayout PlanCache(const std::vector<KvScheme>& schemes, const std::vector<LayerShape>& shapes, int page_size);

// Static parameters of one side of one layer, used by formats with scaling.per_head, key means and outlier channels.
// Index = KV head.
struct SideScales {
  std::vector<float> scale;   // [kv_heads]; 1.0 when nothing was given
  std::vector<float> mean;    // [kv_heads * head_dim], empty without
  std::vector<int> outliers;  // [kv_heads * n], each head's channels ascending; empty without
};

struct LayerScales {
  SideScales k;
  SideScales v;
};

// How rows of a side and KV head are transformed; it points into `scales`.
RowTransform TransformOf(const Side& side, const SideScales& scales, int head, int head_dim) noexcept;

}  // namespace kvanta::formats
