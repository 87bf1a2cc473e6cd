// Context parallelism: ranks that divide the pages of latents give the bits of one process. Ranks are threads.
#include "attention/context_parallel.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <barrier>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "attention/cpu_backend.h"
#include "error_of.h"
#include "formats/scheme.h"
#include "normal_floats.h"

namespace kvanta::attention {
namespace {

// Memory in which the threads find each other's bytes.
struct Meeting {
  explicit Meeting(int size) : own(static_cast<size_t>(size)), strides(own.size()), barrier(size) {}
  std::vector<const uint8_t*> own;
  std::vector<int64_t> strides;
  std::barrier<> barrier;
};

class ThreadRanks final : public parallel::Communicator {
 public:
  ThreadRanks(Meeting& meeting, int rank) : meeting_(meeting), rank_(rank) {}
  int Rank() const noexcept override { return rank_; }
  int Size() const noexcept override { return static_cast<int>(meeting_.own.size()); }
  void ExchangeParts(const uint8_t* own, int64_t stride, std::span<const parallel::Destination> to) noexcept override {
    meeting_.own[static_cast<size_t>(rank_)] = own;
    meeting_.strides[static_cast<size_t>(rank_)] = stride;
    meeting_.barrier.arrive_and_wait();
    for (size_t rank = 0; rank < to.size(); ++rank) {
      const uint8_t* from = meeting_.own[rank] + rank_ * meeting_.strides[rank];
      for (int64_t row = 0; row < to[rank].rows; ++row) {
        uint8_t* place = to[rank].first + row * to[rank].stride;
        if (place != from) std::memcpy(place, from + row * to[rank].row_bytes, static_cast<size_t>(to[rank].row_bytes));
      }
    }
    meeting_.barrier.arrive_and_wait();
  }

 private:
  Meeting& meeting_;
  const int rank_;
};

struct Shape {
  std::string scheme;
  int heads = 4;
  int rank = 64;  // of latents
  int rope_dim = 16;
  int page_size = 16;
  std::vector<int> lengths = {};
};
// Tokens of each sequence in each step; 0: the sequence is not in it.
using Steps = std::vector<std::vector<int>>;

// Latents and queries of all heads, and what ranks compute of them.
class LatentWorld {
 public:
  LatentWorld(const Shape& shape, uint32_t seed)
      : shape_(shape),
        layout_(
            formats::PlanCache({KvScheme::Parse(shape.scheme)}, {{1, shape.rank, shape.rope_dim}}, shape.page_size)) {
    std::mt19937 random(seed);
    NormalFloats normal;
    for (const int length : shape.lengths) {
      std::vector<float>& q = q_.emplace_back(static_cast<size_t>(int64_t{length} * shape.heads * KeyDim()));
      std::vector<float>& k = k_.emplace_back(static_cast<size_t>(int64_t{length} * KeyDim()));
      for (float& x : q) x = normal(random);
      for (float& x : k) x = normal(random);
      pages_ += CeilDiv(length, int64_t{shape.page_size});
    }
  }

  int KeyDim() const { return shape_.rank + shape_.rope_dim; }
  int64_t Budget() const { return (pages_ + 1) * (layout_.page_bytes + layout_.exact_page_bytes); }
  const formats::CacheLayout& layout() const { return layout_; }
  BackendConfig Config(int heads, parallel::Communicator* ranks) const {
    return {.layers = {{.heads = heads,
                        .kv_heads = 1,
                        .head_dim = shape_.rank,
                        .rope_dim = shape_.rope_dim,
                        .softmax_scale = 1 / std::sqrt(static_cast<float>(KeyDim()))}},
            .scales = {},
            .ranks = ranks};
  }

