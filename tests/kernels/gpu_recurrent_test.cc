// Recurrent layers on an emulated and, if present, a real GPU: the CPU's outputs and states within rounding; bits do
// not depend on how tokens are divided into steps and sequences.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "kernels/cuda/cuda_context.h"
#include "kernels/gpu_and_cpu.h"
#include "kernels/random_values.h"
#include "tolerance.h"

namespace kvanta::kernels {
namespace {

constexpr int64_t kSteps = 100;  // tokens of the sequence: more than a block of the convolution has

template <class T>
Buffer CopyTo(Device& device, std::span<const T> values) {
  Buffer buffer = device.Allocate(values.size_bytes());
  if (!values.empty()) device.CopyIn(buffer.data(), values.data(), values.size_bytes());
  return buffer;
}

// Rows [begin, end) of [kSteps][width] values.
struct TokenRange {
  int64_t begin, end;
};
Buffer RowsOf(Device& device, const std::vector<float>& values, int64_t width, std::span<const TokenRange> ranges) {
  std::vector<float> rows;
  for (const auto& [begin, end] : ranges) {
    rows.insert(rows.end(), values.begin() + begin * width, values.begin() + end * width);
  }
  return CopyTo<float>(device, rows);
}

// A recurrent layer with random weights and inputs, for any device.
class RecurrentLayer {
 public:
  virtual ~RecurrentLayer() = default;
  virtual int64_t StateBytes() const = 0;
  virtual int64_t OutWidth() const = 0;
  virtual double Tolerance() const = 0;
  virtual void Run(Ops& ops, std::span<const TokenRange> tokens, int64_t rows, const cache::StateStep& states,
                   bool states_only, float* out) const = 0;
};

class DeltaLayer final : public RecurrentLayer {
 public:
  DeltaLayer(const GatedDeltaNetShape& s, bool by_key_head)
      : shape_(s),
        width_(s.ConvWidth() + s.ValueWidth()),
        projected_(RandomValues(kSteps * width_, 1)),
        gates_(RandomValues(kSteps * 2 * s.v_heads, 2)),
        channel_gates_(RandomValues(kSteps * s.KeyWidth(), 7, 3)),
        output_gates_(RandomValues(kSteps * s.ValueWidth(), 8)),
        conv_(RandomValues(s.conv_width * s.ConvWidth(), 3, 0.5F)),
        dt_bias_(RandomValues(s.v_heads * s.DecayDim(), 4)),
        decay_(RandomValues(s.v_heads, 5)),
        norm_(RandomValues(s.v_dim, 6)) {
    for (float& value : decay_) value = -std::exp(value - 3);
    const int64_t values = s.v_heads / s.k_heads, keys = s.k_dim, group = width_ / s.k_heads;
    if (!by_key_head) {
      runs_ = {{.channel = 0, .projected = 0, .count = s.ConvWidth()}};
      z_ = {.first = s.ConvWidth(), .group_stride = s.v_dim};
      return;
    }
    for (int64_t head = 0; head < s.k_heads; ++head) {
      runs_.push_back({.channel = head * keys, .projected = head * group, .count = keys});
      runs_.push_back({.channel = s.KeyWidth() + head * keys, .projected = head * group + keys, .count = keys});
      runs_.push_back({.channel = 2 * s.KeyWidth() + head * values * s.v_dim,
                       .projected = head * group + 2 * keys,
                       .count = values * s.v_dim});
    }
    z_ = {.first = 2 * keys + values * s.v_dim, .per_group = values, .group_stride = group, .stride = s.v_dim};
  }

