// Test harness: sequences with random queries, keys and values, their KV cache, and steps of any chunking, batch and
// backend. Pages are allocated in shuffled order, and exact records of closed pages are freed after each step, as in
// the engine; unused slots and freed records are NaN (0xFF).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "attention/backend.h"
#include "attention/batch.h"
#include "attention/cpu_backend.h"
#include "attention/reference_backend.h"
#include "base/device.h"
#include "emulated/units.h"
#include "formats/scheme.h"
#include "normal_floats.h"

namespace kvanta::attention {

struct HarnessOptions {
  std::string scheme = "bf16";
  int heads = 4;
  int kv_heads = 2;  // MLA: 1
  int head_dim = 64;
  int rope_dim = 0;  // > 0: MLA with latents of head_dim channels; 0 becomes 16 for formats that support MLA only
  int page_size = 16;
  int sliding_window = 0;
  int chunk = 0;  // chunk size of chunked attention, instead of the window
  bool both_directions = false;
  float softcap = 0;
  bool sinks = false;   // attention sinks of random logits, some far above and below those of the keys
  float magnitude = 1;  // standard deviation of q, k, v
  // Queries with one channel other than 0 (after K's query transform, if any), of twice `magnitude`, a power of two.
  // For a head_dim of 64, a Hadamard transform makes eighths of it: operands of every type represent these exactly, so
  // that large logits have small errors.
  bool axis_queries = false;
  float static_scale = 1;
  std::vector<int> lengths = {100};  // tokens of each sequence
  bool poison = true;
  Device* device = &Cpu();  // memory of the cache

  cache::Visibility Visibility() const {
    if (chunk != 0) return {cache::VisibilityKind::kChunked, chunk};
    return {cache::SlidingWindow(sliding_window).kind, sliding_window, both_directions};
  }
};

// The next `tokens` tokens of a sequence in a step.
struct Part {
  int sequence;
  int tokens;
};
using Step = std::vector<Part>;

class CacheHarness {
 public:
  CacheHarness(const HarnessOptions& options, uint32_t seed)
      : options_(WithLatents(options)),
        layout_(formats::PlanCache({KvScheme::Parse(options.scheme)},
                                   {{options_.kv_heads, options_.head_dim, options_.rope_dim}}, options.page_size)),
        spec_(layout_, std::vector{options_.Visibility()}) {
    std::mt19937 random(seed);
    int64_t pages = 0;
    for (const int length : options.lengths) {
      Sequence sequence;
      sequence.q = Normal(random, int64_t{length} * QWidth());
      sequence.k = Normal(random, int64_t{length} * KvWidth());
      sequence.v = Normal(random, int64_t{length} * KvWidth());
      sequence.out.assign(static_cast<size_t>(int64_t{length} * OutWidth()), std::nanf(""));
      sequence.table.resize(static_cast<size_t>((length + options.page_size - 1) / options.page_size));
      pages += static_cast<int64_t>(sequence.table.size());
      sequences_.push_back(std::move(sequence));
    }
    store_.emplace(*options.device, layout_,
                   cache::PagePoolConfig{.budget_bytes = (pages + 1) * BytesOfEach(), .poison_unused = options.poison});
    std::vector<cache::PageId> ids;
    for (int64_t i = 0; i < pages; ++i) ids.push_back(store_->Allocate(0, cache::PageKind::kQuantized));
    std::shuffle(ids.begin(), ids.end(), random);
    for (Sequence& sequence : sequences_) {
      for (cache::PageRef& page : sequence.table) {
        page.quantized = ids.back();
        ids.pop_back();
      }
    }
    config_.layers.push_back({.heads = options.heads,
                              .kv_heads = options_.kv_heads,
                              .head_dim = options.head_dim,
                              .rope_dim = options_.rope_dim,
                              .softmax_scale = 1.0f / std::sqrt(static_cast<float>(KeyDim())),
                              .softcap = options.softcap,
                              .visibility = options.Visibility(),
                              .sinks = Sinks(random)});
    config_.scales.resize(1);
    config_.scales[0].k.scale.assign(static_cast<size_t>(options_.kv_heads), options.static_scale);
    config_.scales[0].v.scale.assign(static_cast<size_t>(options_.kv_heads), options.static_scale);
    if (layout_.layers[0].k.mean) config_.scales[0].k.mean = Normal(random, KvWidth());
    if (layout_.layers[0].k.query) AddQueryTransform(random);
    if (options_.axis_queries) SetAxisQueries(random);
    AddOutliers();
  }

