// The attention kernels of every unit by themselves: every code of every format through QK and PV, rows that share a
// tile, the softmax's corners.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "emulated/units.h"
#include "formats/bytes.h"
#include "formats/cell_layout.h"
#include "formats/transform.h"
#include "kernels/cpu/attention_table.h"
#include "kernels/reference/attention.h"
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

// Scales near 1 that differ from element to element, and zeros near -2, as each is stored.
void FillScales(formats::ScaleType type, uint8_t* bytes, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const float value = 1.0f + static_cast<float>(i % 7) / 1024.0f;
    switch (type) {
      case formats::ScaleType::kNone:
        return;
      case formats::ScaleType::kF32:
        formats::StoreBytes(bytes + 4 * i, value);
        break;
      case formats::ScaleType::kFp16:
        formats::StoreBytes(bytes + 2 * i, static_cast<uint16_t>(0x3c00 + i % 7));
        break;
      case formats::ScaleType::kE4M3:
        bytes[i] = static_cast<uint8_t>(0x30 + i % 16);
        break;
      case formats::ScaleType::kE8M0:
        bytes[i] = static_cast<uint8_t>(125 + i % 5);
    }
  }
}
void FillZeros(bool present, uint8_t* bytes, int64_t count) {
  for (int64_t i = 0; present && i < count; ++i) {
    formats::StoreBytes(bytes + 2 * i, static_cast<uint16_t>(0xc000 + i % 5));
  }
}

int Tokens(const formats::Format& format) {
  return std::max(16, format.scaling.tile);
}
int LeastHeadDim(const formats::Format& format) {
  return std::max({8, format.scaling.short_rows ? 8 : format.scaling.channels, formats::CodeChannels(format.code)});
}

// The heads and pages that a format is tested with: the smallest, and those that kernels meet by whole tiles.
std::array<formats::CellShape, 2> ShapesOf(const formats::Format& format) {
  const int head_dim = LeastHeadDim(format);
  return {formats::CellShape{Tokens(format), head_dim}, formats::CellShape{64, std::max(64, head_dim)}};
}

Cell MakeCell(const formats::Format& format, SideKind kind, formats::CellShape shape, uint32_t first) {
  const formats::Scaling& scaling = format.scaling;
  const auto [tokens, head_dim] = shape;
  Cell cell{.shape = {.tokens = tokens, .head_dim = head_dim}, .planes = {}, .bytes = {}, .values = {}, .view = {}};
  cell.planes = formats::PlanCell(format, cell.shape);
  std::vector<uint8_t> canonical(static_cast<size_t>(cell.planes.bytes));
  uint32_t code = first;
  for (int64_t i = 0; i < tokens * cell.planes.row_bytes; ++code) {
    const int width = std::max(1, format.code_bits / 8);
    std::memcpy(&canonical[static_cast<size_t>(i)], &code, static_cast<size_t>(width));
    i += width;
  }
  const int64_t blocks = int64_t{tokens} * cell.planes.blocks;
  FillScales(scaling.block, canonical.data() + cell.planes.block_scales, blocks);
  FillZeros(scaling.block_zero, canonical.data() + cell.planes.block_zeros, blocks);
  FillScales(scaling.token, canonical.data() + cell.planes.token_scales, tokens);
  FillZeros(scaling.token_zero, canonical.data() + cell.planes.token_zeros, tokens);
  if (scaling.tile != 0) {
    FillScales(formats::ScaleType::kFp16, canonical.data() + cell.planes.channel_scales,
               tokens / scaling.tile * head_dim);
    FillZeros(true, canonical.data() + cell.planes.channel_zeros, tokens / scaling.tile * head_dim);
  }
  cell.bytes.resize(canonical.size());
  formats::FromCanonical(kind, format, cell.shape, cell.planes, canonical.data(), cell.bytes.data());
  cell.values.resize(static_cast<size_t>(tokens * head_dim));
  reference::DecodeCell(kind, format, cell.shape, cell.planes, cell.bytes.data(), 1.0f, tokens, cell.values.data());
  const auto fp16 = [&cell](int64_t plane) { return reinterpret_cast<const uint16_t*>(cell.bytes.data() + plane); };
  cell.view = {.codes = cell.bytes.data() + cell.planes.codes,
               .page_tokens = tokens,
               .head_dim = head_dim,
               .block = formats::BlockChannels(scaling, head_dim),
               .tile = scaling.tile};
  if (scaling.block != formats::ScaleType::kNone) {
    cell.view.block_scales = {cell.bytes.data() + cell.planes.block_scales, scaling.block};
  }
  if (scaling.token != formats::ScaleType::kNone) {
    cell.view.token_scales = {cell.bytes.data() + cell.planes.token_scales, scaling.token};
  }
  if (scaling.block_zero) cell.view.block_zeros = fp16(cell.planes.block_zeros);
  if (scaling.token_zero) cell.view.token_zeros = fp16(cell.planes.token_zeros);
  if (scaling.tile != 0) {
    cell.view.channel_scales = fp16(cell.planes.channel_scales);
    cell.view.channel_zeros = fp16(cell.planes.channel_zeros);
  }
  return cell;
}

