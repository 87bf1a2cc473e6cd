#include "bench/recurrent_bench.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <span>

#include "base/device.h"
#include "base/math.h"
#include "base/thread_pool.h"
#include "bench/random_values.h"
#include "bench/roofline.h"
#include "kernels/cpu/built_units.h"
#include "kernels/cpu/select.h"
#include "kernels/linear_attention/cpu/gated_delta_net.h"
#include "kernels/linear_attention/cpu/mamba2.h"
#include "kernels/linear_attention/cpu/short_conv.h"
#include "kvanta/error.h"

namespace kvanta::kernels {
namespace {

constexpr int64_t kColdBytes = int64_t{192} << 20;  // of all states that decode cycles through
constexpr int64_t kMaxRows = 1 << 16;
constexpr int64_t kVerifiedTokens = 40;
constexpr double kMaxError = 1e-4;

// A layer of random weights with the inputs of up to `rows` rows.
class Layer {
 public:
  virtual ~Layer() = default;
  virtual formats::StateShape State() const = 0;
  virtual int64_t OutWidth() const = 0;
  virtual int64_t Operations() const = 0;  // of a row
  virtual const char* Kernel() const = 0;
  // Rows from `first` on.
  virtual void Run(int64_t first, int64_t rows, const cache::StateStep& states, const IsaTable& isa,
                   ThreadPool& threads, float* out) = 0;
};

std::vector<float> Decays(int64_t heads) {
  std::vector<float> decays = NormalValues(heads, 5);
  for (float& value : decays) value = -std::exp(value - 3);
  return decays;
}

class DeltaLayer final : public Layer {
 public:
  DeltaLayer(const GatedDeltaNetShape& shape, int64_t rows)
      : shape_(shape),
        projected_(NormalValues(rows * Width(), 1)),
        gates_(NormalValues(rows * 2 * shape.v_heads, 2)),
        channel_gates_(NormalValues(shape.channel_decay ? rows * shape.KeyWidth() : 0, 7)),
        conv_(NormalValues(shape.conv_width * shape.ConvWidth(), 3, 0.5F)),
        dt_bias_(NormalValues(shape.v_heads * shape.DecayDim(), 4)),
        decay_(Decays(shape.v_heads)),
        norm_(NormalValues(shape.v_dim, 6)),
        mixed_(static_cast<size_t>(rows * shape.ConvWidth())),
        factors_(static_cast<size_t>(rows * shape.FactorWidth())) {}

  formats::StateShape State() const override { return shape_.State(); }
  int64_t OutWidth() const override { return shape_.ValueWidth(); }
  int64_t Operations() const override {
    return 8 * shape_.RuleFloats() + int64_t{2} * shape_.conv_width * shape_.ConvWidth();
  }
  const char* Kernel() const override { return shape_.channel_decay ? "Kimi Delta Attention" : "Gated DeltaNet"; }
  void Run(int64_t first, int64_t rows, const cache::StateStep& states, const IsaTable& isa, ThreadPool& threads,
           float* out) override {
    const ChannelRun runs[] = {{.channel = 0, .projected = 0, .count = shape_.ConvWidth()}};
    const float* projected = projected_.data() + first * Width();
    CpuGatedDeltaNet(
        {.shape = shape_,
         .rows = rows,
         .projected = projected,
         .projected_stride = Width(),
         .runs = runs,
         .z = {.first = shape_.ConvWidth(), .group_stride = shape_.v_dim},
         .gates = gates_.data() + first * 2 * shape_.v_heads,
         .gates_stride = int64_t{2} * shape_.v_heads,
         .b = {.first = 0, .group_stride = 1},
         .a = {.first = shape_.v_heads, .group_stride = 1},
         .channel_gates = channel_gates_.data() + (shape_.channel_decay ? first * shape_.KeyWidth() : 0),
         .channel_gates_stride = shape_.KeyWidth(),
         .output_gates = shape_.channel_decay ? channel_gates_.data() + first * shape_.KeyWidth() : nullptr,
         .conv = conv_.data(),
         .dt_bias = dt_bias_.data(),
         .decay = decay_.data(),
         .norm = norm_.data(),
         .eps = 1e-6F,
         .states = states,
         .mixed = mixed_.data(),
         .factors = factors_.data(),
         .out = out},
        isa, threads);
  }

