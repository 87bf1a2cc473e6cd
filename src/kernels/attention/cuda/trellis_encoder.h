// Encodes a row to trellis codes by one warp, with the bytes of formats/trellis.cc and klt.cc. Include the primitives
// first.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "kernels/attention/cuda/attention_params.h"
#include "kernels/attention/cuda/warp_search.h"

namespace kvanta::kernels::cuda {

// formats::SumOf of n elements by a warp; f(i) is a double.
template <class F>
KVANTA_DEVICE double SumOfRow(int n, int lane, F f) {
  double sum = 0;
  for (int i = lane % 8; i < n; i += 8) sum += f(i);
  for (int mask = 4; mask != 0; mask /= 2) sum += ShuffleXor(sum, mask);
  return sum;
}

// Encodes a row as formats::EncodeTrellisRow or EncodeKltRow.
template <formats::ElementType kCode>
struct TrellisEncoder {
  static constexpr bool kUneven = formats::IsAllocated(kCode);
  static constexpr int kBits = formats::CodeBits(kCode);  // on average, if uneven

  // allocation: of uneven bits. row: f32 [head_dim] at byte `row` of shared memory, overwritten; codes, scale: where
  // its bytes and the fp16 scale go. Needs a warp barrier after it.
  static KVANTA_DEVICE void Encode(const AppendParams& params, const RowAllocation& allocation, int row, int codes,
                                   int scale, const TrellisMemory& memory, int lane, formats::EncodeCounts& counts) {
    const int head_dim = params.head_dim;
    const int64_t saturated_before = counts.saturated;
    uint32_t largest = 0;
    for (int i = lane; i < head_dim; i += kWarp) {
      const auto x = LoadShared<float>(row + 4 * i);
      formats::CountRow(&x, 1, formats::kMaxTrellisValue, counts);
      const float value = formats::ClampOrZero(x, formats::kMaxTrellisValue);
      const auto magnitude = static_cast<uint32_t>(formats::MagnitudeBits(value));
      largest = magnitude > largest ? magnitude : largest;
      StoreShared(row + 4 * i, value);
    }
    const bool row_saturates = AnyLane(counts.saturated != saturated_before);
    largest = CombineLanes(largest, [](uint32_t a, uint32_t b) { return a > b ? a : b; });
    SyncWarp();
    const auto value_at = [&](int i) { return double{LoadShared<float>(row + 4 * i)}; };
    uint16_t bits = 0;
    bool found = false;
    if constexpr (kUneven) {
      found = FindUneven(params, allocation, row, codes, memory, lane, value_at);
    } else {
      found = FindEven(params, row, codes, memory, std::bit_cast<float>(largest), lane, value_at);
    }
    if (found) {
      bool saturated = false;
      bits =
          formats::RoundScale(static_cast<float>(FittedScale(params, allocation, memory, lane, value_at)), saturated);
      if (saturated && !row_saturates && lane == 0) ++counts.saturated;
    }
    if (bits == 0) {
      SyncWarp();
      for (int i = lane; i < head_dim * kBits / 8; i += kWarp) StoreShared(codes + i, uint8_t{0});
    }
    if (lane == 0) StoreShared(scale, bits);
  }

 private:
  static constexpr int kOctet = formats::kAllocationBlock;

  static KVANTA_DEVICE void StoreTargets(int row, const TrellisMemory& memory, int count, float factor, float largest,
                                         int lane) {
    for (int i = lane; i < count; i += kWarp) {
      const float scaled = LoadShared<float>(row + 4 * i) * factor;
      const float target = std::max(-largest, std::min(largest, scaled));
      StoreShared(memory.targets + 2 * i, static_cast<int16_t>(formats::RoundToInt(target)));
    }
    SyncWarp();
  }
  // Codes of 8 elements to bytes, and, after a warp barrier, their levels. `next`: the byte that follows.
  static KVANTA_DEVICE void Pack(int bits, const TrellisMemory& memory, int octet, int to) {
    if (bits == 0) return;
    formats::PackOctet(bits, Shared(memory.codes + kOctet * octet, kOctet, 1, Access::kRead),
                       Shared(to, bits, 1, Access::kWrite));
  }
  static KVANTA_DEVICE void StoreLevels(int bits, const TrellisMemory& memory, int octet, int from, uint8_t next,
                                        const int8_t* table) {
    formats::OctetLevels(bits, Shared(from, bits, 1, Access::kRead), next, table,
                         reinterpret_cast<int8_t*>(Shared(memory.codes + kOctet * octet, kOctet, 1, Access::kWrite)));
  }

