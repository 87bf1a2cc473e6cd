// Arguments of the append and attention kernels: plain data, the same for nvcc, the emulation and the host. All
// pointers are to device memory.
#pragma once

#include <cstdint>

#include "cache/gathered_pages.h"
#include "cache/visibility.h"
#include "kernels/attention/cuda/kv_type_desc.h"
#include "kernels/cuda/types.h"
#include "kernels/head_transform.h"
#include "kernels/linear/cuda/packed_rows.h"

namespace kvanta::formats {
struct BitAllocation;
struct TrellisLevelTable;
}  // namespace kvanta::formats

namespace kvanta::kernels::cuda {

inline constexpr int kSplitTokens = 1024;   // KV split (engine-contract 6.5)
inline constexpr int kQuarterTokens = 256;  // a warp's part of a KV split
inline constexpr int kChunkTokens = 32;     // tokens of one page that a warp processes at once
inline constexpr int kMinPage = 16;         // tokens
inline constexpr int kRowsPerMma = 8;       // query rows of a matrix product: its N
inline constexpr int kQueryRows = 16;       // maximum of a tile
inline constexpr int kMaxHeadDim = 512;
inline constexpr int kMaxTiledHeadDim = 256;  // heads beyond it have tiles of kRowsPerMma rows
inline constexpr int kMaxOutliers = 64;
inline constexpr int kMaxLatentRank = 512;
inline constexpr int kMaxRopeDim = 256;
inline constexpr int kMaxTransformedHead =
    256;                               // channels of a head whose norm and RoPE a warp computes (HeadTransform)
inline constexpr int kGroupTiles = 4;  // maximum of a tile group
inline constexpr int kAttendWarps = kSplitTokens / kQuarterTokens;

// Byte offsets of a side's cells in a page record, and of the sections in a cell.
struct CellOffsets {
  int64_t first_cell = 0;   // KV head 0's cell, from the record's start
  int64_t head_stride = 0;  // between the cells of adjacent KV heads
  int64_t codes = 0;
  int64_t block_scales = 0;
  int64_t block_offsets = 0;
  int64_t token_scales = 0;
  int64_t token_offsets = 0;
  int64_t channel_scales = 0;
  int64_t channel_offsets = 0;

  KVANTA_HD constexpr int64_t Cell(int kv_head) const { return first_cell + kv_head * head_stride; }
};

// A pool of page records.
struct PagePool {
  uint8_t* base = nullptr;
  int64_t record_bytes = 0;

