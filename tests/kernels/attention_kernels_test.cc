// Attention kernels of every unit in isolation: QK and PV of every code of every format, and batch invariance.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "emulated/units.h"
#include "formats/cell_layout.h"
#include "kernels/attention/cpu/table.h"
#include "kernels/attention_cells.h"
#include "normal_floats.h"
#include "tolerance.h"

namespace kvanta::kernels {
namespace {

using formats::SideKind;

// Equal, both NaN, or within the roundings of an integer code's scales and offset; subnormals may be flushed (vdpbf16ps
// does).
// prob_error: error from the rounding of probabilities.
::testing::AssertionResult SameValue(float found, float expected, const formats::Format& format,
                                     double prob_error = 0) {
  const bool integer = formats::IsInteger(format.code);
  const formats::Scaling& scaling = format.scaling;
  const double offset = scaling.block_offset || scaling.token_offset || scaling.token_group != 0 ? 2.1 : 0.0;
  if (std::isnan(expected)) return std::isnan(found) ? ::testing::AssertionSuccess() : ::testing::AssertionFailure();
  if (std::abs(expected) < std::numeric_limits<float>::min() && found == 0) return ::testing::AssertionSuccess();
  const double tolerance = integer ? testing::kOperandRelative * (std::abs(expected) + 2 * offset) : 0;
  if (std::abs(double{found} - expected) <= tolerance + prob_error) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << found << " instead of " << expected;
}

class AttentionKernelsTest : public ::testing::TestWithParam<testing::Unit> {
 protected:
  const AttentionKernels& Kernels() const { return *GetParam().table->attention; }
  const KeyKernel& Key(const formats::Format& format) const {
    return (format.scaling.token_group != 0 ? Kernels().channel_scaled_keys
                                            : Kernels().keys)[static_cast<int>(format.code)];
  }
  // Relative rounding of a scaled probability.
  double OperandRounding(formats::ElementType code) const {
    const DType type = Kernels().OperandsOf(code);
    return type == DType::kF32 ? 0 : testing::OperandsOfFloats(type).relative;
  }
  const ValueKernel& Value(const formats::Format& format) const {
    return Kernels().values[static_cast<int>(format.code)];
  }