  // Results of all rows, [sequence][position][head][channel]: computed by `size` ranks with a part of the heads each.
  std::vector<std::vector<float>> Attend(int size, const Steps& steps, int threads) const {
    cache::PagePool own(Cpu(), layout_,
                        {.budget_bytes = Budget(), .poison_unused = true, .lists_changes = true, .ranks = size});
    std::vector<cache::BlockTable> tables;
    for (const int length : shape_.lengths) {
      cache::BlockTable& table = tables.emplace_back();
      for (int64_t page = 0; page * shape_.page_size < length; ++page) {
        const int rank = own.RankOfPage(0, page);
        table.push_back({.quantized = own.Allocate(0, cache::PageKind::kQuantized, rank),
                         .exact = own.Allocate(0, cache::PageKind::kExact, rank)});
      }
    }
    std::vector<std::vector<float>> out;
    for (const int length : shape_.lengths) {
      out.emplace_back(static_cast<size_t>(int64_t{length} * shape_.heads * shape_.rank), NAN);
    }
    Meeting meeting(size);
    std::vector<std::thread> ranks;
    for (int rank = 1; rank < size; ++rank) {
      ranks.emplace_back([&, rank] {
        cache::PagePool pool(Cpu(), layout_, {.budget_bytes = Budget(), .borrowed = true, .ranks = size, .rank = rank});
        RunRank(pool, meeting, tables, steps, threads, out);
      });
    }
    RunRank(own, meeting, tables, steps, threads, out);
    for (std::thread& rank : ranks) rank.join();
    return out;
  }

 private:
  void RunRank(cache::PagePool& pool, Meeting& meeting, const std::vector<cache::BlockTable>& tables,
               const Steps& steps, int threads, std::vector<std::vector<float>>& out) const {
    ThreadRanks ranks(meeting, pool.Rank());
    const int64_t heads = shape_.heads / pool.Ranks(), first_head = heads * pool.Rank();
    const std::unique_ptr<Backend> backend =
        MakeCpuBackend(pool, Config(static_cast<int>(heads), pool.Ranks() == 1 ? nullptr : &ranks),
                       std::make_shared<ThreadPool>(threads));
    std::vector<int64_t> starts(tables.size());
    std::unique_ptr<Plan> plan;
    for (const std::vector<int>& step : steps) {
      std::vector<SequenceSpan> spans;
      std::vector<const cache::PageRef*> pages;
      std::vector<float> q, k;
      for (const cache::BlockTable& table : tables) pages.push_back(table.data());
      for (size_t s = 0; s < step.size(); ++s) {
        if (step[s] == 0) continue;
        spans.push_back({.start = starts[s], .tokens = step[s], .pages = &pages[s]});
        const int64_t end = starts[s] + step[s];
        k.insert(k.end(), k_[s].begin() + starts[s] * KeyDim(), k_[s].begin() + end * KeyDim());
        for (int64_t row = starts[s]; row < end; ++row) {
          const auto first = q_[s].begin() + (row * shape_.heads + first_head) * KeyDim();
          q.insert(q.end(), first, first + heads * KeyDim());
        }
      }
      std::vector<float> results(q.size() / static_cast<size_t>(KeyDim()) * static_cast<size_t>(shape_.rank));
      plan = backend->MakePlan({.sequences = spans}, std::move(plan));
      backend->Append(*plan, 0, k.data(), nullptr, KeyDim());
      backend->Run(*plan, 0, q.data(), heads * KeyDim(), results.data());
      const int64_t width = heads * shape_.rank;
      int64_t row = 0;
      for (size_t s = 0; s < step.size(); ++s) {
        for (int token = 0; token < step[s]; ++token, ++row) {
          const int64_t to = ((starts[s] + token) * shape_.heads + first_head) * shape_.rank;
          std::copy_n(results.begin() + row * width, width, out[s].begin() + to);
        }
        starts[s] += step[s];
      }
    }
  }