 private:
  int64_t Width() const { return shape_.ConvWidth() + shape_.ValueWidth(); }

  GatedDeltaNetShape shape_;
  std::vector<float> projected_, gates_, channel_gates_, conv_, dt_bias_, decay_, norm_, mixed_, factors_;
};

class Mamba2Layer final : public Layer {
 public:
  Mamba2Layer(const Mamba2Shape& shape, int64_t rows)
      : shape_(shape),
        projected_(NormalValues(rows * shape.ProjectedWidth(), 1)),
        conv_(NormalValues(shape.conv_width * shape.ConvWidth(), 3, 0.5F)),
        dt_bias_(NormalValues(shape.heads, 4)),
        decay_(Decays(shape.heads)),
        d_(NormalValues(shape.heads, 8)),
        norm_(NormalValues(shape.Width(), 6)),
        mixed_(static_cast<size_t>(rows * shape.ConvWidth())),
        factors_(static_cast<size_t>(rows * 2 * shape.heads)) {}

  formats::StateShape State() const override { return shape_.State(); }
  int64_t OutWidth() const override { return shape_.Width(); }
  int64_t Operations() const override {
    return 6 * shape_.ScanFloats() + int64_t{2} * shape_.conv_width * shape_.ConvWidth();
  }
  const char* Kernel() const override { return "Mamba-2"; }
  void Run(int64_t first, int64_t rows, const cache::StateStep& states, const IsaTable& isa, ThreadPool& threads,
           float* out) override {
    CpuMamba2({.shape = shape_,
               .rows = rows,
               .z = projected_.data() + first * shape_.ProjectedWidth(),
               .inputs = projected_.data() + first * shape_.ProjectedWidth() + shape_.Width(),
               .stride = shape_.ProjectedWidth(),
               .conv = conv_.data(),
               .conv_bias = nullptr,
               .dt_bias = dt_bias_.data(),
               .decay = decay_.data(),
               .d = d_.data(),
               .norm = norm_.data(),
               .eps = 1e-6F,
               .states = states,
               .mixed = mixed_.data(),
               .factors = factors_.data(),
               .out = out},
              isa, threads);
  }

 private:
  Mamba2Shape shape_;
  std::vector<float> projected_, conv_, dt_bias_, decay_, d_, norm_, mixed_, factors_;
};

class ConvLayer final : public Layer {
 public:
  ConvLayer(const ShortConvShape& shape, int64_t rows)
      : shape_(shape),
        projected_(NormalValues(rows * 3 * shape.channels, 1)),
        conv_(NormalValues(int64_t{shape.conv_width} * shape.channels, 3)) {
    // B becomes B * x in each run: signs keep its size.
    for (int64_t i = 0; i < std::ssize(projected_); ++i) {
      float& value = projected_[static_cast<size_t>(i)];
      if (i / shape.channels % 3 == 2) value = value < 0 ? -1.0F : 1.0F;
    }
  }

  formats::StateShape State() const override { return shape_.State(); }
  int64_t OutWidth() const override { return shape_.channels; }
  int64_t Operations() const override { return int64_t{2} * (shape_.conv_width + 2) * shape_.channels; }
  const char* Kernel() const override { return "short convolution"; }
  void Run(int64_t first, int64_t rows, const cache::StateStep& states, const IsaTable& isa, ThreadPool& threads,
           float* out) override {
    float* b = projected_.data() + first * 3 * shape_.channels;
    CpuShortConv({.shape = shape_,
                  .rows = rows,
                  .b = b,
                  .c = b + shape_.channels,
                  .x = b + int64_t{2} * shape_.channels,
                  .stride = int64_t{3} * shape_.channels,
                  .conv = conv_.data(),
                  .bias = nullptr,
                  .states = states,
                  .out = out},
                 isa, threads);
  }

