// Attention tests on an emulated and, if present, a real GPU, against the reference on the same bytes.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "attention/cache_harness.h"
#include "attention/gpu_backend.h"
#include "emulated/gpus.h"
#include "tolerance.h"

namespace kvanta::attention {

// Special values for encoders. No infinities with a transform: the NaN it makes of them differs between processors.
inline void AddSpecialValues(CacheHarness& harness) {
  const formats::LayerScheme& layer = harness.layout().layers[0];
  const float infinity = std::numeric_limits<float>::infinity();
  for (CacheHarness::Sequence& sequence : harness.sequences()) {
    for (std::vector<float>* rows : {&sequence.k, &sequence.v}) {
      const bool hadamard = rows == &sequence.k ? layer.k.hadamard : layer.v.hadamard;
      const std::vector<float> specials = {0.0F,
                                           -0.0F,
                                           1e-30F,
                                           -1e-40F,
                                           3e4F,
                                           -7e4F,
                                           1e6F,
                                           448.0F,
                                           hadamard ? 1.0F : infinity,
                                           hadamard ? 2.0F : -infinity,
                                           hadamard ? 3.0F : std::nanf("")};
      for (size_t i = 0; i < specials.size(); ++i) (*rows)[i * (rows->size() / specials.size()) + 13] = specials[i];
      const size_t row = static_cast<size_t>(harness.options().head_dim);
      for (const size_t zeros : {size_t{5}, rows->size() / row / 2}) {  // scales of zero
        std::fill_n(rows->begin() + static_cast<int64_t>(zeros * row), row, 0.0F);
      }
    }
  }
}

class GpuAttentionTest : public testing::GpuTestBase, public ::testing::WithParamInterface<std::string> {
 protected:
  void SetUp() override { Start(GetParam()); }

  HarnessOptions On(HarnessOptions options) const {
    options.device = &gpu_->device();
    if (!small_pages_) options.page_size = std::max(options.page_size, 32);
    return options;
  }
  std::unique_ptr<Backend> Make(CacheHarness& harness, int64_t max_result_rows = kMaxResultRows,
                                bool makes_groups = true) {
    return MakeGpuBackend(harness.store(), harness.config(), gpu_, max_result_rows, makes_groups);
  }

  // Runs the steps and compares every row with the reference on the same bytes.
  void Check(const HarnessOptions& requested, const std::vector<Step>& steps, uint32_t seed, int first_row = 0) {
    CacheHarness harness(On(requested), seed);
    const HarnessOptions& options = harness.options();
    SCOPED_TRACE(fmt::format("{}: heads {}/{} of {}, page {}, window {}, chunk {}, softcap {}, magnitude {}",
                             options.scheme, options.heads, options.kv_heads, options.head_dim, options.page_size,
                             options.sliding_window, options.chunk, options.softcap, options.magnitude));
    const std::unique_ptr<Backend> backend = Make(harness);
    const std::unique_ptr<Backend> reference = MakeReferenceBackend(harness.store(), harness.config());
    if (first_row > 0) harness.Append(*backend, {0, first_row});
    harness.Run(*backend, steps, reference.get());
    CompareWithReference(harness, first_row);
  }

  // Compares rows from `first_row` on, after the steps.
  void CompareWithReference(CacheHarness& harness, int first_row = 0) {
    const HarnessOptions& options = harness.options();
    gpu_->device().Synchronize();
    for (const CacheHarness::Sequence& sequence : harness.sequences()) {
      if (sequence.expected.empty()) continue;
      const formats::LayerScheme& layer = harness.layout().layers[0];
      const double q_norm = LargestNorm(sequence.q, harness.KeyDim());
      const double k_norm = 2 * LargestNorm(sequence.k, harness.KeyDim()) + (layer.k.mean ? q_norm : 0);
      const double v_norm = layer.SharesCell() ? k_norm : 2 * LargestNorm(sequence.v, options.head_dim);
      const double logit = double{harness.config().layers[0].softmax_scale} * q_norm * k_norm;
      const formats::Scaling& scaling = layer.k.format->scaling;
      const int rounded =
          (options.axis_queries ? 0 : 1) + (scaling.token_group != 0 ? 1 : 0) + (scaling.channel_bits ? 1 : 0);
      const double tolerance =
          testing::GpuAttentionTolerance(harness.KeyDim(), logit, options.softcap, v_norm, rounded);
      if (options.magnitude != 1 && options.magnitude != 0) {
        EXPECT_LT(tolerance, 2 * LargestMagnitude(layer.SharesCell() ? sequence.k : sequence.v))
            << "any values would pass";
      }
      for (int64_t i = first_row * harness.OutWidth(); i < sequence.start * harness.OutWidth(); ++i) {
        const size_t index = static_cast<size_t>(i);
        ASSERT_NEAR(sequence.out[index], sequence.expected[index], tolerance) << "row " << i / harness.OutWidth();
      }
      if (options.magnitude == 0) continue;
      double rms = options.scheme == "fp32" ? testing::GpuF32AttentionRms(harness.KeyDim()) : testing::kGpuAttentionRms;
      if (options.axis_queries) {
        const double largest = double{harness.config().layers[0].softmax_scale} * LargestMagnitude(sequence.q) *
                               LargestMagnitude(sequence.k);
        rms = testing::GpuLargeAttentionRms(harness.KeyDim(), largest);
      }
      EXPECT_LE(Rms(sequence, first_row * harness.OutWidth(), sequence.start * harness.OutWidth()),
                rms * options.magnitude);
    }
  }

