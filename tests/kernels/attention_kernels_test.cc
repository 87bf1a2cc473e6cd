// The attention kernels of every unit by themselves: every code of every format through QK and PV, rows that share a
// tile, the softmax's corners.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "emulated/units.h"
#include "formats/cell_layout.h"
#include "kernels/cpu/attention_table.h"
#include "tolerance.h"

namespace kvanta::kernels {
namespace {

using formats::SideKind;

// A cell whose codes are consecutive numbers from `first` on, in the cache's layout, and what they decode to.
struct Cell {
  formats::CellShape shape;
  formats::CellPlanes planes;
  std::vector<uint8_t> bytes;
  std::vector<float> values;  // [tokens][head_dim]
  CellView view;
};

Cell MakeCell(const formats::Format& format, SideKind kind, int head_dim, uint32_t first) {
  Cell cell{.shape = {.tokens = 16, .head_dim = head_dim}, .planes = {}, .bytes = {}, .values = {}, .view = {}};
  cell.planes = formats::PlanCell(format, cell.shape);
  cell.bytes.resize(static_cast<size_t>(cell.planes.bytes));
  cell.values.resize(static_cast<size_t>(16 * head_dim));
  uint32_t code = first;
  for (int token = 0; token < 16; ++token) {
    std::vector<uint8_t> codes(static_cast<size_t>(cell.planes.row_bytes));
    if (format.code_bits == 4) {
      for (uint8_t& byte : codes) byte = static_cast<uint8_t>(code++);
    } else {
      for (int c = 0; c < head_dim; ++c, ++code)
        std::memcpy(&codes[static_cast<size_t>(c * format.code_bits / 8)], &code,
                    static_cast<size_t>(format.code_bits / 8));
    }
    std::vector<uint16_t> scales(16, static_cast<uint16_t>(0x3c00 + token));  // fp16 of 1 + token / 1024
    const formats::ConstRowPlanes row{codes.data(), reinterpret_cast<const uint8_t*>(scales.data()),
                                      reinterpret_cast<const uint8_t*>(scales.data())};
    formats::StoreRow(kind, format, cell.shape, cell.planes, token, row, cell.bytes.data());
    format.decode_row(row, head_dim, 1.0f, &cell.values[static_cast<size_t>(token * head_dim)]);
  }
  cell.view = {.codes = cell.bytes.data() + cell.planes.codes, .page_tokens = 16, .head_dim = head_dim};
  if (format.scale == formats::Scale::kPerBlock) {
    cell.view.block_scales = reinterpret_cast<const uint16_t*>(cell.bytes.data() + cell.planes.block_scales);
    cell.view.block = format.block;
  }
  if (format.scale == formats::Scale::kPerToken) {
    cell.view.token_scales = reinterpret_cast<const uint16_t*>(cell.bytes.data() + cell.planes.token_scales);
  }
  return cell;
}

// Equal, both NaN, or within the roundings of an integer code's scales; subnormals may be flushed (vdpbf16ps does).
::testing::AssertionResult SameValue(float found, float expected, bool integer) {
  if (std::isnan(expected)) return std::isnan(found) ? ::testing::AssertionSuccess() : ::testing::AssertionFailure();
  if (std::abs(expected) < std::numeric_limits<float>::min() && found == 0) return ::testing::AssertionSuccess();
  const double tolerance = integer ? testing::kCoefficientRelative * std::abs(expected) : 0;
  if (std::abs(double{found} - expected) <= tolerance) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << found << " instead of " << expected;
}

class AttentionKernelsTest : public ::testing::TestWithParam<testing::Unit> {
 protected:
  const AttentionKernels& Kernels() const { return *GetParam().table->attention; }
  const KeyKernel& Key(formats::Code code) const { return Kernels().keys[static_cast<int>(code)]; }
  const ValueKernel& Value(formats::Code code) const { return Kernels().values[static_cast<int>(code)]; }
};

INSTANTIATE_TEST_SUITE_P(Units, AttentionKernelsTest, ::testing::ValuesIn(testing::Units()),
                         [](const ::testing::TestParamInfo<testing::Unit>& unit) { return unit.param.name; });

bool IsInteger(formats::Code code) {
  return code == formats::Code::kInt8 || code == formats::Code::kInt4;
}
// Infinities never reach a cell (encoders saturate), and infinity times a coefficient of 0 is NaN.
bool HasInfinity(const Cell& cell) {
  for (const float value : cell.values) {
    if (std::isinf(value)) return true;
  }
  return false;
}

// Every code of every format, as a key met by unit vectors and as a value met by one-hot weights.
TEST_P(AttentionKernelsTest, EveryCodeComesBack) {
  for (const formats::Format& format : formats::All()) {
    SCOPED_TRACE(format.name);
    const int head_dim = format.block > 0 ? 32 : 8;
    const uint32_t codes_per_cell = static_cast<uint32_t>(format.code_bits == 4 ? 8 * head_dim : 16 * head_dim);
    const uint32_t count = format.code_bits >= 16 ? 1U << 16 : 256;
    const uint32_t step = format.code_bits == 32 ? 0x10001 * codes_per_cell : codes_per_cell;
    const bool integer = IsInteger(format.code);
    const KeyKernel& key = Key(format.code);
    const int64_t stride = key.query_bytes(head_dim);
    alignas(64) static uint8_t queries[kPassRows * 4096];
    alignas(64) static float scores[kPassRows * kMaxPageTokens];
    alignas(64) static uint8_t weights[kPassRows * kWeightBytes];
    for (uint32_t i = 0; i * codes_per_cell < count; ++i) {
      const Cell keys = MakeCell(format, SideKind::kK, head_dim, i * step);
      const Cell values = MakeCell(format, SideKind::kV, head_dim, i * step);
      if (HasInfinity(keys)) continue;
      for (int first = 0; first < head_dim; first += kPassRows) {
        float row_scale[kPassRows];
        for (int row = 0; row < kPassRows; ++row) {
          std::vector<float> q(static_cast<size_t>(head_dim));
          q[static_cast<size_t>(first + row)] = 1;
          row_scale[row] = key.prepare(q.data(), head_dim, format.block, queries + row * stride);
        }
        key.score({.cell = keys.view,
                   .groups = 1,
                   .rows = kPassRows,
                   .query = queries,
                   .query_stride = stride,
                   .row_scale = row_scale,
                   .scores = scores,
                   .prefetch = {}});
        for (int row = 0; row < kPassRows; ++row) {
          for (int token = 0; token < 16; ++token) {
            const float* stored = &keys.values[static_cast<size_t>(token * head_dim)];
            // A NaN anywhere in a token's row makes its logit NaN.
            bool nan = false;
            for (int c = 0; c < head_dim; ++c) nan = nan || std::isnan(stored[c]);
            const float expected = nan ? std::nanf("") : stored[first + row];
            ASSERT_TRUE(SameValue(scores[row * kMaxPageTokens + token], expected, integer))
                << "channel " << first + row << " token " << token << " cell " << i;
          }
        }
      }
      const float rescale[1] = {0};
      for (int token = 0; token < 16; ++token) {
        std::vector<float> p(kMaxPageTokens), out(static_cast<size_t>(head_dim));
        p[static_cast<size_t>(token)] = 1;
        Value(format.code)
            .accumulate({.cell = values.view,
                         .begin = token,
                         .end = token + 1,
                         .rows = 1,
                         .p = p.data(),
                         .scale = 1,
                         .rescale = rescale,
                         .out = out.data(),
                         .out_stride = head_dim,
                         .weights = weights,
                         .prefetch = {}});
        for (int c = 0; c < head_dim; ++c) {
          ASSERT_TRUE(
              SameValue(out[static_cast<size_t>(c)], values.values[static_cast<size_t>(token * head_dim + c)], integer))
              << "channel " << c << " token " << token << " cell " << i;
        }
      }
    }
  }
}

// NaN keeps no promise about its payload.
bool SameBits(const float* a, const float* b, int count) {
  for (int i = 0; i < count; ++i) {
    if (std::memcmp(&a[i], &b[i], sizeof(float)) != 0 && !(std::isnan(a[i]) && std::isnan(b[i]))) return false;
  }
  return true;
}

// A row's scores and sums are the same bits alone and among 2 to 8 rows.
TEST_P(AttentionKernelsTest, RowsDoNotDependOnTheirTile) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  constexpr int kHeadDim = 64;
  for (const formats::Format& format : formats::All()) {
    const Cell keys = MakeCell(format, SideKind::kK, kHeadDim, 3);
    const Cell values = MakeCell(format, SideKind::kV, kHeadDim, 3);
    const KeyKernel& key = Key(format.code);
    const int64_t stride = key.query_bytes(kHeadDim);
    alignas(64) static uint8_t queries[kPassRows * 4096];
    alignas(64) static uint8_t weights[kPassRows * kWeightBytes];
    float row_scale[kPassRows], rescale[kPassRows];
    std::vector<float> p(kPassRows * kMaxPageTokens), start(kPassRows * kHeadDim);
    for (int row = 0; row < kPassRows; ++row) {
      std::vector<float> q(kHeadDim);
      for (float& x : q) x = normal(random);
      row_scale[row] = key.prepare(q.data(), kHeadDim, format.block, queries + row * stride);
      rescale[row] = 0.5f;
      for (int t = 2; t < 15; ++t) p[static_cast<size_t>(row * kMaxPageTokens + t)] = std::abs(normal(random));
    }
    for (float& x : start) x = normal(random);
    const auto run = [&](int first, int rows, std::vector<float>& scores, std::vector<float>& out) {
      scores.assign(kPassRows * kMaxPageTokens, 0);
      out = start;
      key.score({.cell = keys.view,
                 .groups = 1,
                 .rows = rows,
                 .query = queries + first * stride,
                 .query_stride = stride,
                 .row_scale = row_scale + first,
                 .scores = &scores[static_cast<size_t>(first * kMaxPageTokens)],
                 .prefetch = {}});
      Value(format.code)
          .accumulate({.cell = values.view,
                       .begin = 2,
                       .end = 15,
                       .rows = rows,
                       .p = &p[static_cast<size_t>(first * kMaxPageTokens)],
                       .scale = 1,
                       .rescale = rescale + first,
                       .out = &out[static_cast<size_t>(first * kHeadDim)],
                       .out_stride = kHeadDim,
                       .weights = weights,
                       .prefetch = {}});
    };
    std::vector<float> alone_scores, alone_out, scores, out;
    for (int row = 0; row < kPassRows; ++row) {
      run(row, 1, alone_scores, alone_out);
      for (int rows = row + 1; rows <= kPassRows; ++rows) {
        run(0, rows, scores, out);
        const size_t s = static_cast<size_t>(row * kMaxPageTokens), o = static_cast<size_t>(row * kHeadDim);
        ASSERT_TRUE(SameBits(&scores[s], &alone_scores[s], 16)) << format.name << " " << rows;
        ASSERT_TRUE(SameBits(&out[o], &alone_out[o], kHeadDim)) << format.name << " " << rows;
      }
    }
  }
}

// Integer dots are exact, so a per-token integer format scores the same bits on every unit.
TEST_P(AttentionKernelsTest, IntegerScoresAreEqualOnEveryUnit) {
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  const formats::Format& format = formats::Find("int8");
  const Cell keys = MakeCell(format, SideKind::kK, 128, 77);
  std::vector<float> q(128);
  for (float& x : q) x = normal(random);
  std::vector<std::vector<float>> scores;
  for (const AttentionKernels* kernels : {&Kernels(), testing::Units().front().table->attention}) {
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
               .prefetch = {}});
  }
  EXPECT_EQ(scores[0], scores[1]);
}

