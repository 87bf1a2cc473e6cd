// Gated DeltaNet and Kimi Delta Attention on every CPU unit, compared with the recurrence in double precision; bits do
// not depend on how tokens are divided into steps, sequences or threads.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <vector>

#include "emulated/units.h"
#include "kernels/linear_attention/cpu/gated_delta_net.h"
#include "kernels/random_values.h"
#include "tolerance.h"

namespace kvanta::kernels {
namespace {

using kvanta::testing::Unit;

// Weights of a layer, and a sequence's projected rows.
struct DeltaLayer {
  DeltaLayer(const GatedDeltaNetShape& s, int64_t count)
      : shape(s),
        rows(count),
        projected(RandomValues(count * Width(), 1)),
        gates(RandomValues(count * 2 * s.v_heads, 2)),
        channel_gates(RandomValues(count * s.KeyWidth(), 7, 3)),
        output_gates(RandomValues(count * s.ValueWidth(), 8)),
        conv(RandomValues(s.conv_width * s.ConvWidth(), 3, 0.5F)),
        dt_bias(RandomValues(s.v_heads * s.DecayDim(), 4)),
        decay(RandomValues(s.v_heads, 5)),
        norm(RandomValues(s.v_dim, 6)) {
    for (float& value : decay) value = -std::exp(value - 3);
  }

  int64_t Width() const { return shape.ConvWidth() + shape.ValueWidth(); }
  HeadOffsets Gates(int64_t first) const { return {.first = first, .group_stride = 1}; }

  GatedDeltaNetShape shape;
  int64_t rows;
  std::vector<float> projected, gates, channel_gates, output_gates, conv, dt_bias, decay, norm;
  static constexpr float kEps = 1e-6F;
};

// Records of states, and segments of sequences that all read the layer's rows.
struct DeltaStates {
  DeltaStates(const DeltaLayer& layer, int64_t records)
      : bytes(layer.shape.State().Bytes()), memory(static_cast<size_t>(records * bytes), 0xFF) {}

  cache::StateStep Step() {
    return {.segments = segments, .first_segments = first, .base = memory.data(), .record_bytes = bytes};
  }