// Equal, both NaN, or within the roundings of an integer code's scales and of a zero beside it; subnormals may be
// flushed (vdpbf16ps does).
// `weight`: what a weight's rounding may add.
::testing::AssertionResult SameValue(float found, float expected, const formats::Format& format, double weight = 0) {
  const bool integer = formats::Info(format.code).integer;
  const formats::Scaling& scaling = format.scaling;
  const double zero = scaling.block_zero || scaling.token_zero || scaling.tile != 0 ? 2.1 : 0.0;
  if (std::isnan(expected)) return std::isnan(found) ? ::testing::AssertionSuccess() : ::testing::AssertionFailure();
  if (std::abs(expected) < std::numeric_limits<float>::min() && found == 0) return ::testing::AssertionSuccess();
  const double tolerance = integer ? testing::kCoefficientRelative * (std::abs(expected) + 2 * zero) : 0;
  if (std::abs(double{found} - expected) <= tolerance + weight) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << found << " instead of " << expected;
}

uint8_t* Room() {
  alignas(64) static uint8_t room[kRoomBytes];
  return room;
}

class AttentionKernelsTest : public ::testing::TestWithParam<testing::Unit> {
 protected:
  const AttentionKernels& Kernels() const { return *GetParam().table->attention; }
  const KeyKernel& Key(const formats::Format& format) const {
    return (format.scaling.tile != 0 ? Kernels().tiled_keys : Kernels().keys)[static_cast<int>(format.code)];
  }
  const ValueKernel& Value(const formats::Format& format) const {
    return Kernels().values[static_cast<int>(format.code)];
  }

 private:
  KernelScope scope_{Kernels()};
};

INSTANTIATE_TEST_SUITE_P(Units, AttentionKernelsTest, ::testing::ValuesIn(testing::Units()),
                         [](const ::testing::TestParamInfo<testing::Unit>& unit) { return unit.param.name; });

// Infinities never reach a cell (encoders saturate), and infinity times a coefficient of 0 is NaN.
bool HasInfinity(const Cell& cell) {
  for (const float value : cell.values) {
    if (std::isinf(value)) return true;
  }
  return false;
}

// Cells that hold every code between them; of 32 bits, codes all over the range. Without those that hold an infinity.
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

