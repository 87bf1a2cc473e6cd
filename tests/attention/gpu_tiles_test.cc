// Tiles of the attention kernels on an emulated and, if present, a real GPU: groups of them, heads of 256 channels, and
// attention in both directions.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "attention/gpu_fixture.h"
#include "emulated/guarded_device.h"

namespace kvanta::attention {
namespace {

// Attention to keys after the query, in steps of whole sequences; windows on both sides.
TEST_P(GpuAttentionTest, BothDirections) {
  uint32_t seed = 130;
  for (const char* scheme : {"int4", "bf16", "kivi2+exact=2+sink=3", "nvfp4+exact=none"}) {
    for (const int window : {0, 1, 33, 100}) {
      HarnessOptions options{.scheme = scheme, .heads = 6, .kv_heads = 2, .sliding_window = window};
      options.both_directions = true;
      options.lengths = {150, 1, 64};
      Check(options, {{{0, 150}, {1, 1}, {2, 64}}}, seed);
      CacheHarness alone(On(options), seed), together(On(options), seed);
      const std::unique_ptr<Backend> first = Make(alone, 0), second = Make(together);
      for (const Part& part : {Part{0, 150}, Part{1, 1}, Part{2, 64}}) alone.RunStep(*first, {part});
      together.RunStep(*second, {{2, 64}, {0, 150}, {1, 1}});
      gpu_->device().Synchronize();
      for (const size_t i : {0, 1, 2}) {
        EXPECT_EQ(alone.sequences()[i].out, together.sequences()[i].out) << scheme << ", window " << window;
      }
      ++seed;
    }
#ifdef KVANTA_SANITIZED
    break;
#endif
  }
  for (const int window : {0, 200}) {  // two KV splits, tile groups
    HarnessOptions options{.scheme = "int8", .heads = 6, .kv_heads = 1, .sliding_window = window};
    options.both_directions = true;
    options.lengths = {window == 0 ? 1060 : 300};
    Check(options, {{{0, options.lengths[0]}}}, seed++);
  }
}

// Kernels of their own with twice the outputs of heads of 128: 8 and 16 rows, two KV splits.
TEST_P(GpuAttentionTest, HeadsOf256) {
  uint32_t seed = 160;
  for (const char* scheme : {"bf16", "int4", "fp8_e4m3", "int8+exact=open", "nvfp4+exact=2+sink=1"}) {
    const int heads = seed % 2 == 0 ? 8 : 12;
    Check({.scheme = scheme, .heads = heads, .kv_heads = 1, .head_dim = 256, .static_scale = 0.4F, .lengths = {1100}},
          {{{0, 3}}, {{0, 1}}}, seed, 1090);
    Check({.scheme = scheme,
           .heads = heads,
           .kv_heads = 1,
           .head_dim = 256,
           .sliding_window = 40,
           .softcap = 5,
           .sinks = true,
           .lengths = {80}},
          {{{0, 67}}, {{0, 3}}, {{0, 1}}}, seed + 5);
    ++seed;
#ifdef KVANTA_SANITIZED
    break;
#endif
  }
}

// Tile groups, whose block decodes a chunk once, give the bits of tiles that decode it themselves: of all kernels that
// take groups, in steps of a prompt and a decode sequence, with one result for all KV splits or one for each.
TEST_P(GpuAttentionTest, TileGroupsHaveTheBitsOfSingleTiles) {
  struct Case {
    const char* scheme;
    int head_dim = 128;
    int before = 70;
    HarnessOptions options = {.heads = 6, .kv_heads = 1, .page_size = 32};
  };
  std::vector<Case> cases = {
      {"int4", 128, 1060, {.heads = 3, .kv_heads = 1, .page_size = 32}},  // two KV splits
      {"int4+exact=2+sink=1",
       64,
       290,  // two quarters
       {.heads = 6, .kv_heads = 2, .page_size = 32, .sliding_window = 150, .softcap = 5, .sinks = true}},
      {"klt3"}};
#ifndef KVANTA_SANITIZED
  for (const char* scheme : {"bf16", "int8", "int4", "int4+exact=none", "nvfp4+exact=2+sink=2"}) {
    cases.push_back({scheme, 64});
  }
  for (const char* scheme :
       {"fp8+exact=open", "int8", "nvfp4", "mxfp4", "int2_g32", "t4", "t3", "t2", "klt2", "k=int8,v=int4", "kivi4"}) {
    cases.push_back({scheme});
  }
  for (const char* scheme : {"bf16", "fp8_e4m3", "int8", "int4", "nvfp4+exact=none"}) {
    cases.push_back({scheme, 256});
  }
  cases.push_back({"bf16", 128, 250});
  cases.push_back({"fp8_e4m3", 64, 1046, {.heads = 6, .kv_heads = 1, .page_size = 64, .sliding_window = 40}});
  cases.push_back({"int4", 64, 60, {.heads = 20, .kv_heads = 1, .page_size = 64, .chunk = 75}});
  cases.push_back({"fp8_e4m3", 64, 250, {.heads = 3, .kv_heads = 1, .page_size = 128, .softcap = 3}});
#endif
  std::vector<std::shared_ptr<kernels::CudaContext>> gpus = {gpu_};
  if (emulated_) gpus.push_back(testing::MakeEmulatedGpu({.nccl_library = "", .warpgroups = false}));
  bool divides = false;
  for (auto& [scheme, head_dim, before, options] : cases) {
    SCOPED_TRACE(fmt::format("{} of {}, {} tokens before", scheme, head_dim, before));
    options.scheme = scheme;
    options.head_dim = head_dim;
    options.static_scale = 0.37F;
    constexpr int kPrompt = 26;
    options.lengths = {before + kPrompt, 4};
    const int64_t max_result_rows = divides ? kMaxResultRows : 0;
    const int first_row = before;
    const auto run = [&](const std::shared_ptr<kernels::CudaContext>& gpu, bool makes_groups, CacheHarness& harness) {
      std::vector<float>& v = harness.sequences()[0].v;  // some large values raise their chunk's exponent
      const auto width = static_cast<size_t>(harness.KvWidth());
      for (size_t i = 0; i < v.size(); ++i) v[i] *= i / width % 37 == 20 ? 0x1p10F : 1.0F;
      const std::unique_ptr<Backend> backend =
          MakeGpuBackend(harness.store(), harness.config(), gpu, max_result_rows, makes_groups);
      harness.Append(*backend, {0, first_row});
      harness.RunStep(*backend, {{1, 3}});
      const auto launched = [&] {
        return emulated_ ? dynamic_cast<const testing::GuardedDevice&>(gpu->device()).Launches() : 0;
      };
      const int64_t first = launched();
      harness.RunStep(*backend, {{0, kPrompt}, {1, 1}});
      gpu->device().Synchronize();
      return launched() - first;
    };
    CacheHarness tiles(On(options), 13);
    const int64_t launches = run(gpu_, false, tiles);
    for (const std::shared_ptr<kernels::CudaContext>& gpu : gpus) {
      HarnessOptions on = On(options);
      on.device = &gpu->device();
      CacheHarness groups(on, 13);
      const int64_t of_groups = run(gpu, true, groups);
      if (emulated_) {
        EXPECT_EQ(of_groups, launches + 2) << "launches for the groups, the decode sequence, and the combination";
      }
      CompareBits(groups, tiles, before);
    }
    divides = !divides;
  }
}

}  // namespace
}  // namespace kvanta::attention
