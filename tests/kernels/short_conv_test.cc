// Gated short convolution on every CPU unit, compared with double precision; bits do not depend on how tokens are
// divided into steps, sequences or threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "emulated/units.h"
#include "kernels/linear_attention/cpu/short_conv.h"
#include "kernels/random_values.h"
#include "tolerance.h"

namespace kvanta::kernels {
namespace {

using kvanta::testing::Unit;

// Weights of a layer, and a sequence's projected rows.
struct ConvLayer {
  ConvLayer(const ShortConvShape& s, int64_t count, bool has_bias)
      : shape(s),
        rows(count),
        projected(RandomValues(count * 3 * s.channels, 1)),
        conv(RandomValues(int64_t{s.conv_width} * s.channels, 2)),
        bias(RandomValues(has_bias ? s.channels : 0, 3)) {}

  ShortConvShape shape;
  int64_t rows;
  std::vector<float> projected, conv, bias;
};

// Records of states.
struct ConvStates {
  ConvStates(const ConvLayer& layer, int64_t records)
      : bytes(layer.shape.State().Bytes()), memory(static_cast<size_t>(records * bytes), 0xFF) {}

  cache::StateStep Step() {
    return {.segments = segments, .first_segments = first, .base = memory.data(), .record_bytes = bytes};
  }