  int64_t StateBytes() const override { return shape_.State().Bytes(); }
  int64_t OutWidth() const override { return shape_.ValueWidth(); }
  double Tolerance() const override { return kvanta::testing::DeltaRuleRelative(kSteps, shape_.k_dim); }
  void Run(Ops& ops, std::span<const TokenRange> tokens, int64_t rows, const cache::StateStep& states, bool states_only,
           float* out) const override {
    Device& device = ops.device();
    const int64_t heads = shape_.v_heads;
    const Buffer projected = RowsOf(device, projected_, width_, tokens),
                 gates = RowsOf(device, gates_, 2 * heads, tokens),
                 channel_gates = RowsOf(device, channel_gates_, shape_.KeyWidth(), tokens),
                 output_gates = RowsOf(device, output_gates_, shape_.ValueWidth(), tokens),
                 conv = CopyTo<float>(device, conv_), dt_bias = CopyTo<float>(device, dt_bias_),
                 decay = CopyTo<float>(device, decay_), norm = CopyTo<float>(device, norm_);
    const Buffer mixed = device.Allocate(static_cast<size_t>(rows * shape_.ConvWidth()) * sizeof(float)),
                 factors = device.Allocate(static_cast<size_t>(rows * shape_.FactorWidth()) * sizeof(float));
    ops.GatedDeltaNet({.shape = shape_,
                       .rows = rows,
                       .projected = projected.as<float>(),
                       .projected_stride = width_,
                       .runs = runs_,
                       .z = z_,
                       .gates = gates.as<float>(),
                       .gates_stride = 2 * heads,
                       .b = {.first = 0, .group_stride = 1},
                       .a = {.first = heads, .group_stride = 1},
                       .channel_gates = channel_gates.as<float>(),
                       .channel_gates_stride = shape_.KeyWidth(),
                       .output_gates = output_gates.as<float>(),
                       .conv = conv.as<float>(),
                       .dt_bias = dt_bias.as<float>(),
                       .decay = decay.as<float>(),
                       .norm = states_only ? nullptr : norm.as<float>(),
                       .eps = 1e-6F,
                       .states = states,
                       .mixed = mixed.as<float>(),
                       .factors = factors.as<float>(),
                       .out = out,
                       .states_only = states_only});
    device.Synchronize();
  }

 private:
  GatedDeltaNetShape shape_;
  int64_t width_;
  std::vector<float> projected_, gates_, channel_gates_, output_gates_, conv_, dt_bias_, decay_, norm_;
  std::vector<ChannelRun> runs_;
  HeadOffsets z_;
};

class Mamba2Layer final : public RecurrentLayer {
 public:
  explicit Mamba2Layer(const Mamba2Shape& s)
      : shape_(s),
        projected_(RandomValues(kSteps * s.ProjectedWidth(), 1)),
        conv_(RandomValues(s.conv_width * s.ConvWidth(), 2, 0.5F)),
        conv_bias_(RandomValues(s.ConvWidth(), 3, 0.5F)),
        dt_bias_(RandomValues(s.heads, 4)),
        decay_(RandomValues(s.heads, 5)),
        d_(RandomValues(s.heads, 6)),
        norm_(RandomValues(s.Width(), 7)) {
    for (float& value : decay_) value = -std::exp(value - 3);
  }

  int64_t StateBytes() const override { return shape_.State().Bytes(); }
  int64_t OutWidth() const override { return shape_.Width(); }
  double Tolerance() const override { return kvanta::testing::ScanRelative(kSteps, shape_.state_size); }
  void Run(Ops& ops, std::span<const TokenRange> tokens, int64_t rows, const cache::StateStep& states, bool states_only,
           float* out) const override {
    Device& device = ops.device();
    const Buffer projected = RowsOf(device, projected_, shape_.ProjectedWidth(), tokens),
                 conv = CopyTo<float>(device, conv_), conv_bias = CopyTo<float>(device, conv_bias_),
                 dt_bias = CopyTo<float>(device, dt_bias_), decay = CopyTo<float>(device, decay_),
                 d = CopyTo<float>(device, d_), norm = CopyTo<float>(device, norm_);
    const Buffer mixed = device.Allocate(static_cast<size_t>(rows * shape_.ConvWidth()) * sizeof(float)),
                 factors = device.Allocate(static_cast<size_t>(rows * 2 * shape_.heads) * sizeof(float));
    ops.Mamba2({.shape = shape_,
                .rows = rows,
                .z = states_only ? nullptr : projected.as<float>(),
                .inputs = projected.as<float>() + shape_.Width(),
                .stride = shape_.ProjectedWidth(),
                .z_scale = 1.25F,
                .dt_scale = 0.75F,
                .conv = conv.as<float>(),
                .conv_bias = conv_bias.as<float>(),
                .dt_bias = dt_bias.as<float>(),
                .decay = decay.as<float>(),
                .d = d.as<float>(),
                .norm = states_only ? nullptr : norm.as<float>(),
                .eps = 1e-6F,
                .states = states,
                .mixed = mixed.as<float>(),
                .factors = factors.as<float>(),
                .out = out});
    device.Synchronize();
  }

 private:
  Mamba2Shape shape_;
  std::vector<float> projected_, conv_, conv_bias_, dt_bias_, decay_, d_, norm_;
};

class ConvLayer final : public RecurrentLayer {
 public:
  ConvLayer(const ShortConvShape& s, bool has_bias)
      : shape_(s),
        projected_(RandomValues(kSteps * 3 * s.channels, 1)),
        conv_(RandomValues(int64_t{s.conv_width} * s.channels, 2)),
        bias_(RandomValues(has_bias ? s.channels : 0, 3)) {}