 private:
  ShortConvShape shape_;
  std::vector<float> projected_, conv_;
};

template <class Kind, class Shape>
std::unique_ptr<Layer> Make(const Shape& shape, int64_t rows) {
  return std::make_unique<Kind>(shape, rows);
}

struct NamedLayer {
  const char* name;
  std::unique_ptr<Layer> (*make)(int64_t rows);
};

constexpr NamedLayer kLayers[] = {
    {"qwen3.6-27b",
     [](int64_t rows) {
       return Make<DeltaLayer>(
           GatedDeltaNetShape{.k_heads = 16, .v_heads = 48, .k_dim = 128, .v_dim = 128, .conv_width = 4}, rows);
     }},
    {"kimi-linear-48b",
     [](int64_t rows) {
       return Make<DeltaLayer>(
           GatedDeltaNetShape{
               .k_heads = 32, .v_heads = 32, .k_dim = 128, .v_dim = 128, .conv_width = 4, .channel_decay = true},
           rows);
     }},
    {"nemotron-3-nano",
     [](int64_t rows) {
       return Make<Mamba2Layer>(
           Mamba2Shape{.heads = 64, .head_dim = 64, .groups = 8, .state_size = 128, .conv_width = 4}, rows);
     }},
    {"granite-4-small",
     [](int64_t rows) {
       return Make<Mamba2Layer>(
           Mamba2Shape{.heads = 128, .head_dim = 64, .groups = 1, .state_size = 128, .conv_width = 4}, rows);
     }},
    {"lfm2-8b", [](int64_t rows) { return Make<ConvLayer>(ShortConvShape{.channels = 2048, .conv_width = 3}, rows); }}};

const NamedLayer& Find(const std::string& name) {
  const auto* found = std::ranges::find(kLayers, name, &NamedLayer::name);
  if (found == std::end(kLayers)) {
    throw InputError(
        fmt::format("bench: unknown layer '{}'; expected one of {}", name, fmt::join(RecurrentLayerNames(), ", ")));
  }
  return *found;
}

void Check(const RecurrentBench& options) {
  const auto [layer, isa, threads, sequences, tokens, seconds] = options;
  if (sequences < 1 || tokens < 1 || sequences > kMaxRows || tokens > kMaxRows || sequences * tokens > kMaxRows) {
    throw InputError(fmt::format("bench: {} sequences of {} tokens; at least 1 each, and at most {} tokens together",
                                 sequences, tokens, kMaxRows));
  }
  if (!(seconds >= 0 && seconds <= 3600)) {
    throw InputError(fmt::format("bench: seconds must be from 0 to 3600, got {}", seconds));
  }
}

// States of `records` sequences, zeros at first.
class States {
 public:
  States(const formats::StateShape& shape, int64_t records)
      : bytes_(RoundUp(shape.Bytes(), int64_t{64})), memory_(Cpu().Allocate(static_cast<size_t>(records * bytes_))) {
    std::fill_n(memory_.as<uint8_t>(), records * bytes_, 0);
  }

  // Sequences of `tokens` rows each, with the states from record `first` on.
  cache::StateStep Step(int64_t first, int64_t sequences, int64_t tokens) {
    segments_.clear();
    first_segments_.clear();
    for (int64_t i = 0; i < sequences; ++i) {
      const auto record = static_cast<cache::PageId>(first + i);
      first_segments_.push_back(static_cast<int32_t>(i));
      segments_.push_back(
          {.first_row = i * tokens, .tokens = static_cast<int32_t>(tokens), .from = record, .to = record});
    }
    return {.segments = segments_,
            .first_segments = first_segments_,
            .base = memory_.as<uint8_t>(),
            .record_bytes = bytes_};
  }

