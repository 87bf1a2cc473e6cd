// Attention to a window and to compressed entries, on any device: random sequences, and sums in double precision.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "attention/cache_harness.h"
#include "attention/cpu_backend.h"
#include "cache/kv_cache_spec.h"
#include "normal_floats.h"

namespace kvanta::attention {

struct CompressedOptions {
  std::string rows = "fp32", keys = "fp32";  // schemes without exact pages
  int heads = 3, head_dim = 32, window = 20;
  int row_tokens = 4, top_k = 0;  // 0: all entries
  int page_size = 64;
  std::vector<int> lengths = {150};
  Device* device = &Cpu();
};

// Layers: rows of the window, entries and, with top_k, keys of an indexer of two heads.
class CompressedHarness {
 public:
  static constexpr int kIndexHeads = 2, kIndexDim = 16;

  CompressedHarness(const CompressedOptions& options, uint32_t seed) : options_(options) {
    std::vector<KvScheme> schemes(2, KvScheme::Parse(options.rows, true));
    std::vector<formats::LayerShape> shapes = {
        {.kv_heads = 1, .head_dim = options.head_dim, .shared_kv = true},
        {.kv_heads = 1, .head_dim = options.head_dim, .shared_kv = true, .row_tokens = options.row_tokens}};
    config_.layers = {{.heads = options.heads,
                       .kv_heads = 1,
                       .head_dim = options.head_dim,
                       .index_topk = options.top_k,
                       .entries_layer = 1,
                       .softmax_scale = 0.3F,
                       .visibility = cache::SlidingWindow(options.window)},
                      {.heads = 1, .kv_heads = 1, .head_dim = options.head_dim, .softmax_scale = 1}};
    for (int head = 0; head < options.heads; ++head) config_.layers[0].sinks.push_back(0.5F * static_cast<float>(head));
    if (options.top_k != 0) {
      schemes.push_back(KvScheme::Parse(options.keys, true));
      shapes.push_back({.kv_heads = 1, .head_dim = kIndexDim, .keys_only = true, .row_tokens = options.row_tokens});
      config_.layers.push_back({.heads = kIndexHeads,
                                .kv_heads = 1,
                                .head_dim = kIndexDim,
                                .index_topk = options.top_k,
                                .softmax_scale = 1});
    }
    std::vector<int> groups = {0, 1, 1};
    groups.resize(shapes.size());
    layout_ = formats::PlanCache(schemes, shapes, options.page_size, groups);
    pool_.emplace(*options.device, layout_, cache::PagePoolConfig{.budget_bytes = 64 << 20, .poison_unused = true});
    std::mt19937 random(seed);
    for (const int length : options.lengths) {
      Sequence& sequence = sequences_.emplace_back();
      const int64_t entries = length / options.row_tokens;
      const auto fill = [&](std::vector<float>& values, int64_t count) {
        NormalFloats normal;
        values.resize(static_cast<size_t>(count));
        for (float& value : values) value = normal(random);
      };
      fill(sequence.rows, int64_t{length} * options.head_dim);
      fill(sequence.entries, entries * options.head_dim);
      fill(sequence.keys, entries * kIndexDim);
      fill(sequence.queries, int64_t{length} * options.heads * options.head_dim);
      fill(sequence.index_queries, int64_t{length} * kIndexHeads * kIndexDim);
      fill(sequence.weights, int64_t{length} * kIndexHeads);
      sequence.out.resize(sequence.queries.size());
      for (int group = 0; group < 2; ++group) {
        cache::BlockTable& table = sequence.tables[static_cast<size_t>(group)];
        for (int page = 0; page * options.page_size < length; ++page) {
          table.push_back({.quantized = pool_->Allocate(group, cache::PageKind::kQuantized)});
        }
        sequence.table_data[static_cast<size_t>(group)] = table.data();
      }
    }
  }

