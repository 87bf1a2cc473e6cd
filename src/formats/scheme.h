// A scheme bound to a layer's shape: what the cache and the kernels use. KvScheme (public) names; this resolves.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "formats/cell.h"
#include "formats/query_transform.h"
#include "formats/state_codec.h"
#include "formats/transform.h"
#include "kvanta/kv_scheme.h"

namespace kvanta::formats {

// One side of one layer, resolved.
struct Side {
  const Format* format = nullptr;
  bool hadamard = false;  // false with `query`, whose matrix includes the rotation
  bool mean = false;      // +mean or +query: the key mean is subtracted first
  bool query = false;
  int outliers = 0;         // channels per head in a bf16 cell after the side's; their codes are zero
  CellShape shape{};        // of a cell: the layer's, with head_dim padded to whole blocks
  int unused_channels = 0;  // last channels of a cell's rows that are zero: the padding, unless `hadamard` fills it
  CellSections sections;

  // True if the side's bytes depend on calibrated parameters (SideScales).
  bool UsesScales() const { return format->scaling.per_head || mean || query || outliers != 0; }
  bool operator==(const Side& other) const {
    return format == other.format && hadamard == other.hadamard && mean == other.mean && query == other.query &&
           outliers == other.outliers;
  }
};

// A later level of a layer (KvScheme::ages): pages at least `pages` before a query's own, or that stepped down, are
// read from a record of their own, laid out as the quantized one with these sides. K's unquantized channels are the
// same.
struct AgeScheme {
  int pages = 0;  // 0: by pressure
  Side k;
  Side v;
  int64_t offset = 0;      // this layer's offset in its group's record of the level
  int64_t head_bytes = 0;  // of a KV head's cells
};

// Offsets of a KV head's cells in a record.
struct AgeCells {
  int64_t k, unquantized, v;
};

// One layer's cache: scheme, shape, and offsets of its cells in the page record.
//
// Page record (one page of the layers of one KV cache group): for each layer, for each KV head: K cell | K's
// unquantized channels | V cell. The latents of MLA are K and V in one: V is the K cell, stored once. Keys of an
// indexer have no V. Where one row stands for several tokens (LayerShape::row_tokens), a cell has fewer rows than the
// page has tokens, and at least one.
struct LayerScheme {
  KvScheme scheme;
  Side k;
  Side v;
  CellShape shape{};  // of rows; cells have that of their side
  int kv_heads = 0;
  int rope_dim = 0;                            // as in LayerShape
  bool keys_only = false;                      // as in LayerShape
  bool shared_kv = false;                      // as in LayerShape
  int row_tokens = 1;                          // as in LayerShape
  StateShape state;                            // of a recurrent layer, which has no cells
  int64_t state_bytes = 0;                     // f32 state of a recurrent layer; 0: not recurrent
  const Format* unquantized_format = nullptr;  // bf16, or the latents' own format if that is a float without scales
  bool exact_open = false;                     // own page read in bf16
  int exact_pages = 0;                         // pages up to a query's own that it reads in bf16: 0, 1, 2
  int sink_pages = 0;                          // first pages read in bf16 by everyone
  int group = 0;                               // KV cache group: layers whose cells lie in one record
  int64_t offset = 0;                          // this layer's offset in its group's quantized page record
  int64_t bytes = 0;                           // kv_heads * HeadBytes(); of a recurrent layer: its (coded) state
  int64_t exact_offset = 0;     // this layer's offset in its group's exact (bf16) page record; meaningful if exact_open
  int64_t exact_bytes = 0;      // kv_heads * ExactHeadBytes(); 0 unless exact_open; of a coded state: its f32 form
  std::vector<AgeScheme> ages;  // later levels, one for each of scheme.ages
  int ageless_pages = 0;        // first pages of a sequence, which no later level holds

