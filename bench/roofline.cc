#include "bench/roofline.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <string_view>

#include "base/device.h"
#include "base/thread_pool.h"
#include "bench/roofline_table.h"
#include "kernels/cpu/built_units.h"
#include "kvanta/error.h"

namespace kvanta::kernels {
namespace {

constexpr int64_t kReadBytes = int64_t{256} << 20;  // beyond any L3 that one process has to itself
constexpr int kReadPasses = 4;
constexpr int64_t kChunkBytes = int64_t{4} << 20;  // per task, so that a preempted thread does not delay the others
constexpr int64_t kChunkFloats = kChunkBytes / static_cast<int64_t>(sizeof(float));
constexpr int64_t kPeakRounds = 200'000;
constexpr int kPeakPasses = 12;
constexpr int kPassesNow = 3;

std::atomic<float> sink;  // makes the loops' results observable

double Seconds(const std::function<void()>& run) {
  const auto start = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

using PeakLoop = float (*)(int64_t, double*) noexcept;

double BestOf(int passes, ThreadPool& pool, PeakLoop loop) {
  const int threads = pool.Threads();
  double best = 0;
  for (int pass = 0; pass < passes; ++pass) {
    double operations = 0;  // operations of one task, the same for all
    auto run = [&](int64_t task, int) {
      double done = 0;
      sink.store(loop(kPeakRounds, &done), std::memory_order_relaxed);
      if (task == 0) operations = done;
    };
    const double seconds = Seconds([&] { pool.ForEach(threads, run); });
    best = std::max(best, operations * threads / seconds);
  }
  return best;
}

double MeasurePeak(int threads, PeakLoop loop) {
  ThreadPool pool(threads);
  return BestOf(kPeakPasses, pool, loop);
}

struct Unit {
  const char* isa;
  const RooflineTable& (*table)();
};
constexpr Unit kUnits[] = {
#if defined(__x86_64__)
    {"amx", IsBuilt("amx") ? AmxRooflineTable : nullptr},
    {"zen4", IsBuilt("zen4") ? Zen4RooflineTable : nullptr},
    {"avx512", IsBuilt("avx512") ? Avx512RooflineTable : nullptr},
    {"avx512fp16", IsBuilt("avx512fp16") ? Avx512Fp16RooflineTable : nullptr},
    {"avx2", IsBuilt("avx2") ? Avx2RooflineTable : nullptr},
#elif defined(__aarch64__)
    {"i8mm", I8mmRooflineTable},
    {"dotprod", DotprodRooflineTable},
    {"neon", NeonRooflineTable},
#endif
    {"portable", IsBuilt("portable") ? PortableRooflineTable : nullptr},
};

}  // namespace

const RooflineTable& RooflineOf(const IsaTable& isa) {
  for (const Unit& unit : kUnits) {
    if (std::string_view(unit.isa) == isa.name) return unit.table();
  }
  throw InputError(fmt::format("bench: no roofline loops for ISA unit '{}'", isa.name));
}

struct ReadLimit::State {
  State(int threads, const IsaTable& isa) : loops(RooflineOf(isa)), pool(threads), buffer(Cpu().Allocate(kReadBytes)) {
    auto touch = [this](int64_t chunk, int) { std::fill_n(Chunk(chunk), kChunkFloats, 1.0F); };
    pool.ForEach(kReadBytes / kChunkBytes, touch);
  }

  float* Chunk(int64_t chunk) { return buffer.as<float>() + chunk * kChunkFloats; }

  double Pass(int streams, int64_t ahead) {
    auto read = [&](int64_t chunk, int) {
      sink.store(loops.read(Chunk(chunk), kChunkBytes, streams, ahead), std::memory_order_relaxed);
    };
    return static_cast<double>(kReadBytes) / Seconds([&] { pool.ForEach(kReadBytes / kChunkBytes, read); });
  }

  const RooflineTable& loops;
  ThreadPool pool;
  Buffer buffer;
  double best = 0;
  int best_streams = 1;
  int64_t best_ahead = 0;
};

ReadLimit::ReadLimit(int threads, const IsaTable& isa) : state_(std::make_unique<State>(threads, isa)) {
  for (const int streams : {1, 2, 4, 8}) {
    for (const int64_t ahead : {256, 512, 1024, 2048, 4096}) {
      for (int pass = 0; pass < kReadPasses; ++pass) {
        const double rate = state_->Pass(streams, ahead);
        if (rate <= state_->best) continue;
        state_->best = rate;
        state_->best_streams = streams;
        state_->best_ahead = ahead;
      }
    }
  }
}

ReadLimit::~ReadLimit() = default;

double ReadLimit::Best() const noexcept {
  return state_->best;
}

double ReadLimit::Now() {
  return state_->Pass(state_->best_streams, state_->best_ahead);
}

struct DotLimit::State {
  const RooflineTable& table;
  const AttentionKernels& attention;
  ThreadPool pool;
};

DotLimit::DotLimit(int threads, const IsaTable& isa)
    : state_(new State{RooflineOf(isa), *isa.attention, ThreadPool(threads)}) {}

DotLimit::~DotLimit() = default;

double DotLimit::Now(Dot dot) {
  const RooflineTable& table = state_->table;
  const auto dot_by = [&](DType operands) {
    if (operands == DType::kF16) return table.fp16_fma;
    return operands == DType::kBf16 ? table.bf16_dot : table.bf16_terms_dot;
  };
  const PeakLoop loops[kDots] = {table.f32_fma,
                                 table.bf16_terms_dot,
                                 dot_by(state_->attention.bf16_operands),
                                 dot_by(state_->attention.fp8_operands),
                                 table.wide_dot,
                                 table.subbyte_dot};
  const int terms = dot == Dot::kWide ? table.operand_terms : 1;
  return BestOf(kPassesNow, state_->pool, loops[static_cast<int>(dot)]) / (2.0 * terms);
}

double MeasureUpdateBandwidth(int threads, const IsaTable& isa) {
  constexpr int kPasses = 24;
  ThreadPool pool(threads);
  const Buffer buffer = Cpu().Allocate(kReadBytes);
  auto chunk = [&](int64_t task) { return buffer.as<float>() + task * kChunkFloats; };
  auto touch = [&](int64_t task, int) { std::fill_n(chunk(task), kChunkFloats, 1.0F); };
  pool.ForEach(kReadBytes / kChunkBytes, touch);
  auto update = [&](int64_t task, int) { isa.rows.scale(chunk(task), 1.0F, kChunkFloats); };
  double best = 0;
  for (int pass = 0; pass < kPasses; ++pass) {
    const double seconds = Seconds([&] { pool.ForEach(kReadBytes / kChunkBytes, update); });
    best = std::max(best, 2.0 * static_cast<double>(kReadBytes) / seconds);
  }
  return best;
}

double MeasureReadBandwidth(int threads, const IsaTable& isa) {
  return ReadLimit(threads, isa).Best();
}

double MeasureBf16DotPeak(int threads, const IsaTable& isa) {
  return MeasurePeak(threads, RooflineOf(isa).bf16_dot);
}
double MeasureF32FmaPeak(int threads, const IsaTable& isa) {
  return MeasurePeak(threads, RooflineOf(isa).f32_fma);
}
double MeasureInt8DotPeak(int threads, const IsaTable& isa) {
  return MeasurePeak(threads, RooflineOf(isa).int8_dot);
}
double MeasureInt4DotPeak(int threads, const IsaTable& isa) {
  return MeasurePeak(threads, RooflineOf(isa).int4_dot);
}

}  // namespace kvanta::kernels