  cache::PagePool& store() { return *store_; }
  const BackendConfig& config() const { return config_; }
  const HarnessOptions& options() const { return options_; }
  const formats::CacheLayout& layout() const { return layout_; }

  struct Sequence {
    std::vector<float> q, k, v, out;  // rows by position; MLA: k holds latents and RoPE channels
    std::vector<float> expected;      // the reference's rows, if RunStep was given a reference
    cache::BlockTable table;
    int64_t start = 0;
    const cache::PageRef* table_data = nullptr;

    cache::BlockTables Tables() {
      table_data = table.data();
      return &table_data;
    }
  };
  std::vector<Sequence>& sequences() { return sequences_; }

  std::unique_ptr<Backend> CpuBackend(const kernels::IsaTable& isa, int threads = 1) {
    return MakeCpuBackend(*store_, config_, std::make_shared<ThreadPool>(threads), isa);
  }

  // Runs Append and Run for one step; `reference`, if given, also runs attention on the same bytes.
  void RunStep(Backend& backend, const Step& step, Backend* reference = nullptr, int64_t bucket = 0) {
    std::vector<float> q, k, v;
    std::vector<SequenceSpan> spans;
    for (const Part& part : step) {
      Sequence& sequence = sequences_[static_cast<size_t>(part.sequence)];
      ProvideExact(sequence, part.tokens);
      spans.push_back({.start = sequence.start, .tokens = part.tokens, .pages = sequence.Tables()});
      Gather(sequence.q, sequence.start, part.tokens, QWidth(), q);
      Gather(sequence.k, sequence.start, part.tokens, KvWidth(), k);
      Gather(sequence.v, sequence.start, part.tokens, KvWidth(), v);
    }
    const size_t out_size = q.size() / static_cast<size_t>(QWidth()) * static_cast<size_t>(OutWidth());
    std::vector<float> out(out_size, std::nanf(""));
    plan_ = backend.MakePlan({.sequences = spans, .bucket = bucket}, std::move(plan_));
    const Buffer device_q = Upload(q), device_k = Upload(k), device_v = Upload(v), device_out = Upload(out);
    backend.Append(*plan_, 0, device_k.as<float>(), device_v.as<float>(), KvWidth());
    backend.Run(*plan_, 0, device_q.as<float>(), QWidth(), device_out.as<float>());
    options_.device->CopyOut(out.data(), device_out.data(), out_size * sizeof(float));
    std::vector<float> expected(reference ? out_size : 0);
    if (reference) {
      const std::unique_ptr<Plan> plan = reference->MakePlan({.sequences = spans}, nullptr);
      reference->Run(*plan, 0, q.data(), QWidth(), expected.data());
    }
    int64_t row = 0;
    for (const Part& part : step) {
      Sequence& sequence = sequences_[static_cast<size_t>(part.sequence)];
      const auto first = out.begin() + row * OutWidth();
      std::copy(first, first + part.tokens * OutWidth(), sequence.out.begin() + sequence.start * OutWidth());
      if (reference) {
        const auto rows = expected.begin() + row * OutWidth();
        sequence.expected.resize(sequence.out.size());
        std::copy(rows, rows + part.tokens * OutWidth(), sequence.expected.begin() + sequence.start * OutWidth());
      }
      row += part.tokens;
      sequence.start += part.tokens;
      ReleaseExact(sequence);
    }
  }