  struct Sequence {
    std::vector<float> rows, entries, keys, queries, index_queries, weights, out;
    std::array<cache::BlockTable, 2> tables;
    std::array<const cache::PageRef*, 2> table_data = {};
    int64_t start = 0;
  };
  std::vector<Sequence>& sequences() { return sequences_; }
  const CompressedOptions& options() const { return options_; }
  const BackendConfig& config() const { return config_; }
  cache::PagePool& pool() { return *pool_; }

  std::unique_ptr<Backend> CpuBackend(const kernels::IsaTable& isa, int threads = 1) {
    return MakeCpuBackend(*pool_, config_, std::make_shared<ThreadPool>(threads), isa);
  }

  // Append, Select and Run of one step; without attention, Append alone.
  void RunStep(Backend& backend, const Step& step, bool attends = true) {
    std::vector<SequenceSpan> spans;
    std::vector<float> rows, entries, keys, queries, index_queries, weights;
    const auto add = [](const std::vector<float>& from, int64_t first, int64_t end, int64_t width,
                        std::vector<float>& to) {
      to.insert(to.end(), from.begin() + first * width, from.begin() + end * width);
    };
    const int64_t dim = options_.head_dim, width = options_.heads * dim;
    for (const Part& part : step) {
      Sequence& sequence = sequences_[static_cast<size_t>(part.sequence)];
      const int64_t start = sequence.start, end = start + part.tokens;
      spans.push_back({.start = start, .tokens = part.tokens, .pages = sequence.table_data.data()});
      add(sequence.rows, start, end, dim, rows);
      for (int64_t token = start; token < end; ++token) {  // in the rows of their last tokens
        const int64_t entry = token / options_.row_tokens;
        const bool ends = (token + 1) % options_.row_tokens == 0;
        entries.resize(entries.size() + (ends ? 0 : static_cast<size_t>(dim)), std::nanf(""));
        keys.resize(keys.size() + (ends ? 0 : static_cast<size_t>(kIndexDim)), std::nanf(""));
        if (!ends) continue;
        add(sequence.entries, entry, entry + 1, dim, entries);
        add(sequence.keys, entry, entry + 1, kIndexDim, keys);
      }
      add(sequence.queries, start, end, width, queries);
      add(sequence.index_queries, start, end, kIndexHeads * kIndexDim, index_queries);
      add(sequence.weights, start, end, kIndexHeads, weights);
    }
    std::vector<float> out(queries.size(), std::nanf(""));
    plan_ = backend.MakePlan({.sequences = spans}, std::move(plan_));
    const Buffer inputs[] = {Upload(rows),    Upload(entries),       Upload(keys),
                             Upload(queries), Upload(index_queries), Upload(weights)};
    const Buffer outputs = Upload(out);
    backend.Append(*plan_, 0, inputs[0].as<float>(), nullptr, dim);
    backend.Append(*plan_, 1, inputs[1].as<float>(), nullptr, dim);
    if (options_.top_k != 0) backend.Append(*plan_, 2, inputs[2].as<float>(), nullptr, kIndexDim);
    if (options_.top_k != 0 && attends) {
      backend.Select(*plan_, 2, inputs[4].as<float>(), kIndexHeads * kIndexDim, inputs[5].as<float>());
    }
    if (attends) backend.Run(*plan_, 0, inputs[3].as<float>(), width, outputs.as<float>());
    options_.device->CopyOut(out.data(), outputs.data(), out.size() * sizeof(float));
    const float* next = out.data();
    for (const Part& part : step) {
      Sequence& sequence = sequences_[static_cast<size_t>(part.sequence)];
      std::copy_n(next, part.tokens * width, sequence.out.begin() + sequence.start * width);
      next += part.tokens * width;
      sequence.start += part.tokens;
    }
  }

  // Bytes of a sequence's records of a KV cache group.
  std::vector<uint8_t> Bytes(int sequence, int group) const {
    std::vector<uint8_t> bytes;
    const auto of_page = static_cast<size_t>(pool_->RecordBytes(group, cache::PageKind::kQuantized));
    for (const cache::PageRef& page : sequences_[static_cast<size_t>(sequence)].tables[static_cast<size_t>(group)]) {
      bytes.resize(bytes.size() + of_page);
      options_.device->CopyOut(bytes.data() + bytes.size() - of_page,
                               pool_->Record(group, cache::PageKind::kQuantized, page.quantized), of_page);
    }
    return bytes;
  }

