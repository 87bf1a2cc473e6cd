// Norms and RoPE of heads, pages that close, the combination of split results, and packing, as parts of the launches of
// attention on a GPU.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "attention/gpu_fixture.h"
#include "emulated/guarded_device.h"
#include "kernels/ops.h"

namespace kvanta::attention {
namespace {

using Fixture = GpuAttentionTest;
class GpuHeadsTest : public Fixture {
 protected:
  void SetUp() override {
    Fixture::SetUp();
    if (gpu_ == nullptr) return;
    ops_ = kernels::MakeGpuOps(gpu_, std::make_shared<ThreadPool>(1));
  }
  int64_t Launches() const {
    return emulated_ ? dynamic_cast<const testing::GuardedDevice&>(gpu_->device()).Launches() : 0;
  }

  std::unique_ptr<kernels::Ops> ops_;
};

INSTANTIATE_TEST_SUITE_P(Gpus, GpuHeadsTest, ::testing::ValuesIn(testing::Gpus()),
                         [](const auto& param) { return param.param; });

struct HeadsCase {
  const char* scheme;
  int head_dim = 64;
  int rotary_dim = 64;
  bool interleaved = false;
  int norm = 0;      // 1: of all heads the same weights, 2: of each its own
  int launches = 1;  // of a decode step in which a page closes
};

// Bytes of the cache, counts and queries are those of single operations: in a prompt, and in decode steps of two
// sequences, of which one closes its page in the last.
TEST_P(GpuHeadsTest, NormsAndRopeHaveTheBitsOfSingleOperations) {
  std::vector<HeadsCase> cases = {{"int4", 64, 48, true, 1}, {"bf16"}, {"kivi4", 64, 64, false, 2}};
#ifndef KVANTA_SANITIZED
  for (const char* scheme : {"nvfp4", "fp8", "int8+hadamard", "k=int8+mean,v=int8", "int4+query", "t3", "kivi2"}) {
    cases.push_back({scheme, 128, 128, false, 1});
  }
  cases.push_back({"k=int8,v=int4+exact=open", 96, 32, false, 0, 2});
  cases.push_back({"bf16+exact=open", 256, 64, true, 2});
  cases.push_back({"int4", 64, 0, false, 1});
#endif
  constexpr int kHeads = 4, kKvHeads = 2, kPage = 32;
  for (const HeadsCase& each : cases) {
    const char* const scheme = each.scheme;
    const int head_dim = each.head_dim, rotary_dim = each.rotary_dim, norm = each.norm, launches = each.launches;
    const bool interleaved = each.interleaved;
    SCOPED_TRACE(fmt::format("{} of {}", scheme, head_dim));
    const HarnessOptions options = On({.scheme = scheme,
                                       .heads = kHeads,
                                       .kv_heads = kKvHeads,
                                       .head_dim = head_dim,
                                       .page_size = kPage,
                                       .static_scale = 0.37F,
                                       .lengths = {kPage, 40}});
    CacheHarness one(options, 3), two(options, 3);
    const Buffer table = Upload(one.sequences()[1].v), weights = Upload(one.sequences()[0].v);
    const auto run = [&](CacheHarness& harness, bool at_once) {
      const std::unique_ptr<Backend> backend = Make(harness);
      EXPECT_TRUE(backend->TransformsHeads(0));
      const auto transform = [&](const int64_t* positions) {
        kernels::HeadTransform heads;
        if (norm != 0) {
          heads.norm_weight = weights.as<float>();
          heads.norm_stride = norm == 2 ? head_dim : 0;
          heads.norm_eps = 1e-5F;
        }
        if (rotary_dim != 0) {
          heads.cos_sin = table.as<float>();
          heads.rotary_dim = rotary_dim;
          heads.interleaved = interleaved;
          heads.positions = positions;
        }
        return heads;
      };
      const auto single = [&](const kernels::HeadTransform& heads, int count, float* x, int64_t stride, int64_t rows) {
        for (int head = 0; norm != 0 && head < count; ++head) {
          float* const of_head = x + int64_t{head} * head_dim;
          ops_->RmsNorm(of_head, stride, heads.norm_weight + head * heads.norm_stride, heads.norm_eps, rows, head_dim,
                        of_head, stride);
        }
        if (rotary_dim == 0) return;
        ops_->Rope(x, stride, rows, count, head_dim, rotary_dim, {.interleaved = interleaved}, heads.cos_sin,
                   heads.positions);
      };
      std::vector<float> queries;
      const auto append = [&](Plan& plan, const CacheHarness::Rows& rows) {
        const Buffer positions = Upload(rows.positions);
        const auto count = static_cast<int64_t>(rows.positions.size());
        const kernels::HeadTransform heads = transform(positions.as<int64_t>());
        if (at_once) {
          const int64_t first = Launches();
          backend->AppendHeads(plan, 0,
                               {.q = rows.q,
                                .q_stride = harness.QWidth(),
                                .q_transform = heads,
                                .k = rows.k,
                                .v = rows.v,
                                .kv_stride = harness.KvWidth(),
                                .k_transform = heads,
                                .rows = count});
          if (emulated_ && count == 2) {
            EXPECT_LE(Launches() - first, launches);
          }
        } else {
          single(heads, kHeads, rows.q, harness.QWidth(), count);
          single(heads, kKvHeads, rows.k, harness.KvWidth(), count);
          backend->Append(plan, 0, rows.k, rows.v, harness.KvWidth());
        }
        std::vector<float> found(static_cast<size_t>(count * harness.QWidth()));
        gpu_->device().CopyOut(found.data(), rows.q, found.size() * sizeof(float));
        queries.insert(queries.end(), found.begin(), found.end());
      };
      harness.AppendBy(*backend, {{0, kPage - 3}, {1, 37}}, append);
      for (int step = 0; step < 3; ++step) harness.AppendBy(*backend, {{0, 1}, {1, 1}}, append);
      backend->FetchCounts();
      const AppendCounts counts = backend->Counts(0);
      return std::pair(queries, std::vector{counts.k.values, counts.k.saturated, counts.k.nan, counts.k.blocks,
                                            counts.v.values, counts.v.saturated, counts.v.nan, counts.v.blocks});
    };
    EXPECT_EQ(run(one, true), run(two, false));
    for (const int sequence : {0, 1}) EXPECT_EQ(one.Bytes(sequence), two.Bytes(sequence));
  }
}

TEST_P(GpuHeadsTest, OtherLayersAreNotTransformed) {
  for (const char* scheme : {"int4+outliers=4", "mla_fp8"}) {
    CacheHarness harness(On({.scheme = scheme, .page_size = 32}), 3);
    EXPECT_FALSE(Make(harness)->TransformsHeads(0)) << scheme;
  }
  CacheHarness wide(On({.head_dim = 512, .page_size = 32}), 3);
  EXPECT_FALSE(Make(wide)->TransformsHeads(0)) << "a block has norms of wider heads";
}

// A tile's splits are in several tasks: whichever block is the last, in whichever order they run, the bits are those of
// one task, and the counters are ready for the next launch.
TEST_P(GpuHeadsTest, AnyBlockCombinesATile) {
  constexpr int kBefore = 2080, kSteps = 6;
  for (const char* scheme : {"int4+exact=none", "mla_fp8"}) {
    SCOPED_TRACE(scheme);
    std::vector<float> found[2];
    for (const int64_t max_result_rows : {kMaxResultRows, int64_t{0}}) {
      CacheHarness harness(
          On({.scheme = scheme, .page_size = 64, .sinks = true, .lengths = {kBefore + kSteps, kSteps}}), 5);
      const std::unique_ptr<Backend> backend = Make(harness, max_result_rows);
      harness.Append(*backend, {0, kBefore});
      for (int step = 0; step < kSteps; ++step) harness.RunStep(*backend, {{0, 1}, {1, 1}});
      const std::vector<float>& out = harness.sequences()[0].out;
      found[max_result_rows == 0 ? 1 : 0].assign(out.begin() + kBefore * harness.OutWidth(), out.end());
    }
    EXPECT_EQ(found[0], found[1]);
  }
}

// The linear layer that reads the outputs gives the bits of outputs that it packs itself.
TEST_P(GpuHeadsTest, OutputsArePackedForTheirReader) {
  struct Case {
    const char* scheme;
    int head_dim;
    kernels::WeightType store;
    int fewer[2];  // launches, of a step of several tokens and of a decode step
  };
  constexpr kernels::WeightType kBf16 = kernels::WeightType::kBf16;
  const std::vector<Case> cases = {{"int4", 64, kBf16, {1, 1}},
#ifndef KVANTA_SANITIZED
                                   {"bf16", 128, kBf16, {1, 1}},
                                   {"int8+hadamard", 256, kBf16, {1, 1}},
                                   {"bf16", 40, kBf16, {1, 1}},
                                   {"bf16", 72, kBf16, {1, 1}},
                                   {"bf16", 64, kernels::WeightType::kInt8, {0, 1}},
                                   {"k=int8,v=nvfp4", 96, kernels::WeightType::kF16, {0, 1}}
#endif
  };
  for (const auto& [scheme, head_dim, store, fewer] : cases) {
    SCOPED_TRACE(fmt::format("{} of {}", scheme, head_dim));
    const HarnessOptions options = On({.scheme = scheme, .head_dim = head_dim, .page_size = 32, .lengths = {150, 40}});
    CacheHarness harness(options, 5);
    constexpr int64_t kOut = 24;
    const std::vector<float> w(static_cast<size_t>(kOut * harness.OutWidth()), 0.37F);
    const weights::WeightView view{w.data(), DType::kF32, kOut, harness.OutWidth()};
    const std::unique_ptr<kernels::Linear> reader = ops_->MakeLinear({&view, 1}, {}, store);
    const std::unique_ptr<Backend> backend = Make(harness);
    harness.Append(*backend, {0, 100});
    for (const Step& step : {Step{{0, 20}, {1, 3}}, Step{{0, 1}, {1, 1}}}) {
      const bool is_decode = step[0].tokens == 1;
      std::vector<float> results[2];
      int64_t launches[2] = {};
      harness.AppendBy(*backend, step, [&](Plan& plan, const CacheHarness::Rows& rows) {
        backend->Append(plan, 0, rows.k, rows.v, harness.KvWidth());
        const auto count = static_cast<int64_t>(rows.positions.size());
        for (const bool packs : {false, true}) {
          const Buffer out = Upload(std::vector<float>(static_cast<size_t>(count * harness.OutWidth()), -7.0F));
          const Buffer result = Upload(std::vector<float>(static_cast<size_t>(count * kOut), -7.0F));
          const int64_t first = Launches();
          backend->Run(plan, 0, rows.q, harness.QWidth(), out.as<float>(), packs ? reader.get() : nullptr);
          reader->Forward(out.as<float>(), count, result.as<float>(), kOut);
          launches[packs ? 1 : 0] = Launches() - first;
          results[packs ? 1 : 0] = Download(result);
        }
      });
      EXPECT_EQ(results[1], results[0]);
      if (emulated_) {
        EXPECT_EQ(launches[0] - launches[1], fewer[is_decode ? 1 : 0]);
      }
    }
  }
}

}  // namespace
}  // namespace kvanta::attention
