// The searches for trellis codes that formats/trellis_search.h and klt_search.h define, by one warp, in the same
// integers. Include the primitives first.
//
// A lane has windows 8 lane to 8 lane + 7, and so 2^(3 - b) values of u, the state that a window w = u << b | c leaves
// (of 4 bits: half a value). An element's windows meet in shared memory, where those that compete for a u are read.
#pragma once

#include <cstdint>

#include "formats/bit_allocation.h"
#include "formats/klt_levels.h"
#include "formats/trellis_levels.h"
#include "formats/trellis_row.h"
#include "formats/trellis_search.h"
#include "kernels/cuda/types.h"

namespace kvanta::kernels::cuda {

// Bits of a row's channels, and how errors in them weigh (formats::BitAllocation), in shared or global memory.
struct RowAllocation {
  int scalar_blocks = 0;
  int coded_blocks = 0;
  const uint8_t* bits = nullptr;
  const float* weight = nullptr;
  const int16_t* gain = nullptr;

  RowAllocation() = default;
  explicit KVANTA_DEVICE RowAllocation(const formats::BitAllocation& allocation)
      : scalar_blocks(allocation.scalar_blocks),
        coded_blocks(allocation.coded_blocks),
        bits(allocation.bits),
        weight(allocation.weight),
        gain(allocation.gain) {}
};

// Offsets in a warp's shared memory.
struct TrellisMemory {
  static constexpr int kMetricBytes = 2 * formats::kTrellisStates;
  int metrics;    // two of [256] int16
  int found;      // where the string's ends join
  int targets;    // int16 [head_dim]
  int codes;      // uint8 [head_dim], then their levels
  int decisions;  // [head_dim][kWarp]: a byte has those of a lane's states

  KVANTA_DEVICE TrellisMemory(int base, int head_dim)
      : metrics(base),
        found(metrics + 2 * kMetricBytes),
        targets(found + 16),
        codes(targets + 2 * head_dim),
        decisions(codes + head_dim) {}
  static constexpr KVANTA_DEVICE int Bytes(int head_dim) {
    return 2 * kMetricBytes + 16 + ((3 + kWarp) * head_dim + 15) / 16 * 16;
  }
};

template <class T, class Combine>
KVANTA_DEVICE T CombineLanes(T value, Combine combine) {
  for (int mask = 1; mask < kWarp; mask *= 2) value = combine(value, ShuffleXor(value, mask));
  return value;
}
KVANTA_DEVICE int32_t WarpMinimum(int32_t value) {
  return CombineLanes(value, [](int32_t a, int32_t b) { return a < b ? a : b; });
}

// Windows, states and decisions of a lane for codes of kBits bits.
template <int kBits>
struct LaneWindows {
  static constexpr int kStates = kBits < 3 ? 8 >> kBits : 1;

  // The lowest of the metrics in shared memory that compete for each of the lane's states, and which they are.
  static KVANTA_DEVICE uint8_t Compete(int metrics, int lane, int32_t (&best)[kStates]) {
    constexpr int kChoices = kBits == 4 ? 8 : 1 << kBits;  // of 4 bits: a half of them
    const int first = kBits == 4 ? lane % 2 * kChoices : 0;
    const int state = kBits == 4 ? lane / 2 : kStates * lane;
    int32_t key[kStates];  // metric and choice: of equal metrics the lowest choice
    KVANTA_UNROLL
    for (int x = 0; x < kChoices; ++x) {
      const int at = metrics + 2 * ((first + x) << (8 - kBits) | state);
      int32_t metric[kStates];
      LoadMetrics(at, metric);
      KVANTA_UNROLL
      for (int s = 0; s < kStates; ++s) {
        const int32_t own = metric[s] * 16 + first + x;
        key[s] = x == 0 || own < key[s] ? own : key[s];
      }
    }
    uint32_t decisions = 0;
    KVANTA_UNROLL
    for (int s = 0; s < kStates; ++s) {
      if constexpr (kBits == 4) {
        const int32_t other = ShuffleXor(key[s], 1);
        key[s] = other < key[s] ? other : key[s];
      }
      best[s] = key[s] >> 4;
      decisions |= static_cast<uint32_t>(key[s] & 15) << static_cast<unsigned>(kBits * s);
    }
    return static_cast<uint8_t>(decisions);
  }

  static KVANTA_DEVICE int StateOf(int window) { return kBits < 3 ? window >> kBits : 0; }

