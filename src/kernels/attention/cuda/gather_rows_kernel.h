// Copies of the rows that a query attends to (GatherRowsOp): one block per page of copies. Include the primitives
// first.
#pragma once

#include "cache/visibility.h"
#include "kernels/attention/cuda/sparse_kernels.h"

namespace kvanta::kernels::cuda {

// A row of K and V in a cell, in shared memory: addresses of its first code unit and scales, and what is between them.
struct CopiedRow {
  uint64_t codes, block_scales, token_scale;
  int32_t unit_stride, block_stride;
};
static_assert(sizeof(CopiedRow) == 32);

inline LaunchShape ShapeOf(const GatherRowsOp& op) {
  return {int64_t{op.max_rows} * op.pages, kRowThreads, static_cast<int>(sizeof(CopiedRow)) * kMaxGatheredTokens};
}

struct RowCopier {
  const GatherRowsOp& op;
  int row_bytes, blocks, block_bytes, token_bytes;

  KVANTA_DEVICE explicit RowCopier(const GatherRowsOp& gather)
      : op(gather),
        row_bytes(gather.head_dim * gather.bits / 8),
        blocks(gather.scaling.block == formats::ScaleType::kNone
                   ? 0
                   : gather.head_dim / formats::BlockChannels(gather.scaling, gather.head_dim)),
        block_bytes(formats::Bytes(gather.scaling.block)),
        token_bytes(formats::Bytes(gather.scaling.token)) {}

  static KVANTA_DEVICE const PageIds* PagesOf(const AttentionMetadata* metadata, int32_t sequence) {
    return metadata->pages + metadata->first_pages[sequence];
  }
  static KVANTA_DEVICE uint64_t Address(const uint8_t* from) { return reinterpret_cast<uint64_t>(from); }

  // Compressed entries are canonical (formats/cell.h).
  KVANTA_DEVICE CopiedRow Entry(int32_t sequence, int32_t entry) const {
    const auto page = cache::PageOfEntry<int32_t>(entry, op.row_tokens, op.page_size);
    const int32_t slot = entry % op.page_entries;
    const uint8_t* cell =
        op.entries.Record(PagesOf(op.entry_pages, sequence)[page].quantized) + op.entry_cell.first_cell;
    return {.codes = Address(cell + op.entry_cell.codes + int64_t{slot} * row_bytes),
            .block_scales = Address(cell + op.entry_cell.block_scales + int64_t{slot} * blocks * block_bytes),
            .token_scale = Address(cell + op.entry_cell.token_scales + int64_t{slot} * token_bytes),
            .unit_stride = 4,
            .block_stride = block_bytes};
  }
  // Tokens have the order of keys (formats/cell_layout.h).
  KVANTA_DEVICE CopiedRow Token(int32_t sequence, int32_t token) const {
    const int32_t page = token / op.page_size, slot = token % op.page_size;
    const uint8_t* cell =
        op.tokens.Record(PagesOf(op.token_pages, sequence)[page].quantized) + op.token_cell.first_cell;
    return {.codes = Address(cell + op.token_cell.codes + slot / 16 * (16 * row_bytes) + slot % 16 * 4),
            .block_scales = Address(cell + op.token_cell.block_scales + int64_t{slot} * block_bytes),
            .token_scale = Address(cell + op.token_cell.token_scales + int64_t{slot} * token_bytes),
            .unit_stride = 64,
            .block_stride = op.page_size * block_bytes};
  }

  static KVANTA_DEVICE CopiedRow RowAt(int slot) {
    const auto at = static_cast<int>(sizeof(CopiedRow)) * slot;
    return {.codes = LoadShared<uint64_t>(at),
            .block_scales = LoadShared<uint64_t>(at + 8),
            .token_scale = LoadShared<uint64_t>(at + 16),
            .unit_stride = LoadShared<int32_t>(at + 24),
            .block_stride = LoadShared<int32_t>(at + 28)};
  }
  static KVANTA_DEVICE void Store(int slot, const CopiedRow& row) {
    const auto at = static_cast<int>(sizeof(CopiedRow)) * slot;
    StoreShared(at, row.codes);
    StoreShared(at + 8, row.block_scales);
    StoreShared(at + 16, row.token_scale);
    StoreShared(at + 24, row.unit_stride);
    StoreShared(at + 28, row.block_stride);
  }

  // Copies the page's first `count` rows, whose places are in shared memory, in the order of keys.
  KVANTA_DEVICE void Copy(int count, uint8_t* to) const {
    for (int i = ThreadIndex(); i < row_bytes / 4 * op.page_size; i += kRowThreads) {
      const int slot = i % op.page_size, unit = i / op.page_size;
      if (slot >= count) continue;
      const CopiedRow row = RowAt(slot);
      *reinterpret_cast<uint32_t*>(to + op.copy_cell.codes + slot / 16 * (16 * row_bytes) + unit * 64 + slot % 16 * 4) =
          LoadWord(reinterpret_cast<const uint8_t*>(row.codes) + int64_t{unit} * row.unit_stride);
    }
    for (int i = ThreadIndex(); i < blocks * op.page_size; i += kRowThreads) {
      const int slot = i % op.page_size, block = i / op.page_size;
      if (slot >= count) continue;
      const CopiedRow row = RowAt(slot);
      const auto* from = reinterpret_cast<const uint8_t*>(row.block_scales) + int64_t{block} * row.block_stride;
      for (int byte = 0; byte < block_bytes; ++byte) {
        to[op.copy_cell.block_scales + int64_t{i} * block_bytes + byte] = from[byte];
      }
    }
    for (int slot = ThreadIndex(); token_bytes != 0 && slot < count; slot += kRowThreads) {
      const auto* from = reinterpret_cast<const uint8_t*>(RowAt(slot).token_scale);
      for (int byte = 0; byte < token_bytes; ++byte) {
        to[op.copy_cell.token_scales + int64_t{slot} * token_bytes + byte] = from[byte];
      }
    }
  }
};

KVANTA_DEVICE void RunBlock(const GatherRowsOp& op) {
  const int32_t of_wave = BlockIndex() / op.pages, page = BlockIndex() % op.pages;
  const int32_t index = op.first_row + of_wave;
  if (index >= op.step->count) return;
  const CompressedRow row = op.step->rows[index];
  const int32_t all = row.entries + row.tokens, first = page * op.page_size;
  if (first >= all) return;
  const int32_t count = all - first < op.page_size ? all - first : op.page_size;
  if (ThreadIndex() == 0) {
    op.page_ids[BlockIndex()] = {.quantized = BlockIndex(), .exact = -1};
    const int32_t pages = (all + op.page_size - 1) / op.page_size;
    if (page == 0) op.gathered[of_wave] = {.page_size = op.page_size, .tokens = {0, all, 0}, .ends = {0, pages, pages}};
  }
  const RowCopier copier(op);
  if (ThreadIndex() < count) {
    const int32_t at = first + ThreadIndex();
    if (at < row.entries) {
      const int32_t entry = row.chosen < 0 ? at : op.selection->positions[int64_t{row.chosen} * op.top_k + at];
      copier.Store(ThreadIndex(), copier.Entry(row.sequence, entry));
    } else {
      copier.Store(ThreadIndex(), copier.Token(row.sequence, row.first_token + at - row.entries));
    }
  }
  SyncBlock();
  copier.Copy(count, op.copies.Record(BlockIndex()));
}

}  // namespace kvanta::kernels::cuda