// Every code of every format, as a key met by unit vectors and as a value met by one-hot weights.
TEST_P(AttentionKernelsTest, EveryCodeOfKeysComesBack) {
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
                     .room = Room(),
                     .prefetch = {}});
          for (int token = 0; token < tokens; ++token) {
            const float* stored = &keys.values[static_cast<size_t>(token * head_dim)];
            // A NaN anywhere in a token's row makes its logit NaN.
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

// `whole`: all slots are seen, and those with a weight of 0 as well.
void ExpectValuesBack(const ValueKernel& kernel, const formats::Format& format, const Cell& values, bool whole) {
  const int tokens = values.shape.tokens, head_dim = values.shape.head_dim;
  const float rescale[1] = {0};
  const auto stored = [&](int token, int c) { return values.values[static_cast<size_t>(token * head_dim + c)]; };
  std::vector<bool> nan(static_cast<size_t>(head_dim));
  // Slots that share the unit of their weights: less than a step of the largest, times the largest code.
  double rounded = 0;
  if (whole && IsNarrow(format.code)) {
    for (const float value : values.values)
      rounded = std::max(rounded, std::abs(double{value}) / testing::kNarrowWeightSteps);
  }
  for (int t = 0; whole && t < tokens; ++t) {
    for (int c = 0; c < head_dim; ++c)
      nan[static_cast<size_t>(c)] = nan[static_cast<size_t>(c)] || std::isnan(stored(t, c));
  }
  for (int token = 0; token < tokens; ++token) {
    std::vector<float> p(kMaxPageTokens), out(static_cast<size_t>(head_dim));
    p[static_cast<size_t>(token)] = 1;
    kernel.accumulate({.cell = values.view,
                       .begin = whole ? 0 : token,
                       .end = whole ? tokens : token + 1,
                       .rows = 1,
                       .p = p.data(),
                       .scale = 1,
                       .rescale = rescale,
                       .out = out.data(),
                       .out_stride = head_dim,
                       .room = Room(),
                       .prefetch = {}});
    for (int c = 0; c < head_dim; ++c) {
      const float expected = nan[static_cast<size_t>(c)] ? std::nanf("") : stored(token, c);
      ASSERT_TRUE(SameValue(out[static_cast<size_t>(c)], expected, format, rounded))
          << "channel " << c << " token " << token;
    }
  }
}

TEST_P(AttentionKernelsTest, EveryCodeOfValuesComesBack) {
  for (const formats::Format& name : formats::All()) {
    const formats::Format& format = formats::OnSide(name, false);
    for (const formats::CellShape shape : ShapesOf(format)) {
      SCOPED_TRACE(fmt::format("{} of {}", format.name, shape.head_dim));
      for (const Cell& values : EveryCode(format, SideKind::kV, shape)) {
        ExpectValuesBack(Value(format), format, values, shape.tokens == 64);
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

// Both kernels on rows that are prepared once.
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
    std::normal_distribution<float> normal;
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

  // What `rows` rows from `first` on come to.
  void Run(int first, int rows, Visit visit, std::vector<float>& scores, std::vector<float>& out) const {
    scores.assign(kPassRows * kMaxPageTokens, 0);
    out = start_;
    key_.score({.cell = keys_.view,
                .groups = shape_.tokens / 16,
                .rows = rows,
                .query = queries_ + first * stride_,
                .query_stride = stride_,
                .row_scale = row_scale_ + first,
                .scores = &scores[static_cast<size_t>(first * kMaxPageTokens)],
                .room = Room(),
                .visit = visit,
                .prefetch = {}});
    value_.accumulate({.cell = values_.view,
                       .begin = begin_,
                       .end = end_,
                       .rows = rows,
                       .p = &p_[static_cast<size_t>(first * kMaxPageTokens)],
                       .scale = 1,
                       .rescale = rescale_ + first,
                       .out = &out[static_cast<size_t>(first * shape_.head_dim)],
                       .out_stride = shape_.head_dim,
                       .room = Room(),
                       .visit = visit,
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

// A row's scores and sums are the same bits alone and among 2 to 16 rows, of a page seen whole and in part, and where a
// pass finds what an earlier one made of the page.
void ExpectSameRows(const RowsOfPass& pass, formats::CellShape shape) {
  std::vector<float> alone_scores, alone_out, scores, out;
  for (int row = 0; row < kPassRows; ++row) {
    pass.Run(row, 1, Visit::kOnly, alone_scores, alone_out);
    const auto expect_same = [&, row = row](const char* how, int rows) {
      const size_t s = static_cast<size_t>(row * kMaxPageTokens), o = static_cast<size_t>(row * shape.head_dim);
      ASSERT_TRUE(SameBits(&scores[s], &alone_scores[s], shape.tokens)) << how << rows;
      ASSERT_TRUE(SameBits(&out[o], &alone_out[o], shape.head_dim)) << how << rows;
    };
    for (const int rows : {row + 1, 4, 5, 8, 9, kPassRows}) {
      if (rows <= row) continue;
      pass.Run(0, rows, Visit::kOnly, scores, out);
      expect_same("in a pass of ", rows);
    }
    pass.Run(0, kPassRows, Visit::kFirst, scores, out);
    expect_same("in the first pass of ", kPassRows);
    for (const int rows : {1, kPassRows}) {
      pass.Run(rows == 1 ? row : 0, rows, Visit::kAgain, scores, out);
      expect_same("in a later pass of ", rows);
    }
  }
}

TEST_P(AttentionKernelsTest, RowsDoNotDependOnTheirTile) {
  for (const formats::Format& format : formats::All()) {
    const bool latents = format.name.starts_with("mla_");
    for (const formats::CellShape shape : {formats::CellShape{64, 64}, formats::CellShape{128, latents ? 512 : 128}}) {
      for (const auto& [begin, end] : {std::pair(2, 15), std::pair(0, shape.tokens)}) {
        SCOPED_TRACE(fmt::format("{} of {}, slots {} to {}", format.name, shape.head_dim, begin, end));
        const formats::Format& value_format = formats::OnSide(format, false);
        ExpectSameRows(RowsOfPass(Key(format), Value(value_format), format, shape, begin, end), shape);
      }
    }
  }
}

// Integer dots are exact, so a per-token integer format scores the same bits on every unit.
TEST_P(AttentionKernelsTest, IntegerScoresAreEqualOnEveryUnit) {
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
    const KernelScope of_best(kernels == &Kernels() ? none : best);  // the test has one of its own
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
               .room = Room(),
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
  for (const float x : logits) sum += std::exp2(double{x} - state.max);
  EXPECT_NEAR(state.sum, sum, 32 * testing::kExpRelative * sum);
  for (size_t i = 0; i < p.size(); ++i) {
    EXPECT_NEAR(p[i], std::exp2(double{logits[i]} - state.max), 32 * testing::kExpRelative);
  }
}

TEST_P(AttentionKernelsTest, TransformIsThatOfTheFormatsToTheBit) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (const int head_dim : {8, 16, 24, 32, 48, 64, 80, 96, 128, 192, 256, 512}) {
    std::vector<float> x(static_cast<size_t>(head_dim));
    for (float& value : x) value = normal(random);
    x[3] = 0x1p-140F;  // below what is normal
    x[5] = -x[4];      // meets its opposite
    std::vector<float> expected = x, out(x.size());
    formats::Hadamard(expected.data(), head_dim);
    Kernels().transform(x.data(), head_dim, out.data());
    const auto same = [&](const std::vector<float>& result) {
      return std::memcmp(result.data(), expected.data(), x.size() * sizeof(float)) == 0;
    };
    EXPECT_TRUE(same(out)) << head_dim;
    Kernels().transform(x.data(), head_dim, x.data());
    EXPECT_TRUE(same(x)) << head_dim << " in place";
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
