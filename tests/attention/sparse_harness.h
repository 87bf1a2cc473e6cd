// Test harness of sparse attention: a layer of latents and one of the keys of its indexer, over sequences of random
// rows, in steps of any chunks and batches. Pages are allocated in shuffled order, unused slots and freed records are
// NaN.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "attention/backend.h"
#include "attention/cache_harness.h"
#include "attention/cpu_backend.h"
#include "attention/reference_backend.h"
#include "formats/scheme.h"
#include "normal_floats.h"

namespace kvanta::attention {

struct SparseOptions {
  std::string latents = "fp32", keys = "fp32";  // schemes
  int heads = 4, rank = 32, rope_dim = 16;
  int index_heads = 4, index_head_dim = 32;
  int top_k = 16;
  int page_size = 16;
  std::vector<int> lengths = {100};
  Device* device = &Cpu();  // memory of the cache
};

class SparseHarness {
 public:
  static constexpr int kLatents = 0, kKeys = 1;  // layers, and their groups

  SparseHarness(const SparseOptions& options, uint32_t seed)
      : options_(options),
        layout_(formats::PlanCache({KvScheme::Parse(options.latents, true), KvScheme::Parse(options.keys, true)},
                                   {{.kv_heads = 1, .head_dim = options.rank, .rope_dim = options.rope_dim},
                                    {.kv_heads = 1, .head_dim = options.index_head_dim, .keys_only = true}},
                                   options.page_size, {kLatents, kKeys})) {
    std::mt19937 random(seed);
    int64_t pages = 0;
    for (const int length : options.lengths) {
      Sequence& sequence = sequences_.emplace_back();
      for (size_t i = 0; i < sequence.rows.size(); ++i) {
        sequence.rows[i] = Normal(random, int64_t{length} * Widths()[i]);
      }
      sequence.out.resize(static_cast<size_t>(int64_t{length} * options.heads * options.rank));
      sequence.chosen.resize(static_cast<size_t>(length));
      pages += (length + options.page_size - 1) / options.page_size;
    }
    pool_.emplace(*options.device, layout_,
                  cache::PagePoolConfig{.budget_bytes = (pages + 2) * (layout_.page_bytes + layout_.exact_page_bytes),
                                        .poison_unused = true});
    for (const int group : {kLatents, kKeys}) {
      std::vector<cache::PageId> ids;
      for (int64_t i = 0; i < pages; ++i) ids.push_back(pool_->Allocate(group, cache::PageKind::kQuantized));
      std::shuffle(ids.begin(), ids.end(), random);
      for (size_t s = 0; s < sequences_.size(); ++s) {
        cache::BlockTable& table = sequences_[s].tables[static_cast<size_t>(group)];
        table.resize(static_cast<size_t>((options.lengths[s] + options.page_size - 1) / options.page_size));
        for (cache::PageRef& page : table) {
          page.quantized = ids.back();
          ids.pop_back();
        }
      }
    }
    config_.layers = {{.heads = options.heads,
                       .kv_heads = 1,
                       .head_dim = options.rank,
                       .rope_dim = options.rope_dim,
                       .index_topk = options.top_k,
                       .softmax_scale = 1.0F / std::sqrt(static_cast<float>(options.rank + options.rope_dim))},
                      {.heads = options.index_heads,
                       .kv_heads = 1,
                       .head_dim = options.index_head_dim,
                       .index_topk = options.top_k,
                       .softmax_scale = 1}};
  }

  struct Sequence {
    // By position: latents, keys, queries, queries of the indexer, weights of its heads.
    std::array<std::vector<float>, 5> rows;
    std::vector<float> out;
    std::vector<std::vector<int32_t>> chosen;
    std::array<cache::BlockTable, 2> tables;
    std::array<const cache::PageRef*, 2> table_data = {};
    int64_t start = 0;
  };
  std::vector<Sequence>& sequences() { return sequences_; }
  const BackendConfig& config() const { return config_; }
  cache::PagePool& pool() { return *pool_; }

  std::unique_ptr<Backend> CpuBackend(const kernels::IsaTable& isa, int threads = 1) {
    return MakeCpuBackend(*pool_, config_, std::make_shared<ThreadPool>(threads), isa);
  }
  std::unique_ptr<Backend> Reference() { return MakeReferenceBackend(*pool_, config_); }

