// The attention kernels of keys by tiles (tiles_amx.h): a group of 16 tokens lies in the cache as a tile wants its
// second operand, 64 bytes of channels are one. Codes below 8 bits and fp8 become bytes or bf16 in the room first.
// A row of a pass is one row of sums for each of its *parts*: coefficients of 16 bits are two terms of 8, f32 is two
// terms of bf16, and each block of channels with a scale of its own is a row that is 0 elsewhere. Few rows have more
// than one part in a tile, for a product costs the same whatever its rows hold.
// Included by isa_amx.cc after attention_narrow_values.h.
#pragma once

#include <cstdint>

#include "kernels/attention/cpu/x86/codes_amx.h"
#include "kernels/attention/cpu/kernels.h"
#include "kernels/attention/cpu/subbyte_keys.h"
#include "kernels/cpu/inline.h"
#include "kernels/cpu/x86/tiles_amx.h"

namespace kvanta::kernels {
namespace {

// How the rows of a pass, at most kRows, become rows of tiles: of each chunk of channels kParts parts of kRows rows,
// one behind the other. kBlocks: of a chunk, with scales of their own.
template <class DotsOf, int kBlocksOf, int kRowsOf>
struct PackedQueries {
  using Dots = DotsOf;
  static constexpr int kBlocks = kBlocksOf, kRows = kRowsOf;
  static constexpr int kParts = kBlocks * Dots::kTerms;
  static constexpr int64_t kPartBytes = int64_t{kRows} * 64;
  static constexpr int kTiles = kParts * kRows > kTileRows ? kParts* kRows / kTileRows : 1;  // of a chunk
  static constexpr int kGroups = kTilesUnroll / kTiles;                                      // met at a time
};

// The first operands of a pass: tile `i` of a chunk is at first + (chunk * kTiles + i) * apart.
struct Operands {
  const uint8_t* first;
  int64_t apart;
  int64_t stride;  // of the rows of a tile
};

// Rows that there are not stay as they are, and what they are multiplied to is not read.
template <class Rows>
KVANTA_INLINE Operands LayRows(const KeyPass& pass, int chunks, uint8_t* tiles) {
  constexpr int kTerms = Rows::Dots::kTerms, kBlocks = Rows::kBlocks, kLanes = 16 / kBlocks;
  // As they are prepared already.
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

// What the keys of a pass are met as.
struct KeySource {
  KeyTiles tiles;
  UnpackKeyTiles unpack;  // each time; null where the tiles are there
};
// Where tiles are that later passes find again.
KVANTA_INLINE KeyTiles KeptKeys(const KeyPass& pass) {
  return {pass.workspace + kCallWorkspaceBytes, kTileBytes, int64_t{kMaxPageTokens / 16} * kTileBytes};
}

// Where scales are that later passes find again. A pass that is the only one has its own: it may come between others.
KVANTA_INLINE KeyScales& KeptKeyScales(const KeyPass& pass) {
  static_assert(sizeof(KeyScales) <= kKeptKeyScaleBytes);
  return *reinterpret_cast<KeyScales*>(pass.workspace + kWorkspaceBytes - kKeptKeyScaleBytes);
}

// What the scores of 16 rows' dots still lack where keys have zeros.
__attribute__((noinline)) void AddKeyOffsets(const KeyPass& pass, const KeyScales& scales, int group, int groups) {
  const CellView& cell = pass.cell;
  const int blocks = ScaleBlocks(cell);
  for (int first = group * 16; first < (group + groups) * 16; first += 16) {
    const Vec16::F of_token = cell.token_scales ? LoadScales(cell.token_scales, first) : Vec16::Set1(1);
    for (int row = 0; row < pass.rows; ++row) {
      const float* totals = Totals<SubbyteQuery>(pass, row);
      float* scores = pass.scores + row * kMaxPageTokens + first;
      Vec16::F sum = Vec16::Load(scores);
      for (int b = 0; cell.block_offsets && b < blocks; ++b) {
        sum = Vec16::Fma(Vec16::Set1(totals[b]), Vec16::Load(scales.zero + b * cell.page_tokens + first), sum);
      }
      if (cell.token_scales) sum = Vec16::Mul(sum, of_token);
      if (cell.token_offsets) {
        sum = Vec16::Fma(Vec16::Set1(totals[0]), Vec16::LoadFp16(cell.token_offsets + first), sum);
      }
      Vec16::Store(scores, Vec16::Mul(sum, Vec16::Set1(pass.row_scale[row])));
    }
  }
}

// What kGroups groups' dots [groups][kTiles] of a run of chunks, which begins at block `first_block`, add to the rows'
// scores. kFirst, kLast: whether it is the head's first, and whether the scores are complete with it.
template <class Rows, int kGroups, bool kFirst, bool kLast>
__attribute__((noinline)) void AddTileDots(const KeyPass& pass, const KeyScales& scales, const uint8_t* dots, int group,
                                           int first_block, Prefetcher& prefetch) {
  constexpr int kBlocks = Rows::kBlocks;
  const CellView& cell = pass.cell;
  const bool of_tokens = static_cast<bool>(cell.token_scales);
  for (int g = 0; g < kGroups; ++g, dots += Rows::kTiles * kTileBytes) {
    const int first = (group + g) * 16;
    const float* scale = scales.scale + first_block * cell.page_tokens + first;
    Vec16::F of_block[kBlocks];
    for (int b = 0; b < kBlocks; ++b) of_block[b] = Vec16::Load(scale + b * cell.page_tokens);
    const Vec16::F of_token = kLast && of_tokens ? LoadScales(cell.token_scales, first) : Vec16::Set1(1);
    const uint8_t* of_row = dots;
    float* scores = pass.scores + first;
    for (int row = 0; row < pass.rows; ++row, of_row += 64, scores += kMaxPageTokens) {
      Vec16::F sum = kFirst ? Vec16::Zero() : Vec16::Load(scores);
#pragma GCC unroll 4
      for (int b = 0; b < kBlocks; ++b) {
        const uint8_t* dot = of_row + b * Rows::Dots::kTerms * Rows::kPartBytes;
        sum = Vec16::Fma(Rows::Dots::Join(dot, Rows::kPartBytes), of_block[b], sum);
      }
      if constexpr (kLast) {
        prefetch.Steps<kStepsOfRow>();
        if (of_tokens) sum = Vec16::Mul(sum, of_token);
        sum = Vec16::Mul(sum, Vec16::Set1(pass.row_scale[row]));
      }
      Vec16::Store(scores, sum);
    }
  }
}

// Products of a chunk's operands with kGroups tiles `apart` bytes from one another; tile i of group g is added to sum
// g * kTiles + i.
template <class Rows, int kGroups>
KVANTA_INLINE void MultiplyChunk(const uint8_t* operands, const Operands& rows, const uint8_t* columns, int64_t apart,
                                 Prefetcher& prefetch) {
  const auto meet = [&](auto i, auto g) __attribute__((always_inline)) {
    constexpr int kTile = decltype(i)::kValue, kGroup = decltype(g)::kValue;
    prefetch.Steps<kStepsOfTile>();
    Rows::Dots::template Dot<kGroup * Rows::kTiles + kTile, kFirstOperand + kTile % 2, kSecondOperand + kGroup % 2>();
  };
  const auto load = [&](auto g) __attribute__((always_inline)) {
    constexpr int kGroup = decltype(g)::kValue;
    Tiles::Load<kSecondOperand + kGroup % 2>(columns + kGroup * apart, 64);
  };
  if constexpr (Rows::kTiles == 1) {
    Tiles::Load<kFirstOperand>(operands, rows.stride);
    ForTiles<kGroups>([&](auto g) __attribute__((always_inline)) {
      load(g);
      meet(Index<0>{}, g);
    });
  } else {
    ForTiles<kGroups>(load);
    ForTiles<Rows::kTiles>([&](auto i) __attribute__((always_inline)) {
      constexpr int kTile = decltype(i)::kValue;
      Tiles::Load<kFirstOperand + kTile % 2>(operands + kTile * rows.apart, rows.stride);
      ForTiles<kGroups>([&](auto g) __attribute__((always_inline)) { meet(i, g); });
    });
  }
}

// Groups [group, last), kGroups at a time; returns the first that is left. `run`: chunks of a block. The sums of a run
// wait in their tiles while those before are made use of.
template <class Rows, int kGroups>
__attribute__((noinline)) int ScoreTilesOf(const KeyPass& pass, const KeySource& keys, const KeyScales& scales,
                                           const Operands& rows, int chunks, int run, uint8_t* dots, int group,
                                           int last, Prefetcher& prefetch) {
  constexpr int kSums = kGroups * Rows::kTiles;
  uint8_t* workspace = dots + kTilesUnroll * kTileBytes;
  int done_group = -1, done_block = 0;
  const bool zeros = pass.cell.block_offsets != nullptr || pass.cell.token_offsets != nullptr;
  const auto add = [&] {
    const bool is_end = done_block + Rows::kBlocks == chunks / run * Rows::kBlocks;
    const bool is_first = done_block == 0, is_last = is_end && !zeros;
    (is_first  ? is_last ? AddTileDots<Rows, kGroups, true, true> : AddTileDots<Rows, kGroups, true, false>
      : is_last ? AddTileDots<Rows, kGroups, false, true>
               : AddTileDots<Rows, kGroups, false, false>)(pass, scales, dots, done_group, done_block, prefetch);
    if (is_end && zeros) AddKeyOffsets(pass, scales, done_group, kGroups);
  };
  for (; group + kGroups <= last; group += kGroups) {
    for (int chunk = 0, block = 0; chunk < chunks; block += Rows::kBlocks) {
      ForTiles<kSums>([](auto i) __attribute__((always_inline)) { Tiles::Zero<decltype(i)::kValue>(); });
      for (const int end = chunk + run; chunk < end; ++chunk) {
        KeyTiles tiles = keys.tiles;
        tiles.first += group * tiles.of_group + chunk * tiles.of_chunk;
        if (keys.unpack != nullptr) {
          uint8_t* unpacked = workspace + chunk % 2 * kGroups * kTileBytes;
          keys.unpack(pass.cell, group, kGroups, chunk, unpacked);
          tiles = {unpacked, kTileBytes, 0};
        }
        MultiplyChunk<Rows, kGroups>(rows.first + chunk * Rows::kTiles * rows.apart, rows, tiles.first, tiles.of_group,
                                     prefetch);
      }
      if (done_group >= 0) add();
      ForTiles<kSums>([&](auto i) __attribute__((always_inline)) {
        constexpr int kSum = decltype(i)::kValue;
        Tiles::Store<kSum>(dots + kSum * kTileBytes, 64);
      });
      done_group = group;
      done_block = block;
    }
  }
  if (done_group >= 0) add();
  return group;
}

// Groups [first, last) of a pass. `channels`: of a chunk.
template <class Rows>
KVANTA_INLINE void ScoreRowTiles(const KeyPass& pass, const KeySource& keys, const KeyScales& scales, int channels,
                                 int first, int last, Prefetcher& prefetch) {
  const int chunks = pass.cell.head_dim / channels;
  const int block = pass.cell.block_scales ? pass.cell.block : pass.cell.head_dim;
  const int run = block > channels ? block / channels : 1;
  const Operands rows = LayRows<Rows>(pass, chunks, pass.workspace);
  uint8_t* dots = pass.workspace + int64_t{chunks} * Rows::kTiles * kTileBytes;
  constexpr int kGroups = Rows::kGroups;
  int group = ScoreTilesOf<Rows, kGroups>(pass, keys, scales, rows, chunks, run, dots, first, last, prefetch);
  if constexpr (kGroups > 2) {
    group = ScoreTilesOf<Rows, 2>(pass, keys, scales, rows, chunks, run, dots, group, last, prefetch);
  }
  if constexpr (kGroups > 1) ScoreTilesOf<Rows, 1>(pass, keys, scales, rows, chunks, run, dots, group, last, prefetch);
}

template <class Dots, int kBlocks>
__attribute__((noinline)) void ScoreBlocks(const KeyPass& pass, const KeySource& keys, const KeyScales& scales,
                                           int channels, int first, int last, Prefetcher& prefetch) {
  constexpr int kFew = kTileRows / 2;
  if (Dots::kTerms * kBlocks > 1 && pass.rows <= kFew) {
    return ScoreRowTiles<PackedQueries<Dots, kBlocks, Dots::kTerms * kBlocks == 1 ? kTileRows : kFew>>(
        pass, keys, scales, channels, first, last, prefetch);
  }
  ScoreRowTiles<PackedQueries<Dots, kBlocks, kTileRows>>(pass, keys, scales, channels, first, last, prefetch);
}

// Blocks of channels that a chunk has, with scales of their own.
template <class Keys>
KVANTA_INLINE int BlocksOfChunk(const CellView& cell) {
  return cell.block_scales && cell.block < Keys::kChannels ? Keys::kChannels / cell.block : 1;
}

// Groups [first, last) of a pass.
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
  constexpr int kFew = kTileRows / 2;
  const int parts = BlocksOfChunk<Keys>(pass.cell) * Keys::Dots::kTerms;
  const int tiles = pass.rows <= kFew ? (parts + 1) / 2 : parts;
  return (pass.cell.head_dim / Keys::kChannels * tiles * kStepsOfTile + pass.rows * kStepsOfRow) * pass.groups;
}

// Where a pass finds its keys; those that later passes are to find are unpacked.
template <class Keys>
KVANTA_INLINE KeySource FindKeys(const KeyPass& pass) {
  const CellView& cell = pass.cell;
  if constexpr (Keys::kUnpack == nullptr) {
    return {{cell.codes, int64_t{cell.head_dim} * 16 * Keys::kBytes, kTileBytes}, nullptr};
  } else {
    const KeyTiles kept = KeptKeys(pass);
    if (pass.workspace_use == WorkspaceUse::kNone) return {kept, Keys::kUnpack};
    uint8_t* out = pass.workspace + kCallWorkspaceBytes;
    for (int chunk = 0; pass.workspace_use == WorkspaceUse::kFill && chunk < cell.head_dim / Keys::kChannels; ++chunk) {
      Keys::kUnpack(cell, 0, pass.groups, chunk, out + chunk * kept.of_chunk);
    }
    return {kept, nullptr};
  }
}

template <class Keys>
void ScoreTiles(const KeyPass& pass) {
  KeyScales own;
  KeyScales& scales = pass.workspace_use == WorkspaceUse::kNone ? own : KeptKeyScales(pass);
  Prefetcher prefetch{pass.prefetch, TileSteps<Keys>(pass)};
  if (pass.workspace_use != WorkspaceUse::kReuse) LoadKeyScales(pass.cell, pass.groups, scales);
  ScoreByTiles<Keys>(pass, FindKeys<Keys>(pass), scales, 0, pass.groups, prefetch);
}

}  // namespace
}  // namespace kvanta::kernels