 private:
  static KVANTA_DEVICE void LoadMetrics(int at, int32_t (&metric)[kStates]) {
    const auto half = [](uint32_t word, int i) { return static_cast<int16_t>(word >> static_cast<unsigned>(16 * i)); };
    if constexpr (kStates == 1) {
      metric[0] = LoadShared<int16_t>(at);
    } else if constexpr (kStates == 2) {
      const auto word = LoadShared<uint32_t>(at);
      metric[0] = half(word, 0);
      metric[1] = half(word, 1);
    } else {
      const auto words = LoadShared<Vec2>(at);
      KVANTA_UNROLL
      for (int s = 0; s < kStates; ++s) metric[s] = half(words.word[s / 2], s % 2);
    }
  }
};

KVANTA_DEVICE void StoreMetrics(int metrics, int lane, const int32_t (&values)[8]) {
  Vec4 words;
  KVANTA_UNROLL
  for (int i = 0; i < 4; ++i) {
    words.word[i] =
        PermuteBytes(static_cast<uint32_t>(values[2 * i]), static_cast<uint32_t>(values[2 * i + 1]), 0x5410);
  }
  StoreShared(metrics + 16 * lane, words);
}

// The window by which state u of an element was reached, for codes of `bits` bits.
KVANTA_DEVICE int WindowAt(const TrellisMemory& memory, int bits, int u, int element) {
  const int window = u << bits;  // the first that leaves it
  const int shift = bits < 4 ? bits * (u & ((8 >> bits) - 1)) : 0;
  const int decisions = LoadShared<uint8_t>(memory.decisions + element * kWarp + window / 8);
  return u | (decisions >> shift & ((1 << bits) - 1)) << (8 - bits);
}

// The search of trellis_search.h.
template <int kBits>
struct TrellisSearch {
  using Windows = LaneWindows<kBits>;
  static constexpr int kTargets = formats::kTrellisStates >> kBits;

  static KVANTA_DEVICE void Run(const int8_t* table, const TrellisMemory& memory, int head_dim, int lane) {
    int32_t levels[8];
    for (int i = 0; i < 8; ++i) levels[i] = table[8 * lane + i];
    int32_t metrics[Windows::kStates] = {};
    const int join = head_dim < formats::kJoinBits / kBits ? head_dim : formats::kJoinBits / kBits;
    Steps(levels, memory, 0, join, lane, metrics);
    Steps(levels, memory, head_dim - join, join, lane, metrics);
    int32_t lowest = INT32_MAX;  // metric and state
    for (int s = 0; s < Windows::kStates; ++s) {
      const int32_t own = metrics[s] * formats::kTrellisStates + StateOf(lane, s);
      lowest = own < lowest ? own : lowest;
    }
    int u = WarpMinimum(lowest) & (formats::kTrellisStates - 1);
    if (lane == 0) {
      for (int element = 0; element < join; ++element) u = WindowAt(memory, kBits, u, element) >> kBits;
      StoreShared(memory.found, u);
    }
    SyncWarp();
    const int ends = LoadShared<int>(memory.found);
    for (int s = 0; s < Windows::kStates; ++s) metrics[s] = StateOf(lane, s) == ends ? 0 : formats::kWrongStart;
    Steps(levels, memory, 0, head_dim, lane, metrics);
    if (lane == 0) {
      u = ends;
      for (int element = 0; element < head_dim; ++element) {
        const int window = WindowAt(memory, kBits, u, element);
        StoreShared(memory.codes + element, static_cast<uint8_t>(window & ((1 << kBits) - 1)));
        u = window >> kBits;
      }
    }
    SyncWarp();
  }

 private:
  static KVANTA_DEVICE int StateOf(int lane, int s) { return kBits == 4 ? lane / 2 : Windows::kStates * lane + s; }

  // Processes targets [first, first + count) from the last on. Ends with a warp barrier.
  static KVANTA_DEVICE void Steps(const int32_t (&levels)[8], const TrellisMemory& memory, int first, int count,
                                  int lane, int32_t (&metrics)[Windows::kStates]) {
    for (int step = 1; step <= count; ++step) {
      const int element = count - step;
      const int32_t target = LoadShared<int16_t>(memory.targets + 2 * (first + element));
      int32_t costs[8];
      KVANTA_UNROLL
      for (int i = 0; i < 8; ++i) {
        const int32_t product = (target * levels[i] + 64) >> 7;
        costs[i] = formats::SaturateInt16(formats::SaturateInt16(metrics[Windows::StateOf(i)] - product) +
                                          ((levels[i] * levels[i] + 1) >> 1));
      }
      const int buffer = memory.metrics + step % 2 * TrellisMemory::kMetricBytes;
      StoreMetrics(buffer, lane, costs);
      SyncWarp();
      StoreShared(memory.decisions + element * kWarp + lane, Windows::Compete(buffer, lane, metrics));
      const int32_t square = (target * target + (1 << 14)) >> 15;
      int32_t lowest = INT32_MAX;
      KVANTA_UNROLL
      for (int s = 0; s < Windows::kStates; ++s) {
        metrics[s] = formats::SaturateInt16(metrics[s] + square);
        lowest = metrics[s] < lowest ? metrics[s] : lowest;
      }
      if (step % formats::kReducedSteps != 0) continue;
      lowest = WarpMinimum(lowest);
      for (int s = 0; s < Windows::kStates; ++s) metrics[s] = formats::SaturateInt16(metrics[s] - lowest);
    }
    SyncWarp();
  }
};

// The search of klt_search.h.
struct KltSearch {
  const formats::TrellisLevelTable* tables;
  const RowAllocation& allocation;
  const TrellisMemory& memory;
  int lane;
  int32_t metrics[8];  // of the lane's windows
  int buffer = 0;      // that has them

