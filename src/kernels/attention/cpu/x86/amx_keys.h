// QK kernels by AMX tiles (tiles_amx.h): the cache stores a group of 16 tokens in the layout of a second operand, 64
// bytes of channels per tile row. Codes below 8 bits and fp8 are first decoded to bytes or bf16 in the workspace. A
// query row takes one row of sums per *part*: 16-bit operands are two terms of 8 bits, f32 is two terms of bf16, and
// each block of channels with a scale of its own is a row that is 0 elsewhere. With few query rows, several parts share
// a tile, since a product costs the same whatever its rows hold. Included by isa_amx.cc after subbyte_values.h.
#pragma once

#include <cstdint>

#include "kernels/attention/cpu/keys.h"
#include "kernels/attention/cpu/subbyte_keys.h"
#include "kernels/attention/cpu/x86/codes_amx.h"
#include "kernels/cpu/inline.h"
#include "kernels/cpu/x86/tiles_amx.h"

namespace kvanta::kernels {
namespace {

// Layout of a call with at most kRows query rows as rows of tiles: for each chunk of channels, kParts parts of kRows
// rows, consecutive. kBlocks: blocks of a chunk that have a scale each.
template <class DotsOf, int kBlocksOf, int kRowsOf>
struct PackedQueries {
  using Dots = DotsOf;
  static constexpr int kBlocks = kBlocksOf, kRows = kRowsOf;
  static constexpr int kParts = kBlocks * Dots::kTerms;
  static constexpr int64_t kPartBytes = int64_t{kRows} * 64;
  static constexpr int kTiles = kParts * kRows > kTileRows ? kParts* kRows / kTileRows : 1;  // tiles per chunk
  static constexpr int kGroups = kTilesUnroll / kTiles;  // groups of tokens multiplied at a time
};

// First operands of a call: tile `i` of a chunk is at first + (chunk * kTiles + i) * tile_stride.
struct Operands {
  const uint8_t* first;
  int64_t tile_stride;
  int64_t row_stride;  // between the rows of a tile
};

// Packs the prepared queries to tiles. Missing rows stay uninitialized; their results are not read.
template <class Rows>
KVANTA_INLINE Operands PackQueries(const KeyPass& pass, int chunks, uint8_t* tiles) {
  constexpr int kTerms = Rows::Dots::kTerms, kBlocks = Rows::kBlocks, kLanes = 16 / kBlocks;
  // Prepared queries have this layout already.
  if (kBlocks == 1 && Rows::kRows == kTileRows && pass.rows == kTileRows) return {pass.query, 64, pass.query_stride};
  for (int row = 0; row < pass.rows; ++row, tiles += 64) {
    const uint8_t* query = pass.query + row * pass.query_stride;
    uint8_t* out = tiles;
    for (int chunk = 0; chunk < chunks; ++chunk, out += Rows::kTiles * kTileBytes) {
#pragma GCC unroll 2
      for (int term = 0; term < kTerms; ++term, query += 64) {
        const __m512i x = _mm512_loadu_si512(query);
#pragma GCC unroll 4
        for (int b = 0; b < kBlocks; ++b) {
          const auto in = static_cast<__mmask16>(((1U << kLanes) - 1U) << (b * kLanes));
          _mm512_store_si512(out + (b * kTerms + term) * Rows::kPartBytes,
                             kBlocks == 1 ? x : _mm512_maskz_mov_epi32(in, x));
        }
      }
    }
  }
  return {tiles - pass.rows * int64_t{64}, kTileBytes, 64};
}

// Source of the key tiles of a call.
struct KeySource {
  KeyTiles tiles;
  UnpackKeyTiles unpack;  // decodes each tile before use; null where tiles can be loaded
};
// Tiles in the workspace that later calls reuse.
KVANTA_INLINE KeyTiles ReusedKeys(const KeyPass& pass) {
  return {pass.workspace + kCallWorkspaceBytes, kTileBytes, int64_t{kMaxPageTokens / 16} * kTileBytes};
}

// Scales in the workspace that later calls reuse. A call with WorkspaceUse::kNone has its own: it may come between
// others.
KVANTA_INLINE KeyScales& ReusedKeyScales(const KeyPass& pass) {
  static_assert(sizeof(KeyScales) <= kReusedKeyScaleBytes);
  return *reinterpret_cast<KeyScales*>(pass.workspace + kWorkspaceBytes - kReusedKeyScaleBytes);
}

// Adds the offsets of keys to the scores, then applies the token scales and offsets.
__attribute__((noinline)) void AddKeyOffsets(const KeyPass& pass, const KeyScales& scales, int group, int groups) {
  const CellView& cell = pass.cell;
  const int blocks = ScaleBlocks(cell);
  for (int first = group * 16; first < (group + groups) * 16; first += 16) {
    const Vec16::F token_scale = cell.token_scales ? LoadScales(cell.token_scales, first) : Vec16::Set1(1);
    for (int row = 0; row < pass.rows; ++row) {
      const float* query_sums = QuerySums<SubbyteQuery>(pass, row);
      float* scores = pass.scores + row * kMaxPageTokens + first;
      Vec16::F sum = Vec16::Load(scores);
      for (int b = 0; cell.block_offsets && b < blocks; ++b) {
        sum = Vec16::Fma(Vec16::Set1(query_sums[b]), Vec16::Load(scales.offset + b * cell.page_tokens + first), sum);
      }
      if (cell.token_scales) sum = Vec16::Mul(sum, token_scale);
      if (cell.token_offsets) {
        sum = Vec16::Fma(Vec16::Set1(query_sums[0]), Vec16::LoadFp16(cell.token_offsets + first), sum);
      }
      Vec16::Store(scores, Vec16::Mul(sum, Vec16::Set1(pass.row_scale[row])));
    }
  }
}

// Adds the dots [groups][kTiles] of kGroups groups to the rows' scores, for the chunks of the blocks from `first_block`
// on. kFirst: these are the head's first blocks. kLast: the scores are complete afterwards.
template <class Rows, int kGroups, bool kFirst, bool kLast>
__attribute__((noinline)) void AddTileDots(const KeyPass& pass, const KeyScales& scales, const uint8_t* dots, int group,
                                           int first_block, Prefetcher& prefetch) {
  constexpr int kBlocks = Rows::kBlocks;
  const CellView& cell = pass.cell;
  const bool has_token_scales = static_cast<bool>(cell.token_scales);
  for (int g = 0; g < kGroups; ++g, dots += Rows::kTiles * kTileBytes) {
    const int first = (group + g) * 16;
    const float* scale = scales.scale + first_block * cell.page_tokens + first;
    Vec16::F block_scale[kBlocks];
    for (int b = 0; b < kBlocks; ++b) block_scale[b] = Vec16::Load(scale + b * cell.page_tokens);
    const Vec16::F token_scale = kLast && has_token_scales ? LoadScales(cell.token_scales, first) : Vec16::Set1(1);
    const uint8_t* row_dots = dots;
    float* scores = pass.scores + first;
    for (int row = 0; row < pass.rows; ++row, row_dots += 64, scores += kMaxPageTokens) {
      Vec16::F sum = kFirst ? Vec16::Zero() : Vec16::Load(scores);
#pragma GCC unroll 4
      for (int b = 0; b < kBlocks; ++b) {
        const uint8_t* dot = row_dots + b * Rows::Dots::kTerms * Rows::kPartBytes;
        sum = Vec16::Fma(Rows::Dots::Combine(dot, Rows::kPartBytes), block_scale[b], sum);
      }
      if constexpr (kLast) {
        prefetch.Steps<kStepsOfRow>();
        if (has_token_scales) sum = Vec16::Mul(sum, token_scale);
        sum = Vec16::Mul(sum, Vec16::Set1(pass.row_scale[row]));
      }
      Vec16::Store(scores, sum);
    }
  }
}

// Multiplies a chunk's operands by kGroups tiles `group_stride` bytes apart; tile i of group g is added to sum g *
// kTiles + i.
template <class Rows, int kGroups>
KVANTA_INLINE void MultiplyChunk(const uint8_t* operands, const Operands& rows, const uint8_t* columns,
                                 int64_t group_stride, Prefetcher& prefetch) {
  const auto multiply = [&](auto i, auto g) __attribute__((always_inline)) {
    constexpr int kTile = decltype(i)::kValue, kGroup = decltype(g)::kValue;
    prefetch.Steps<kStepsOfTile>();
    Rows::Dots::template Dot<kGroup * Rows::kTiles + kTile, kFirstOperand + kTile % 2, kSecondOperand + kGroup % 2>();
  };
  const auto load = [&](auto g) __attribute__((always_inline)) {
    constexpr int kGroup = decltype(g)::kValue;
    Tiles::Load<kSecondOperand + kGroup % 2>(columns + kGroup * group_stride, 64);
  };
  if constexpr (Rows::kTiles == 1) {
    Tiles::Load<kFirstOperand>(operands, rows.row_stride);
    ForTiles<kGroups>([&](auto g) __attribute__((always_inline)) {
      load(g);
      multiply(Index<0>{}, g);
    });
  } else {
    ForTiles<kGroups>(load);
    ForTiles<Rows::kTiles>([&](auto i) __attribute__((always_inline)) {
      constexpr int kTile = decltype(i)::kValue;
      Tiles::Load<kFirstOperand + kTile % 2>(operands + kTile * rows.tile_stride, rows.row_stride);
      ForTiles<kGroups>([&](auto g) __attribute__((always_inline)) { multiply(i, g); });
    });
  }
}

// Scores groups [group, last), kGroups at a time; returns the first that is left. block_chunks: chunks per block. Sums
// stay in their tiles until the previous ones have been processed, so that products and vector work overlap.
template <class Rows, int kGroups>
__attribute__((noinline)) int ScoreTilesOf(const KeyPass& pass, const KeySource& keys, const KeyScales& scales,
                                           const Operands& rows, int chunks, int block_chunks, uint8_t* dots, int group,
                                           int last, Prefetcher& prefetch) {
  constexpr int kSums = kGroups * Rows::kTiles;
  uint8_t* workspace = dots + kTilesUnroll * kTileBytes;
  int pending_group = -1, pending_block = 0;
  const bool has_offsets = pass.cell.block_offsets != nullptr || pass.cell.token_offsets != nullptr;
  const auto add = [&] {
    const bool is_end = pending_block + Rows::kBlocks == chunks / block_chunks * Rows::kBlocks;
    const bool is_first = pending_block == 0, is_last = is_end && !has_offsets;
    (is_first  ? is_last ? AddTileDots<Rows, kGroups, true, true> : AddTileDots<Rows, kGroups, true, false>
      : is_last ? AddTileDots<Rows, kGroups, false, true>
               : AddTileDots<Rows, kGroups, false, false>)(pass, scales, dots, pending_group, pending_block, prefetch);
    if (is_end && has_offsets) AddKeyOffsets(pass, scales, pending_group, kGroups);
  };
  for (; group + kGroups <= last; group += kGroups) {
    for (int chunk = 0, block = 0; chunk < chunks; block += Rows::kBlocks) {
      ForTiles<kSums>([](auto i) __attribute__((always_inline)) { Tiles::Zero<decltype(i)::kValue>(); });
      for (const int end = chunk + block_chunks; chunk < end; ++chunk) {
        KeyTiles tiles = keys.tiles;
        tiles.first += group * tiles.group_stride + chunk * tiles.chunk_stride;
        if (keys.unpack != nullptr) {
          uint8_t* unpacked = workspace + chunk % 2 * kGroups * kTileBytes;
          keys.unpack(pass.cell, group, kGroups, chunk, unpacked);
          tiles = {unpacked, kTileBytes, 0};
        }
        MultiplyChunk<Rows, kGroups>(rows.first + chunk * Rows::kTiles * rows.tile_stride, rows, tiles.first,
                                     tiles.group_stride, prefetch);
      }
      if (pending_group >= 0) add();
      ForTiles<kSums>([&](auto i) __attribute__((always_inline)) {
        constexpr int kSum = decltype(i)::kValue;
        Tiles::Store<kSum>(dots + kSum * kTileBytes, 64);
      });
      pending_group = group;
      pending_block = block;
    }
  }
  if (pending_group >= 0) add();
  return group;
}

// Scores groups [first, last). channels: per chunk.
template <class Rows>
KVANTA_INLINE void ScoreRowTiles(const KeyPass& pass, const KeySource& keys, const KeyScales& scales, int channels,
                                 int first, int last, Prefetcher& prefetch) {
  const int chunks = pass.cell.head_dim / channels;
  const int block = pass.cell.block_scales ? pass.cell.block : pass.cell.head_dim;
  const int block_chunks = block > channels ? block / channels : 1;
  const Operands rows = PackQueries<Rows>(pass, chunks, pass.workspace);
  uint8_t* dots = pass.workspace + int64_t{chunks} * Rows::kTiles * kTileBytes;
  constexpr int kGroups = Rows::kGroups;
  int group = ScoreTilesOf<Rows, kGroups>(pass, keys, scales, rows, chunks, block_chunks, dots, first, last, prefetch);
  if constexpr (kGroups > 2) {
    group = ScoreTilesOf<Rows, 2>(pass, keys, scales, rows, chunks, block_chunks, dots, group, last, prefetch);
  }
  if constexpr (kGroups > 1)
    ScoreTilesOf<Rows, 1>(pass, keys, scales, rows, chunks, block_chunks, dots, group, last, prefetch);
}

template <class Dots, int kBlocks>
__attribute__((noinline)) void ScoreBlocks(const KeyPass& pass, const KeySource& keys, const KeyScales& scales,
                                           int channels, int first, int last, Prefetcher& prefetch) {
  constexpr int kFewRows = kTileRows / 2;
  if (Dots::kTerms * kBlocks > 1 && pass.rows <= kFewRows) {
    return ScoreRowTiles<PackedQueries<Dots, kBlocks, Dots::kTerms * kBlocks == 1 ? kTileRows : kFewRows>>(
        pass, keys, scales, channels, first, last, prefetch);
  }
  ScoreRowTiles<PackedQueries<Dots, kBlocks, kTileRows>>(pass, keys, scales, channels, first, last, prefetch);
}

// Number of blocks in a chunk that have a scale each.
template <class Keys>
KVANTA_INLINE int BlocksOfChunk(const CellView& cell) {
  return cell.block_scales && cell.block < Keys::kChannels ? Keys::kChannels / cell.block : 1;
}

// Scores groups [first, last).
template <class Keys>
KVANTA_INLINE void ScoreByTiles(const KeyPass& pass, const KeySource& keys, const KeyScales& scales, int first,
                                int last, Prefetcher& prefetch) {
  using Dots = typename Keys::Dots;
  const int blocks = BlocksOfChunk<Keys>(pass.cell);
  if constexpr (Keys::kChannels / Keys::kBlock >= 4) {
    if (blocks == 4) return ScoreBlocks<Dots, 4>(pass, keys, scales, Keys::kChannels, first, last, prefetch);
  }
  if constexpr (Keys::kChannels / Keys::kBlock >= 2) {
    if (blocks == 2) return ScoreBlocks<Dots, 2>(pass, keys, scales, Keys::kChannels, first, last, prefetch);
  }
  ScoreBlocks<Dots, 1>(pass, keys, scales, Keys::kChannels, first, last, prefetch);
}

template <class Keys>
KVANTA_INLINE int TileSteps(const KeyPass& pass) {
  constexpr int kFewRows = kTileRows / 2;
  const int parts = BlocksOfChunk<Keys>(pass.cell) * Keys::Dots::kTerms;
  const int tiles = pass.rows <= kFewRows ? (parts + 1) / 2 : parts;
  return (pass.cell.head_dim / Keys::kChannels * tiles * kStepsOfTile + pass.rows * kStepsOfRow) * pass.groups;
}

// The key tiles of a call; decodes them to the workspace if later calls are to reuse them.
template <class Keys>
KVANTA_INLINE KeySource FindKeys(const KeyPass& pass) {
  const CellView& cell = pass.cell;
  if constexpr (Keys::kUnpack == nullptr) {
    return {{cell.codes, int64_t{cell.head_dim} * 16 * Keys::kBytes, kTileBytes}, nullptr};
  } else {
    const KeyTiles kept = ReusedKeys(pass);
    if (pass.workspace_use == WorkspaceUse::kNone) return {kept, Keys::kUnpack};
    uint8_t* out = pass.workspace + kCallWorkspaceBytes;
    for (int chunk = 0; pass.workspace_use == WorkspaceUse::kFill && chunk < cell.head_dim / Keys::kChannels; ++chunk) {
      Keys::kUnpack(cell, 0, pass.groups, chunk, out + chunk * kept.chunk_stride);
    }
    return {kept, nullptr};
  }
}

template <class Keys>
void ScoreTiles(const KeyPass& pass) {
  KeyScales own;
  KeyScales& scales = pass.workspace_use == WorkspaceUse::kNone ? own : ReusedKeyScales(pass);
  Prefetcher prefetch{pass.prefetch, TileSteps<Keys>(pass)};
  if (pass.workspace_use != WorkspaceUse::kReuse) LoadKeyScales(pass.cell, pass.groups, scales);
  ScoreByTiles<Keys>(pass, FindKeys<Keys>(pass), scales, 0, pass.groups, prefetch);
}

}  // namespace
}  // namespace kvanta::kernels
