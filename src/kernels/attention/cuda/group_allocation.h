// Scales and bits of the channels of a token group (formats/klt_group.h), found by one warp: those of
// formats::EncodeKltGroup, by the same operations in the same order. Include the primitives first.
#pragma once

#include <cstdint>

#include "formats/klt_group.h"
#include "kernels/attention/cuda/attention_params.h"
#include "kernels/attention/cuda/warp_search.h"

namespace kvanta::kernels::cuda {

// In a warp's shared memory.
class GroupAllocation {
 public:
  static constexpr KVANTA_DEVICE int Bytes(int head_dim) {
    return (7 * head_dim + 3 * (head_dim / kOctet) + 15) / 16 * 16;
  }

  KVANTA_DEVICE GroupAllocation(const AppendParams& params, int base, int own)
      : levels_(params.levels),
        head_dim_(params.head_dim),
        blocks_(params.head_dim / kOctet),
        weights_(base),
        gains_(weights_ + 4 * head_dim_),
        steps_(gains_ + 2 * head_dim_),
        block_bits_(steps_ + head_dim_),
        bits_(block_bits_ + blocks_),
        places_(bits_ + blocks_),
        lane_(own) {}

  // Finds them. calibrated: deviations [head_dim] of the KV head; value_at(token, channel): of a token of the group;
  // scratch: shared memory of 4 head_dim bytes, and of 8 for each block of channels. Ends with a warp barrier.
  template <class ValueAt>
  KVANTA_DEVICE void Find(const float* calibrated, int mean_bits, int scratch, ValueAt value_at) {
    const int deviations = scratch, variances = scratch + 4 * head_dim_;
    for (int c = lane_; c < head_dim_; c += kWarp) {
      double square = 0;
      for (int token = 0; token < formats::kKltGroup; ++token) {
        const double value = formats::ClampOrZero(value_at(token, c), formats::kMaxTrellisValue);
        square += value * value;
      }
      const int step = formats::DeviationStep(square / formats::kKltGroup);
      StoreShared(steps_ + c, static_cast<uint8_t>(step));
      StoreShared(deviations + 4 * c, static_cast<float>(double{calibrated[c]} * formats::GroupDeviation(step)));
    }
    SyncWarp();
    SpendBits(deviations, variances, mean_bits);
    SortBlocks();
    SetWeights(deviations, variances);
    SyncWarp();
  }

  // Writes the section of a cell's group `group`.
  KVANTA_DEVICE void StoreSection(uint8_t* sections, int group) const {
    constexpr formats::Scaling kScaling = {.token_group = formats::kKltGroup, .channel_bits = true};
    const int of_channels = head_dim_ / 2, used = of_channels + blocks_ / 2;
    const auto bytes = static_cast<int>(formats::GroupScaleBytes(kScaling, head_dim_));
    for (int i = lane_; i < bytes; i += kWarp) {
      const int pair = i < of_channels ? steps_ + 2 * i : block_bits_ + 2 * (i - of_channels);
      const auto nibble = [](int at) { return static_cast<unsigned>(LoadShared<uint8_t>(at)); };
      sections[group * bytes + i] = static_cast<uint8_t>(i < used ? nibble(pair) | nibble(pair + 1) << 4U : 0U);
    }
  }

  // The channel of a code, and the levels of a value of 1 in it.
  KVANTA_DEVICE int Channel(int code) const {
    return LoadShared<uint8_t>(places_ + code / kOctet) * kOctet + code % kOctet;
  }
  KVANTA_DEVICE float LevelsOfUnit(int code) const {
    const int step = LoadShared<uint8_t>(steps_ + Channel(code));
    return 1 / formats::ScaleOfLevel(step, levels_[LoadShared<uint8_t>(bits_ + code / kOctet)].rms);
  }

  KVANTA_DEVICE const RowAllocation& Row() const { return row_; }

 private:
  static constexpr int kOctet = formats::kAllocationBlock;
  static constexpr int kLaneBlocks = kMaxHeadDim / kOctet / kWarp;  // of SpendBits

