#include "bench/linear_bench.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <random>
#include <string_view>

#include "base/dtype.h"
#include "base/thread_pool.h"
#include "bench/roofline.h"
#include "kernels/cpu/select.h"
#include "kernels/ops.h"
#include "kvanta/error.h"
#include "weights/quantized_weight.h"
#include "weights/weight_blocks.h"

namespace kvanta::kernels {
namespace {

// Copies of the weights through which runs cycle to measure memory: together larger than the caches.
constexpr int64_t kColdBytes = int64_t{128} << 20;
constexpr int64_t kMaxCopies = 1024;
constexpr int64_t kStreamedRows = 16;  // up to this many rows, weights are read from memory
constexpr int64_t kMaxSide = 1 << 20;
constexpr int64_t kMaxElements = int64_t{1} << 28;  // 1 GiB of f32

struct Kind {
  std::string_view name;
  WeightType type;
  double (*measure_peak)(int threads, const IsaTable& isa);   // operations per second of its dot
  weights::BlockFormat blocks = weights::BlockFormat::kNone;  // only for kStored
  weights::QuantizedFormat quantized = {};  // as in checkpoints: codes and scales apart; a group of 0: a row

  bool IsQuantized() const { return quantized.codes != weights::CodeType::kNone; }
};

constexpr Kind QuantizedKind(std::string_view name, weights::CodeType codes, int64_t group) {
  return {name,
          WeightType::kStored,
          MeasureF32FmaPeak,
          weights::BlockFormat::kNone,
          {codes, weights::GroupScale::kF32, group}};
}

constexpr Kind kKinds[] = {
    {"bf16", WeightType::kBf16, MeasureBf16DotPeak},     {"f32", WeightType::kF32, MeasureF32FmaPeak},
    {"f16", WeightType::kF16, MeasureF32FmaPeak},        {"int8", WeightType::kInt8, MeasureInt8DotPeak},
    {"int4", WeightType::kInt4, MeasureInt4DotPeak},     QuantizedKind("fp8", weights::CodeType::kE4M3, 128),
    QuantizedKind("w8a16", weights::CodeType::kInt8, 0), QuantizedKind("w4a16", weights::CodeType::kInt4, 128),
    QuantizedKind("nf4", weights::CodeType::kNf4, 64)};

// Tiles multiply in bf16; all other units keep x in f32.
bool RoundsToBf16(const Kind& kind, const IsaTable& isa) {
  if (kind.IsQuantized()) return kind.quantized.codes != weights::CodeType::kNf4 && std::string_view(isa.name) == "amx";
  return kind.type == WeightType::kBf16;
}

Kind KindOf(const std::string& name) {
  for (const Kind& kind : kKinds) {
    if (name == kind.name) return kind;
  }
  std::vector<std::string_view> formats;
  for (int i = 1; i < weights::kBlockFormats; ++i) {
    const auto format = static_cast<weights::BlockFormat>(i);
    if (name == Name(format)) return {Name(format), WeightType::kStored, MeasureInt8DotPeak, format};
    formats.push_back(Name(format));
  }
  throw InputError(
      fmt::format("bench: unknown weights '{}'; expected bf16, f32, f16, int8, int4, fp8, w8a16, w4a16, nf4, "
                  "or blocks of {}",
                  name, fmt::join(formats, ", ")));
}

std::vector<float> RandomValues(int64_t n, uint32_t seed) {
  std::mt19937 generator(seed);
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<float> values(static_cast<size_t>(n));
  for (float& value : values) value = uniform(generator);
  return values;
}

// Random codes; scales and zero points that differ from group to group.
class RandomCodes final : public weights::QuantizedWeight {
 public:
  RandomCodes(LinearShape shape, weights::QuantizedFormat format)
      : weights::QuantizedWeight(shape.out, shape.in, format), codes_(static_cast<size_t>(shape.in * shape.out)) {
    std::mt19937 generator(1);
    for (uint8_t& code : codes_) {
      code = static_cast<uint8_t>(generator());
      if (format.codes == weights::CodeType::kInt4 || format.codes == weights::CodeType::kNf4) code &= 15;
      if (format.codes == weights::CodeType::kE4M3 && (code & 0x7f) == 0x7f) code = 0;  // NaN
    }
  }

  void ReadCodes(int64_t row, uint8_t* codes) const override { std::copy_n(&codes_[row * In()], In(), codes); }
  void ReadScales(int64_t row, float* scales) const override {
    for (int64_t group = 0; group < Groups(); ++group)
      scales[group] = 0.01F + 1e-4F * static_cast<float>((row + group) % 32);
  }
  void ReadZeros(int64_t row, uint8_t* zeros) const override {
    for (int64_t group = 0; group < Groups(); ++group) zeros[group] = static_cast<uint8_t>((row + group) % 17);
  }