TEST_P(AttentionKernelsTest, SoftmaxOverPagesIsTheSoftmaxOfAll) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal(0, 5);
  std::vector<float> scores(kMaxPageTokens, std::nanf("")), logits;
  SoftmaxState state{-std::numeric_limits<float>::infinity(), 0};
  std::vector<double> p;
  for (int page = 0; page < 5; ++page) {
    const int begin = page == 0 ? 3 : 0, end = page == 4 ? 21 : 32;
    for (int t = begin; t < end; ++t) scores[static_cast<size_t>(t)] = normal(random);
    for (int t = begin; t < end; ++t) logits.push_back(scores[static_cast<size_t>(t)]);
    float rescale = 0;
    Kernels().softmax({.begin = begin,
                       .end = end,
                       .page_tokens = 32,
                       .rows = 1,
                       .softcap = 0,
                       .bias = nullptr,
                       .scores = scores.data(),
                       .state = &state,
                       .rescale = &rescale});
    for (double& x : p) x *= rescale;
    for (int t = 0; t < 32; ++t) {
      if (t >= begin && t < end) {
        p.push_back(scores[static_cast<size_t>(t)]);
      } else if (t >= begin / 16 * 16 && t < (end + 15) / 16 * 16) {
        EXPECT_EQ(scores[static_cast<size_t>(t)], 0) << "masked slot " << t;
      }
    }
  }
  double sum = 0;
  for (const float x : logits) sum += std::exp(double{x} - state.max);
  EXPECT_NEAR(state.sum, sum, 32 * testing::kExpRelative * sum);
  for (size_t i = 0; i < p.size(); ++i) {
    EXPECT_NEAR(p[i], std::exp(double{logits[i]} - state.max), 32 * testing::kExpRelative);
  }
}

TEST_P(AttentionKernelsTest, MergeOfAnEmptyPartChangesNothing) {
  const float inf = std::numeric_limits<float>::infinity();
  SoftmaxState state{2.0f, 3.0f};
  const SoftmaxState empty{-inf, 0};
  std::vector<float> out = {1, -2, 3, -0.0f, 5, 6, 7, 8};
  const std::vector<float> before = out, garbage(8, std::nanf(""));
  Kernels().merge(state, out.data(), empty, garbage.data(), 8);
  EXPECT_EQ(std::memcmp(out.data(), before.data(), 32), 0);
  EXPECT_EQ(state.sum, 3.0f);
  SoftmaxState first = empty;
  std::vector<float> target = garbage;
  Kernels().merge(first, target.data(), state, out.data(), 8);
  EXPECT_EQ(target, out);
  EXPECT_EQ(first.max, 2.0f);
}

}  // namespace
}  // namespace kvanta::kernels