  bool IsRecurrent() const { return state_bytes != 0; }
  // A token is one cell, in K's layout: the latents of MLA are K and V in one, and keys of an indexer have no V.
  bool SharesCell() const { return rope_dim != 0 || keys_only || shared_kv; }
  // Compressed entries: their cells are canonical (cell.h), since they are copied before attention reads them.
  bool HasEntries() const { return shared_kv && row_tokens != 1; }
  // True if queries read all pages, or may: ranks can divide them (cache::PagePoolConfig::ranks). Those of a window
  // next to entries, and states, are whole on every rank.
  bool ReadsAllPages() const { return !IsRecurrent() && (!shared_kv || row_tokens != 1); }
  // The entries that end within the first `position` + 1 tokens.
  int64_t EntriesAt(int64_t position) const { return (position + 1) / row_tokens; }
  int64_t HeadBytes() const { return k.sections.bytes + UnquantizedBytes() + (SharesCell() ? 0 : v.sections.bytes); }
  int64_t KCell(int head) const { return offset + head * HeadBytes(); }
  int64_t KUnquantized(int head) const { return KCell(head) + k.sections.bytes; }
  int64_t VCell(int head) const { return SharesCell() ? KCell(head) : KUnquantized(head) + UnquantizedBytes(); }
  // Cells of the exact record: [head][K, K's unquantized channels, V], all in the bf16 cache layout.
  int64_t ExactHeadBytes() const {
    return ExactCellBytes(k) + UnquantizedBytes() + (SharesCell() ? 0 : ExactCellBytes(v));
  }
  int64_t ExactKCell(int head) const { return exact_offset + head * ExactHeadBytes(); }
  int64_t ExactKUnquantized(int head) const { return ExactKCell(head) + ExactCellBytes(k); }
  int64_t ExactVCell(int head) const {
    return SharesCell() ? ExactKCell(head) : ExactKUnquantized(head) + UnquantizedBytes();
  }
  AgeCells CellsOf(const AgeScheme& age, int head) const {
    const int64_t k_cell = age.offset + head * age.head_bytes, rest = k_cell + age.k.sections.bytes;
    return {.k = k_cell, .unquantized = rest, .v = SharesCell() ? k_cell : rest + UnquantizedBytes()};
  }
  // K's unquantized channels (its outliers, or the rotated part of a latent's key) are a cell of `unquantized_format`,
  // the same in both records.
  CellShape UnquantizedShape() const { return {.tokens = shape.tokens, .head_dim = k.outliers + rope_dim}; }
  static int64_t ExactCellBytes(const Side& side) { return Bf16Sections(side.shape).bytes; }
  CellSections UnquantizedSections() const {
    return formats::UnquantizedSections(unquantized_format->code_bits, UnquantizedShape());
  }
  int64_t UnquantizedBytes() const { return UnquantizedSections().bytes; }
};

// Bytes of one group's page records.
struct GroupBytes {
  int64_t page_bytes = 0;                                  // quantized record
  int64_t exact_page_bytes = 0;                            // exact (bf16) record; 0 when no layer keeps exact pages
  std::array<int64_t, KvScheme::kMaxAges> age_bytes = {};  // records of later levels; 0: no such level
};

// All layers of a model: the layout of page records, one of each kind per KV cache group.
struct CacheLayout {
  std::vector<LayerScheme> layers;
  int page_size = 64;  // tokens per page
  std::vector<GroupBytes> groups;
  int64_t page_bytes = 0;                                  // quantized records of all groups
  int64_t exact_page_bytes = 0;                            // exact records of all groups
  std::array<int64_t, KvScheme::kMaxAges> age_bytes = {};  // records of later levels of all groups
  int64_t state_bytes = 0;  // records of recurrent layers, which are not pages of K and V: not in page_bytes
  // Code of the states of recurrent layers at multiples of state_grid tokens (state_codec.h). With kFloat32 states are
  // never rounded; else a group's quantized record is a coded state, and its exact record the f32 state.
  StateCode state_code = StateCode::kFloat32;
  int64_t state_grid = 0;
  bool UsesScales() const;       // some side of some layer does
  std::string Identity() const;  // everything that changes the bytes of a page, as text (for hashes and headers)
  // Index after the last layer of the run of layers from `first` on that have the same scheme and shape.
  size_t RunEnd(size_t first) const;
};

// Shape of one layer of a model.
struct LayerShape {
  int kv_heads;
  int head_dim;  // rank of the latents (MLA)
  // 0: K and V are separate. Otherwise they are one latent, shared by all query heads, and a key has this many rotated
  // channels more: in bf16, or in the format of latents that are not quantized.
  int rope_dim = 0;
  // Recurrent layers, which have no K and V (kv_heads is 0): a sequence's state.
  StateShape state = {};
  bool keys_only = false;  // one key per token without V: those of an indexer, which selects tokens for another layer
  // K and V are one row, of which all channels are both (DeepSeek V4).
  bool shared_kv = false;
  // Tokens that a row of the cache stands for, with keys_only or shared_kv: a compressed entry, which lies in the page
  // of its last token. Divides the page size, or is a multiple of it.
  int row_tokens = 1;
};

// Code of states, and the positions at which they are rounded.
struct StateRounding {
  StateCode code = StateCode::kFloat32;
  int64_t grid = 0;  // tokens; a multiple of the page size
};

inline constexpr int kMaxLatentRank = 512;
inline constexpr int kMaxRopeDim = 256;

// Resolves and lays out. groups: each layer's KV cache group, from 0 on without gaps (cache/kv_cache_spec.h); empty:
// one group. Throws InputError when a layer's shape cannot take its scheme, naming those that it can.
CacheLayout PlanCache(const std::vector<KvScheme>& schemes, const std::vector<LayerShape>& shapes, int page_size,
                      const std::vector<int>& groups = {}, const StateRounding& states = {});

// Static parameters of one side of one layer, used by formats with scaling.per_head, key means, query-aware matrices
// and outlier channels. Index = KV head.
struct SideScales {
  std::vector<float> scale;                     // [kv_heads]; 1.0 when nothing was given
  std::vector<float> mean;                      // [kv_heads * head_dim], empty without
  std::vector<int> outliers;                    // [kv_heads * n], each head's channels ascending; empty without
  std::shared_ptr<const QueryTransform> query;  // null without
  std::shared_ptr<const EigenChannels> eigen;   // null without; `query` of layers in klt3 and klt2 is made of them
  std::string query_hash;  // QueryTransform::Hash() in scales read from the header of a page, which has no matrices
};

struct LayerScales {
  SideScales k;
  SideScales v;
};

// Transform of the rows of a side and KV head; it points into `scales`.
RowTransform TransformOf(const Side& side, const SideScales& scales, int head, int head_dim) noexcept;

}  // namespace kvanta::formats