  int64_t StateBytes() const override { return shape_.State().Bytes(); }
  int64_t OutWidth() const override { return shape_.channels; }
  double Tolerance() const override { return kvanta::testing::ShortConvRelative(shape_.conv_width); }
  void Run(Ops& ops, std::span<const TokenRange> tokens, int64_t rows, const cache::StateStep& states, bool states_only,
           float* out) const override {
    Device& device = ops.device();
    const int64_t channels = shape_.channels;
    const Buffer projected = RowsOf(device, projected_, 3 * channels, tokens), conv = CopyTo<float>(device, conv_),
                 bias = CopyTo<float>(device, bias_);
    auto* const b = projected.as<float>();
    // The states alone are stored from products.
    if (states_only) {
      std::vector<float> products;
      for (const auto& [begin, end] : tokens) {
        for (int64_t i = begin * 3 * channels; i < end * 3 * channels; ++i) {
          const auto at = static_cast<size_t>(i);
          const bool is_b = i % (3 * channels) < channels;
          products.push_back(is_b ? projected_[at] * projected_[at + static_cast<size_t>(2 * channels)] : 0.0F);
        }
      }
      device.CopyIn(b, products.data(), products.size() * sizeof(float));
    }
    ops.ShortConv({.shape = shape_,
                   .rows = rows,
                   .b = b,
                   .c = b + channels,
                   .x = states_only ? nullptr : b + 2 * channels,
                   .stride = 3 * channels,
                   .conv = conv.as<float>(),
                   .bias = bias_.empty() ? nullptr : bias.as<float>(),
                   .states = states,
                   .out = out});
    device.Synchronize();
  }

 private:
  ShortConvShape shape_;
  std::vector<float> projected_, conv_, bias_;
};

// Entries and keys side by side, in the rows of their last tokens; other rows are zero.
class CompressorLayer final : public RecurrentLayer {
 public:
  explicit CompressorLayer(const CompressorShape& s)
      : shape_(s),
        inputs_(RandomValues(kSteps * s.InputWidth(), 1)),
        entry_bias_(RandomValues(s.row_tokens * s.Series() * s.entry_dim, 2)),
        key_bias_(RandomValues(s.row_tokens * s.Series() * s.key_dim, 3)) {}

  int64_t StateBytes() const override { return shape_.State().Bytes(); }
  int64_t OutWidth() const override { return shape_.entry_dim + shape_.key_dim; }
  double Tolerance() const override { return 1e-6; }
  void Run(Ops& ops, std::span<const TokenRange> tokens, int64_t rows, const cache::StateStep& states, bool states_only,
           float* out) const override {
    Device& device = ops.device();
    std::vector<int64_t> positions;
    for (const auto& [begin, end] : tokens) {
      for (int64_t position = begin; position < end; ++position) positions.push_back(position);
    }
    const auto zeros = [&](int width) {
      return CopyTo<float>(device, std::vector<float>(static_cast<size_t>(rows * width)));
    };
    const Buffer inputs = RowsOf(device, inputs_, shape_.InputWidth(), tokens), at = CopyTo<int64_t>(device, positions),
                 entry_bias = CopyTo<float>(device, entry_bias_), key_bias = CopyTo<float>(device, key_bias_),
                 entries = zeros(shape_.entry_dim), keys = zeros(shape_.key_dim);
    ops.Compress({.shape = shape_,
                  .inputs = inputs.as<float>(),
                  .positions = at.as<int64_t>(),
                  .rows = rows,
                  .entry_bias = entry_bias.as<float>(),
                  .key_bias = key_bias.as<float>(),
                  .states = states,
                  .entries = states_only ? nullptr : entries.as<float>(),
                  .keys = states_only ? nullptr : keys.as<float>()});
    ops.Copy(entries.as<float>(), shape_.entry_dim, rows, shape_.entry_dim, out, OutWidth());
    ops.Copy(keys.as<float>(), shape_.key_dim, rows, shape_.key_dim, out + shape_.entry_dim, OutWidth());
    device.Synchronize();
  }

