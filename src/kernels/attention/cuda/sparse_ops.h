// Arguments of sparse attention's operations on a GPU (docs/adr/0088): scores of all tokens, or entries, by an
// indexer's keys, the top k of each row, and copies of the chosen tokens, or of a window and compressed entries
// (docs/adr/0095), to pages that the kernel of latents reads. Plain data; all pointers are to device memory.
#pragma once

#include <cstdint>

#include "cache/gathered_pages.h"
#include "kernels/attention/cuda/attention_params.h"

namespace kvanta::kernels::cuda {

// A row of a step that attends to chosen tokens alone: it sees more than top_k. Where keys stand for several tokens,
// entries take the place of tokens: `position` is the last entry that the row sees.
struct SparseRow {
  int32_t sequence = 0;
  int32_t row = 0;  // of q, weights and out
  int32_t position = 0;
};

// The sparse rows of a step, in device memory.
struct SparseStep {
  const SparseRow* rows = nullptr;
  int32_t count = 0;
  int32_t score_stride = 0;      // of a row, in floats: a multiple of kSplitTokens
  float* scores = nullptr;       // [rows of a wave][score_stride]
  int32_t* positions = nullptr;  // [rows][top_k], each row's ascending: what was chosen last
};

// Rows [first_row, first_row + max_rows) of a step, as far as there are: whose scores, or copies, are in memory at
// once.
struct SparseWave {
  const SparseStep* step = nullptr;
  int32_t first_row = 0;
  int32_t max_rows = 0;
  int32_t top_k = 0;
};

// score of a key k = sum over the heads, in their order, of weight * max(<q, k>, 0).
struct ScoreTokensOp {
  SparseWave wave;
  AttentionParams keys;            // of a layer of keys without V: its q and metadata
  const float* weights = nullptr;  // [rows][heads]
  int32_t blocks = 1;              // the grid
};

// The top k of each row's scores, of equal ones the earlier; NaN is the smallest.
struct ChooseTokensOp {
  SparseWave wave;
};

// Copies the chosen tokens' cells of a layer of latents.
struct GatherTokensOp {
  SparseWave wave;
  AttentionParams from, to;                      // to: pools of copies and their offsets
  int32_t pages = 0;                             // of a row, at most
  int32_t quantized_pages = 0, exact_pages = 0;  // of a row's copies
  cache::GatheredPages* gathered = nullptr;      // [wave's rows]
  PageIds* page_ids = nullptr;                   // [wave's rows][pages]
};

// A row that attends to compressed entries and then to the tokens of its window.
struct CompressedRow {
  int32_t sequence = 0;
  int32_t chosen = -1;  // SparseStep's row whose positions are the entries; -1: all
  int32_t entries = 0;
  int32_t first_token = 0, tokens = 0;
};

// All rows of a step, in device memory.
struct CompressedStep {
  const CompressedRow* rows = nullptr;
  int32_t count = 0;
};

// Copies what rows [first_row, first_row + max_rows) of a step attend to in a layer whose K and V are one row.
struct GatherRowsOp {
  const CompressedStep* step = nullptr;
  const SparseStep* selection = nullptr;  // null: no row has chosen entries
  int32_t first_row = 0;
  int32_t max_rows = 0;
  int32_t pages = 0;  // of a row's copies
  int32_t top_k = 0;
  int32_t page_size = 0;                     // tokens of a page, and of one of copies
  int32_t row_tokens = 1, page_entries = 1;  // of entries
  int32_t head_dim = 0;                      // of rows
  int32_t bits = 0;                          // of a code
  formats::Scaling scaling = {};
  PagePool tokens = {}, entries = {}, copies = {};  // copies: one cell per record
  CellOffsets token_cell = {}, entry_cell = {}, copy_cell = {};
  const AttentionMetadata *token_pages = nullptr, *entry_pages = nullptr;
  cache::GatheredPages* gathered = nullptr;  // [rows of the wave]
  PageIds* page_ids = nullptr;               // [rows of the wave][pages]
};

}  // namespace kvanta::kernels::cuda