  // Append, Select and Run of one step; without attention, Append alone.
  void RunStep(Backend& backend, const Step& step, bool attends = true) {
    std::array<std::vector<float>, 5> rows;
    std::vector<SequenceSpan> spans;
    for (const Part& part : step) {
      Sequence& sequence = sequences_[static_cast<size_t>(part.sequence)];
      for (const int group : {kLatents, kKeys}) ProvideExact(sequence, group, part.tokens);
      for (size_t group = 0; group < 2; ++group) sequence.table_data[group] = sequence.tables[group].data();
      spans.push_back({.start = sequence.start, .tokens = part.tokens, .pages = sequence.table_data.data()});
      for (size_t i = 0; i < rows.size(); ++i) {
        const auto first = sequence.rows[i].begin() + sequence.start * Widths()[i];
        rows[i].insert(rows[i].end(), first, first + part.tokens * Widths()[i]);
      }
    }
    const int64_t out_width = int64_t{options_.heads} * options_.rank;
    std::vector<float> out(rows[0].size() / static_cast<size_t>(Widths()[0]) * static_cast<size_t>(out_width),
                           std::nanf(""));
    plan_ = backend.MakePlan({.sequences = spans}, std::move(plan_));
    std::array<Buffer, 5> inputs;
    for (size_t i = 0; i < inputs.size(); ++i) inputs[i] = Upload(rows[i]);
    const Buffer outputs = Upload(out);
    backend.Append(*plan_, kLatents, inputs[0].as<float>(), nullptr, Widths()[0]);
    backend.Append(*plan_, kKeys, inputs[1].as<float>(), nullptr, Widths()[1]);
    if (attends) {
      backend.Select(*plan_, kKeys, inputs[3].as<float>(), Widths()[3], inputs[4].as<float>());
      backend.Run(*plan_, kLatents, inputs[2].as<float>(), Widths()[2], outputs.as<float>());
    }
    options_.device->CopyOut(out.data(), outputs.data(), out.size() * sizeof(float));
    int64_t row = 0;
    for (const Part& part : step) {
      Sequence& sequence = sequences_[static_cast<size_t>(part.sequence)];
      for (int token = 0; token < part.tokens; ++token, ++row) {
        const int64_t position = sequence.start + token;
        std::copy_n(out.begin() + row * out_width, out_width, sequence.out.begin() + position * out_width);
        if (!attends) continue;
        const std::span<const int32_t> chosen = backend.Selected(*plan_, row);
        sequence.chosen[static_cast<size_t>(position)].assign(chosen.begin(), chosen.end());
      }
      sequence.start += part.tokens;
      for (const int group : {kLatents, kKeys}) ReleaseExact(sequence, group);
    }
  }

 private:
  Buffer Upload(const std::vector<float>& values) const {
    Buffer buffer = options_.device->Allocate(values.size() * sizeof(float));
    options_.device->CopyIn(buffer.data(), values.data(), values.size() * sizeof(float));
    return buffer;
  }

  std::array<int64_t, 5> Widths() const {
    const int64_t key = options_.rank + options_.rope_dim;
    return {key, options_.index_head_dim, options_.heads * key, int64_t{options_.index_heads} * options_.index_head_dim,
            options_.index_heads};
  }

  static std::vector<float> Normal(std::mt19937& random, int64_t count) {
    NormalFloats normal;
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) value = normal(random);
    return values;
  }

  void ProvideExact(Sequence& sequence, int group, int tokens) {
    if (!layout_.layers[static_cast<size_t>(group)].exact_open) return;
    for (int64_t page = sequence.start / options_.page_size; page * options_.page_size < sequence.start + tokens;
         ++page) {
      cache::PageId& exact = sequence.tables[static_cast<size_t>(group)][static_cast<size_t>(page)].exact;
      if (exact == cache::kNoPage) exact = pool_->Allocate(group, cache::PageKind::kExact);
    }
  }

  void ReleaseExact(Sequence& sequence, int group) {
    const formats::LayerScheme& layer = layout_.layers[static_cast<size_t>(group)];
    if (!layer.exact_open) return;
    for (int64_t page = layer.sink_pages; (page + layer.exact_pages) * options_.page_size <= sequence.start; ++page) {
      cache::PageId& exact = sequence.tables[static_cast<size_t>(group)][static_cast<size_t>(page)].exact;
      if (exact != cache::kNoPage) pool_->Release(group, cache::PageKind::kExact, exact);
      exact = cache::kNoPage;
    }
  }

  const SparseOptions options_;
  formats::CacheLayout layout_;
  std::optional<cache::PagePool> pool_;
  BackendConfig config_;
  std::vector<Sequence> sequences_;
  std::unique_ptr<Plan> plan_;
};

// Runs the same sequences, of `lengths` tokens, token by token in `one`, and in random batches of random chunks in
// `two`; the tokens chosen and the outputs must be the same bits.
inline void ExpectSameBitsInBatches(const std::vector<int>& lengths, SparseHarness& one, Backend& serial,
                                    SparseHarness& two, Backend& batched, std::mt19937& random) {
  for (size_t i = 0; i < lengths.size(); ++i) {
    for (int token = 0; token < lengths[i]; ++token) one.RunStep(serial, {{static_cast<int>(i), 1}});
  }
  std::vector<int> left = lengths;
  while (std::ranges::any_of(left, [](int tokens) { return tokens > 0; })) {
    Step step;
    for (size_t i = 0; i < left.size(); ++i) {
      if (left[i] == 0 || random() % 3 == 0) continue;
      step.push_back({static_cast<int>(i), std::uniform_int_distribution<int>(1, std::min(left[i], 40))(random)});
      left[i] -= step.back().tokens;
    }
    std::shuffle(step.begin(), step.end(), random);
    if (!step.empty()) two.RunStep(batched, step);
  }
  for (size_t i = 0; i < lengths.size(); ++i) {
    const auto &a = one.sequences()[i], &b = two.sequences()[i];
    ASSERT_EQ(a.chosen, b.chosen) << "sequence " << i;
    ASSERT_EQ(std::memcmp(a.out.data(), b.out.data(), a.out.size() * sizeof(float)), 0) << "sequence " << i;
  }
}

}  // namespace kvanta::attention
