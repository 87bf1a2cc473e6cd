// Matrix kernel of quantized weights (group_quant_layout.h), written once over the Vec16 of the including ISA unit. x
// stays f32. Chains of at most 32 k inside a group are summed apart and then multiplied by the group's scale: y +=
// scale * chain, in ascending order. Few rows run two chains at once, with the same bits.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/cpu/inline.h"
#include "kernels/linear/cpu/group_quant_layout.h"
#include "kernels/linear/cpu/kernels.h"

namespace kvanta::kernels {
namespace {

template <class Layout>
struct QuantizedStep {
  static constexpr bool kIsBlock = true;
  static constexpr int kStepK = Layout::kStepK;
  static constexpr int kPanelStepBytes = Layout::kPanelStepBytes;
  static constexpr int kPhases = 1;
  struct X {
    float values[kStepK];
  };
  static constexpr int kBlockSteps = 4;
  // Sums of two chains or of one, two vectors of weights, and what decodes them.
  static constexpr int kRowTile = Vec16::kTileSums >= 24 ? 6 : Vec16::kTileSums >= 6 ? 4 : 2;
  static constexpr int kTileSums = kRowTile;
  static constexpr int kColumnTile = 1;
  static constexpr int64_t kPrefetchBytes = 0;  // AddStep prefetches: a whole step at once would fill the buffers

  static constexpr int kChain = Layout::kGroup < 32 ? Layout::kGroup : 32;
  static constexpr int kPairs = kChain / 2;
  static constexpr int64_t kAhead = 4096;  // prefetch distance in bytes

  // x: rows `x_stride` bytes apart, at the step; w: the panel, at the step.
  template <int kRows, int kPanels>
  static KVANTA_INLINE void AddStep(const uint8_t* x, int64_t x_stride, const uint8_t* w, int64_t /*w_panel*/,
                                    Vec16::F (*sums)[kPanels]) {
    static_assert(kPanels == 1);
    // Two chains of all rows fit into 32 registers; with 16, those of a single row do.
    constexpr int kAtOnce = kRows == 1 || Vec16::kTileSums >= 24 ? 2 : 1;
    using Codes = typename Layout::Codes;
    const Codes codes;
    // Decoding takes the time of few rows, products that of more, which leave no registers for tables.
    constexpr bool kLoadsFour = kRows <= 2 && requires(const uint8_t* p, Vec16::F* values) {
      codes.LoadFour(p, values);
    };
    constexpr int kLoadedPairs = kLoadsFour ? 2 : 1;
    // Prefetches in the order of addresses, whatever the order of chains: memory is read half as fast otherwise.
    constexpr int kPrefetches = kStepK / 2 / kAtOnce, kLine = 64;
    constexpr int kAheadBytes =
        kPanelStepBytes < kLine * kPrefetches ? (kPanelStepBytes + kPrefetches - 1) / kPrefetches : kLine;
    const uint8_t* ahead = w + kAhead;
    for (int line = kAheadBytes * kPrefetches; line < kPanelStepBytes; line += kLine) __builtin_prefetch(ahead + line);
    for (int chain = 0; chain < kStepK / kChain; chain += kAtOnce) {
      Vec16::F partial[kAtOnce][kRows], zeros[kAtOnce];
#pragma GCC unroll 2
      for (int c = 0; c < kAtOnce; ++c) {
        zeros[c] = Layout::Zero(w, Group(chain + c));
#pragma GCC unroll 16
        for (int row = 0; row < kRows; ++row) partial[c][row] = Vec16::Zero();
      }
      for (int pair = 0; pair < kPairs; pair += kLoadedPairs) {
#pragma GCC unroll 2
        for (int i = 0; i < kLoadedPairs; ++i, ahead += kAheadBytes) __builtin_prefetch(ahead);
#pragma GCC unroll 2
        for (int c = 0; c < kAtOnce; ++c) {
          const int at = (chain + c) * kPairs + pair;
          const uint8_t* p = w + at * Codes::kPairBytes;
          Vec16::F weights[2 * kLoadedPairs];
          if constexpr (kLoadsFour) {
            codes.LoadFour(p, weights);
          } else {
            codes.Load(p, zeros[c], weights[0], weights[1]);
          }
#pragma GCC unroll 16
          for (int row = 0; row < kRows; ++row) {
            const float* values = reinterpret_cast<const float*>(x + row * x_stride) + 2 * at;
#pragma GCC unroll 4
            for (int i = 0; i < 2 * kLoadedPairs; ++i) {
              partial[c][row] = Vec16::Fma(Vec16::Set1(values[i]), weights[i], partial[c][row]);
            }
          }
        }
      }
#pragma GCC unroll 2
      for (int c = 0; c < kAtOnce; ++c) {
        const Vec16::F scale = Layout::Scale(w, Group(chain + c));
#pragma GCC unroll 16
        for (int row = 0; row < kRows; ++row) sums[row][0] = Vec16::Fma(partial[c][row], scale, sums[row][0]);
      }
    }
  }

  // Copies k values and pads them to whole steps with zeros.
  static KVANTA_INLINE void PackRow(const float* x, int64_t k, X* out) {
    std::memcpy(out, x, static_cast<size_t>(k) * sizeof(float));
    Pad(k, out);
  }
  // Likewise the columns order[0] to order[k - 1] of x.
  static KVANTA_INLINE void PackOrderedRow(const float* x, const int32_t* order, int64_t k, X* out) {
    for (int64_t i = 0; i < k; ++i) reinterpret_cast<float*>(out)[i] = x[order[i]];
    Pad(k, out);
  }

 private:
  static KVANTA_INLINE void Pad(int64_t k, X* out) {
    const int64_t steps = (k + kStepK - 1) / kStepK;
    std::memset(reinterpret_cast<float*>(out) + k, 0, static_cast<size_t>(steps * kStepK - k) * sizeof(float));
  }
  static constexpr int Group(int chain) {
    return chain * kChain / Layout::kGroup;
  }
};

template <int kFormat = 0>
constexpr void SetQuantizedKernels(QuantizedKernels& kernels) {
  if constexpr (kFormat < weights::kKernelFormatCount) {
    kernels.of[kFormat] = kWeightKernels<QuantizedStep<LayoutOfFormat<kFormat>>>;
    SetQuantizedKernels<kFormat + 1>(kernels);
  }
}
constexpr QuantizedKernels MakeQuantizedKernels() {
  QuantizedKernels kernels{};
  SetQuantizedKernels(kernels);
  return kernels;
}

}  // namespace
}  // namespace kvanta::kernels