  KVANTA_HD constexpr uint8_t* Record(int32_t page) const { return base + page * record_bytes; }
};

// ---- Append

// Destination of one token's row.
struct Slot {
  int32_t quantized = -1;  // page in the quantized pool, -1: none
  int32_t exact = -1;      // page in the exact pool, -1: none
  int32_t offset = 0;      // token index in the page
  int32_t row = 0;         // row of the step's K and V; -1: of an earlier step, a token of a page that closes
};

// A step's rows to write, in device memory.
struct SlotMapping {
  const Slot* slots = nullptr;
  int32_t count = 0;
};

// Sums over all launches since the backend was created.
struct AppendSums {
  int64_t values = 0, saturated = 0, nan = 0, blocks = 0, zero_blocks = 0;
};

// One side of one layer: new rows are transformed and encoded into cells, those of closed pages re-encoded from exact
// cells. What changes between steps is reached through the slot mappings (and AttentionParams::metadata), so that
// captured launches stay valid for later steps.
struct AppendParams {
  const float* rows = nullptr;  // f32 [rows][stride], KV head after KV head
  int64_t stride = 0;
  int32_t row_dim = 0;  // channels of a KV head in `rows`
  HeadTransform heads;  // of keys
  // New rows, and all rows of the pages that close; null: none. Only one of the two, or those of a step in which pages
  // close by few new rows: these are then encoded from `rows` twice.
  const SlotMapping* slot_mapping = nullptr;
  const SlotMapping* closed_mapping = nullptr;
  int32_t max_slots = 0, max_closed_slots = 0;  // bounds of their counts: determine the grid
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
  int32_t page_size = 0;
  bool is_key = false;
  bool is_canonical = false;  // rows of the cell are canonical (formats/cell.h): compressed entries
  bool to_exact = false;      // encode new rows as bf16 into exact records
  // K's unquantized channels (formats/scheme.h), [kv_heads][outlier_count]: zeros in K's own cell. `is_unquantized`:
  // this side is their cell; without `outliers` it holds a latent's rotated channels.
  const int32_t* outliers = nullptr;
  int32_t outlier_count = 0;
  bool is_unquantized = false;
  bool hadamard = false;
  float hadamard_norm = 0;  // 1 / sqrt(hadamard_block)
  int32_t hadamard_block = 0;
  const float* mean = nullptr;            // [kv_heads][row_dim], or null
  const float* query_matrices = nullptr;  // QueryTransform::key_matrices() of +query, or null
  const float* scale = nullptr;           // [kv_heads], static
  // Levels of trellis codes: one table; with `allocations` [kv_heads], of klt3 and klt2, one for each width from 0
  // bits. Token groups with bits of their own need the allocations' deviations alone.
  const formats::TrellisLevelTable* levels = nullptr;
  const formats::BitAllocation* allocations = nullptr;
  PagePool quantized, exact;
  CellOffsets cell;        // in quantized records
  CellOffsets exact_cell;  // in exact records
  AppendSums* sums = nullptr;
};

// Queries whose heads are transformed in place.
struct QueryHeads {
  float* q = nullptr;  // f32 [rows][stride], head after head of head_dim channels
  int64_t stride = 0;
  int32_t rows = 0;
  int32_t heads = 0;  // a multiple of kv_heads; 0: none
  int32_t head_dim = 0;
  HeadTransform transform;
};

// Sides of a layer that one encoder writes in one launch, with the same slots and KV heads.
struct AppendSides {
  AppendParams sides[2];
  int32_t count = 1;
  QueryHeads queries = {};
  int32_t max_blocks = 1;  // of each side, and of the queries: set by CudaContext
};

// ---- Attend

struct PageIds {
  int32_t quantized = -1;
  int32_t exact = -1;
};

// Query rows of one KV head: `tokens` tokens of one page, `heads` of the group's query heads, token-major. At most
// kQueryRows in total.
struct QueryTile {
  int32_t page_table = 0;      // index of the sequence's first page in AttentionMetadata::pages
  int32_t first_position = 0;  // position of the first token
  int32_t row = 0;             // row of the first token in q and out
  int16_t tokens = 0;
  int16_t heads = 0;
  int16_t kv_head = 0;
  int16_t first_head = 0;       // query head
  int32_t num_tasks = 0;        // SplitTasks of the tile
  int32_t num_results = 0;      // split results, each of one or more KV splits, in order
  int32_t result_row = 0;       // row of the first split result; each takes AttentionMetadata::result_stride rows
  int32_t gathered = 0;         // index in AttentionParams::gathered
  int32_t sequence_tokens = 0;  // of the sequence, which attention in both directions reads
};

// KV splits [first_split, last_split) of a tile, each with a split result of its own, or accumulated into one; or those
// of a tile group, adjacent tiles of a page and KV head, whose results follow each other like their own result_row.
struct SplitTask {
  int32_t tile = 0;  // the first
  int32_t tiles = 1;
  int32_t result_row = 0;
  int32_t result_rows = 0;  // between the results of adjacent splits; 0: one result
  int32_t first_split = 0;
  int32_t last_split = 0;
};

// A step's work for layers of one shape, in device memory. Split results: f32 [row][head_dim] and [row] of (max, sum);
// logits are in powers of 2.
struct AttentionMetadata {
  const PageIds* pages = nullptr;
  const int32_t* first_pages = nullptr;  // [sequence], index in pages; for sparse attention
  const QueryTile* tiles = nullptr;
  const SplitTask* tasks = nullptr;
  const int32_t* work_indptr = nullptr;  // [work_count + 1]: work item i, of one block, is tasks [i'th, i + 1'th)
  int32_t tile_count = 0;
  int32_t work_count = 0;
  int32_t result_stride = kQueryRows;  // rows
  float* split_out = nullptr;
  float* split_state = nullptr;
  uint32_t* finished_tasks = nullptr;  // [tile_count], zeros between launches
  uint32_t* finished_tiles = nullptr;  // [rows], likewise; where all tiles have one token
};

// One layer.
struct AttentionParams {
  const float* q = nullptr;  // f32 [rows][q_stride], head after head of key_dim channels
  int64_t q_stride = 0;
  int32_t key_dim = 0;   // head_dim, plus a latent's rotated channels
  float* out = nullptr;  // f32 [rows][heads * head_dim]
  // In place of `out` for the linear layer that reads it: pairs of channels, or, with `row_tiles`, the tiles of a row,
  // which have one token, whole rows, which are in `out`, too.
  PackTarget pack;
  int32_t row_tiles = 0;
  int32_t heads = 0;
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
  int32_t page_size = 0;  // 2^page_shift
  int32_t page_shift = 0;
  cache::Visibility visibility;
  float softmax_scale = 0;
  float softcap = 0;
  const float* sinks = nullptr;  // [heads] logits without a value, or null
  cache::ExactPageRule exact_pages;
  // Null: the pages are a sequence's own. Else copies of chosen tokens (docs/adr/0088), by QueryTile::gathered, which
  // say in place of exact_pages what is exact, and how many tokens a page has.
  const cache::GatheredPages* gathered = nullptr;
  bool k_hadamard = false, v_hadamard = false;
  float hadamard_norm = 0;
  int32_t hadamard_block = 0;
  const float* k_mean = nullptr;
  const float* query_matrices = nullptr;  // QueryTransform::query_matrices() of +query, or null
  const float* k_scale = nullptr;         // [kv_heads]; ones where the format has no static scale
  const float* v_scale = nullptr;
  KvTypeDesc k_type, v_type;
  // As in AppendParams.
  const formats::TrellisLevelTable *k_levels = nullptr, *v_levels = nullptr;
  const formats::BitAllocation* k_allocations = nullptr;
  // K's unquantized channels, 0: none. With `outliers` [kv_heads][unquantized_dim]: outlier channels; without: the
  // rotated channels of a latent.
  int32_t unquantized_dim = 0;
  const int32_t* outliers = nullptr;
  DecodeKind unquantized_decode = DecodeKind::kBf16;
  PagePool quantized, exact;
  CellOffsets k, v, exact_k, exact_v, unquantized, exact_unquantized;  // no v for latents
  const AttentionMetadata* metadata = nullptr;
  // The same with the tasks of tile groups (group_block.h, latent_block.h), or null: none. `has_tiles`: `metadata` has
  // tasks.
  const AttentionMetadata* group_metadata = nullptr;
  bool has_tiles = true;
  int32_t tile_rows = kQueryRows;  // bound of a tile's query rows
  int32_t max_tiles = 0;           // bound of metadata->tile_count: determines the combine kernel's grid

  // True if split results are combined by the blocks that computed them, else by a kernel of its own.
  KVANTA_HD constexpr bool CombinesTiles() const { return group_metadata == nullptr; }
};

}  // namespace kvanta::kernels::cuda