  // Find the codes of a row and their levels; false if all of its values are too small.
  template <class ValueAt>
  static KVANTA_DEVICE bool FindEven(const AppendParams& params, int row, int codes, const TrellisMemory& memory,
                                     float largest, int lane, ValueAt value_at) {
    const int head_dim = params.head_dim;
    const double square = SumOfRow(head_dim, lane, [&](int i) { return value_at(i) * value_at(i); });
    constexpr double kRms = formats::kTrellisLevels[kBits - formats::kMinTrellisBits].rms;
    const double of_rms = SquareRoot(square / head_dim) / kRms;
    const double of_largest = double{largest} / double{formats::kMaxTrellisTarget / formats::kTrellisUnit};
    const double step = of_rms < of_largest ? of_largest : of_rms;
    if (!(step >= formats::kMinTrellisStep)) return false;
    StoreTargets(row, memory, head_dim, static_cast<float>(double{formats::kTrellisUnit} / step),
                 formats::kMaxTrellisTarget, lane);
    const int8_t* const table = params.levels->levels;
    TrellisSearch<kBits>::Run(table, memory, head_dim, lane);
    for (int octet = lane; octet < head_dim / kOctet; octet += kWarp) Pack(kBits, memory, octet, codes + kBits * octet);
    SyncWarp();
    for (int octet = lane; octet < head_dim / kOctet; octet += kWarp) {
      const bool is_last = octet + 1 == head_dim / kOctet;
      const auto next = LoadShared<uint8_t>(codes + (is_last ? 0 : kBits * (octet + 1)));
      StoreLevels(kBits, memory, octet, codes + kBits * octet, next, table);
    }
    SyncWarp();
    return true;
  }

  template <class ValueAt>
  static KVANTA_DEVICE bool FindUneven(const AppendParams& params, const RowAllocation& allocation, int row, int codes,
                                       const TrellisMemory& memory, int lane, ValueAt value_at) {
    const formats::TrellisLevelTable* const tables = params.levels;
    const int coded = allocation.coded_blocks * kOctet;
    const double square = SumOfRow(coded, lane, [&](int i) {
      const double value = value_at(i) / double{tables[allocation.bits[i / kOctet]].rms};
      return value * value;
    });
    const double step = SquareRoot(square / coded);
    if (!(step >= formats::kMinTrellisStep)) return false;
    StoreTargets(row, memory, coded, static_cast<float>(double{formats::kKltUnit} / step),
                 float{formats::kMaxKltTarget}, lane);
    for (int i = lane; i < allocation.scalar_blocks * kOctet; i += kWarp) {
      const int bits = allocation.bits[i / kOctet];
      const int32_t target = LoadShared<int16_t>(memory.targets + 2 * i);
      StoreShared(memory.codes + i, formats::ScalarCode(bits, tables[bits].levels, formats::kKltUnit, target));
    }
    SyncWarp();
    if (allocation.scalar_blocks < allocation.coded_blocks) KltSearch(tables, allocation, memory, lane).Run();
    const auto byte_of = [&](int block) {
      int byte = 0;
      for (int i = 0; i < block; ++i) byte += allocation.bits[i];
      return byte;
    };
    for (int block = lane; block < allocation.coded_blocks; block += kWarp) {
      Pack(allocation.bits[block], memory, block, codes + byte_of(block));
    }
    SyncWarp();
    for (int block = lane; block < params.head_dim / kOctet; block += kWarp) {
      const int bits = allocation.bits[block];
      uint8_t next = 0;
      if (bits <= formats::kMaxAllocatedTrellis && bits != 0) {
        next = LoadShared<uint8_t>(codes +
                                   byte_of(block + 1 < allocation.coded_blocks ? block + 1 : allocation.scalar_blocks));
      }
      StoreLevels(bits, memory, block, codes + byte_of(block), next, tables[bits].levels);
    }
    SyncWarp();
    return true;
  }

  template <class ValueAt>
  static KVANTA_DEVICE double FittedScale(const AppendParams& params, const RowAllocation& allocation,
                                          const TrellisMemory& memory, int lane, ValueAt value_at) {
    const auto level_at = [&](int i) { return int{LoadShared<int8_t>(memory.codes + i)}; };
    if constexpr (kUneven) {
      const auto weighted = [&](int i) { return double{allocation.weight[i]} * static_cast<double>(level_at(i)); };
      const double product = SumOfRow(params.head_dim, lane, [&](int i) { return weighted(i) * value_at(i); });
      const double energy =
          SumOfRow(params.head_dim, lane, [&](int i) { return weighted(i) * static_cast<double>(level_at(i)); });
      return energy > 0 ? product / energy : 0.0;
    } else {
      const double product =
          SumOfRow(params.head_dim, lane, [&](int i) { return value_at(i) * static_cast<double>(level_at(i)); });
      int32_t energy = 0;
      for (int i = lane; i < params.head_dim; i += kWarp) energy += level_at(i) * level_at(i);
      energy = CombineLanes(energy, [](int32_t a, int32_t b) { return a + b; });
      return product / (energy > 1 ? energy : 1);
    }
  }
};

}  // namespace kvanta::kernels::cuda