 private:
  KernelScope scope_{Kernels()};
};

INSTANTIATE_TEST_SUITE_P(Units, AttentionKernelsTest, ::testing::ValuesIn(testing::AllUnits()),
                         [](const ::testing::TestParamInfo<testing::Unit>& unit) { return unit.param.name; });

// Cells never hold infinities (encoders saturate), and infinity times an operand of 0 is NaN.
bool HasInfinity(const Cell& cell) {
  for (const float value : cell.values) {
    if (std::isinf(value)) return true;
  }
  return false;
}

// Cells that together hold every code, or, for 32 bits, codes spread over the whole range; without cells that hold an
// infinity.
std::vector<Cell> EveryCode(const formats::Format& format, SideKind kind, formats::CellShape shape) {
  const uint32_t codes_of_cell =
      static_cast<uint32_t>(shape.tokens * shape.head_dim * format.code_bits / std::max(8, format.code_bits));
  const uint32_t count = format.code_bits >= 16 ? 1U << 16 : 256;
  const uint32_t step = format.code_bits == 32 ? 0x10001 * codes_of_cell : codes_of_cell;
  std::vector<Cell> cells;
  for (uint32_t i = 0; i * codes_of_cell < count; ++i) {
    cells.push_back(MakeCell(format, kind, shape, i * step));
    if (HasInfinity(cells.back())) cells.pop_back();
  }
  return cells;
}

// Every code of every format, as a key multiplied by unit vectors and as a value weighted by one-hot probabilities.
TEST_P(AttentionKernelsTest, KeysDecodeEveryCode) {
  for (const formats::Format& format : formats::All()) {
    for (const auto [tokens, head_dim] : ShapesOf(format)) {
      SCOPED_TRACE(fmt::format("{} of {}", format.name, head_dim));
      const KeyKernel& key = Key(format);
      const int64_t stride = key.query_bytes(head_dim);
      alignas(64) static uint8_t queries[kPassRows * 4096];
      alignas(64) static float scores[kPassRows * kMaxPageTokens];
      for (const Cell& keys : EveryCode(format, SideKind::kK, {tokens, head_dim})) {
        for (int first = 0; first < head_dim; first += kPassRows) {
          const int rows = std::min(kPassRows, head_dim - first);
          float row_scale[kPassRows];
          for (int row = 0; row < rows; ++row) {
            std::vector<float> q(static_cast<size_t>(head_dim));
            q[static_cast<size_t>(first + row)] = 1;
            row_scale[row] = key.prepare(q.data(), head_dim, formats::BlockChannels(format.scaling, head_dim),
                                         queries + row * stride);
          }
          key.score({.cell = keys.view,
                     .groups = tokens / 16,
                     .rows = rows,
                     .query = queries,
                     .query_stride = stride,
                     .row_scale = row_scale,
                     .scores = scores,
                     .workspace = Workspace(),
                     .prefetch = {}});
          for (int token = 0; token < tokens; ++token) {
            const float* stored = &keys.values[static_cast<size_t>(token * head_dim)];
            // A NaN anywhere in a token's row makes its score NaN.
            const bool nan = std::any_of(stored, stored + head_dim, [](float x) { return std::isnan(x); });
            for (int row = 0; row < rows; ++row) {
              const float expected = nan ? std::nanf("") : stored[first + row];
              ASSERT_TRUE(SameValue(scores[row * kMaxPageTokens + token], expected, format))
                  << "channel " << first + row << " token " << token;
            }
          }
        }
      }
    }
  }
}

// whole: all slots are visible, including those with a probability of 0. rounding: of scaled probabilities, relative.
void ExpectDecodedValues(const ValueKernel& kernel, const formats::Format& format, const Cell& values, bool whole,
                         double rounding) {
  const int tokens = values.shape.tokens, head_dim = values.shape.head_dim;
  const float rescale[1] = {0};
  const auto stored = [&](int token, int c) { return values.values[static_cast<size_t>(token * head_dim + c)]; };
  std::vector<bool> nan(static_cast<size_t>(head_dim));
  // Error of slots that share the quantization scale of their probabilities: less than a step of the largest, times the
  // largest code.
  double rounded = 0;
  if (whole && HasByteOperands(format.code)) {
    for (const float value : values.values)
      rounded = std::max(rounded, std::abs(double{value}) / testing::kUint8ProbSteps);
  }
  for (int t = 0; whole && t < tokens; ++t) {
    for (int c = 0; c < head_dim; ++c)
      nan[static_cast<size_t>(c)] = nan[static_cast<size_t>(c)] || std::isnan(stored(t, c));
  }
  for (int token = 0; token < tokens; ++token) {
    std::vector<float> p(kMaxPageTokens), out(static_cast<size_t>(head_dim));
    p[static_cast<size_t>(token)] = 1;
    AccumulateValues(kernel, {.cell = values.view,
                              .begin = whole ? 0 : token,
                              .end = whole ? tokens : token + 1,
                              .rows = 1,
                              .p = p.data(),
                              .scale = 1,
                              .rescale = rescale,
                              .out = out.data(),
                              .out_stride = head_dim,
                              .workspace = Workspace(),
                              .prefetch = {}});
    for (int c = 0; c < head_dim; ++c) {
      const float expected = nan[static_cast<size_t>(c)] ? std::nanf("") : stored(token, c);
      ASSERT_TRUE(
          SameValue(out[static_cast<size_t>(c)], expected, format, rounded + rounding * std::abs(double{expected})))
          << "channel " << c << " token " << token;
    }
  }
}

TEST_P(AttentionKernelsTest, ValuesDecodeEveryCode) {
  for (const formats::Format& name : formats::All()) {
    const formats::Format& format = formats::OnSide(name, false);
    for (const formats::CellShape shape : ShapesOf(format)) {
      SCOPED_TRACE(fmt::format("{} of {}", format.name, shape.head_dim));
      for (const Cell& values : EveryCode(format, SideKind::kV, shape)) {
        ExpectDecodedValues(Value(format), format, values, shape.tokens == 64, OperandRounding(format.code));
      }
    }
  }
}

// Bit equality; NaN payloads are unspecified.
bool SameBits(const float* a, const float* b, int count) {
  for (int i = 0; i < count; ++i) {
    if (std::memcmp(&a[i], &b[i], sizeof(float)) != 0 && !(std::isnan(a[i]) && std::isnan(b[i]))) return false;
  }
  return true;
}

// Runs both kernels on rows that are prepared once.
class RowsOfPass {
 public:
  RowsOfPass(const KeyKernel& key, const ValueKernel& value, const formats::Format& format, formats::CellShape shape,
             int begin, int end)
      : shape_(shape),
        key_(key),
        value_(value),
        keys_(MakeCell(format, SideKind::kK, shape, 3)),
        values_(MakeCell(formats::OnSide(format, false), SideKind::kV, shape, 3)),
        begin_(begin),
        end_(end),
        stride_(key.query_bytes(shape.head_dim)) {
    std::mt19937 random(1);
    NormalFloats normal;
    for (int row = 0; row < kPassRows; ++row) {
      std::vector<float> q(static_cast<size_t>(shape.head_dim));
      for (float& x : q) x = normal(random);
      row_scale_[row] = key.prepare(q.data(), shape.head_dim, formats::BlockChannels(format.scaling, shape.head_dim),
                                    queries_ + row * stride_);
      rescale_[row] = 0.5f;
      for (int t = begin; t < end; ++t) p_[static_cast<size_t>(row * kMaxPageTokens + t)] = std::abs(normal(random));
    }
    start_.resize(static_cast<size_t>(kPassRows * shape.head_dim));
    for (float& x : start_) x = normal(random);
  }