  // Appends without attention.
  void Append(Backend& backend, Part part) {
    Sequence& sequence = sequences_[static_cast<size_t>(part.sequence)];
    ProvideExact(sequence, part.tokens);
    const SequenceSpan span{.start = sequence.start, .tokens = part.tokens, .pages = sequence.Tables()};
    plan_ = backend.MakePlan({.sequences = {&span, 1}}, std::move(plan_));
    std::vector<float> k, v;
    Gather(sequence.k, sequence.start, part.tokens, KvWidth(), k);
    Gather(sequence.v, sequence.start, part.tokens, KvWidth(), v);
    const Buffer device_k = Upload(k), device_v = Upload(v);
    backend.Append(*plan_, 0, device_k.as<float>(), device_v.as<float>(), KvWidth());
    options_.device->CopyOut(k.data(), device_k.data(), sizeof(float));  // synchronizes before the buffers are freed
    sequence.start += part.tokens;
    ReleaseExact(sequence);
  }

  // A step's rows on the device, for append(plan, rows) to append.
  struct Rows {
    float *q, *k, *v;
    std::vector<int64_t> positions;
  };
  template <class F>
  void AppendBy(Backend& backend, const Step& step, F append) {
    std::vector<float> q, k, v;
    std::vector<SequenceSpan> spans;
    std::vector<int64_t> positions;
    for (const Part& part : step) {
      Sequence& sequence = sequences_[static_cast<size_t>(part.sequence)];
      ProvideExact(sequence, part.tokens);
      spans.push_back({.start = sequence.start, .tokens = part.tokens, .pages = sequence.Tables()});
      for (int i = 0; i < part.tokens; ++i) positions.push_back(sequence.start + i);
      Gather(sequence.q, sequence.start, part.tokens, QWidth(), q);
      Gather(sequence.k, sequence.start, part.tokens, KvWidth(), k);
      Gather(sequence.v, sequence.start, part.tokens, KvWidth(), v);
    }
    plan_ = backend.MakePlan({.sequences = spans}, std::move(plan_));
    const Buffer device_q = Upload(q), device_k = Upload(k), device_v = Upload(v);
    append(*plan_, Rows{device_q.as<float>(), device_k.as<float>(), device_v.as<float>(), positions});
    options_.device->CopyOut(q.data(), device_q.data(), sizeof(float));  // synchronizes before the buffers are freed
    for (const Part& part : step) {
      Sequence& sequence = sequences_[static_cast<size_t>(part.sequence)];
      sequence.start += part.tokens;
      ReleaseExact(sequence);
    }
  }

  void Run(Backend& backend, const std::vector<Step>& steps, Backend* reference = nullptr) {
    for (const Step& step : steps) RunStep(backend, step, reference);
  }

  // Bytes of a sequence's remaining records, in order of pages.
  std::vector<uint8_t> Bytes(int index) {
    std::vector<uint8_t> bytes;
    const auto add = [&](cache::PageKind kind, cache::PageId page) {
      if (page == cache::kNoPage) return;
      const auto size = static_cast<size_t>(store_->RecordBytes(0, kind));
      bytes.resize(bytes.size() + size);
      store_->device().CopyOut(bytes.data() + bytes.size() - size, store_->Record(0, kind, page), size);
    };
    for (const cache::PageRef& page : sequences_[static_cast<size_t>(index)].table) {
      for (const cache::PageKind kind : cache::kPageKinds) add(kind, page.Of(kind));
    }
    return bytes;
  }

  int KeyDim() const { return options_.head_dim + options_.rope_dim; }
  int64_t QWidth() const { return int64_t{options_.heads} * KeyDim(); }
  int64_t KvWidth() const { return int64_t{options_.kv_heads} * KeyDim(); }
  int64_t OutWidth() const { return int64_t{options_.heads} * options_.head_dim; }

 private:
  static HarnessOptions WithLatents(HarnessOptions options) {
    const bool only = formats::Find(KvScheme::Parse(options.scheme).k.format).latents == formats::MlaSupport::kRequired;
    if (only && options.rope_dim == 0) options.rope_dim = 16;
    if (options.rope_dim != 0) options.kv_heads = 1;
    return options;
  }

  std::vector<float> Normal(std::mt19937& random, int64_t count) const {
    NormalFloats normal(0, options_.magnitude);
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) value = options_.magnitude == 0 ? 0.0f : normal(random);
    return values;
  }

