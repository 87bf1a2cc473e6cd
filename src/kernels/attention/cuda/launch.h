// What the kernels for a GPU are told: plain data, the same for nvcc, for the emulation and for who fills it in. All
// pointers are of device memory.
#pragma once

#include <cstdint>

#include "kernels/attention/cuda/kv_type_desc.h"
#include "kernels/attention/cuda/launch_shape.h"

namespace kvanta::kernels::cuda {

inline constexpr int kSplitTokens = 1024;   // engine-contract 6.5
inline constexpr int kQuarterTokens = 256;  // a warp's part of a run
inline constexpr int kChunkTokens = 32;     // tokens of one page that a warp attends to at once
inline constexpr int kMinPage = 16;         // tokens
inline constexpr int kQueryRows = 16;       // query rows of a tile: a product's M
inline constexpr int kMaxHeadDim = 256;
inline constexpr int kMaxOutliers = 64;
inline constexpr int kMaxLatentRank = 512;
inline constexpr int kMaxRopeDim = 256;
inline constexpr int kAttendWarps = kSplitTokens / kQuarterTokens;

// Where a side's cells lie in a page record, and its planes in a cell; bytes.
struct CellPlace {
  int64_t first = 0;   // of KV head 0's cell in the record
  int64_t stride = 0;  // from one KV head's to the next
  int64_t codes = 0;
  int64_t block_scales = 0;
  int64_t block_offsets = 0;
  int64_t token_scales = 0;
  int64_t token_offsets = 0;
  int64_t channel_scales = 0;
  int64_t channel_offsets = 0;
};

// A pool of page records.
struct Records {
  uint8_t* base = nullptr;
  int64_t bytes = 0;  // of one
};

// ---- Append

// A row that is written: a token's place, in both kinds of record (-1: none).
struct Slot {
  int32_t quantized = -1;
  int32_t exact = -1;
  int32_t slot = 0;  // in the page
  int32_t row = 0;   // of the step's rows; not read when a page is closed
};

// The rows of a step that are written; in the device's memory.
struct SlotMapping {
  const Slot* places = nullptr;
  int32_t count = 0;
};

// Sums over all launches since the backend was made.
struct AppendSums {
  int64_t values = 0, saturated = 0, nan = 0, blocks = 0, zero_blocks = 0;
};

// What changes from step to step is behind `list` (and in AttentionParams behind `step`), so that launches that were
// recorded are good for later steps. One side of one layer: rows are transformed and encoded into `cells`, or
// (from_exact) taken from exact cells.
struct AppendParams {
  const float* rows = nullptr;  // f32 [rows][stride], KV head after KV head
  int64_t stride = 0;
  int32_t row_dim = 0;  // channels of a KV head in `rows`
  const SlotMapping* list = nullptr;
  int32_t limit = 0;  // of the list's count: what the grid is made for
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
  int32_t page_size = 0;
  bool is_key = false;
  bool to_exact = false;    // encoded as bf16 into exact records
  bool from_exact = false;  // values are exact cells'; only what saturates then is counted (and blocks)
  // K's channels that have a cell of their own (formats/scheme.h), of each KV head [outlier_count]: in K's they are
  // zeros. `is_unquantized`: the side is that cell, and there are no others where it is a latent's.
  const int32_t* outliers = nullptr;
  int32_t outlier_count = 0;
  bool is_unquantized = false;
  bool hadamard = false;
  float hadamard_norm = 0;  // 1 / sqrt(block)
  int32_t hadamard_block = 0;
  const float* mean = nullptr;   // [kv_heads][row_dim], or none
  const float* scale = nullptr;  // [kv_heads], static
  Records quantized, exact;
  CellPlace cell;        // in quantized records
  CellPlace exact_cell;  // in exact ones
  AppendSums* sums = nullptr;
};

// ---- Attend

struct PageIds {
  int32_t quantized = -1;
  int32_t exact = -1;
};

// Query rows of one KV head: `tokens` tokens of one page, `heads` of the group's query heads, token by token. At most
// kQueryRows together.
struct QueryTile {
  int32_t pages = 0;  // where the sequence's pages begin in AttentionMetadata::pages
  int32_t first = 0;  // position of its first token
  int32_t row = 0;    // that token's row of q and out
  int16_t tokens = 0;
  int16_t heads = 0;
  int16_t kv_head = 0;
  int16_t first_head = 0;  // query head
  int32_t parts = 0;       // partial results, of one or several runs each, in order
  int32_t slot = 0;        // of the first, which take kQueryRows slots each
};
// A tile's runs [first_split, last_split), which give one partial result.
struct SplitTask {
  int32_t tile = 0;
  int32_t slot = 0;
  int32_t first_split = 0;
  int32_t last_split = 0;
};

// A step's work for layers of one shape; in the device's memory. Partial results: f32 [slot][head_dim] and [slot] of
// (peak, sum); logits in powers of 2.
struct AttentionMetadata {
  const PageIds* pages = nullptr;
  const QueryTile* tiles = nullptr;
  const SplitTask* tasks = nullptr;
  int32_t tile_count = 0;
  int32_t task_count = 0;
  float* split_out = nullptr;
  float* split_state = nullptr;
};

// One layer.
struct AttentionParams {
  const float* q = nullptr;  // f32 [rows][q_stride], head after head of key_dim channels
  int64_t q_stride = 0;
  int32_t key_dim = 0;   // head_dim, and a latent's plain channels behind it
  float* out = nullptr;  // f32 [rows][heads * head_dim]
  int32_t heads = 0;
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
  int32_t page_size = 0;  // 2^page_shift
  int32_t page_shift = 0;
  int32_t sliding_window = 0;
  float softmax_scale = 0;
  float softcap = 0;
  int32_t exact_pages = 0;
  int32_t exact_sinks = 0;  // 0 unless the layer has exact pages
  bool k_hadamard = false, v_hadamard = false;
  float hadamard_norm = 0;
  int32_t hadamard_block = 0;
  const float* k_mean = nullptr;
  const float* k_scale = nullptr;  // [kv_heads]; ones where the format has no static scale
  const float* v_scale = nullptr;
  KvTypeDesc k_type, v_type;
  // K's channels in a cell of their own, 0 where there is none: outliers, of each KV head [unquantized_dim], or, where
  // K and V are one latent, those behind it.
  int32_t unquantized_dim = 0;
  const int32_t* outliers = nullptr;
  DecodeKind unquantized_kind = DecodeKind::kBf16;
  Records quantized, exact;
  CellPlace k, v, exact_k, exact_v, plain, exact_unquantized;  // of latents there is no v
  const AttentionMetadata* step = nullptr;
  int32_t max_tiles = 0;  // of the step's: what the merge's grid is made for
};

}  // namespace kvanta::kernels::cuda
