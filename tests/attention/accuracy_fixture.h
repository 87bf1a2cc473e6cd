// Fixture of accuracy_test.cc: compares steps on a unit with the double-precision reference on the same bytes, and
// records the errors.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "attention/cache_harness.h"
#include "kernels/attention/cpu/table.h"
#include "kernels/attention/reference/attention.h"
#include "tolerance.h"

namespace kvanta::attention {

class AccuracyTest : public ::testing::TestWithParam<testing::Unit> {
 protected:
  // Records the results for tools/support_matrix.py.
  void TearDown() override {
    for (const formats::Format& format : formats::All()) {
      for (const bool decode : {true, false}) {
        const auto found = worst_.find(Cell(format.name, decode));
        if (found != worst_.end()) RecordProperty(found->first, fmt::format("{:.3g}", found->second));
      }
    }
  }

  // Appends `first_row` tokens without attention, then runs the steps and compares every row.
  void Check(const HarnessOptions& requested, const std::vector<Step>& steps, uint32_t seed, int64_t first_row = 0) {
    CacheHarness harness(requested, seed);
    const HarnessOptions& options = harness.options();
    SCOPED_TRACE(fmt::format("{}: heads {}/{} of {} + {}, page {}, window {}, chunk {}, softcap {}, magnitude {}",
                             options.scheme, options.heads, options.kv_heads, options.head_dim, options.rope_dim,
                             options.page_size, options.sliding_window, options.chunk, options.softcap,
                             options.magnitude));
    const std::unique_ptr<Backend> reference = MakeReferenceBackend(harness.store(), harness.config());
    const std::unique_ptr<Backend> backend = harness.CpuBackend(*GetParam().table, 2);
    if (first_row > 0) harness.Append(*backend, {0, static_cast<int>(first_row)});
    harness.Run(*backend, steps, reference.get());
    const formats::LayerScheme& layer = harness.layout().layers[0];
    for (size_t index = 0; index < harness.sequences().size(); ++index) {
      const CacheHarness::Sequence& sequence = harness.sequences()[index];
      if (sequence.expected.empty()) continue;
      const std::vector<float>& values = layer.SharesCell() ? sequence.k : sequence.v;
      const int v_head_dim = layer.SharesCell() ? harness.KeyDim() : options.head_dim;
      const testing::Operands queries = options.axis_queries ? testing::kExactOperands : Queries(layer);
      const testing::RowSizes q = Sizes(harness, sequence.q, true), k = Sizes(harness, sequence.k, false);
      const double bias =
          layer.k.mean ? q.Norm() * LargestNorm(harness.config().scales[0].k.mean, options.head_dim) : 0;
      const double logit_error = testing::LogitError(queries, layer.k.shape.head_dim + options.rope_dim, q, k,
                                                     layer.k.format->scaling.token_group != 0, bias,
                                                     double{harness.config().layers[0].softmax_scale}, options.softcap);
      const double v_norm = LargestNorm(values, v_head_dim);
      const double largest = kGrowth * (layer.v.hadamard ? v_norm : LargestMagnitude(values));
      const double tolerance =
          testing::AttentionTolerance(logit_error, Probs(layer), options.page_size, largest, Growth(layer.v) * v_norm);
      if (options.magnitude != 1 && options.magnitude != 0) {
        EXPECT_LT(tolerance, 2 * LargestMagnitude(values)) << "any values would pass";
      }
      int64_t row = first_row;
      for (const Step& step : steps) {
        for (const Part& part : step) {
          if (part.sequence != static_cast<int>(index)) continue;
          for (const int64_t end = row + part.tokens; row < end; ++row) {
            const double error = LargestError(sequence, row, harness.OutWidth());
            ASSERT_LE(error, tolerance) << "row " << row;
            if (ReadsPacked(layer, options, row)) Note(options.scheme, part.tokens == 1, error, tolerance);
          }
        }
      }
      if (options.magnitude != 0) CheckRms(harness, queries, sequence, first_row);
    }
  }

  // True if rows that read quantized pages of `format` were compared, in decode or in prefill steps.
  bool Compared(std::string_view format, bool decode) const { return worst_.contains(Cell(format, decode)); }

 private:
  static testing::Operands OperandsOf(const formats::Side& side, double byte_steps) {
    const formats::ElementType code = side.format->code;
    if (formats::IsInteger(code))
      return {.steps = kernels::HasByteOperands(code) ? byte_steps : testing::kInt16OperandSteps};
    return testing::OperandsOfFloats(GetParam().table->attention->OperandsOf(code));
  }
  static testing::Operands Queries(const formats::LayerScheme& layer) {
    return OperandsOf(layer.k, testing::kInt8OperandSteps);
  }
  static testing::Operands Probs(const formats::LayerScheme& layer) {
    return OperandsOf(layer.v, testing::kUint8ProbSteps);
  }