  std::vector<float> Sinks(std::mt19937& random) const {
    std::vector<float> sinks;
    if (!options_.sinks) return sinks;
    constexpr float kShifts[] = {0, 3, -2, 30, -200};
    NormalFloats normal;
    for (int head = 0; head < options_.heads; ++head) sinks.push_back(normal(random) + kShifts[head % 5]);
    return sinks;
  }

  // Random matrices with singular values from 1/2 to 2: a diagonal between two reflections.
  void AddQueryTransform(std::mt19937& random) {
    const auto size = static_cast<size_t>(options_.head_dim);
    std::vector<float> matrices;
    std::uniform_real_distribution<float> exponent(-1, 1);
    NormalFloats normal;
    for (int head = 0; head < options_.kv_heads; ++head) {
      std::vector<float> matrix(size * size, 0.0F);
      for (size_t i = 0; i < size; ++i) matrix[i * size + i] = std::exp2(exponent(random));
      for (const bool rows : {true, false}) {
        std::vector<float> u(size);
        for (float& x : u) x = normal(random);
        float norm = 0;
        for (const float x : u) norm += x * x;
        for (size_t i = 0; i < size; ++i) {
          const auto at = [&](size_t j) -> float& { return matrix[rows ? i * size + j : j * size + i]; };
          float dot = 0;
          for (size_t j = 0; j < size; ++j) dot += at(j) * u[j];
          for (size_t j = 0; j < size; ++j) at(j) -= 2 * dot / norm * u[j];
        }
      }
      matrices.insert(matrices.end(), matrix.begin(), matrix.end());
    }
    std::vector<formats::BitAllocation> allocations;
    const formats::Format& format = *layout_.layers[0].k.format;
    for (int head = 0; formats::IsAllocated(format.code) && head < options_.kv_heads; ++head) {
      std::vector<float> deviations(static_cast<size_t>(layout_.layers[0].k.shape.head_dim));  // 0 of padding
      for (size_t i = 0; i < size; ++i) {
        deviations[i] =
            std::exp2(-4.0F * static_cast<float>(head + 1) * static_cast<float>(i) / static_cast<float>(size));
      }
      allocations.push_back(formats::AllocateBits(deviations, format.code_bits));
    }
    config_.scales[0].k.query = std::make_shared<formats::QueryTransform>(std::move(matrices), options_.kv_heads,
                                                                          options_.head_dim, std::move(allocations));
  }

  void SetAxisQueries(std::mt19937& random) {
    const auto width = static_cast<size_t>(KeyDim());
    const auto group = static_cast<size_t>(options_.heads / options_.kv_heads);
    for (Sequence& sequence : sequences_) {
      for (size_t row = 0; row * width < sequence.q.size(); ++row) {
        const float value = (random() % 2 == 0 ? 2 : -2) * options_.magnitude;
        const size_t channel = random() % width, head = row % static_cast<size_t>(options_.heads) / group;
        for (size_t c = 0; c < width; ++c) {
          float axis = c == channel ? 1.0F : 0.0F;
          if (const auto& query = config_.scales[0].k.query) {  // A^-T makes an axis of a row of A
            axis = query->matrices()[(head * width + channel) * width + c];
          }
          sequence.q[row * width + c] = value * axis;
        }
      }
    }
  }

  // Multiplies some channels of K by ten, different ones in each head.
  void AddOutliers() {
    const int count = layout_.layers[0].k.outliers;
    std::vector<int>& channels = config_.scales[0].k.outliers;
    for (int head = 0; count != 0 && head < options_.kv_heads; ++head) {
      const int step = options_.head_dim / count;
      for (int i = 0; i < count; ++i) channels.push_back(i * step + head % step);
    }
    for (Sequence& sequence : sequences_) {
      for (size_t row = 0; row < sequence.k.size(); row += static_cast<size_t>(options_.head_dim)) {
        const size_t head = row / static_cast<size_t>(options_.head_dim) % static_cast<size_t>(options_.kv_heads);
        for (int i = 0; i < count; ++i) {
          sequence.k[row + static_cast<size_t>(channels[head * static_cast<size_t>(count) + static_cast<size_t>(i)])] *=
              10;
        }
      }
    }
  }