  const Shape shape_;
  const formats::CacheLayout layout_;
  std::vector<std::vector<float>> q_, k_;
  int64_t pages_ = 0;
};

// Steps that advance all sequences by up to `max_tokens` tokens each.
Steps RandomSteps(std::vector<int> left, int max_tokens, std::mt19937& random) {
  Steps steps;
  while (std::ranges::any_of(left, [](int tokens) { return tokens > 0; })) {
    std::vector<int>& step = steps.emplace_back();
    for (int& tokens : left) {
      step.push_back(std::min<int>(tokens, static_cast<int>(random() % static_cast<uint32_t>(max_tokens + 1))));
      tokens -= step.back();
    }
    if (std::ranges::all_of(step, [](int tokens) { return tokens == 0; })) steps.pop_back();
  }
  return steps;
}

bool SameBits(const std::vector<std::vector<float>>& a, const std::vector<std::vector<float>>& b) {
  return std::ranges::equal(a, b, [](const std::vector<float>& x, const std::vector<float>& y) {
    return x.size() == y.size() && std::memcmp(x.data(), y.data(), x.size() * sizeof(float)) == 0;
  });
}

class ContextParallelTest : public ::testing::TestWithParam<const char*> {};
#ifdef KVANTA_SANITIZED  // sanitizers look for faults of memory and threads, which formats share
constexpr const char* kSchemes[] = {"bf16", "mla_int8", "mla_int4+exact=2+sink=3"};
constexpr int kLong = 4300;
#else
constexpr const char* kSchemes[] = {"bf16",
                                    "fp16",
                                    "fp32",
                                    "mla_fp8",
                                    "mla_fp8_e5m2",
                                    "mla_int8",
                                    "mla_int4",
                                    "mla_nvfp4",
                                    "mla_int4+exact=2+sink=3",
                                    "mla_int8+exact=none"};
constexpr int kLong = 8400;
#endif
INSTANTIATE_TEST_SUITE_P(Schemes, ContextParallelTest, ::testing::ValuesIn(kSchemes), [](const auto& param) {
  std::string name = param.param;
  std::ranges::replace_if(
      name, [](unsigned char c) { return std::isalnum(c) == 0; }, '_');
  return name;
});

TEST_P(ContextParallelTest, RanksGiveTheBitsOfOneProcess) {
  std::mt19937 random(7);
  for (uint32_t seed = 0; seed < 6; ++seed) {
    Shape shape{.scheme = GetParam(), .page_size = seed % 2 == 0 ? 16 : 32};
    shape.heads = seed % 3 == 0 ? 8 : 4;
    shape.lengths = {static_cast<int>(100 + random() % 100), static_cast<int>(1 + random() % 40), 17};
    const LatentWorld world(shape, seed);
    const auto expected = world.Attend(1, RandomSteps(shape.lengths, 1, random), 1);
    for (const int ranks : {1, 2, 4}) {
      const int threads = 1 + static_cast<int>(random() % 3);
      const auto found = world.Attend(ranks, RandomSteps(shape.lengths, 40, random), threads);
      ASSERT_TRUE(SameBits(found, expected)) << ranks << " ranks, " << threads << " threads, seed " << seed;
    }
  }
}

// Several KV splits of each class, in whole tiles and distributed over threads.
TEST_P(ContextParallelTest, LongContexts) {
  Shape shape{.scheme = GetParam(), .heads = 4, .rank = 32, .rope_dim = 8, .page_size = 64, .lengths = {kLong, 300}};
  const LatentWorld world(shape, 3);
  Steps steps = {{4000, 0}, {kLong - 4100, 290}};
  for (int token = 0; token < 10; ++token) steps.push_back({10, 1});
  const auto expected = world.Attend(1, steps, 1);
  EXPECT_FALSE(std::isnan(expected[0].back()));
  steps = {{100, 300}, {kLong - 400, 0}, {300, 0}};
  for (const int ranks : {1, 2, 4}) ASSERT_TRUE(SameBits(world.Attend(ranks, steps, 2), expected)) << ranks;
  std::mt19937 random(1);
  ASSERT_TRUE(SameBits(world.Attend(2, RandomSteps(shape.lengths, 900, random), 3), expected));
}

// More rows than are exchanged at once: 16 MiB hold 9 rows of these.
TEST(ContextParallel, WavesDoNotChangeBits) {
  const Shape shape{.scheme = "bf16", .heads = 256, .rank = 512, .rope_dim = 64, .page_size = 16, .lengths = {90, 30}};
  const LatentWorld world(shape, 3);
  const auto expected = world.Attend(1, {{90, 30}}, 1);
  for (const int ranks : {2, 4}) ASSERT_TRUE(SameBits(world.Attend(ranks, {{60, 20}, {30, 10}}, 1), expected)) << ranks;
}

TEST(ContextParallel, PagesOfSplitsAreThoseOfAllRanksOnce) {
  for (const int window : {0, 1, 100, 5000}) {
    const cache::Visibility visibility = cache::SlidingWindow(window);
    for (const int64_t position : {0, 63, 64, 300, 4095, 4096, 9000, 20000}) {
      for (const int ranks : {1, 2, 4}) {
        std::vector<int> times(static_cast<size_t>(position / 64 + 1));
        for (int rank = 0; rank < ranks; ++rank) {
          const PageClasses classes{.of = kLatentClasses, .first = rank, .step = ranks};
          const int64_t splits = (position / kSplitTokens / classes.of + 1) * classes.Own();
          for (int64_t split = 0; split < splits; ++split) {
            const SplitPages pages = PagesOfSplit(classes, visibility, position, position, 64, split);
            for (int64_t page = pages.first; page < pages.end; page += pages.step) {
              EXPECT_EQ(page % ranks, rank);
              ++times.at(static_cast<size_t>(page));
            }
            EXPECT_TRUE(pages.IsEmpty() || pages.Last() + pages.step >= pages.end);
          }
        }
        for (size_t page = 0; page < times.size(); ++page) {
          const bool visible = static_cast<int64_t>(page) >= visibility.First(position) / 64;
          EXPECT_EQ(times[page], visible ? 1 : 0) << "page " << page << " of " << position << ", window " << window;
        }
      }
    }
  }
}

TEST(ContextParallel, RefusesWhatIsNotDivided) {
  const Shape shape{.scheme = "bf16", .lengths = {20}};
  const LatentWorld world(shape, 1);
  Meeting meeting(2);
  ThreadRanks ranks(meeting, 0);
  const auto error = [&](int of_pages, BackendConfig config) {
    cache::PagePool pool(Cpu(), world.layout(), {.budget_bytes = world.Budget(), .ranks = of_pages});
    return ErrorOf([&] { MakeCpuBackend(pool, std::move(config), std::make_shared<ThreadPool>(1)); });
  };
  EXPECT_EQ(error(2, world.Config(2, &ranks)), "no error");
  EXPECT_EQ(error(1, world.Config(2, &ranks)), "attention of 2 ranks to pages of 1; both are 1, 2 or 4");
  EXPECT_EQ(error(2, world.Config(2, nullptr)), "attention of 1 ranks to pages of 2; both are 1, 2 or 4");
  BackendConfig with_sinks = world.Config(2, &ranks);
  with_sinks.layers[0].sinks = {1, 2};
  EXPECT_THAT(error(2, with_sinks), ::testing::HasSubstr("layer 0: pages are divided among ranks of dense attention"));
}

// A page of another rank in the place of one's own would be outside of the memory.
TEST(ContextParallel, RefusesARecordOfAnotherRank) {
  const Shape shape{.scheme = "bf16", .lengths = {20}};
  const LatentWorld world(shape, 1);
  Meeting meeting(2);
  ThreadRanks ranks(meeting, 1);
  cache::PagePool pool(Cpu(), world.layout(),
                       {.budget_bytes = world.Budget(), .borrowed = true, .ranks = 2, .rank = 1});
  const auto backend = MakeCpuBackend(pool, world.Config(2, &ranks), std::make_shared<ThreadPool>(1));
  const cache::PageRef of_rank_0[] = {{.quantized = 0}, {.quantized = 1}};
  const cache::PageRef* table = of_rank_0;
  const SequenceSpan span{.start = 0, .tokens = 20, .pages = &table};
  EXPECT_THAT(ErrorOf([&] {
                backend->MakePlan({.sequences = {&span, 1}}, nullptr);
              }),
              ::testing::HasSubstr("page 1 has no quantized record"));
}

}  // namespace
}  // namespace kvanta::attention
