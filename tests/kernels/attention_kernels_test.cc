// The attention kernels of every unit by themselves: every code of every format through QK and PV, rows that share a
// tile, the softmax's corners.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "emulated/units.h"
#include "formats/bytes.h"
#include "formats/cell_layout.h"
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

Cell MakeCell(const formats::Format& format, SideKind kind, int head_dim, uint32_t first) {
  const formats::Scaling& scaling = format.scaling;
  const int tokens = Tokens(format);
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
    FillScales(formats::ScaleType::kFp16, canonical.data() + cell.planes.channel_scales, head_dim);
    FillZeros(true, canonical.data() + cell.planes.channel_zeros, head_dim);
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
::testing::AssertionResult SameValue(float found, float expected, const formats::Format& format) {
  const bool integer = formats::Info(format.code).integer;
  const formats::Scaling& scaling = format.scaling;
  const double zero = scaling.block_zero || scaling.token_zero || scaling.tile != 0 ? 2.1 : 0.0;
  if (std::isnan(expected)) return std::isnan(found) ? ::testing::AssertionSuccess() : ::testing::AssertionFailure();
  if (std::abs(expected) < std::numeric_limits<float>::min() && found == 0) return ::testing::AssertionSuccess();
  const double tolerance = integer ? testing::kCoefficientRelative * (std::abs(expected) + 2 * zero) : 0;
  if (std::abs(double{found} - expected) <= tolerance) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << found << " instead of " << expected;
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
std::vector<Cell> EveryCode(const formats::Format& format, SideKind kind, int head_dim) {
  const uint32_t codes_of_cell =
      static_cast<uint32_t>(Tokens(format) * head_dim * format.code_bits / std::max(8, format.code_bits));
  const uint32_t count = format.code_bits >= 16 ? 1U << 16 : 256;
  const uint32_t step = format.code_bits == 32 ? 0x10001 * codes_of_cell : codes_of_cell;
  std::vector<Cell> cells;
  for (uint32_t i = 0; i * codes_of_cell < count; ++i) {
    cells.push_back(MakeCell(format, kind, head_dim, i * step));
    if (HasInfinity(cells.back())) cells.pop_back();
  }
  return cells;
}

// Every code of every format, as a key met by unit vectors and as a value met by one-hot weights.
TEST_P(AttentionKernelsTest, EveryCodeOfKeysComesBack) {
  for (const formats::Format& format : formats::All()) {
    SCOPED_TRACE(format.name);
    const int head_dim = LeastHeadDim(format);
    const KeyKernel& key = Key(format);
    const int64_t stride = key.query_bytes(head_dim);
    alignas(64) static uint8_t queries[kPassRows * 4096];
    alignas(64) static float scores[kPassRows * kMaxPageTokens];
    for (const Cell& keys : EveryCode(format, SideKind::kK, head_dim)) {
      for (int first = 0; first < head_dim; first += kPassRows) {
        float row_scale[kPassRows];
        for (int row = 0; row < kPassRows; ++row) {
          std::vector<float> q(static_cast<size_t>(head_dim));
          q[static_cast<size_t>(first + row)] = 1;
          row_scale[row] =
              key.prepare(q.data(), head_dim, formats::BlockChannels(format.scaling, head_dim), queries + row * stride);
        }
        key.score({.cell = keys.view,
                   .groups = Tokens(format) / 16,
                   .rows = kPassRows,
                   .query = queries,
                   .query_stride = stride,
                   .row_scale = row_scale,
                   .scores = scores,
                   .prefetch = {}});
        for (int row = 0; row < kPassRows; ++row) {
          for (int token = 0; token < Tokens(format); ++token) {
            const float* stored = &keys.values[static_cast<size_t>(token * head_dim)];
            // A NaN anywhere in a token's row makes its logit NaN.
            bool nan = false;
            for (int c = 0; c < head_dim; ++c) nan = nan || std::isnan(stored[c]);
            const float expected = nan ? std::nanf("") : stored[first + row];
            ASSERT_TRUE(SameValue(scores[row * kMaxPageTokens + token], expected, format))
                << "channel " << first + row << " token " << token;
          }
        }
      }
    }
  }
}

TEST_P(AttentionKernelsTest, EveryCodeOfValuesComesBack) {
  for (const formats::Format& name : formats::All()) {
    const formats::Format& format = formats::OnSide(name, false);
    SCOPED_TRACE(format.name);
    const int head_dim = LeastHeadDim(format);
    alignas(64) static uint8_t room[kRoomBytes];
    for (const Cell& values : EveryCode(format, SideKind::kV, head_dim)) {
      const float rescale[1] = {0};
      for (int token = 0; token < Tokens(format); ++token) {
        std::vector<float> p(kMaxPageTokens), out(static_cast<size_t>(head_dim));
        p[static_cast<size_t>(token)] = 1;
        Value(format).accumulate({.cell = values.view,
                                  .begin = token,
                                  .end = token + 1,
                                  .rows = 1,
                                  .p = p.data(),
                                  .scale = 1,
                                  .rescale = rescale,
                                  .out = out.data(),
                                  .out_stride = head_dim,
                                  .room = room,
                                  .prefetch = {}});
        for (int c = 0; c < head_dim; ++c) {
          ASSERT_TRUE(
              SameValue(out[static_cast<size_t>(c)], values.values[static_cast<size_t>(token * head_dim + c)], format))
              << "channel " << c << " token " << token;
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
    const formats::Format& value_format = formats::OnSide(format, false);
    const Cell keys = MakeCell(format, SideKind::kK, kHeadDim, 3);
    const Cell values = MakeCell(value_format, SideKind::kV, kHeadDim, 3);
    const KeyKernel& key = Key(format);
    const int64_t stride = key.query_bytes(kHeadDim);
    alignas(64) static uint8_t queries[kPassRows * 4096];
    alignas(64) static uint8_t room[kRoomBytes];
    float row_scale[kPassRows], rescale[kPassRows];
    std::vector<float> p(kPassRows * kMaxPageTokens), start(kPassRows * kHeadDim);
    for (int row = 0; row < kPassRows; ++row) {
      std::vector<float> q(kHeadDim);
      for (float& x : q) x = normal(random);
      row_scale[row] =
          key.prepare(q.data(), kHeadDim, formats::BlockChannels(format.scaling, kHeadDim), queries + row * stride);
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
      Value(value_format)
          .accumulate({.cell = values.view,
                       .begin = 2,
                       .end = 15,
                       .rows = rows,
                       .p = &p[static_cast<size_t>(first * kMaxPageTokens)],
                       .scale = 1,
                       .rescale = rescale + first,
                       .out = &out[static_cast<size_t>(first * kHeadDim)],
                       .out_stride = kHeadDim,
                       .room = room,
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
  for (const float x : logits) sum += std::exp2(double{x} - state.max);
  EXPECT_NEAR(state.sum, sum, 32 * testing::kExpRelative * sum);
  for (size_t i = 0; i < p.size(); ++i) {
    EXPECT_NEAR(p[i], std::exp2(double{logits[i]} - state.max), 32 * testing::kExpRelative);
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