 private:
  Buffer Upload(const std::vector<float>& values) const {
    Buffer buffer = options_.device->Allocate(values.size() * sizeof(float));
    options_.device->CopyIn(buffer.data(), values.data(), values.size() * sizeof(float));
    return buffer;
  }

  const CompressedOptions options_;
  formats::CacheLayout layout_;
  std::optional<cache::PagePool> pool_;
  BackendConfig config_;
  std::vector<Sequence> sequences_;
  std::unique_ptr<Plan> plan_;
};

// Entries that a query sees, or of these the top_k with the largest scores.
inline std::vector<int64_t> EntriesOf(const CompressedHarness& world, const CompressedHarness::Sequence& sequence,
                                      int64_t position) {
  const CompressedOptions& options = world.options();
  std::vector<int64_t> entries(static_cast<size_t>((position + 1) / options.row_tokens));
  std::iota(entries.begin(), entries.end(), 0);
  if (options.top_k == 0 || std::ssize(entries) <= options.top_k) return entries;
  constexpr int kHeads = CompressedHarness::kIndexHeads, kDim = CompressedHarness::kIndexDim;
  std::vector<double> scores(entries.size());
  for (size_t entry = 0; entry < entries.size(); ++entry) {
    for (int64_t head = 0; head < kHeads; ++head) {
      double dot = 0;
      for (int64_t c = 0; c < kDim; ++c) {
        dot += double{sequence.index_queries[static_cast<size_t>((position * kHeads + head) * kDim + c)]} *
               double{sequence.keys[entry * kDim + static_cast<size_t>(c)]};
      }
      scores[entry] += double{sequence.weights[static_cast<size_t>(position * kHeads + head)]} * std::max(dot, 0.0);
    }
  }
  std::ranges::stable_sort(
      entries, [&](int64_t a, int64_t b) { return scores[static_cast<size_t>(a)] > scores[static_cast<size_t>(b)]; });
  entries.resize(static_cast<size_t>(options.top_k));
  return entries;
}

// Largest error of the rows from `first` on.
inline double LargestError(const CompressedHarness& world, const CompressedHarness::Sequence& sequence,
                           int64_t first = 0) {
  const CompressedOptions& options = world.options();
  const int64_t dim = options.head_dim;
  double largest = 0;
  for (int64_t position = first; position < sequence.start; ++position) {
    std::vector<const float*> rows;
    for (const int64_t entry : EntriesOf(world, sequence, position))
      rows.push_back(&sequence.entries[static_cast<size_t>(entry * dim)]);
    for (int64_t token = std::max<int64_t>(0, position - options.window + 1); token <= position; ++token) {
      rows.push_back(&sequence.rows[static_cast<size_t>(token * dim)]);
    }
    for (int64_t head = 0; head < options.heads; ++head) {
      const auto at = static_cast<size_t>((position * options.heads + head) * dim);
      double sum = std::exp(0.5 * static_cast<double>(head));  // the sink
      std::vector<double> expected(static_cast<size_t>(dim));
      for (const float* row : rows) {
        double dot = 0;
        for (int64_t c = 0; c < dim; ++c) dot += double{sequence.queries[at + static_cast<size_t>(c)]} * double{row[c]};
        const double weight = std::exp(dot * double{0.3F});
        sum += weight;
        for (int64_t c = 0; c < dim; ++c) expected[static_cast<size_t>(c)] += weight * double{row[c]};
      }
      for (size_t c = 0; c < expected.size(); ++c) {
        largest = std::max(largest, std::abs(expected[c] / sum - double{sequence.out[at + c]}));
      }
    }
  }
  return largest;
}

}  // namespace kvanta::attention
