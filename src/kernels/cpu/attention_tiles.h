// The attention kernels of keys by tiles (tiles_amx.h): a group of 16 tokens lies in the cache as a tile wants its
// second operand, 64 bytes of channels are one. Codes below 8 bits and fp8 become bytes or bf16 in the room first.
// Products cost what loading the second operand does, whatever the rows of the first: coefficients of 16 bits are two
// rows of 8, f32 is two rows of bf16, and blocks of channels with a scale of their own are rows of the same tile that
// are 0 elsewhere. Included by isa_amx.cc after attention_narrow_values.h.
#pragma once

#include <cstdint>

#include "kernels/cpu/attention_kernels.h"
#include "kernels/cpu/attention_narrow.h"
#include "kernels/cpu/codes_tiles.h"
#include "kernels/cpu/inline.h"
#include "kernels/cpu/tiles_amx.h"

namespace kvanta::kernels {
namespace {

// How the rows of a pass become rows of tiles: row r of a set, term t, block b of the chunk's is row
// (b * kTerms + t) * rows + r.
// Where rows need more than one set, blocks are no longer than a chunk, so a run is one chunk: its bytes are still
// there for the later sets.
struct RowPlan {
  int blocks;  // of a chunk, with scales of their own
  int rows;    // of a set
  int chunks;  // of a head
  int run;     // chunks of a block
};

template <class Keys>
KVANTA_INLINE RowPlan PlanRows(const CellView& cell) {
  const int block = cell.block_scales ? cell.block : cell.head_dim;
  RowPlan plan{.blocks = 1, .rows = 0, .chunks = cell.head_dim / Keys::kChannels, .run = 1};
  if (block < Keys::kChannels) plan.blocks = Keys::kChannels / block;
  if (block > Keys::kChannels) plan.run = block / Keys::kChannels;
  const int rows = kTileRows / (Keys::Dots::kTerms * plan.blocks);
  plan.rows = rows < kPassRows ? rows : kPassRows;
  return plan;
}

// The first operands of a pass: [sets][chunks] tiles. Rows that there are not stay as they are, and what they are
// multiplied to is not read. kBlocks: the plan's.
template <int kTerms, int kBlocks>
KVANTA_INLINE void LayRowsOf(const KeyPass& pass, const RowPlan& plan, uint8_t* tiles) {
  constexpr int kLanes = 16 / kBlocks;
  const int64_t of_row = int64_t{plan.rows} * 64;
  for (int row = 0, r = 0; row < pass.rows; ++row) {
    const uint8_t* query = pass.query + row * pass.query_stride;
    uint8_t* out = tiles + r * 64;
    for (int chunk = 0; chunk < plan.chunks; ++chunk, out += kTileBytes) {
#pragma GCC unroll 2
      for (int term = 0; term < kTerms; ++term, query += 64) {
        const __m512i x = _mm512_loadu_si512(query);
#pragma GCC unroll 4
        for (int b = 0; b < kBlocks; ++b) {
          const auto in = static_cast<__mmask16>(((1U << kLanes) - 1U) << (b * kLanes));
          _mm512_store_si512(out + (b * kTerms + term) * of_row, kBlocks == 1 ? x : _mm512_maskz_mov_epi32(in, x));
        }
      }
    }
    if (++r == plan.rows) r = 0, tiles += int64_t{plan.chunks} * kTileBytes;
  }
}
template <int kTerms>
__attribute__((noinline)) void LayRows(const KeyPass& pass, const RowPlan& plan, uint8_t* tiles) {
  switch (plan.blocks) {
    case 1:
      return LayRowsOf<kTerms, 1>(pass, plan, tiles);
    case 2:
      return LayRowsOf<kTerms, 2>(pass, plan, tiles);
    default:
      return LayRowsOf<kTerms, 4>(pass, plan, tiles);
  }
}

// What the dots of a pass's rows are made to: [sets][runs][groups] tiles. kBlocks: of a head, or 0 for any.
template <class Dots, int kBlocks>
KVANTA_INLINE void AddTileDotsOf(const KeyPass& pass, const KeyScales& scales, const RowPlan& plan, const uint8_t* dots,
                                 int group, int groups, Prefetcher& prefetch) {
  const CellView& cell = pass.cell;
  const int blocks = kBlocks != 0 ? kBlocks : ScaleBlocks(cell);
  const int64_t run_bytes = int64_t{groups} * kTileBytes, lower = int64_t{plan.rows} * 64;
  const int64_t set_bytes = run_bytes * (plan.chunks / plan.run);
  int64_t of_block[kBlocks != 0 ? kBlocks : kMaxBlocks];
  for (int b = 0; b < blocks; ++b) {
    of_block[b] = b / plan.blocks * run_bytes + b % plan.blocks * Dots::kTerms * lower;
  }
  for (int g = 0; g < groups; ++g, dots += kTileBytes) {
    const int first = (group + g) * 16;
    const float* scale = scales.scale + first;
    const Lanes::F of_token = cell.token_scales ? LoadScales(cell.token_scales, first) : Lanes::Set1(1);
    const uint8_t* query = pass.query + BiasOffset<NarrowQuery>(cell.head_dim);
    float* scores = pass.scores + first;
    const uint8_t* of_row = dots;
    for (int row = 0, r = 0; row < pass.rows; ++row, query += pass.query_stride, scores += kMaxPageTokens) {
      const int32_t* bias = reinterpret_cast<const int32_t*>(query);
      const float* totals = reinterpret_cast<const float*>(bias + kMaxBlocks);
      prefetch.Steps<kStepsOfRow>();
      Lanes::F sum = Lanes::Zero();
#pragma GCC unroll 8
      for (int b = 0; b < blocks; ++b) {
        const Lanes::F dot = Dots::Join(of_row + of_block[b], lower, Dots::kHasBias ? bias[b] : 0);
        sum = Lanes::Fma(dot, Lanes::Load(scale + b * cell.page_tokens), sum);
      }
      for (int b = 0; cell.block_zeros && b < blocks; ++b) {
        sum = Lanes::Fma(Lanes::Set1(totals[b]), Lanes::Load(scales.zero + b * cell.page_tokens + first), sum);
      }
      if (cell.token_scales) sum = Lanes::Mul(sum, of_token);
      if (cell.token_zeros) {
        sum = Lanes::Fma(Lanes::Set1(totals[0]), Lanes::LoadFp16(cell.token_zeros + first), sum);
      }
      Lanes::Store(scores, Lanes::Mul(sum, Lanes::Set1(pass.row_scale[row])));
      of_row += 64;
      if (++r == plan.rows) r = 0, of_row += set_bytes - lower;
    }
  }
}
// One function for all codes of a kind.
template <class Dots>
__attribute__((noinline)) void AddTileDots(const KeyPass& pass, const KeyScales& scales, const RowPlan& plan,
                                           const uint8_t* dots, int group, int groups, Prefetcher& prefetch) {
  switch (ScaleBlocks(pass.cell)) {
    case 1:
      return AddTileDotsOf<Dots, 1>(pass, scales, plan, dots, group, groups, prefetch);
    case 4:
      return AddTileDotsOf<Dots, 4>(pass, scales, plan, dots, group, groups, prefetch);
    case 8:
      return AddTileDotsOf<Dots, 8>(pass, scales, plan, dots, group, groups, prefetch);
    default:
      return AddTileDotsOf<Dots, 0>(pass, scales, plan, dots, group, groups, prefetch);
  }
}

template <class Keys, int kGroups>
KVANTA_INLINE void ScoreTilesOf(const KeyPass& pass, const KeyScales& scales, const RowPlan& plan,
                                const uint8_t* queries, uint8_t* room, int group, Prefetcher& prefetch) {
  uint8_t* dots = room + 2 * kGroups * kTileBytes;
  uint8_t* const kept = pass.room + kCallRoomBytes;
  uint8_t* unpacked = nullptr;
  const int runs = plan.chunks / plan.run;
  KeyTiles tiles{};
  for (int run = 0; run < runs; ++run) {
    uint8_t* of_run = dots + int64_t{run} * kGroups * kTileBytes;
    const uint8_t* operands = queries + int64_t{run} * plan.run * kTileBytes;
    for (int row = 0; row < pass.rows; row += plan.rows) {
      ForTiles<kGroups>([](auto g) __attribute__((always_inline)) { Tiles::Zero<decltype(g)::kValue>(); });
      for (int i = 0; i < plan.run; ++i) {
        const int chunk = run * plan.run + i;
        if (pass.visit != Visit::kOnly) unpacked = kept + (int64_t{chunk} * (kMaxPageTokens / 16) + group) * kTileBytes;
        if (Keys::kUnpacks && pass.visit == Visit::kAgain) {
          tiles = {unpacked, kTileBytes};
        } else if (row == 0) {
          if (pass.visit == Visit::kOnly) unpacked = room + chunk % 2 * kGroups * kTileBytes;
          tiles = Keys::template Find<kGroups>(pass.cell, group, chunk, unpacked);
        }
        Tiles::Load<kFirstOperand>(operands + int64_t{i} * kTileBytes, 64);
        ForTiles<kGroups>([&](auto g) __attribute__((always_inline)) {
          constexpr int kGroup = decltype(g)::kValue, kColumns = kSecondOperand + kGroup % 2;
          prefetch.Steps<kStepsOfTile>();
          Tiles::Load<kColumns>(tiles.first + kGroup * tiles.apart, 64);
          Keys::Dots::template Dot<kGroup, kColumns>();
        });
      }
      ForTiles<kGroups>([&](auto g) __attribute__((always_inline)) {
        constexpr int kGroup = decltype(g)::kValue;
        Tiles::Store<kGroup>(of_run + kGroup * kTileBytes, 64);
      });
      operands += int64_t{plan.chunks} * kTileBytes;
      of_run += int64_t{runs} * kGroups * kTileBytes;
    }
  }
  AddTileDots<typename Keys::Dots>(pass, scales, plan, dots, group, kGroups, prefetch);
}

// Groups [first, last) of a pass.
template <class Keys>
KVANTA_INLINE void ScoreByTiles(const KeyPass& pass, const KeyScales& scales, int first, int last,
                                Prefetcher& prefetch) {
  const RowPlan plan = PlanRows<Keys>(pass.cell);
  uint8_t* queries = pass.room;
  uint8_t* room = queries + int64_t{(pass.rows + plan.rows - 1) / plan.rows} * plan.chunks * kTileBytes;
  LayRows<Keys::Dots::kTerms>(pass, plan, queries);
  int group = first;
  for (; group + kTilesBeside <= last; group += kTilesBeside) {
    ScoreTilesOf<Keys, kTilesBeside>(pass, scales, plan, queries, room, group, prefetch);
  }
  for (; group + 2 <= last; group += 2) ScoreTilesOf<Keys, 2>(pass, scales, plan, queries, room, group, prefetch);
  if (group < last) ScoreTilesOf<Keys, 1>(pass, scales, plan, queries, room, group, prefetch);
}

template <class Keys>
KVANTA_INLINE int TileSteps(const KeyPass& pass) {
  const RowPlan plan = PlanRows<Keys>(pass.cell);
  const int tiles = (pass.rows + plan.rows - 1) / plan.rows * plan.chunks;
  return (tiles * kStepsOfTile + pass.rows * kStepsOfRow) * pass.groups;
}

template <class Keys>
void ScoreTiles(const KeyPass& pass) {
  KeyScales scales;
  Prefetcher prefetch{pass.prefetch, TileSteps<Keys>(pass)};
  LoadKeyScales(pass.cell, pass.groups, scales);
  ScoreByTiles<Keys>(pass, scales, 0, pass.groups, prefetch);
}

}  // namespace
}  // namespace kvanta::kernels