  KVANTA_DEVICE KltSearch(const formats::TrellisLevelTable* widths, const RowAllocation& bits,
                          const TrellisMemory& shared, int own)
      : tables(widths), allocation(bits), memory(shared), lane(own) {}

  KVANTA_DEVICE void Run() {
    constexpr int kBlock = formats::kAllocationBlock;
    const int begin = allocation.scalar_blocks, end = allocation.coded_blocks;
    int head = begin, tail = end;
    for (int bits = 0; head < end && bits < formats::kJoinBits; ++head) bits += kBlock * allocation.bits[head];
    for (int bits = 0; tail > begin && bits < formats::kJoinBits; --tail) bits += kBlock * allocation.bits[tail - 1];
    for (int i = 0; i < 8; ++i) metrics[i] = 0;
    Store();
    for (int block = head; block-- > begin;) Block(block);
    for (int block = end; block-- > tail;) Block(block);
    int32_t lowest = INT32_MAX;  // metric and window
    for (int i = 0; i < 8; ++i) {
      const int32_t own = metrics[i] * formats::kTrellisStates + 8 * lane + i;
      lowest = own < lowest ? own : lowest;
    }
    int window = WarpMinimum(lowest) & (formats::kTrellisStates - 1);
    if (lane == 0) {
      for (int element = tail * kBlock; element < end * kBlock; ++element) window = Previous(window, element);
      StoreShared(memory.found, window);
    }
    SyncWarp();
    const int ends = LoadShared<int>(memory.found);
    for (int i = 0; i < 8; ++i) metrics[i] = 8 * lane + i == ends ? 0 : formats::kWrongStart;
    Store();
    for (int block = end; block-- > begin;) Block(block);
    if (lane == 0) {
      window = ends;
      for (int element = begin * kBlock; element < end * kBlock; ++element) {
        const int bits = allocation.bits[element / kBlock];
        StoreShared(memory.codes + element, static_cast<uint8_t>(window & ((1 << bits) - 1)));
        window = Previous(window, element);
      }
    }
    SyncWarp();
  }

 private:
  // The window of the element after it.
  KVANTA_DEVICE int Previous(int window, int element) const {
    const int bits = allocation.bits[element / formats::kAllocationBlock];
    return WindowAt(memory, bits, window >> bits, element);
  }

  // Makes the lanes' metrics visible to all, in the other buffer.
  KVANTA_DEVICE void Store() {
    buffer ^= 1;
    StoreMetrics(memory.metrics + buffer * TrellisMemory::kMetricBytes, lane, metrics);
    SyncWarp();
  }

  KVANTA_DEVICE void Block(int block) {
    switch (allocation.bits[block]) {
      case 4:
        return Elements<4>(block);
      case 3:
        return Elements<3>(block);
      case 2:
        return Elements<2>(block);
      default:
        return Elements<1>(block);
    }
  }

  template <int kBits>
  KVANTA_DEVICE void Elements(int block) {
    using Windows = LaneWindows<kBits>;
    int32_t levels[8];
    for (int i = 0; i < 8; ++i) levels[i] = formats::kKltUnit * tables[kBits].levels[8 * lane + i];
    const int first = block * formats::kAllocationBlock;
    for (int i = formats::kAllocationBlock - 1; i >= 0; --i) {
      const int element = first + i;
      int32_t best[Windows::kStates];
      const uint8_t decisions = Windows::Compete(memory.metrics + buffer * TrellisMemory::kMetricBytes, lane, best);
      StoreShared(memory.decisions + element * kWarp + lane, decisions);
      const int32_t target = LoadShared<int16_t>(memory.targets + 2 * element);
      const int32_t gain = allocation.gain[element];
      int32_t lowest = INT32_MAX;
      KVANTA_UNROLL
      for (int w = 0; w < 8; ++w) {
        const int32_t error = formats::SaturateInt16(8 * (((target - levels[w]) * gain + (1 << 14)) >> 15));
        metrics[w] = formats::SaturateInt16(best[Windows::StateOf(w)] + ((error * error) >> 16));
        lowest = metrics[w] < lowest ? metrics[w] : lowest;
      }
      if (i == 0) {
        lowest = WarpMinimum(lowest);
        for (int w = 0; w < 8; ++w) metrics[w] = formats::SaturateInt16(metrics[w] - lowest);
      }
      Store();
    }
  }
};

}  // namespace kvanta::kernels::cuda