 private:
  std::vector<uint8_t> codes_;
};

// W in memory as a checkpoint has it.
class RandomWeight {
 public:
  RandomWeight(const Kind& kind, LinearShape shape) : type_(kind.type), shape_(shape), blocks_(kind.blocks) {
    if (kind.IsQuantized()) {
      weights::QuantizedFormat format = kind.quantized;
      if (format.group == 0) format.group = shape.in;
      codes_ = std::make_unique<RandomCodes>(shape, format);
      return;
    }
    if (blocks_ == weights::BlockFormat::kNone) {
      values_ = RandomValues(shape.in * shape.out, 1);
      return;
    }
    if (shape.in % weights::BlockWeights(blocks_) != 0) {
      throw InputError(fmt::format("bench: rows of {} weights; {} has blocks of {}", shape.in, Name(blocks_),
                                   weights::BlockWeights(blocks_)));
    }
    std::mt19937 generator(1);
    bytes_.resize(static_cast<size_t>(shape.out * weights::RowBytes(blocks_, shape.in)));
    for (uint8_t& byte : bytes_) byte = generator() & 0x3bU;  // as any byte of an fp16 scale, a finite one
    if (blocks_ != weights::BlockFormat::kMXFP4) return;
    constexpr uint8_t kOne = 127;  // exponents of normal results
    for (size_t i = 0; i < bytes_.size(); i += static_cast<size_t>(weights::BlockBytes(blocks_))) bytes_[i] = kOne;
  }

  std::unique_ptr<Linear> Pack(Ops& ops) const {
    if (codes_) {
      const weights::QuantizedView view{codes_.get()};
      auto linear = ops.MakeQuantizedLinear({&view, 1}, {});
      if (!linear) throw InputError(fmt::format("bench: rows of {} weights do not have whole groups", shape_.in));
      return linear;
    }
    const void* data = values_.empty() ? static_cast<const void*>(bytes_.data()) : values_.data();
    const weights::WeightView view{
        .data = data, .dtype = DType::kF32, .out = shape_.out, .in = shape_.in, .blocks = blocks_};
    return ops.MakeLinear({&view, 1}, {}, type_);
  }