 private:
  CompressorShape shape_;
  std::vector<float> inputs_, entry_bias_, key_bias_;
};

// StateRecords of a layer's states on a device, NaN until written.
class StateRecords {
 public:
  StateRecords(Ops& ops, const RecurrentLayer& layer, int64_t count)
      : ops_(ops),
        layer_(layer),
        memory_(ops.device().Allocate(static_cast<size_t>(count * layer.StateBytes()))),
        table_(ops.device().Allocate(sizeof(cache::StateTable))) {
    ops.device().Fill(memory_.data(), 0xFF, memory_.bytes());
  }

  // Outputs of one step. `tokens`: of each sequence, whose segments begin at first_segments.
  std::vector<float> Step(std::vector<TokenRange> tokens, const std::vector<cache::StateSegment>& segments,
                          std::vector<int32_t> first_segments, bool states_only = false) {
    Device& device = ops_.device();
    const int64_t rows = segments.back().first_row + segments.back().tokens;
    cache::StateStep step{.segments = segments,
                          .first_segments = first_segments,
                          .base = memory_.data(),
                          .record_bytes = layer_.StateBytes()};
    std::vector<int32_t> ends = first_segments;
    ends.push_back(static_cast<int32_t>(segments.size()));
    const Buffer device_segments = CopyTo<cache::StateSegment>(device, segments),
                 device_ends = CopyTo<int32_t>(device, ends);
    if (!ops_.OnHost()) {
      const cache::StateTable table{.segments = device_segments.as<cache::StateSegment>(),
                                    .first_segments = device_ends.as<int32_t>(),
                                    .sequences = static_cast<int32_t>(first_segments.size())};
      device.CopyIn(table_.data(), &table, sizeof(table));
      step.table = table_.as<cache::StateTable>();
      step.max_sequences = table.sequences + 2;  // as in a graph for more
    }
    const Buffer out = device.Allocate(static_cast<size_t>(rows * layer_.OutWidth()) * sizeof(float));
    layer_.Run(ops_, tokens, rows, step, states_only, out.as<float>());
    return Read(out);
  }
  std::vector<float> Record(int64_t index) const {
    const auto bytes = static_cast<size_t>(layer_.StateBytes());
    return Read(memory_.Part(static_cast<size_t>(index) * bytes, bytes));
  }

 private:
  std::vector<float> Read(const Buffer& buffer) const {
    std::vector<float> values(buffer.bytes() / sizeof(float));
    ops_.device().CopyOut(values.data(), buffer.data(), buffer.bytes());
    return values;
  }