  int64_t bytes;
  std::vector<uint8_t> memory;  // NaN until written
  std::vector<cache::StateSegment> segments;
  std::vector<int32_t> first;
};

std::vector<float> RunConv(const ConvLayer& layer, std::vector<float> projected, const cache::StateStep& states,
                           const Unit& unit, int threads) {
  const int64_t rows = std::ssize(projected) / 3 / layer.shape.channels;
  std::vector<float> out(static_cast<size_t>(rows * layer.shape.channels));
  ThreadPool pool(threads);
  CpuShortConv({.shape = layer.shape,
                .rows = rows,
                .b = projected.data(),
                .c = projected.data() + layer.shape.channels,
                .x = projected.data() + int64_t{2} * layer.shape.channels,
                .stride = int64_t{3} * layer.shape.channels,
                .conv = layer.conv.data(),
                .bias = layer.bias.empty() ? nullptr : layer.bias.data(),
                .states = states,
                .out = out.data()},
               *unit.table, pool);
  return out;
}

// Rows [begin, end) of the layer's sequence.
std::vector<float> RowsOf(const ConvLayer& layer, int64_t begin, int64_t end) {
  const int64_t width = int64_t{3} * layer.shape.channels;
  return {layer.projected.begin() + begin * width, layer.projected.begin() + end * width};
}

class ShortConvTest : public ::testing::TestWithParam<Unit> {};

constexpr ShortConvShape kConvShapes[] = {{.channels = 24, .conv_width = 3},
                                          {.channels = 1030, .conv_width = 4},
                                          {.channels = 512, .conv_width = 2},
                                          {.channels = 7, .conv_width = 8}};

TEST_P(ShortConvTest, EqualsTheSums) {
  for (const ShortConvShape& shape : kConvShapes) {
    for (const bool has_bias : {false, true}) {
      const ConvLayer layer(shape, 20, has_bias);
      ConvStates states(layer, 1);
      states.segments = {{.first_row = 0, .tokens = 20, .to = 0}};
      states.first = {0};
      const std::vector<float> out = RunConv(layer, layer.projected, states.Step(), GetParam(), 2);
      const int64_t channels = shape.channels;
      const auto at = [&](int64_t row, int part, int64_t c) {
        return double{layer.projected[static_cast<size_t>((3 * row + part) * channels + c)]};
      };
      for (int64_t row = 0; row < layer.rows; ++row) {
        for (int64_t c = 0; c < channels; ++c) {
          double sum = has_bias ? layer.bias[static_cast<size_t>(c)] : 0, size = std::abs(sum);
          for (int tap = 0; tap < shape.conv_width; ++tap) {
            const int64_t from = row - shape.conv_width + 1 + tap;
            if (from < 0) continue;
            const double term = at(from, 0, c) * at(from, 2, c) * layer.conv[static_cast<size_t>(tap * channels + c)];
            sum += term;
            size += std::abs(term);
          }
          const double gate = at(row, 1, c);
          ASSERT_NEAR(out[static_cast<size_t>(row * channels + c)], gate * sum,
                      kvanta::testing::ShortConvRelative(shape.conv_width) * std::abs(gate) * size)
              << row << ' ' << c;
        }
      }
    }
  }
}

TEST_P(ShortConvTest, StepsAndThreadsChangeNoBit) {
  for (const ShortConvShape& shape : kConvShapes) {
    const ConvLayer layer(shape, 45, true);
    ConvStates whole(layer, 4);
    // Snapshots after 16 and 32 tokens, and the working state.
    whole.segments = {{.first_row = 0, .tokens = 16, .to = 0},
                      {.first_row = 16, .tokens = 16, .from = 0, .to = 1},
                      {.first_row = 32, .tokens = 13, .from = 1, .to = 2}};
    whole.first = {0};
    const std::vector<float> expected = RunConv(layer, layer.projected, whole.Step(), GetParam(), 1);
    ConvStates parts(layer, 1);
    std::vector<float> found;
    int64_t begin = 0;
    for (const int tokens : {1, 2, 20, 1, 1, 7, 13}) {
      parts.segments = {{.first_row = 0, .tokens = tokens, .from = begin == 0 ? cache::kNoPage : 0, .to = 0}};
      parts.first = {0};
      const std::vector<float> out = RunConv(layer, RowsOf(layer, begin, begin + tokens), parts.Step(), GetParam(), 3);
      found.insert(found.end(), out.begin(), out.end());
      begin += tokens;
    }
    EXPECT_EQ(found, expected);
    const auto at = [&](int record) { return whole.memory.begin() + record * whole.bytes; };
    EXPECT_TRUE(std::equal(parts.memory.begin(), parts.memory.end(), at(2))) << "the state after the last token";
    // Two sequences in one step: one goes on from the snapshot after 32 tokens, the other begins.
    std::vector<float> both = RowsOf(layer, 32, 45);
    const std::vector<float> beginning = RowsOf(layer, 0, 20);
    both.insert(both.end(), beginning.begin(), beginning.end());
    whole.segments = {{.first_row = 0, .tokens = 13, .from = 1, .to = 3}, {.first_row = 13, .tokens = 20, .to = 0}};
    whole.first = {0, 1};
    const std::vector<float> out = RunConv(layer, both, whole.Step(), GetParam(), 2);
    const int64_t width = shape.channels;
    EXPECT_TRUE(std::equal(out.begin(), out.begin() + 13 * width, expected.begin() + 32 * width));
    EXPECT_TRUE(std::equal(out.begin() + 13 * width, out.end(), expected.begin()));
    EXPECT_TRUE(std::equal(at(2), at(3), at(3)));
  }
}

// Drafted rows have the outputs of plain steps and leave the state of the row before them, which then advances over
// accepted ones alone.
TEST_P(ShortConvTest, StatesAdvanceOverAcceptedDrafts) {
  for (const ShortConvShape& shape : kConvShapes) {
    const ConvLayer layer(shape, 20, true);
    const int64_t channels = shape.channels;
    for (const int accepted : {1, 2, 6}) {
      ConvStates plain(layer, 1), drafted(layer, 1);
      plain.segments = {{.first_row = 0, .tokens = 12 + accepted, .to = 0}};
      plain.first = drafted.first = {0};
      const std::vector<float> expected = RunConv(layer, RowsOf(layer, 0, 12 + accepted), plain.Step(), GetParam(), 1);
      drafted.segments = {{.first_row = 0, .tokens = 11, .to = 0}};
      RunConv(layer, RowsOf(layer, 0, 11), drafted.Step(), GetParam(), 2);
      drafted.segments = {{.first_row = 0, .tokens = 1, .from = 0, .to = 0}, {.first_row = 1, .tokens = 6, .from = 0}};
      const std::vector<float> out = RunConv(layer, RowsOf(layer, 11, 18), drafted.Step(), GetParam(), 2);
      EXPECT_TRUE(std::equal(expected.begin() + 11 * channels, expected.end(), out.begin()));
      std::vector<float> products;
      for (int64_t row = 12; row < 18; ++row) {
        const float* b = layer.projected.data() + row * 3 * channels;
        for (int64_t c = 0; c < channels; ++c) products.push_back(b[c] * b[2 * channels + c]);
      }
      drafted.segments = {{.first_row = 0, .tokens = accepted, .from = 0, .to = 0}};
      ThreadPool pool(2);
      CpuShortConv({.shape = shape, .rows = 6, .b = products.data(), .stride = channels, .states = drafted.Step()},
                   *GetParam().table, pool);
      EXPECT_EQ(drafted.memory, plain.memory) << accepted;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Units, ShortConvTest, ::testing::ValuesIn(kvanta::testing::Units()),
                         [](const auto& unit) { return unit.param.name; });

}  // namespace
}  // namespace kvanta::kernels