  // As formats::SpendBits, by the channels' order.
  KVANTA_DEVICE void SpendBits(int deviations, int variances, int mean_bits) const {
    double variance[kLaneBlocks] = {};
    int bits[kLaneBlocks] = {};
    KVANTA_UNROLL
    for (int i = 0; i < kLaneBlocks; ++i) {
      const int block = lane_ + i * kWarp;
      if (block >= blocks_) continue;
      variance[i] = formats::BlockVariance(reinterpret_cast<const float*>(
          Shared(deviations + 4 * kOctet * block, 4 * kOctet, alignof(float), Access::kRead)));
      StoreShared(variances + 8 * block, variance[i]);
    }
    for (int spent = 0; spent < mean_bits * blocks_; ++spent) {
      double gain = -1;
      int best = blocks_;
      KVANTA_UNROLL
      for (int i = 0; i < kLaneBlocks; ++i) {
        const int block = lane_ + i * kWarp;
        if (block >= blocks_ || bits[i] == formats::kMaxAllocatedBits) continue;
        const double own = variance[i] * (formats::AllocatedError(bits[i]) - formats::AllocatedError(bits[i] + 1));
        if (own <= gain) continue;
        gain = own;
        best = block;
      }
      for (int mask = 1; mask < kWarp; mask *= 2) {  // of equal gains the first block
        const double other_gain = ShuffleXor(gain, mask);
        const int other = ShuffleXor(best, mask);
        const bool better = other_gain > gain || (other_gain == gain && other < best);
        gain = better ? other_gain : gain;
        best = better ? other : best;
      }
      KVANTA_UNROLL
      for (int i = 0; i < kLaneBlocks; ++i) bits[i] += best == lane_ + i * kWarp ? 1 : 0;
    }
    KVANTA_UNROLL
    for (int i = 0; i < kLaneBlocks; ++i) {
      const int block = lane_ + i * kWarp;
      if (block < blocks_) StoreShared(block_bits_ + block, static_cast<uint8_t>(bits[i]));
    }
    SyncWarp();
  }

  // Puts blocks in the order of their bits, the most first.
  KVANTA_DEVICE void SortBlocks() {
    for (int block = lane_; block < blocks_; block += kWarp) {
      const auto bits = LoadShared<uint8_t>(block_bits_ + block);
      int at = 0;
      for (int i = 0; i < blocks_; ++i) {
        const auto other = LoadShared<uint8_t>(block_bits_ + i);
        at += other > bits || (other == bits && i < block) ? 1 : 0;
      }
      StoreShared(bits_ + at, bits);
      StoreShared(places_ + at, static_cast<uint8_t>(block));
    }
    SyncWarp();
  }

  // As formats::BitAllocation::SetWeights.
  KVANTA_DEVICE void SetWeights(int deviations, int variances) {
    row_ = {};
    double error = 0;
    int searched = 0;
    for (int at = 0; at < blocks_; ++at) {
      const int bits = LoadShared<uint8_t>(bits_ + at);
      row_.scalar_blocks += bits > formats::kMaxAllocatedTrellis ? 1 : 0;
      row_.coded_blocks += bits > 0 ? 1 : 0;
      if (bits == 0 || bits > formats::kMaxAllocatedTrellis) continue;
      const int block = LoadShared<uint8_t>(places_ + at);
      error += LoadShared<double>(variances + 8 * block) * formats::AllocatedError(bits);
      searched += kOctet;
    }
    const double unit = error > 0 ? SquareRoot(formats::kMeanGainError * searched / error) : 1.0;
    const double first = LoadShared<float>(deviations + 4 * Channel(0));
    const double norm = 1 / SquareRoot(first * first);
    for (int code = lane_; code < head_dim_; code += kWarp) {
      const double deviation = LoadShared<float>(deviations + 4 * Channel(code));
      const double of_level = deviation / double{levels_[LoadShared<uint8_t>(bits_ + code / kOctet)].rms};
      StoreShared(weights_ + 4 * code, formats::WeightOfLevel(of_level, norm));
      StoreShared(gains_ + 2 * code, formats::GainOfLevel(of_level, unit));
    }
    SyncWarp();
    row_.bits = Shared(bits_, blocks_, 1, Access::kRead);
    row_.weight = reinterpret_cast<const float*>(Shared(weights_, 4 * head_dim_, alignof(float), Access::kRead));
    row_.gain = reinterpret_cast<const int16_t*>(Shared(gains_, 2 * head_dim_, alignof(int16_t), Access::kRead));
  }

  const formats::TrellisLevelTable* levels_;  // by bits
  int head_dim_, blocks_;
  int weights_;     // f32 [head_dim], in the order of the codes
  int gains_;       // int16 [head_dim], likewise
  int steps_;       // uint8 [head_dim], of deviations, in the order of the channels
  int block_bits_;  // uint8 [blocks], likewise
  int bits_;        // uint8 [blocks], in the order of the codes
  int places_;      // uint8 [blocks], likewise: blocks of channels
  int lane_;
  RowAllocation row_;
};

}  // namespace kvanta::kernels::cuda