  Buffer Upload(const std::vector<float>& values) const {
    const Buffer buffer = options_.device->Allocate(values.size() * sizeof(float));
    options_.device->CopyIn(buffer.data(), values.data(), values.size() * sizeof(float));
    return buffer;
  }

  static void Gather(const std::vector<float>& from, int64_t start, int64_t rows, int64_t width,
                     std::vector<float>& to) {
    to.insert(to.end(), from.begin() + start * width, from.begin() + (start + rows) * width);
  }

  int64_t BytesOfEach() const {
    int64_t bytes = layout_.page_bytes + layout_.exact_page_bytes;
    for (const int64_t of_level : layout_.age_bytes) bytes += of_level;
    return bytes;
  }

  // Records of later levels of pages that age in a step.
  void ProvideAged(Sequence& sequence, int tokens) {
    if (!Group().ages.IsUsed()) return;
    const int64_t end = Group().FirstYoung(sequence.start + tokens);
    for (int64_t page = Group().FirstYoung(sequence.start); page < end; ++page) {
      for (const cache::PageKind kind : cache::kAgedKinds) {
        if (!Group().Reaches(kind, page)) continue;
        sequence.table[static_cast<size_t>(page)].Of(kind) = store_->Allocate(0, kind);
      }
    }
  }
  // Releases what queries from sequence.start on no longer read of pages that have aged.
  void ReleaseAged(Sequence& sequence) {
    if (!Group().ages.IsUsed()) return;
    for (int64_t page = Group().ages.ageless; page < Group().FirstYoung(sequence.start); ++page) {
      for (const cache::PageKind kind : cache::kPageKinds) {
        cache::PageId& id = sequence.table[static_cast<size_t>(page)].Of(kind);
        if (id == cache::kNoPage || kind == cache::PageKind::kExact || Group().Keeps(kind, page, sequence.start))
          continue;
        store_->Release(0, kind, id);
        id = cache::kNoPage;
      }
    }
  }
  const cache::KvCacheGroup& Group() const { return spec_.groups[0]; }

  void ProvideExact(Sequence& sequence, int tokens) {
    ProvideAged(sequence, tokens);
    if (layout_.exact_page_bytes == 0) return;
    for (int64_t page = sequence.start / options_.page_size; page * options_.page_size < sequence.start + tokens;
         ++page) {
      cache::PageId& exact = sequence.table[static_cast<size_t>(page)].exact;
      if (exact == cache::kNoPage) exact = store_->Allocate(0, cache::PageKind::kExact);
    }
  }

  void ReleaseExact(Sequence& sequence) {
    ReleaseAged(sequence);
    if (layout_.exact_page_bytes == 0) return;
    const formats::LayerScheme& layer = layout_.layers[0];
    for (int64_t page = layer.sink_pages; (page + layer.exact_pages) * options_.page_size <= sequence.start; ++page) {
      cache::PageId& exact = sequence.table[static_cast<size_t>(page)].exact;
      if (exact != cache::kNoPage) store_->Release(0, cache::PageKind::kExact, exact);
      exact = cache::kNoPage;
    }
  }

  const HarnessOptions options_;
  formats::CacheLayout layout_;
  cache::KvCacheSpec spec_;
  std::optional<cache::PagePool> store_;
  BackendConfig config_;
  std::vector<Sequence> sequences_;
  std::unique_ptr<Plan> plan_;
};

inline double LargestMagnitude(const std::vector<float>& values) {
  double largest = 0;
  for (const float x : values) largest = std::max(largest, std::abs(double{x}));
  return largest;
}

// Largest L2 norm of the rows of head_dim values.
inline double LargestNorm(const std::vector<float>& values, int head_dim) {
  double largest = 0;
  for (size_t first = 0; first < values.size(); first += static_cast<size_t>(head_dim)) {
    double sum = 0;
    for (size_t i = first; i < first + static_cast<size_t>(head_dim); ++i) sum += double{values[i]} * double{values[i]};
    largest = std::max(largest, std::sqrt(sum));
  }
  return largest;
}

}  // namespace kvanta::attention