  static std::string Cell(std::string_view format, bool decode) {
    return fmt::format("{}.{}", decode ? "decode" : "prefill", format);
  }
  void Note(const std::string& scheme, bool decode, double error, double tolerance) {
    double& worst = worst_[Cell(scheme, decode)];
    if (tolerance > 0) worst = std::max(worst, error / tolerance);  // tolerance 0: all zeros, compared exactly
  }
  // True if a query at `position` sees a page that it reads in quantized form.
  static bool ReadsPacked(const formats::LayerScheme& layer, const HarnessOptions& options, int64_t position) {
    const int64_t first = options.Visibility().First(position);
    const int64_t last_page = position / options.page_size - layer.exact_pages;
    return last_page >= std::max<int64_t>(first / options.page_size, layer.sink_pages);
  }
  // Largest error of a row; infinite if the row contains NaN.
  static double LargestError(const CacheHarness::Sequence& sequence, int64_t row, int64_t width) {
    double largest = 0;
    for (int64_t i = row * width; i < (row + 1) * width; ++i) {
      const double error =
          std::abs(double{sequence.out[static_cast<size_t>(i)]} - sequence.expected[static_cast<size_t>(i)]);
      if (!(error <= largest)) largest = std::isnan(error) ? HUGE_VAL : error;
    }
    return largest;
  }
  // A stored row may exceed its input by this factor: if a value rounds up to the smallest subnormal.
  static constexpr double kGrowth = 2;
  // The same for a row minus its offset.
  static double Growth(const formats::Side& side) {
    const formats::Scaling& scaling = side.format->scaling;
    return scaling.block_offset || scaling.token_offset || scaling.token_group != 0 ? 2 * kGrowth : kGrowth;
  }
  // Sizes of queries or of stored keys after K's transforms.
  static testing::RowSizes Sizes(const CacheHarness& harness, const std::vector<float>& rows, bool queries) {
    const HarnessOptions& options = harness.options();
    const formats::Side& side = harness.layout().layers[0].k;
    const auto head_dim = static_cast<size_t>(options.head_dim), width = static_cast<size_t>(harness.KeyDim());
    const auto heads = static_cast<size_t>(queries ? options.heads : options.kv_heads);
    testing::RowSizes sizes;
    std::vector<float> x(static_cast<size_t>(side.shape.head_dim)), unquantized;
    for (size_t row = 0; row * width < rows.size(); ++row) {
      const size_t head = row % heads * static_cast<size_t>(options.kv_heads) / heads;
      formats::RowTransform transform =
          formats::TransformOf(side, harness.config().scales[0].k, static_cast<int>(head), options.head_dim);
      if (queries) {
        transform.mean = nullptr;
        transform.key_matrix = transform.query_matrix;
      }
      const float* channels = rows.data() + row * width;
      unquantized.assign(transform.outliers.size(), 0);
      transform.Forward(channels, x.data(), unquantized.data());
      unquantized.insert(unquantized.end(), channels + head_dim, channels + width);
      sizes.max = std::max(sizes.max, LargestMagnitude(x));
      sizes.norm = std::max(sizes.norm, LargestNorm(x, side.shape.head_dim));
      sizes.unquantized_norm =
          std::max(sizes.unquantized_norm, LargestNorm(unquantized, static_cast<int>(unquantized.size())));
    }
    if (queries) return sizes;
    return {.max = kGrowth * sizes.max, .norm = Growth(side) * sizes.norm, .unquantized_norm = sizes.unquantized_norm};
  }
  // Checks the RMS error, for normal k and v of standard deviation `magnitude`.
  static void CheckRms(CacheHarness& harness, testing::Operands queries, const CacheHarness::Sequence& sequence,
                       int64_t first_row) {
    const HarnessOptions& options = harness.options();
    const formats::LayerScheme& layer = harness.layout().layers[0];
    double sum = 0;
    int64_t count = 0;
    for (int64_t i = first_row * harness.OutWidth(); i < sequence.start * harness.OutWidth(); ++i, ++count) {
      const double error = double{sequence.out[static_cast<size_t>(i)]} - sequence.expected[static_cast<size_t>(i)];
      sum += error * error;
    }
    const double k_norm = options.magnitude * std::sqrt(harness.KeyDim()) * (layer.k.mean ? 1.5 : 1.0) *
                          (layer.k.query ? 4 : 1) * Growth(layer.k) / 2;
    EXPECT_LE(std::sqrt(sum / static_cast<double>(count)),
              testing::AttentionRms(queries, Probs(layer), double{harness.config().layers[0].softmax_scale},
                                    LargestMagnitude(sequence.q), k_norm, options.page_size,
                                    options.magnitude * Growth(layer.v) / 2));
  }

 protected:
  // Attention of one row of a query head over the unquantized keys and values.
  static std::vector<double> ExactRow(CacheHarness& harness, int64_t row) {
    const AttentionSpec& layer = harness.config().layers[0];
    const CacheHarness::Sequence& sequence = harness.sequences()[0];
    const int64_t position = row / layer.heads;
    const float* q = sequence.q.data() + row * layer.head_dim;
    std::vector<double> query(q, q + layer.head_dim), out(query.size());
    kernels::reference::Attend(query, sequence.k.data(), sequence.v.data(), position + 1,
                               {.scale = layer.softmax_scale}, out);
    return out;
  }

 private:
  std::map<std::string, double> worst_;  // by cell: largest error relative to its tolerance
};

}  // namespace kvanta::attention
