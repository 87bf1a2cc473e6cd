#include "bench/attention_bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <utility>

#include "attention/cpu_backend.h"
#include "attention/reference_backend.h"
#include "bench/bench_caches.h"
#include "bench/random_values.h"
#include "bench/roofline.h"
#include "kernels/cpu/select.h"
#include "kvanta/error.h"

namespace kvanta::attention {
namespace {

using kernels::Dot;

// Relative to the largest output: ten times the error expected of 16-bit, of bf16 (fp16: less) and of 8-bit operands.
constexpr double kMaxError = 1e-3;
constexpr double kMaxBf16OperandError = 2e-2;
constexpr double kMaxByteOperandError = 5e-2;
constexpr int kMinRounds = 3;
constexpr double kRoundNs = 10e6;  // minimum, about the time of one pass over memory

void Check(const AttentionBench& options) {
  if (options.formats.empty() || options.threads.empty())
    throw InputError("bench: formats and threads must not be empty");
  for (const int threads : options.threads) {
    if (threads < 1) throw InputError(fmt::format("bench: threads must be at least 1, got {}", threads));
  }
  if (options.layers < 1 || options.batch < 1 || options.query_tokens < 1 || options.context < 0) {
    throw InputError(
        fmt::format("bench: layers, batch and query_tokens must be at least 1 and context at least 0, got {}, {}, {} "
                    "and {}",
                    options.layers, options.batch, options.query_tokens, options.context));
  }
  if (!(options.seconds >= 0 && options.seconds <= 3600)) {
    throw InputError(fmt::format("bench: seconds must be from 0 to 3600, got {}", options.seconds));
  }
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Times attention over one format's caches with one number of threads.
class TimedAttention {
 public:
  // spans: of every batch; successive runs cycle through the layers of a batch, then through the batches.
  TimedAttention(BenchCaches& caches, std::vector<std::vector<SequenceSpan>> spans, const AttentionBench& options,
                 const std::vector<float>& q, int threads)
      : q_(q),
        width_(int64_t{options.heads} * options.head_dim),
        layers_(static_cast<size_t>(options.layers)),
        backend_(MakeCpuBackend(caches.store(), caches.config(), std::make_shared<ThreadPool>(threads),
                                options.isa.c_str())),
        out_(q.size()),
        spans_(std::move(spans)) {
    for (const std::vector<SequenceSpan>& batch : spans_) {
      plans_.push_back(backend_->MakePlan({.sequences = batch}, nullptr));
    }
    Run();
  }

  // Appends the times of one round of runs, in nanoseconds; returns their sum.
  double TimeRound(std::vector<double>& times) {
    double sum = 0;
    while (sum < kRoundNs) {
      times.push_back(Run());
      sum += times.back();
    }
    return sum;
  }

  // Runs attention over the next layer; returns nanoseconds. The constructor's run was over the first one.
  double Run() {
    using Clock = std::chrono::steady_clock;
    const Clock::time_point begin = Clock::now();
    Plan& plan = *plans_[runs_ / layers_ % plans_.size()];
    backend_->Run(plan, static_cast<int>(runs_ % layers_), q_.data(), width_, out_.data());
    ++runs_;
    return std::chrono::duration<double, std::nano>(Clock::now() - begin).count();
  }

  const std::vector<float>& out() const { return out_; }
  std::string Isa() const { return backend_->Info().name.substr(4); }  // "cpu-avx2" -> "avx2"

 private:
  const std::vector<float>& q_;
  int64_t width_;
  size_t layers_;
  std::unique_ptr<Backend> backend_;
  std::vector<float> out_;
  std::vector<std::vector<SequenceSpan>> spans_;
  std::vector<std::unique_ptr<Plan>> plans_;
  size_t runs_ = 0;
};

std::vector<std::vector<SequenceSpan>> AllSpans(const BenchCaches& caches) {
  std::vector<std::vector<SequenceSpan>> spans;
  for (int64_t copy = 0; copy < caches.copies(); ++copy) spans.push_back(caches.Spans(copy));
  return spans;
}

// Maximum difference between the last query token's row of every sequence of copy 0 and the reference's, relative to
// the reference's largest value.
double ErrorOf(BenchCaches& caches, const AttentionBench& options, const std::vector<float>& q,
               const std::vector<float>& out) {
  const int64_t width = int64_t{options.heads} * options.head_dim;
  const std::unique_ptr<Backend> reference = MakeReferenceBackend(caches.store(), caches.config());
  std::vector<float> expected(static_cast<size_t>(width));
  double error = 0;
  double largest = 0;
  int64_t row = -1;
  for (SequenceSpan last : caches.Spans(0)) {
    row += last.tokens;
    last.start += last.tokens - 1;
    last.tokens = 1;
    const std::unique_ptr<Plan> plan = reference->MakePlan({.sequences = {&last, 1}}, nullptr);
    reference->Run(*plan, 0, q.data() + row * width, width, expected.data());
    for (int64_t i = 0; i < width; ++i) {
      const double value = expected[static_cast<size_t>(i)];
      const double difference = std::abs(out[static_cast<size_t>(row * width + i)] - value);
      if (!(difference <= error)) error = difference;
      largest = std::max(largest, std::abs(value));
    }
  }
  return error / largest;
}

// Returns the error; throws if it exceeds the tolerance.
double Verify(BenchCaches& caches, const AttentionBench& options, const std::string& format,
              const std::vector<float>& q, const std::vector<float>& out) {
  const double error = ErrorOf(caches, options, q, out);
  const formats::LayerScheme& scheme = caches.store().Layout().layers.front();
  const kernels::AttentionKernels& table = *kernels::SelectIsa(options.isa).attention;
  double tolerance = kMaxError;
  for (const formats::ElementType code : {scheme.k.format->code, scheme.v.format->code}) {
    if (kernels::HasByteOperands(code)) tolerance = kMaxByteOperandError;
    if (table.OperandsOf(code) != DType::kF32) tolerance = std::max(tolerance, kMaxBf16OperandError);
  }
  if (!(error <= tolerance)) {
    throw Error(fmt::format("bench: {} differs from the reference by {:.1e} of its largest value", format, error));
  }
  return error;
}

// Roofline of the machine with a number of threads.
struct Roofline {
  Roofline(int threads, const kernels::IsaTable& isa) : read(threads, isa), dots(threads, isa) {}
  kernels::ReadLimit read;
  kernels::DotLimit dots;
};

class Bench {
 public:
  explicit Bench(const AttentionBench& options)
      : options_(options),
        isa_(kernels::SelectIsa(options.isa)),
        q_(NormalValues(int64_t{options.batch} * options.query_tokens * options.heads * options.head_dim, 7)),
        base_(options, "bf16") {
    for (const int threads : options.threads) rooflines_.try_emplace(threads, threads, isa_);
  }

  // Appends a row per number of threads.
  void Measure(const std::string& format, const std::function<void()>& measured, std::vector<AttentionBenchRow>& rows) {
    BenchCaches caches(options_, format);
    std::vector<float> first;
    double error = 0;
    for (const int threads : options_.threads) {
      TimedAttention timed(caches, AllSpans(caches), options_, q_, threads);
      if (first.empty()) {
        first = timed.out();
        error = Verify(caches, options_, format, q_, first);
      }
      for (int layer = 0; layer < options_.layers; ++layer) {  // all hold the same rows
        if (layer != 0) timed.Run();
        if (std::memcmp(first.data(), timed.out().data(), first.size() * sizeof(float)) != 0) {
          throw Error(
              fmt::format("bench: the result of {} changes in layer {} with {} threads", format, layer, threads));
        }
      }
      TimedAttention in_cache(caches, {caches.SpansOfOnePage()}, options_, q_, threads);
      rows.push_back(Time(timed, in_cache, format, threads, caches.Work()));
      rows.back().max_error = error;
      if (measured) measured();
    }
  }

 private:
  AttentionBenchRow Time(TimedAttention& timed, TimedAttention& in_cache, const std::string& format, int threads,
                         const BenchWork& work) {
    TimedAttention base(base_, AllSpans(base_), options_, q_, threads);
    Roofline& roofline = rooflines_.at(threads);
    std::vector<double> times, base_times, cached_times, memory_times, dot_times, bf16_rates;
    double total = 0;
    for (int round = 0; round < kMinRounds || total < options_.seconds * 1e9; ++round) {
      total += timed.TimeRound(times);
      memory_times.push_back(static_cast<double>(work.bytes) / roofline.read.Now() * 1e9);
      base.TimeRound(base_times);
      in_cache.TimeRound(cached_times);
      double dot_ns = 0;
      for (int dot = 0; dot < kernels::kDots; ++dot) {
        const double products = work.products[static_cast<size_t>(dot)];
        if (products > 0) dot_ns += products / roofline.dots.Now(static_cast<Dot>(dot)) * 1e9;
      }
      dot_times.push_back(dot_ns);
      bf16_rates.push_back(roofline.dots.Now(kernels::DotOf(formats::ElementType::kBf16)));
    }
    AttentionBenchRow row{.format = format,
                          .isa = timed.Isa(),
                          .threads = threads,
                          .batch = options_.batch,
                          .context = options_.context,
                          .query_tokens = options_.query_tokens,
                          .bytes = work.bytes};
    row.ns_min = *std::min_element(times.begin(), times.end());
    row.ns_median = Median(std::move(times));
    row.bf16_ns = Median(std::move(base_times));
    row.in_cache_ns = Median(std::move(cached_times));
    row.memory_ns = Median(std::move(memory_times));
    row.dot_ns = Median(std::move(dot_times));
    row.share_of_limit = std::max(row.memory_ns, row.dot_ns) / row.ns_median;
    row.share_of_bf16_peak = work.Products() / row.ns_median * 1e9 / Median(std::move(bf16_rates));
    row.times_bf16 = row.bf16_ns / row.ns_median;
    row.read_gb_s = static_cast<double>(work.bytes) / row.memory_ns;
    row.gb_s = static_cast<double>(work.bytes) / row.ns_median;
    row.gelem_s = work.Products() * options_.kv_heads / options_.heads / row.ns_median;
    return row;
  }

  const AttentionBench& options_;
  const kernels::IsaTable& isa_;
  std::vector<float> q_;
  BenchCaches base_;
  std::map<int, Roofline> rooflines_;  // by threads
};

}  // namespace

std::vector<AttentionBenchRow> RunAttentionBench(const AttentionBench& options, const std::function<void()>& measured) {
  Check(options);
  Bench bench(options);
  std::vector<AttentionBenchRow> rows;
  for (const std::string& format : options.formats) bench.Measure(format, measured, rows);
  return rows;
}

}  // namespace kvanta::attention