  // Scores and outputs of `rows` rows from `first` on.
  void Run(int first, int rows, WorkspaceUse workspace_use, std::vector<float>& scores, std::vector<float>& out) const {
    scores.assign(kPassRows * kMaxPageTokens, 0);
    out = start_;
    key_.score({.cell = keys_.view,
                .groups = shape_.tokens / 16,
                .rows = rows,
                .query = queries_ + first * stride_,
                .query_stride = stride_,
                .row_scale = row_scale_ + first,
                .scores = &scores[static_cast<size_t>(first * kMaxPageTokens)],
                .workspace = Workspace(),
                .workspace_use = workspace_use,
                .prefetch = {}});
    AccumulateValues(value_, {.cell = values_.view,
                              .begin = begin_,
                              .end = end_,
                              .rows = rows,
                              .p = &p_[static_cast<size_t>(first * kMaxPageTokens)],
                              .scale = 1,
                              .rescale = rescale_ + first,
                              .out = &out[static_cast<size_t>(first * shape_.head_dim)],
                              .out_stride = shape_.head_dim,
                              .workspace = Workspace(),
                              .workspace_use = workspace_use,
                              .prefetch = {}});
  }

 private:
  formats::CellShape shape_;
  const KeyKernel& key_;
  const ValueKernel& value_;
  Cell keys_, values_;
  int begin_, end_;
  int64_t stride_;
  alignas(64) uint8_t queries_[kPassRows * 4096];
  float row_scale_[kPassRows], rescale_[kPassRows];
  std::vector<float> p_ = std::vector<float>(kPassRows * kMaxPageTokens);
  std::vector<float> start_;
};

// Scores and outputs of a row are bit-identical alone and among 2 to 16 rows, for a whole page and a part of it, and if
// a call reuses the workspace of an earlier one.
void ExpectSameRows(const RowsOfPass& pass, formats::CellShape shape) {
  std::vector<float> alone_scores[kPassRows], alone_out[kPassRows], scores, out;
  const auto expect_same = [&](const char* how, int first, int rows) {
    for (int row = first; row < first + rows; ++row) {
      const size_t s = static_cast<size_t>(row * kMaxPageTokens), o = static_cast<size_t>(row * shape.head_dim);
      ASSERT_TRUE(SameBits(&scores[s], &alone_scores[row][s], shape.tokens)) << how << rows << ", row " << row;
      ASSERT_TRUE(SameBits(&out[o], &alone_out[row][o], shape.head_dim)) << how << rows << ", row " << row;
    }
  };
  for (int row = 0; row < kPassRows; ++row) {
    pass.Run(row, 1, WorkspaceUse::kNone, alone_scores[row], alone_out[row]);
  }
  for (int rows = 2; rows <= kPassRows; ++rows) {
    pass.Run(0, rows, WorkspaceUse::kNone, scores, out);
    expect_same("in a pass of ", 0, rows);
  }
  pass.Run(0, kPassRows, WorkspaceUse::kFill, scores, out);
  expect_same("in the first pass of ", 0, kPassRows);
  pass.Run(0, kPassRows, WorkspaceUse::kReuse, scores, out);
  expect_same("in a later pass of ", 0, kPassRows);
  for (int row = 0; row < kPassRows; ++row) {
    pass.Run(row, 1, WorkspaceUse::kReuse, scores, out);
    expect_same("in a later pass of ", row, 1);
  }
}

TEST_P(AttentionKernelsTest, RowsAreBatchInvariant) {
  for (const formats::Format& format : formats::All()) {
    const bool latents = format.name.starts_with("mla_");
    for (const formats::CellShape shape : {formats::CellShape{64, 64}, formats::CellShape{128, latents ? 512 : 128}}) {
      for (const auto& [begin, end] : {std::pair(2, 15), std::pair(4, 44), std::pair(0, shape.tokens)}) {
        if (begin == 4 && shape.head_dim != 64) continue;  // whole words of a part of a page: one shape will do
        SCOPED_TRACE(fmt::format("{} of {}, slots {} to {}", format.name, shape.head_dim, begin, end));
        const formats::Format& value_format = formats::OnSide(format, false);
        ExpectSameRows(RowsOfPass(Key(format), Value(value_format), format, shape, begin, end), shape);
      }
    }
  }
}

// Integer dots are exact, so a per-token integer format has bit-identical scores on every unit.
TEST_P(AttentionKernelsTest, IntegerScoresAreBitIdenticalOnEveryUnit) {
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  const formats::Format& format = formats::Find("int8");
  const Cell keys = MakeCell(format, SideKind::kK, {16, 128}, 77);
  std::vector<float> q(128);
  for (float& x : q) x = normal(random);
  std::vector<std::vector<float>> scores;
  const AttentionKernels& best = *testing::Units().front().table->attention;
  const AttentionKernels none{};
  for (const AttentionKernels* kernels : {&Kernels(), &best}) {
    const KernelScope of_best(kernels == &Kernels() ? none : best);  // the fixture has a scope for its own unit
    const KeyKernel& key = kernels->keys[static_cast<int>(format.code)];
    alignas(64) uint8_t query[4096];
    const float row_scale = key.prepare(q.data(), 128, 0, query);
    scores.emplace_back(kMaxPageTokens);
    key.score({.cell = keys.view,
               .groups = 1,
               .rows = 1,
               .query = query,
               .query_stride = key.query_bytes(128),
               .row_scale = &row_scale,
               .scores = scores.back().data(),
               .workspace = Workspace(),
               .prefetch = {}});
  }
  EXPECT_EQ(scores[0], scores[1]);
  // The same bits on every processor: those of a scalar dot of the query, rounded to 16 bits, with the codes.
  const auto largest = *std::ranges::max_element(q, {}, [](float x) { return std::abs(x); });
  const float inverse = 32512.0f / std::abs(largest), row_scale = std::abs(largest) / 32512.0f;
  for (size_t t = 0; t < 16; ++t) {
    const float scale = 1.0f + static_cast<float>(t % 7) / 1024.0f;  // FillScales()
    int64_t dot = 0;
    for (size_t c = 0; c < q.size(); ++c) {
      dot += std::lround(keys.values[t * q.size() + c] / scale) * std::lround(std::nearbyint(q[c] * inverse));
    }
    EXPECT_EQ(scores[0][t], static_cast<float>(dot) * scale * row_scale) << t;
  }
}

}  // namespace
}  // namespace kvanta::kernels