 private:
  int64_t bytes_;
  Buffer memory_;
  std::vector<cache::StateSegment> segments_;
  std::vector<int32_t> first_segments_;
};

// One sequence through `isa`, `tokens` at a time.
std::vector<float> Outputs(const NamedLayer& named, int64_t tokens, const IsaTable& isa, int threads) {
  const std::unique_ptr<Layer> layer = named.make(kVerifiedTokens);
  States states(layer->State(), 1);
  ThreadPool pool(threads);
  std::vector<float> out(static_cast<size_t>(kVerifiedTokens * layer->OutWidth()));
  for (int64_t first = 0; first < kVerifiedTokens; first += tokens) {
    layer->Run(first, tokens, states.Step(0, 1, tokens), isa, pool, out.data() + first * layer->OutWidth());
  }
  return out;
}

double Verify(const NamedLayer& named, const IsaTable& isa, int threads) {
  const std::vector<float> found = Outputs(named, kVerifiedTokens, isa, threads);
  if (found != Outputs(named, 1, isa, 1)) {
    throw Error(fmt::format("bench: {} on {}: a step of {} tokens differs from {} steps of one", named.name, isa.name,
                            kVerifiedTokens, kVerifiedTokens));
  }
  constexpr auto kPortable = IsBuilt("portable") ? &PortableTable : nullptr;
  if constexpr (!IsBuilt("portable")) return 0;
  const std::vector<float> expected = Outputs(named, kVerifiedTokens, kPortable(), threads);
  double squares = 0, errors = 0;
  for (size_t i = 0; i < found.size(); ++i) {
    squares += double{expected[i]} * expected[i];
    errors += (double{found[i]} - expected[i]) * (double{found[i]} - expected[i]);
  }
  const double error = std::sqrt(errors / squares);
  if (!(error < kMaxError)) {
    throw Error(fmt::format("bench: {} on {} differs from the portable unit by {}", named.name, isa.name, error));
  }
  return error;
}

}  // namespace

std::vector<std::string> RecurrentLayerNames() {
  std::vector<std::string> names;
  for (const NamedLayer& layer : kLayers) names.emplace_back(layer.name);
  return names;
}

RecurrentRoofline MeasureRecurrentRoofline(const std::string& isa, int threads) {
  const IsaTable& unit = SelectIsa(isa);
  return {.updated_bytes = MeasureUpdateBandwidth(threads, unit), .operations = MeasureF32FmaPeak(threads, unit)};
}

RecurrentBenchRow RunRecurrentBench(const RecurrentBench& options) {
  using Clock = std::chrono::steady_clock;
  Check(options);
  const NamedLayer& named = Find(options.layer);
  const IsaTable& isa = SelectIsa(options.isa);
  const int64_t rows = options.sequences * options.tokens;
  const std::unique_ptr<Layer> layer = named.make(rows);
  const int64_t state_bytes = layer->State().Bytes(), step_bytes = options.sequences * state_bytes;
  RecurrentBenchRow row{.layer = options.layer,
                        .kernel = layer->Kernel(),
                        .isa = isa.name,
                        .threads = options.threads,
                        .sequences = options.sequences,
                        .tokens = options.tokens,
                        .state_bytes = state_bytes};
  row.max_error = Verify(named, isa, options.threads);
  const int64_t copies = options.tokens == 1 ? std::max<int64_t>(2, kColdBytes / step_bytes) : 2;
  States states(layer->State(), copies * options.sequences);
  ThreadPool pool(options.threads);
  std::vector<float> out(static_cast<size_t>(rows * layer->OutWidth()));
  const auto run_all = [&] {
    const auto start = Clock::now();
    for (int64_t copy = 0; copy < copies; ++copy) {
      layer->Run(0, rows, states.Step(copy * options.sequences, options.sequences, options.tokens), isa, pool,
                 out.data());
    }
    return std::chrono::duration<double, std::nano>(Clock::now() - start).count() / static_cast<double>(copies);
  };
  run_all();
  const auto end = Clock::now() + std::chrono::duration<double>(options.seconds);
  for (int pass = 0; pass < 3 || Clock::now() < end; ++pass) {
    const double ns = run_all();
    if (pass == 0 || ns < row.ns) row.ns = ns;
  }
  row.bytes_per_second = 2.0 * static_cast<double>(step_bytes) / row.ns * 1e9;
  row.operations_per_second = static_cast<double>(rows * layer->Operations()) / row.ns * 1e9;
  return row;
}

}  // namespace kvanta::kernels