  Ops& ops_;
  const RecurrentLayer& layer_;
  Buffer memory_, table_;
};

class GpuRecurrentTest : public testing::GpuAndCpuTest {
 protected:
  void Check(const RecurrentLayer& layer);
};

INSTANTIATE_TEST_SUITE_P(Gpus, GpuRecurrentTest, ::testing::ValuesIn(testing::Gpus()),
                         [](const auto& param) { return param.param; });

void ExpectNear(const std::vector<float>& found, const std::vector<float>& expected, double tolerance) {
  double squares = 0, errors = 0;
  for (size_t i = 0; i < found.size(); ++i) {
    const double error = double{found[i]} - double{expected[i]};
    squares += double{expected[i]} * double{expected[i]};
    errors += error * error;
  }
  EXPECT_LT(std::sqrt(errors / squares), tolerance);
}

bool SameBits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

void GpuRecurrentTest::Check(const RecurrentLayer& layer) {
  // Snapshots after 16 and 80 tokens, and the working state.
  const std::vector<cache::StateSegment> segments = {{.first_row = 0, .tokens = 16, .to = 0},
                                                     {.first_row = 16, .tokens = 64, .from = 0, .to = 1},
                                                     {.first_row = 80, .tokens = 20, .from = 1, .to = 2}};
  StateRecords whole(*ops_, layer, 4), on_cpu(*cpu_, layer, 3);
  const std::vector<float> out = whole.Step({{0, kSteps}}, segments, {0});
  ExpectNear(out, on_cpu.Step({{0, kSteps}}, segments, {0}), layer.Tolerance());
  for (const int record : {0, 1, 2}) ExpectNear(whole.Record(record), on_cpu.Record(record), layer.Tolerance());

  StateRecords parts(*ops_, layer, 1);
  int64_t begin = 0;
  const auto rows = [&](int64_t first, int64_t end) {
    return std::span(out).subspan(static_cast<size_t>(first * layer.OutWidth()),
                                  static_cast<size_t>((end - first) * layer.OutWidth()));
  };
  for (const int tokens : {1, 2, 70, 1, 1, 7, 18}) {
    const std::vector<float> part =
        parts.Step({{begin, begin + tokens}},
                   {{.first_row = 0, .tokens = tokens, .from = begin == 0 ? cache::kNoPage : 0, .to = 0}}, {0});
    EXPECT_TRUE(SameBits(part, rows(begin, begin + tokens))) << "tokens from " << begin << " on";
    begin += tokens;
  }
  EXPECT_TRUE(SameBits(parts.Record(0), whole.Record(2))) << "the state after the last token";

  // Two sequences in one step: one goes on from the snapshot after 80 tokens, the other begins.
  const std::vector<float> both = whole.Step(
      {{80, 93}, {0, 20}},
      {{.first_row = 0, .tokens = 13, .from = 1, .to = 3}, {.first_row = 13, .tokens = 20, .to = 0}}, {0, 1});
  EXPECT_TRUE(SameBits(std::span(both).first(rows(80, 93).size()), rows(80, 93)));
  EXPECT_TRUE(SameBits(std::span(both).subspan(rows(80, 93).size()), rows(0, 20)));

  // Drafted rows leave the state of the row before them, which then advances over accepted ones alone.
  StateRecords drafted(*ops_, layer, 1), plain(*ops_, layer, 1);
  plain.Step({{0, 15}}, {{.first_row = 0, .tokens = 15, .to = 0}}, {0});
  drafted.Step({{0, 11}}, {{.first_row = 0, .tokens = 11, .to = 0}}, {0});
  const std::vector<float> drafts = drafted.Step(
      {{11, 18}}, {{.first_row = 0, .tokens = 1, .from = 0, .to = 0}, {.first_row = 1, .tokens = 6, .from = 0}}, {0});
  EXPECT_TRUE(SameBits(drafts, rows(11, 18)));
  drafted.Step({{12, 15}}, {{.first_row = 0, .tokens = 3, .from = 0, .to = 0}}, {0}, /*states_only=*/true);
  EXPECT_TRUE(SameBits(drafted.Record(0), plain.Record(0)));
}

TEST_P(GpuRecurrentTest, GatedDeltaNet) {
  Check(DeltaLayer({.k_heads = 2, .v_heads = 6, .k_dim = 16, .v_dim = 24, .conv_width = 4}, true));
#ifndef KVANTA_SANITIZED
  Check(DeltaLayer({.k_heads = 1, .v_heads = 2, .k_dim = 8, .v_dim = 8, .conv_width = 8}, true));
  Check(DeltaLayer({.k_heads = 2, .v_heads = 4, .tiled_v_heads = true, .k_dim = 40, .v_dim = 72, .conv_width = 2},
                   false));
  Check(DeltaLayer({.k_heads = 1, .v_heads = 1, .k_dim = 136, .v_dim = 32, .conv_width = 3}, false));
#endif
}

TEST_P(GpuRecurrentTest, KimiDeltaAttention) {
  GatedDeltaNetShape shape{
      .k_heads = 2, .v_heads = 2, .k_dim = 40, .v_dim = 40, .conv_width = 4, .channel_decay = true};
  Check(DeltaLayer(shape, false));
  shape.decay_lower_bound = -5;
  Check(DeltaLayer(shape, false));
}

TEST_P(GpuRecurrentTest, Mamba2) {
  Check(Mamba2Layer({.heads = 6, .head_dim = 24, .groups = 2, .state_size = 16, .conv_width = 4}));
#ifndef KVANTA_SANITIZED
  Check(Mamba2Layer(
      {.heads = 2, .head_dim = 40, .groups = 1, .state_size = 24, .conv_width = 2, .gate = Mamba2Gate::kNoNorm}));
  Check(Mamba2Layer({.heads = 4,
                     .head_dim = 72,
                     .groups = 1,  // norms of more channels than a warp takes
                     .state_size = 136,
                     .conv_width = 3,
                     .gate = Mamba2Gate::kNormBeforeGate,
                     .min_dt = 0.5F,
                     .max_dt = 1.0F}));
#endif
}

TEST_P(GpuRecurrentTest, ShortConvolutions) {
  Check(ConvLayer({.channels = 300, .conv_width = 3}, false));
  Check(ConvLayer({.channels = 7, .conv_width = 8}, true));
}

TEST_P(GpuRecurrentTest, Compressors) {
  Check(CompressorLayer({.row_tokens = 4, .overlaps = true, .entry_dim = 72, .key_dim = 24}));
  Check(CompressorLayer({.row_tokens = 32, .overlaps = false, .entry_dim = 300, .key_dim = 0}));
}

}  // namespace
}  // namespace kvanta::kernels