  int64_t bytes;
  std::vector<uint8_t> memory;  // NaN until written
  std::vector<cache::StateSegment> segments;
  std::vector<int32_t> first;
};

// Rows [begin, end) of the layer's sequence with the states of a step.
std::vector<float> RunDelta(const DeltaLayer& layer, int64_t begin, int64_t end, const cache::StateStep& states,
                            const Unit& unit, int threads, bool states_only = false) {
  const GatedDeltaNetShape& shape = layer.shape;
  const int64_t rows = end - begin;
  const std::vector<ChannelRun> runs = {{.channel = 0, .projected = 0, .count = shape.ConvWidth()}};
  std::vector<float> mixed(static_cast<size_t>(rows * shape.ConvWidth())),
      factors(static_cast<size_t>(rows * shape.FactorWidth())), out(static_cast<size_t>(rows * shape.ValueWidth()));
  ThreadPool pool(threads);
  CpuGatedDeltaNet({.shape = shape,
                    .rows = rows,
                    .projected = layer.projected.data() + begin * layer.Width(),
                    .projected_stride = layer.Width(),
                    .runs = runs,
                    .z = {.first = shape.ConvWidth(), .group_stride = shape.v_dim},
                    .gates = layer.gates.data() + begin * 2 * shape.v_heads,
                    .gates_stride = int64_t{2} * shape.v_heads,
                    .b = layer.Gates(0),
                    .a = layer.Gates(shape.v_heads),
                    .channel_gates = layer.channel_gates.data() + begin * shape.KeyWidth(),
                    .channel_gates_stride = shape.KeyWidth(),
                    .output_gates = layer.output_gates.data() + begin * shape.ValueWidth(),
                    .conv = layer.conv.data(),
                    .dt_bias = layer.dt_bias.data(),
                    .decay = layer.decay.data(),
                    .norm = states_only ? nullptr : layer.norm.data(),
                    .eps = DeltaLayer::kEps,
                    .states = states,
                    .mixed = mixed.data(),
                    .factors = factors.data(),
                    .out = out.data(),
                    .states_only = states_only},
                   *unit.table, pool);
  return out;
}

std::vector<double> DeltaOracle(const DeltaLayer& layer) {
  const GatedDeltaNetShape& shape = layer.shape;
  const int64_t channels = shape.ConvWidth();
  const auto sigmoid = [](double x) { return 1 / (1 + std::exp(-x)); };
  std::vector<double> state(static_cast<size_t>(shape.RuleFloats())), out;
  for (int64_t row = 0; row < layer.rows; ++row) {
    std::vector<double> mixed(static_cast<size_t>(channels));
    for (int64_t c = 0; c < channels; ++c) {
      double sum = 0;
      for (int tap = 0; tap < shape.conv_width; ++tap) {
        const int64_t from = row - shape.conv_width + 1 + tap;
        if (from >= 0) sum += double{layer.projected[from * layer.Width() + c]} * layer.conv[tap * channels + c];
      }
      mixed[c] = sum * sigmoid(sum);
    }
    const auto normed = [&](int64_t first, double scale) {
      double squares = 1e-6;
      for (int i = 0; i < shape.k_dim; ++i) squares += mixed[first + i] * mixed[first + i];
      std::vector<double> x(static_cast<size_t>(shape.k_dim));
      for (int i = 0; i < shape.k_dim; ++i) x[i] = mixed[first + i] * scale / std::sqrt(squares);
      return x;
    };
    for (int head = 0; head < shape.v_heads; ++head) {
      const int64_t key_head = int64_t{shape.KeyHead(head)} * shape.k_dim;
      const std::vector<double> q = normed(key_head, 1 / std::sqrt(double(shape.k_dim)));
      const std::vector<double> k = normed(shape.KeyWidth() + key_head, 1);
      const float* gates = layer.gates.data() + row * 2 * shape.v_heads;
      const double beta = sigmoid(gates[head]);
      std::vector<double> decay(static_cast<size_t>(shape.k_dim));
      for (int i = 0; i < shape.k_dim; ++i) {
        const int64_t at = int64_t{head} * shape.k_dim + i;
        const double x = shape.channel_decay
                             ? double{layer.channel_gates[row * shape.KeyWidth() + at]} + layer.dt_bias[at]
                             : double{gates[shape.v_heads + head]} + layer.dt_bias[head];
        const double bound = shape.decay_lower_bound, rate = layer.decay[head];
        decay[i] = std::exp(bound != 0 ? bound * sigmoid(-rate * x) : rate * std::log1p(std::exp(x)));
      }
      double* s = state.data() + int64_t{head} * shape.k_dim * shape.v_dim;
      std::vector<double> o(static_cast<size_t>(shape.v_dim));
      double squares = 0;
      for (int j = 0; j < shape.v_dim; ++j) {
        double known = 0;
        for (int i = 0; i < shape.k_dim; ++i) known += decay[i] * s[i * shape.v_dim + j] * k[i];
        const double delta = beta * (mixed[2 * shape.KeyWidth() + head * shape.v_dim + j] - known);
        for (int i = 0; i < shape.k_dim; ++i) {
          double& x = s[i * shape.v_dim + j];
          x = decay[i] * x + k[i] * delta;
          o[j] += x * q[i];
        }
        squares += o[j] * o[j];
      }
      const float* z = layer.projected.data() + row * layer.Width() + channels + int64_t{head} * shape.v_dim;
      for (int j = 0; j < shape.v_dim; ++j) {
        const double norm = layer.norm[j] / std::sqrt(squares / shape.v_dim + DeltaLayer::kEps);
        const double gate = layer.output_gates[row * shape.ValueWidth() + int64_t{head} * shape.v_dim + j];
        out.push_back(o[j] * norm * (shape.channel_decay ? sigmoid(gate) : z[j] * sigmoid(z[j])));
      }
    }
  }
  return out;
}

class GatedDeltaNetTest : public ::testing::TestWithParam<Unit> {};

constexpr GatedDeltaNetShape kDeltaShapes[] = {
    {.k_heads = 2, .v_heads = 6, .k_dim = 16, .v_dim = 24, .conv_width = 4},
    {.k_heads = 2, .v_heads = 4, .tiled_v_heads = true, .k_dim = 40, .v_dim = 72, .conv_width = 2},
    {.k_heads = 3, .v_heads = 3, .k_dim = 128, .v_dim = 128, .conv_width = 4},
    {.k_heads = 1, .v_heads = 2, .k_dim = 8, .v_dim = 8, .conv_width = 8},
    {.k_heads = 2, .v_heads = 2, .k_dim = 128, .v_dim = 128, .conv_width = 4, .channel_decay = true},
    {.k_heads = 3, .v_heads = 3, .k_dim = 40, .v_dim = 40, .conv_width = 3, .channel_decay = true},
    {.k_heads = 3,
     .v_heads = 3,
     .k_dim = 40,
     .v_dim = 40,
     .conv_width = 3,
     .channel_decay = true,
     .decay_lower_bound = -5}};

TEST_P(GatedDeltaNetTest, EqualsTheRecurrence) {
  for (const GatedDeltaNetShape& shape : kDeltaShapes) {
    const DeltaLayer layer(shape, 70);
    DeltaStates states(layer, 1);
    states.segments = {{.first_row = 0, .tokens = 70, .to = 0}};
    states.first = {0};
    const std::vector<float> out = RunDelta(layer, 0, 70, states.Step(), GetParam(), 2);
    const std::vector<double> expected = DeltaOracle(layer);
    double squares = 0, errors = 0;
    for (size_t i = 0; i < out.size(); ++i) {
      squares += expected[i] * expected[i];
      errors += (out[i] - expected[i]) * (out[i] - expected[i]);
    }
    EXPECT_LT(std::sqrt(errors / squares), kvanta::testing::DeltaRuleRelative(70, shape.k_dim)) << shape.k_dim;
  }
}

TEST_P(GatedDeltaNetTest, StepsAndThreadsChangeNoBit) {
  for (const GatedDeltaNetShape& shape : kDeltaShapes) {
    const DeltaLayer layer(shape, 45);
    DeltaStates whole(layer, 4);
    // Snapshots after 16 and 32 tokens, and the working state.
    whole.segments = {{.first_row = 0, .tokens = 16, .to = 0},
                      {.first_row = 16, .tokens = 16, .from = 0, .to = 1},
                      {.first_row = 32, .tokens = 13, .from = 1, .to = 2}};
    whole.first = {0};
    const std::vector<float> expected = RunDelta(layer, 0, 45, whole.Step(), GetParam(), 1);
    DeltaStates parts(layer, 1);
    std::vector<float> found;
    int64_t begin = 0;
    for (const int tokens : {1, 2, 20, 1, 1, 7, 13}) {
      parts.segments = {{.first_row = 0, .tokens = tokens, .from = begin == 0 ? cache::kNoPage : 0, .to = 0}};
      parts.first = {0};
      const std::vector<float> out = RunDelta(layer, begin, begin + tokens, parts.Step(), GetParam(), 3);
      found.insert(found.end(), out.begin(), out.end());
      begin += tokens;
    }
    EXPECT_EQ(found, expected);
    const auto at = [&](int record) { return whole.memory.begin() + record * whole.bytes; };
    EXPECT_TRUE(std::equal(parts.memory.begin(), parts.memory.end(), at(2))) << "the state after the last token";
    // Two sequences in one step: one goes on from the snapshot after 32 tokens, the other begins.
    DeltaLayer both = layer;
    const auto rows = [&](std::vector<float>& to, const std::vector<float>& from, int64_t width) {
      to.assign(from.begin() + 32 * width, from.end());
      to.insert(to.end(), from.begin(), from.begin() + 20 * width);
    };
    rows(both.projected, layer.projected, layer.Width());
    rows(both.gates, layer.gates, int64_t{2} * shape.v_heads);
    rows(both.channel_gates, layer.channel_gates, shape.KeyWidth());
    rows(both.output_gates, layer.output_gates, shape.ValueWidth());
    whole.segments = {{.first_row = 0, .tokens = 13, .from = 1, .to = 3}, {.first_row = 13, .tokens = 20, .to = 0}};
    whole.first = {0, 1};
    const std::vector<float> out = RunDelta(both, 0, 33, whole.Step(), GetParam(), 2);
    const int64_t width = shape.ValueWidth();
    EXPECT_TRUE(std::equal(out.begin(), out.begin() + 13 * width, expected.begin() + 32 * width));
    EXPECT_TRUE(std::equal(out.begin() + 13 * width, out.end(), expected.begin()));
    EXPECT_TRUE(std::equal(at(2), at(3), at(3)));
  }
}

// Drafted rows have the outputs of plain steps and leave the state of the row before them, which then advances over
// accepted ones alone.
TEST_P(GatedDeltaNetTest, StatesAdvanceOverAcceptedDrafts) {
  for (const GatedDeltaNetShape& shape : kDeltaShapes) {
    const DeltaLayer layer(shape, 20);
    for (const int accepted : {1, 2, 6}) {
      DeltaStates plain(layer, 1), drafted(layer, 1);
      plain.segments = {{.first_row = 0, .tokens = 12 + accepted, .to = 0}};
      plain.first = drafted.first = {0};
      const std::vector<float> expected = RunDelta(layer, 0, 12 + accepted, plain.Step(), GetParam(), 1);
      drafted.segments = {{.first_row = 0, .tokens = 11, .to = 0}};
      RunDelta(layer, 0, 11, drafted.Step(), GetParam(), 2);
      drafted.segments = {{.first_row = 0, .tokens = 1, .from = 0, .to = 0}, {.first_row = 1, .tokens = 6, .from = 0}};
      const std::vector<float> out = RunDelta(layer, 11, 18, drafted.Step(), GetParam(), 2);
      EXPECT_TRUE(std::equal(expected.begin() + 11 * shape.ValueWidth(), expected.end(), out.begin()));
      drafted.segments = {{.first_row = 0, .tokens = accepted, .from = 0, .to = 0}};
      RunDelta(layer, 12, 18, drafted.Step(), GetParam(), 2, /*states_only=*/true);
      EXPECT_EQ(drafted.memory, plain.memory) << accepted;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Units, GatedDeltaNetTest, ::testing::ValuesIn(kvanta::testing::Units()),
                         [](const auto& unit) { return unit.param.name; });

}  // namespace
}  // namespace kvanta::kernels
