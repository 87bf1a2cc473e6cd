// Encoding and decoding one cell on its own: canonical bytes from rows and back, transform included. The specification
// in code; the cache's backends give the same bytes, and tests, researchers and kvanta.formats (Python) call this.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "formats/cell.h"
#include "formats/cell_layout.h"
#include "formats/query_transform.h"
#include "kvanta/kv_scheme.h"

namespace kvanta::formats {

// "k" or "v". Throws InputError.
SideKind ParseSideKind(std::string_view text);

struct CellParameters {
  float static_scale = 1.0F;              // for formats with scaling.per_head: stored value = x / static_scale; > 0
  std::span<const float> mean = {};       // [head_dim], finite, for sides with +mean or +query
  const QueryTransform* query = nullptr;  // transform of one head, for sides with +query
  std::span<const int> outliers = {};     // ascending channels, as many as the side's +outliers
  // Rounds each transformed row to bf16 before encoding. The cache does so for schemes with exact pages, where a page
  // is written in bf16 first and quantized from that when it closes; without, the row is encoded as it is.
  bool via_bf16 = false;
};

// x: f32 [tokens][head_dim], in the original space; mean and transform are applied here. Returns the canonical bytes:
// the cell, with rows padded to whole blocks, then a bf16 cell of the outlier channels. Any number of tokens from 1;
// sections are padded with zeros to 16 bytes. Throws InputError if the format does not support head_dim, or sizes
// disagree.
std::vector<uint8_t> EncodeCell(const KvScheme& scheme, SideKind kind, std::span<const float> x, CellShape shape,
                                const CellParameters& parameters = {}, EncodeCounts* counts = nullptr);

// The inverse up to rounding: f32 [tokens][head_dim] in the original space.
std::vector<float> DecodeCell(const KvScheme& scheme, SideKind kind, std::span<const uint8_t> bytes, CellShape shape,
                              const CellParameters& parameters = {});

}  // namespace kvanta::formats