 private:
  WeightType type_;
  LinearShape shape_;
  weights::BlockFormat blocks_;
  std::vector<float> values_;
  std::vector<uint8_t> bytes_;
  std::unique_ptr<RandomCodes> codes_;
};

void Check(const LinearBench& options) {
  const auto [in, out] = options.shape;
  if (in < 1 || out < 1 || in > kMaxSide || out > kMaxSide || in * out > kMaxElements) {
    throw InputError(fmt::format("bench: layer {} x {}: each side must be from 1 to {}, and the product at most {}", in,
                                 out, kMaxSide, kMaxElements));
  }
  if (options.rows.empty()) throw InputError("bench: rows must not be empty");
  for (const int64_t rows : options.rows) {
    if (rows < 1 || rows > kMaxSide || rows * std::max(in, out) > kMaxElements) {
      throw InputError(fmt::format("bench: {} rows of {} and {} values; the product must be at most {}", rows, in, out,
                                   kMaxElements));
    }
  }
  if (!(options.seconds >= 0 && options.seconds <= 3600)) {
    throw InputError(fmt::format("bench: seconds must be from 0 to 3600, got {}", options.seconds));
  }
}

bool HasBlocks(const Kind& kind) {
  return kind.type == WeightType::kInt8 || kind.type == WeightType::kInt4 || kind.blocks != weights::BlockFormat::kNone;
}

// Row x [in] as rounded by the product.
std::vector<double> Rounded(const float* x, int64_t in, const Kind& kind, const IsaTable& isa) {
  std::vector<double> values(x, x + in);
  if (RoundsToBf16(kind, isa)) {
    for (double& value : values) value = Bf16ToFloat(FloatToBf16(static_cast<float>(value)));
  }
  for (int64_t begin = 0; HasBlocks(kind) && begin < in; begin += weights::kBlockWeights) {
    const int64_t end = std::min<int64_t>(in, begin + weights::kBlockWeights);
    float largest = 0;
    for (int64_t k = begin; k < end; ++k) largest = std::max(largest, std::abs(x[k]));
    for (int64_t k = begin; k < end; ++k) values[k] = std::nearbyint(x[k] * (127 / largest)) * double{largest / 127};
  }
  return values;
}

// Verifies elements of about seven rows against double on the stored weights, and these rows bit by bit against the
// product of one row alone. Returns the largest error relative to the bound on the sum's rounding errors. With codes,
// a term is a code and an offset, each up to twice the largest weight.
double Verify(const Linear& linear, const std::vector<float>& x, const std::vector<float>& y, int64_t rows,
              const Kind& kind, const IsaTable& isa) {
  const double terms = static_cast<double>(linear.In() + 3) * (HasBlocks(kind) || kind.IsQuantized() ? 4 : 1);
  std::vector<float> w(static_cast<size_t>(linear.In()));
  std::vector<float> alone(static_cast<size_t>(linear.Out()));
  double largest = 0;
  for (int64_t row = 0; row < rows; row += std::max<int64_t>(1, rows / 7)) {
    linear.Forward(x.data() + row * linear.In(), 1, alone.data(), linear.Out());
    if (!std::equal(alone.begin(), alone.end(), y.begin() + row * linear.Out())) {
      throw Error(fmt::format("bench: row {} of {} differs from the row alone", row, rows));
    }
    const std::vector<double> values = Rounded(x.data() + row * linear.In(), linear.In(), kind, isa);
    for (int64_t column = 0; column < linear.Out(); column += std::max<int64_t>(1, linear.Out() / 61)) {
      linear.DequantizeRow(column, w.data());
      double sum = 0;
      double magnitude = 0;
      for (int64_t k = 0; k < linear.In(); ++k) {
        sum += values[k] * w[k];
        magnitude += std::abs(values[k] * w[k]);
      }
      const double error = std::abs(alone[column] - sum) / std::max(terms * 0x1p-24 * magnitude, 1e-300);
      if (!(error <= 1)) {
        throw Error(fmt::format("bench: row {}, column {}: {} instead of {}", row, column, alone[column], sum));
      }
      largest = std::max(largest, error);
    }
  }
  return largest;
}

}  // namespace

LinearRoofline MeasureLinearRoofline(const std::string& weights, const std::string& isa, int threads) {
  const Kind kind = KindOf(weights);
  const IsaTable& unit = SelectIsa(isa);
  const bool has_bf16_tiles = kind.IsQuantized() && RoundsToBf16(kind, unit);
  const auto measure_peak = has_bf16_tiles ? MeasureBf16DotPeak : kind.measure_peak;
  return {.read_bytes = MeasureReadBandwidth(threads, unit), .operations = measure_peak(threads, unit)};
}

struct LinearTimer::State {
  Kind kind;
  LinearShape shape;
  const IsaTable& isa;
  std::unique_ptr<Ops> ops;
  RandomWeight weight;
  std::vector<std::unique_ptr<Linear>> copies = {};
  int64_t rows = 0;
  std::vector<float> x = {}, y = {};
};

LinearTimer::LinearTimer(const LinearBench& options) {
  Check(options);
  const Kind kind = KindOf(options.weights);
  const IsaTable& isa = SelectIsa(options.isa);
  state_ = std::make_unique<State>(State{.kind = kind,
                                         .shape = options.shape,
                                         .isa = isa,
                                         .ops = MakeCpuOps(std::make_shared<ThreadPool>(options.threads), isa),
                                         .weight = {kind, options.shape}});
  state_->copies.push_back(state_->weight.Pack(*state_->ops));
}

LinearTimer::~LinearTimer() = default;

double LinearTimer::Verify(int64_t rows) {
  State& s = *state_;
  Check({.shape = s.shape, .rows = {rows}});
  const int64_t num_copies = rows <= kStreamedRows ? std::clamp<int64_t>(kColdBytes / WeightBytes(), 2, kMaxCopies) : 1;
  while (std::ssize(s.copies) < num_copies) s.copies.push_back(s.weight.Pack(*s.ops));
  s.copies.resize(static_cast<size_t>(num_copies));
  s.rows = rows;
  s.x = RandomValues(rows * s.shape.in, 2);
  s.y.assign(static_cast<size_t>(rows * s.shape.out), 0);
  s.copies.front()->Forward(s.x.data(), rows, s.y.data(), s.shape.out);
  return kernels::Verify(*s.copies.front(), s.x, s.y, rows, s.kind, s.isa);
}

// Whole passes over all copies average out single copies that happen to be cached.
double LinearTimer::Time() {
  using Clock = std::chrono::steady_clock;
  State& s = *state_;
  const auto start = Clock::now();
  for (const auto& linear : s.copies) linear->Forward(s.x.data(), s.rows, s.y.data(), s.shape.out);
  return std::chrono::duration<double, std::nano>(Clock::now() - start).count() / static_cast<double>(s.copies.size());
}

int64_t LinearTimer::WeightBytes() const {
  return state_->copies.front()->WeightBytes();
}

std::vector<LinearBenchRow> RunLinearBench(const LinearBench& options) {
  using Clock = std::chrono::steady_clock;
  LinearTimer timer(options);
  const auto [in, out] = options.shape;
  std::vector<LinearBenchRow> results;
  for (const int64_t rows : options.rows) {
    LinearBenchRow row{.weights = options.weights,
                       .isa = SelectIsa(options.isa).name,
                       .threads = options.threads,
                       .shape = options.shape,
                       .rows = rows,
                       .weight_bytes = timer.WeightBytes()};
    row.max_error = timer.Verify(rows);
    const auto end = Clock::now() + std::chrono::duration<double>(options.seconds);
    for (int pass = 0; pass < 3 || Clock::now() < end; ++pass) {
      const double ns = timer.Time();
      if (pass == 0 || ns < row.ns) row.ns = ns;
    }
    row.bytes_per_second = static_cast<double>(row.weight_bytes) / row.ns * 1e9;
    row.operations_per_second = 2.0 * static_cast<double>(rows * in * out) / row.ns * 1e9;
    results.push_back(row);
  }
  return results;
}

}  // namespace kvanta::kernels