  // Appends by prefill, decode and chunks across pages: bytes and counts must equal the CPU's.
  void CheckBytes(HarnessOptions options, uint32_t seed) {
    SCOPED_TRACE(fmt::format("{}: head_dim {}, page {}", options.scheme, options.head_dim, options.page_size));
    const int scale = std::max(1, options.page_size / 32);
    options.lengths = {149 * scale + 1, 32 * scale + 1};
    CacheHarness found(On(options), seed), expected(options, seed);
    for (CacheHarness* harness : {&found, &expected}) AddSpecialValues(*harness);
    const std::unique_ptr<Backend> gpu = Make(found);
    const std::unique_ptr<Backend> cpu = MakeReferenceBackend(expected.store(), expected.config());
    for (const Part& part : {Part{0, 70 * scale}, Part{1, 1}, Part{0, 1}, Part{1, 32 * scale}, Part{0, 79 * scale}}) {
      found.Append(*gpu, part);
      expected.Append(*cpu, part);
    }
    gpu->FetchCounts();
    const AppendCounts a = gpu->Counts(0), b = cpu->Counts(0);
    for (const int sequence : {0, 1}) ASSERT_EQ(found.Bytes(sequence), expected.Bytes(sequence));
    for (const auto& [x, y] : {std::pair{a.k, b.k}, {a.v, b.v}}) {
      EXPECT_EQ(x.values, y.values);
      EXPECT_EQ(x.saturated, y.saturated);
      EXPECT_EQ(x.nan, y.nan);
      EXPECT_EQ(x.blocks, y.blocks);
      EXPECT_EQ(x.zero_blocks, y.zero_blocks);
    }
  }

  // Processes rows from `before` on token by token, and again in batched chunks with serial KV splits: bits must be
  // equal.
  void CheckBits(const HarnessOptions& requested, int before) {
    HarnessOptions options = On(requested);
    options.lengths = {before + 40, 20};
    SCOPED_TRACE(fmt::format("{}: window {}, chunk {}", options.scheme, options.sliding_window, options.chunk));
    CacheHarness one(options, 7), two(options, 7);
    const std::unique_ptr<Backend> single = Make(one), batch = Make(two, 0);
    one.Append(*single, {0, before});
    two.Append(*batch, {0, before});
    for (int token = 0; token < 40; ++token) one.RunStep(*single, {{0, 1}});
    for (int token = 0; token < 20; ++token) one.RunStep(*single, {{1, 1}});
    two.Run(*batch, {{{1, 7}, {0, 25}}, {{0, 15}, {1, 13}}});
    gpu_->device().Synchronize();
    CompareBits(one, two, before);
  }

  // Compares what two harnesses have computed: rows of sequence 0 from `before` on, all of sequence 1, and bytes.
  static void CompareBits(CacheHarness& one, CacheHarness& two, int before) {
    for (const int index : {0, 1}) {
      const CacheHarness::Sequence& a = one.sequences()[static_cast<size_t>(index)];
      const CacheHarness::Sequence& b = two.sequences()[static_cast<size_t>(index)];
      const int64_t first = (index == 0 ? before : 0) * one.OutWidth();
      for (int64_t i = first; i < a.start * one.OutWidth(); ++i) {
        const size_t at = static_cast<size_t>(i);
        ASSERT_EQ(std::bit_cast<uint32_t>(a.out[at]), std::bit_cast<uint32_t>(b.out[at]))
            << "row " << i / one.OutWidth() << ", " << a.out[at] << " " << b.out[at];
      }
      EXPECT_EQ(one.Bytes(index), two.Bytes(index));
    }
  }

 protected:
  bool small_pages_ = false;  // allow pages of 16 tokens

 private:
  static double Rms(const CacheHarness::Sequence& sequence, int64_t begin, int64_t end) {
    double sum = 0;
    for (int64_t i = begin; i < end; ++i) {
      sum += std::pow(double{sequence.out[static_cast<size_t>(i)]} - sequence.expected[static_cast<size_t>(i)], 2);
    }
    return std::sqrt(sum / static_cast<double>(end - begin));
  }
};

}  // namespace kvanta::attention
