// Mamba-2 on every CPU unit, compared with the recurrence in double precision; bits do not depend on how tokens are
// divided into steps, sequences or threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "emulated/units.h"
#include "kernels/linear_attention/cpu/mamba2.h"
#include "kernels/random_values.h"
#include "tolerance.h"

namespace kvanta::kernels {
namespace {

using kvanta::testing::Unit;

// Weights of a layer, and a sequence's projected rows.
struct Mamba2Layer {
  Mamba2Layer(const Mamba2Shape& s, int64_t count)
      : shape(s),
        rows(count),
        projected(RandomValues(count * s.ProjectedWidth(), 1)),
        conv(RandomValues(s.conv_width * s.ConvWidth(), 2, 0.5F)),
        conv_bias(RandomValues(s.ConvWidth(), 3, 0.5F)),
        dt_bias(RandomValues(s.heads, 4)),
        decay(RandomValues(s.heads, 5)),
        d(RandomValues(s.heads, 6)),
        norm(RandomValues(s.Width(), 7)) {
    for (float& value : decay) value = -std::exp(value - 3);
  }

  Mamba2Shape shape;
  int64_t rows;
  std::vector<float> projected, conv, conv_bias, dt_bias, decay, d, norm;
  static constexpr float kEps = 1e-6F, kZScale = 1.25F, kDtScale = 0.75F;
};

// Records of states, and segments of sequences that all read the layer's rows.
struct Mamba2States {
  Mamba2States(const Mamba2Layer& layer, int64_t records)
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
std::vector<float> RunMamba2(const Mamba2Layer& layer, int64_t begin, int64_t end, const cache::StateStep& states,
                             const Unit& unit, int threads, bool states_only = false) {
  const Mamba2Shape& shape = layer.shape;
  const int64_t rows = end - begin;
  std::vector<float> projected(layer.projected.begin() + begin * shape.ProjectedWidth(),
                               layer.projected.begin() + end * shape.ProjectedWidth());
  std::vector<float> mixed(static_cast<size_t>(rows * shape.ConvWidth())),
      factors(static_cast<size_t>(rows * 2 * shape.heads)), out(static_cast<size_t>(rows * shape.Width()));
  ThreadPool pool(threads);
  CpuMamba2({.shape = shape,
             .rows = rows,
             .z = states_only ? nullptr : projected.data(),
             .inputs = projected.data() + shape.Width(),
             .stride = shape.ProjectedWidth(),
             .z_scale = Mamba2Layer::kZScale,
             .dt_scale = Mamba2Layer::kDtScale,
             .conv = layer.conv.data(),
             .conv_bias = layer.conv_bias.data(),
             .dt_bias = layer.dt_bias.data(),
             .decay = layer.decay.data(),
             .d = layer.d.data(),
             .norm = states_only ? nullptr : layer.norm.data(),
             .eps = Mamba2Layer::kEps,
             .states = states,
             .mixed = mixed.data(),
             .factors = factors.data(),
             .out = out.data()},
            *unit.table, pool);
  return out;
}

double Silu(double x) {
  return x / (1 + std::exp(-x));
}

// Gates and norms a row in place.
void GateAndNorm(const Mamba2Layer& layer, const float* z, double* y) {
  const Mamba2Shape& shape = layer.shape;
  const auto gate = [&] {
    for (int64_t i = 0; i < shape.Width(); ++i) y[i] *= Silu(double{z[i]} * Mamba2Layer::kZScale);
  };
  if (shape.gate != Mamba2Gate::kNormBeforeGate) gate();
  if (shape.gate == Mamba2Gate::kNoNorm) return;
  for (int64_t first = 0; first < shape.Width(); first += shape.GroupWidth()) {
    double squares = 0;
    for (int64_t i = 0; i < shape.GroupWidth(); ++i) squares += y[first + i] * y[first + i];
    const double factor = 1 / std::sqrt(squares / double(shape.GroupWidth()) + Mamba2Layer::kEps);
    for (int64_t i = 0; i < shape.GroupWidth(); ++i) y[first + i] *= factor * layer.norm[first + i];
  }
  if (shape.gate == Mamba2Gate::kNormBeforeGate) gate();
}

std::vector<double> Mamba2Oracle(const Mamba2Layer& layer) {
  const Mamba2Shape& shape = layer.shape;
  const int64_t channels = shape.ConvWidth(), width = shape.ProjectedWidth();
  std::vector<double> state(static_cast<size_t>(shape.ScanFloats())), out;
  for (int64_t row = 0; row < layer.rows; ++row) {
    const float* projected = layer.projected.data() + row * width;
    std::vector<double> mixed(static_cast<size_t>(channels)), y(static_cast<size_t>(shape.Width()));
    for (int64_t c = 0; c < channels; ++c) {
      double sum = layer.conv_bias[c];
      for (int tap = 0; tap < shape.conv_width; ++tap) {
        const int64_t from = row - shape.conv_width + 1 + tap;
        if (from < 0) continue;
        sum += double{layer.projected[from * width + shape.Width() + c]} * layer.conv[tap * channels + c];
      }
      mixed[c] = Silu(sum);
    }
    for (int head = 0; head < shape.heads; ++head) {
      const double x = double{projected[width - shape.heads + head]} * Mamba2Layer::kDtScale + layer.dt_bias[head];
      const double dt = std::clamp(std::log1p(std::exp(x)), double{shape.min_dt}, double{shape.max_dt});
      const double decay = std::exp(layer.decay[head] * dt);
      const double* b = mixed.data() + shape.Width() + int64_t{head} * shape.groups / shape.heads * shape.state_size;
      const double* c = b + int64_t{shape.groups} * shape.state_size;
      for (int j = 0; j < shape.head_dim; ++j) {
        const int64_t channel = int64_t{head} * shape.head_dim + j;
        double* h = state.data() + channel * shape.state_size;
        for (int i = 0; i < shape.state_size; ++i) {
          h[i] = decay * h[i] + b[i] * dt * mixed[channel];
          y[channel] += c[i] * h[i];
        }
        y[channel] += layer.d[head] * mixed[channel];
      }
    }
    GateAndNorm(layer, projected, y.data());
    out.insert(out.end(), y.begin(), y.end());
  }
  return out;
}

class Mamba2Test : public ::testing::TestWithParam<Unit> {};

constexpr Mamba2Shape kMamba2Shapes[] = {
    {.heads = 6, .head_dim = 24, .groups = 2, .state_size = 16, .conv_width = 4},
    {.heads = 2, .head_dim = 72, .groups = 1, .state_size = 40, .conv_width = 2, .gate = Mamba2Gate::kNoNorm},
    {.heads = 4,
     .head_dim = 64,
     .groups = 4,
     .state_size = 128,
     .conv_width = 4,
     .gate = Mamba2Gate::kNormBeforeGate,
     .min_dt = 0.5F,
     .max_dt = 1.0F},
    {.heads = 1, .head_dim = 8, .groups = 1, .state_size = 256, .conv_width = 8}};

TEST_P(Mamba2Test, EqualsTheRecurrence) {
  for (const Mamba2Shape& shape : kMamba2Shapes) {
    const Mamba2Layer layer(shape, 70);
    Mamba2States states(layer, 1);
    states.segments = {{.first_row = 0, .tokens = 70, .to = 0}};
    states.first = {0};
    const std::vector<float> out = RunMamba2(layer, 0, 70, states.Step(), GetParam(), 2);
    const std::vector<double> expected = Mamba2Oracle(layer);
    double squares = 0, errors = 0;
    for (size_t i = 0; i < out.size(); ++i) {
      squares += expected[i] * expected[i];
      errors += (out[i] - expected[i]) * (out[i] - expected[i]);
    }
    EXPECT_LT(std::sqrt(errors / squares), kvanta::testing::ScanRelative(70, shape.state_size)) << shape.state_size;
  }
}

TEST_P(Mamba2Test, StepsAndThreadsChangeNoBit) {
  for (const Mamba2Shape& shape : kMamba2Shapes) {
    const Mamba2Layer layer(shape, 45);
    Mamba2States whole(layer, 4);
    // Snapshots after 16 and 32 tokens, and the working state.
    whole.segments = {{.first_row = 0, .tokens = 16, .to = 0},
                      {.first_row = 16, .tokens = 16, .from = 0, .to = 1},
                      {.first_row = 32, .tokens = 13, .from = 1, .to = 2}};
    whole.first = {0};
    const std::vector<float> expected = RunMamba2(layer, 0, 45, whole.Step(), GetParam(), 1);
    Mamba2States parts(layer, 1);
    std::vector<float> found;
    int64_t begin = 0;
    for (const int tokens : {1, 2, 20, 1, 1, 7, 13}) {
      parts.segments = {{.first_row = 0, .tokens = tokens, .from = begin == 0 ? cache::kNoPage : 0, .to = 0}};
      parts.first = {0};
      const std::vector<float> out = RunMamba2(layer, begin, begin + tokens, parts.Step(), GetParam(), 3);
      found.insert(found.end(), out.begin(), out.end());
      begin += tokens;
    }
    EXPECT_EQ(found, expected);
    const auto at = [&](int record) { return whole.memory.begin() + record * whole.bytes; };
    EXPECT_TRUE(std::equal(parts.memory.begin(), parts.memory.end(), at(2))) << "the state after the last token";
    // Two sequences in one step: one goes on from the snapshot after 32 tokens, the other begins.
    Mamba2Layer both = layer;
    const int64_t projected = shape.ProjectedWidth(), width = shape.Width();
    both.projected.assign(layer.projected.begin() + 32 * projected, layer.projected.end());
    both.projected.insert(both.projected.end(), layer.projected.begin(), layer.projected.begin() + 20 * projected);
    whole.segments = {{.first_row = 0, .tokens = 13, .from = 1, .to = 3}, {.first_row = 13, .tokens = 20, .to = 0}};
    whole.first = {0, 1};
    const std::vector<float> out = RunMamba2(both, 0, 33, whole.Step(), GetParam(), 2);
    EXPECT_TRUE(std::equal(out.begin(), out.begin() + 13 * width, expected.begin() + 32 * width));
    EXPECT_TRUE(std::equal(out.begin() + 13 * width, out.end(), expected.begin()));
    EXPECT_TRUE(std::equal(at(2), at(3), at(3)));
  }
}

// Drafted rows have the outputs of plain steps and leave the state of the row before them, which then advances over
// accepted ones alone.
TEST_P(Mamba2Test, StatesAdvanceOverAcceptedDrafts) {
  for (const Mamba2Shape& shape : kMamba2Shapes) {
    const Mamba2Layer layer(shape, 20);
    for (const int accepted : {1, 2, 6}) {
      Mamba2States plain(layer, 1), drafted(layer, 1);
      plain.segments = {{.first_row = 0, .tokens = 12 + accepted, .to = 0}};
      plain.first = drafted.first = {0};
      const std::vector<float> expected = RunMamba2(layer, 0, 12 + accepted, plain.Step(), GetParam(), 1);
      drafted.segments = {{.first_row = 0, .tokens = 11, .to = 0}};
      RunMamba2(layer, 0, 11, drafted.Step(), GetParam(), 2);
      drafted.segments = {{.first_row = 0, .tokens = 1, .from = 0, .to = 0}, {.first_row = 1, .tokens = 6, .from = 0}};
      const std::vector<float> out = RunMamba2(layer, 11, 18, drafted.Step(), GetParam(), 2);
      EXPECT_TRUE(std::equal(expected.begin() + 11 * shape.Width(), expected.end(), out.begin()));
      drafted.segments = {{.first_row = 0, .tokens = accepted, .from = 0, .to = 0}};
      RunMamba2(layer, 12, 18, drafted.Step(), GetParam(), 2, /*states_only=*/true);
      EXPECT_EQ(drafted.memory, plain.memory) << accepted;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Units, Mamba2Test, ::testing::ValuesIn(kvanta::testing::Units()),
                         [](const auto& unit) { return unit.param.name; });

}  // namespace
}  // namespace kvanta::kernels
