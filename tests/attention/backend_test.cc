// Backend interface: validation in MakePlan and the constructors, bytes written by Append, list of backends.
#include "attention/backend.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "attention/array_attention.h"
#include "attention/backends.h"
#include "attention/cache_harness.h"
#include "attention/gpu_layers.h"
#include "formats/cell_layout.h"
#include "formats/transform.h"
#include "kernels/attention/cpu/table.h"
#include "kernels/attention/reference/attention.h"
#include "kernels/ops.h"
#include "kvanta/error.h"
#include "tolerance.h"

namespace kvanta::attention {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;

template <class F>
std::string ErrorOf(F f) {
  try {
    f();
  } catch (const InputError& error) {
    return error.what();
  }
  return "no error";
}

TEST(BackendsTest, ListsTheMachinesUnitsAndTheReference) {
  const std::vector<std::string> names = BackendNames();
  const std::string last = std::string("cpu-") + kernels::RunnableIsas().back();
  EXPECT_THAT(names, Contains(last));
  EXPECT_EQ(names.back(), "reference");
  CacheHarness harness({}, 1);
  for (const std::string& name : names) {
    if (name.starts_with("cuda-")) {  // needs a pool in GPU memory
      EXPECT_THAT(ErrorOf([&] { MakeBackend(name, harness.store(), harness.config(), nullptr); }), HasSubstr("cpu"));
      continue;
    }
    EXPECT_EQ(MakeBackend(name, harness.store(), harness.config(), std::make_shared<ThreadPool>(1))->Info().name, name);
  }
  EXPECT_THAT(ErrorOf([&] { MakeBackend("cuda", harness.store(), harness.config(), std::make_shared<ThreadPool>(1)); }),
              HasSubstr(last + ", reference"));
}

TEST(BackendsTest, PaddedRowsAreRefusedOnAGpuByTheirReason) {
  const auto refusal = [](const char* scheme, int head_dim) {
    return FindUnsupported(formats::PlanCache({KvScheme::Parse(scheme)}, {{2, head_dim}}, 64).layers[0]);
  };
  EXPECT_THAT(refusal("k=int8,v=int4", 80),
              AllOf(HasSubstr("padded rows (int4 has blocks of 32 channels, which do not divide head_dim 80 (80 % 32 = "
                              "16); formats that take it: "),
                    HasSubstr(" nvfp4,")));
  EXPECT_EQ(refusal("k=int8,v=int4", 96), "");
  EXPECT_EQ(refusal("nvfp4", 80), "");
}

TEST(BackendsTest, EveryFormatRunsOnEveryFamily) {
  const std::vector<std::string> all = {"cpu", "cuda", "reference"};
  for (const formats::Format& format : formats::All()) EXPECT_EQ(BackendFamiliesOf(format), all) << format.name;
}

TEST(BackendTest, RefusesConfigsThatDoNotFitTheCache) {
  CacheHarness harness({.scheme = "k=int8+mean+outliers=2,v=int8"}, 1);
  const auto error = [&](auto change) {
    BackendConfig config = harness.config();
    change(config);
    return ErrorOf([&] { MakeReferenceBackend(harness.store(), config); });
  };
  EXPECT_EQ(error([](BackendConfig&) {}), "no error");
  EXPECT_THAT(error([](BackendConfig& c) { c.layers.clear(); }), HasSubstr("0 layers"));
  EXPECT_THAT(error([](BackendConfig& c) { c.layers[0].heads = 3; }), HasSubstr("3 query heads"));
  EXPECT_THAT(error([](BackendConfig& c) { c.layers[0].head_dim = 32; }), HasSubstr("2 KV heads of 32"));
  EXPECT_THAT(error([](BackendConfig& c) { c.layers[0].softmax_scale = 0; }), HasSubstr("softmax_scale 0"));
  EXPECT_THAT(error([](BackendConfig& c) { c.scales[0].k.scale = {1.0f}; }), HasSubstr("1 k scales for 2"));
  EXPECT_THAT(error([](BackendConfig& c) { c.scales[0].v.scale = {1.0f, 0.0f}; }), HasSubstr("v scale 0"));
  EXPECT_THAT(error([](BackendConfig& c) { c.scales[0].k.mean.clear(); }), HasSubstr("+mean"));
  EXPECT_THAT(error([](BackendConfig& c) { c.scales[0].k.mean[70] = std::nanf(""); }), HasSubstr("not all finite"));
  EXPECT_THAT(error([](BackendConfig& c) { c.scales[0].k.outliers.pop_back(); }), HasSubstr("+outliers=2"));
  EXPECT_THAT(error([](BackendConfig& c) { c.scales[0].k.outliers = {0, 64, 0, 1}; }), HasSubstr("channel 64"));
  EXPECT_THAT(error([](BackendConfig& c) { c.scales[0].k.outliers = {0, 1, 5, 5}; }), HasSubstr("channel 5"));
}

TEST(BackendTest, RefusesHeadsWiderThanItsKernelsTake) {
  for (const int head_dim : {kernels::kMaxHeadDim, kernels::kMaxHeadDim + 8}) {
    CacheHarness harness({.scheme = "bf16", .heads = 2, .kv_heads = 1, .head_dim = head_dim}, 1);
    const std::string cpu = ErrorOf([&] { harness.CpuBackend(*testing::Units().front().table); });
    const std::string reference = ErrorOf([&] { MakeReferenceBackend(harness.store(), harness.config()); });
    if (head_dim == kernels::kMaxHeadDim) {
      EXPECT_EQ(cpu, "no error");
      EXPECT_EQ(reference, "no error");
    } else {
      EXPECT_EQ(cpu, "layer 0: head_dim 520: backend cpu takes multiples of 8 from 8 to 512");
      EXPECT_EQ(reference, "layer 0: head_dim 520: backend reference takes multiples of 8 from 8 to 512");
    }
  }
}

TEST(BackendTest, RefusesBatchesWithoutTheirPages) {
  CacheHarness harness({.scheme = "int4", .lengths = {40}}, 1);
  const std::unique_ptr<Backend> backend = harness.CpuBackend(*testing::Units().front().table);
  cache::BlockTable& table = harness.sequences()[0].table;
  const cache::BlockTables tables = harness.sequences()[0].Tables();
  const auto error = [&](int64_t start, int tokens) {
    const SequenceSpan span{.start = start, .tokens = tokens, .pages = tables};
    return ErrorOf([&] { backend->MakePlan({.sequences = {&span, 1}}, nullptr); });
  };
  EXPECT_THAT(error(-1, 1), HasSubstr("start -1"));
  EXPECT_THAT(error(0, 0), HasSubstr("0 tokens"));
  EXPECT_THAT(error(0, 5), HasSubstr("page 0 has no exact record"));
  for (cache::PageRef& page : table) page.exact = harness.store().Allocate(0, cache::PageKind::kExact);
  EXPECT_EQ(error(0, 40), "no error");
  const cache::PageId closed = table[1].quantized;
  table[1].quantized = cache::kNoPage;
  EXPECT_THAT(error(0, 40), HasSubstr("page 1 has no quantized record"));
  EXPECT_EQ(error(0, 20), "no error");  // an open page needs no quantized record
  table[1].quantized = closed;
  harness.store().Release(0, cache::PageKind::kExact, table[0].exact);
  EXPECT_THAT(error(32, 1), HasSubstr("page 0 has no exact record"));  // a sink page
}

TEST(BackendTest, PlansAreOfTheirBackend) {
  CacheHarness harness({}, 1);
  const std::unique_ptr<Backend> cpu = harness.CpuBackend(*testing::Units().front().table);
  const std::unique_ptr<Backend> reference = MakeReferenceBackend(harness.store(), harness.config());
  const SequenceSpan span{.start = 0, .tokens = 1, .pages = harness.sequences()[0].Tables()};
  std::unique_ptr<Plan> plan = reference->MakePlan({.sequences = {&span, 1}}, nullptr);
  EXPECT_THROW(cpu->MakePlan({.sequences = {&span, 1}}, std::move(plan)), InputError);
}

// Append writes the encoder's bytes of each row after mean subtraction and transform.
TEST(BackendTest, AppendEncodesByTheSpecification) {
  for (const char* scheme : {"fp32", "bf16", "fp8", "int8", "int4+exact=none", "k=int8+mean,v=fp16",
                             "turboquant_3bit_nc", "nvfp4+exact=none", "k=int5_g32+exact=none,v=mxfp8"}) {
    const HarnessOptions options{.scheme = scheme, .lengths = {21}};
    CacheHarness harness(options, 3);
    const std::unique_ptr<Backend> backend = harness.CpuBackend(*testing::Units().front().table, 2);
    harness.Append(*backend, {0, 21});
    const formats::LayerScheme& layer = harness.layout().layers[0];
    CacheHarness::Sequence& sequence = harness.sequences()[0];
    formats::EncodeCounts counts;
    for (int token = 0; token < 21; ++token) {
      for (int head = 0; head < options.kv_heads; ++head) {
        std::vector<float> x(64);
        for (int c = 0; c < 64; ++c) {
          x[static_cast<size_t>(c)] = sequence.k[static_cast<size_t>((token * options.kv_heads + head) * 64 + c)];
          if (layer.k.mean) {
            x[static_cast<size_t>(c)] -= harness.config().scales[0].k.mean[static_cast<size_t>(head * 64 + c)];
          }
        }
        if (layer.k.hadamard) formats::Hadamard(x.data(), 64);
        formats::RowBuffer buffer;
        const formats::RowSections row = buffer.Sections();
        layer.k.format->encode_row(x.data(), 64, 1.0f, row, counts);
        std::vector<float> expected(64), found(64);
        layer.k.format->decode_row(row, 64, 1.0f, expected.data());
        const cache::PageId page = sequence.table[static_cast<size_t>(token / 16)].quantized;
        const uint8_t* cell = harness.store().Record(0, cache::PageKind::kQuantized, page) + layer.KCell(head);
        formats::LoadRow(formats::SideKind::kK, *layer.k.format, layer.shape, layer.k.sections, token % 16, cell, row);
        layer.k.format->decode_row(row, 64, 1.0f, found.data());
        ASSERT_EQ(found, expected) << scheme << " token " << token << " head " << head;
      }
    }
    EXPECT_EQ(backend->Counts(0).k.values, 21 * 2 * 64) << scheme;
    EXPECT_EQ(backend->Counts(0).k.saturated, 0) << scheme;
  }
}

TEST(BackendTest, CountsSaturation) {
  HarnessOptions options{.scheme = "fp8", .lengths = {20}};
  options.magnitude = 1;
  CacheHarness harness(options, 3);
  CacheHarness::Sequence& sequence = harness.sequences()[0];
  sequence.k[5] = 1e4f;
  sequence.v[7] = -1e4f;
  sequence.v[8] = std::numeric_limits<float>::infinity();
  const std::unique_ptr<Backend> backend = harness.CpuBackend(*testing::Units().front().table);
  harness.Append(*backend, {0, 20});
  EXPECT_EQ(backend->Counts(0).k.saturated, 1);
  EXPECT_EQ(backend->Counts(0).v.saturated, 2);
  EXPECT_EQ(backend->Scales(0).k.scale, harness.config().scales[0].k.scale);
}

// Layers with different schemes, windows and heads in one cache and one plan agree with the reference.
TEST(BackendTest, LayersOfDifferentKinds) {
  const formats::CacheLayout layout =
      formats::PlanCache({KvScheme::Parse("bf16"), KvScheme::Parse("int4"), KvScheme::Parse("fp8")},
                         {{2, 32}, {1, 64}, {2, 32}}, 16, {0, 1, 0});
  constexpr int kTokens = 75;
  cache::PagePool store(Cpu(), layout,
                        {.budget_bytes = 6 * (layout.page_bytes + layout.exact_page_bytes), .poison_unused = true});
  cache::BlockTable tables[2] = {cache::BlockTable(5), cache::BlockTable(5)};
  for (int group = 0; group < 2; ++group) {
    for (cache::PageRef& page : tables[group]) {
      page = {.quantized = store.Allocate(group, cache::PageKind::kQuantized),
              .exact = store.Allocate(group, cache::PageKind::kExact)};
    }
    std::ranges::shuffle(tables[group], std::mt19937(static_cast<uint32_t>(group)));
  }
  const cache::PageRef* const pages[] = {tables[0].data(), tables[1].data()};
  BackendConfig config;
  config.layers = {
      {.heads = 4, .kv_heads = 2, .head_dim = 32, .softmax_scale = 0.2f},
      {.heads = 2, .kv_heads = 1, .head_dim = 64, .softmax_scale = 0.1f, .visibility = cache::SlidingWindow(20)},
      {.heads = 2, .kv_heads = 2, .head_dim = 32, .softmax_scale = 0.2f}};
  for (const testing::Unit& unit : testing::Units()) {
    const std::unique_ptr<Backend> cpu = MakeCpuBackend(store, config, std::make_shared<ThreadPool>(2), *unit.table);
    const std::unique_ptr<Backend> reference = MakeReferenceBackend(store, config);
    std::unique_ptr<Plan> plan;
    int64_t start = 0;
    for (const int tokens : {40, 1, 34}) {
      const SequenceSpan span{.start = start, .tokens = tokens, .pages = pages};
      plan = cpu->MakePlan({.sequences = {&span, 1}}, std::move(plan));
      const std::unique_ptr<Plan> reference_plan = reference->MakePlan({.sequences = {&span, 1}}, nullptr);
      std::mt19937 random(static_cast<uint32_t>(start));
      std::normal_distribution<float> normal;
      for (int layer = 0; layer < 3; ++layer) {
        const AttentionSpec& attention = config.layers[static_cast<size_t>(layer)];
        const int64_t width = int64_t{attention.heads} * attention.head_dim;
        const int64_t stride = width + 2 * 64;  // q | k | v, the output of a fused QKV projection
        std::vector<float> qkv(static_cast<size_t>(tokens * stride));
        for (float& x : qkv) x = normal(random);
        cpu->Append(*plan, layer, qkv.data() + width, qkv.data() + width + 64, stride);
        std::vector<float> out(static_cast<size_t>(tokens * width)), expected(out.size());
        cpu->Run(*plan, layer, qkv.data(), stride, out.data());
        reference->Run(*reference_plan, layer, qkv.data(), stride, expected.data());
        // Values reach 3.5. int4: queries and probabilities are rounded to within half a step of 1 / 127 each. bf16 and
        // fp8: to bf16 or fp16 on some units.
        const kernels::AttentionKernels& table = *unit.table->attention;
        const DType operands = layer == 2 ? table.fp8_operands : table.bf16_operands;
        const double floats = std::max(1e-3, 3.5 * testing::OperandsOfFloats(operands).Rms());
        const double tolerance = layer == 1 ? 3.5 / testing::kInt8OperandSteps : floats;
        for (size_t i = 0; i < out.size(); ++i)
          ASSERT_NEAR(out[i], expected[i], tolerance) << unit.name << " " << layer;
      }
      start += tokens;
    }
    ASSERT_EQ(start, kTokens);
  }
}

TEST(BackendTest, BothDirectionsAreOfWholeSequences) {
  const auto& unit = *testing::Units().front().table;
  CacheHarness harness({.both_directions = true, .lengths = {40}}, 1);
  const std::unique_ptr<Backend> backend = harness.CpuBackend(unit);
  harness.RunStep(*backend, {{0, 20}});
  EXPECT_THAT(ErrorOf([&] {
                harness.RunStep(*backend, {{0, 20}});
              }),
              HasSubstr("start 20; attention in both directions"));
  CacheHarness latents({.rope_dim = 16, .both_directions = true}, 1);
  EXPECT_THAT(ErrorOf([&] { latents.CpuBackend(unit); }), HasSubstr("without latents"));
}

// A page outside every layer's window needs no record.
TEST(BackendTest, PagesBeyondTheWindowMayBeGone) {
  CacheHarness harness({.scheme = "int8", .sliding_window = 20, .lengths = {70}}, 1);
  const std::unique_ptr<Backend> backend = harness.CpuBackend(*testing::Units().front().table);
  const std::unique_ptr<Backend> reference = MakeReferenceBackend(harness.store(), harness.config());
  harness.Append(*backend, {0, 60});
  CacheHarness::Sequence& sequence = harness.sequences()[0];
  for (size_t page = 0; page < 2; ++page) {
    harness.store().Release(0, cache::PageKind::kQuantized, sequence.table[page].quantized);
    sequence.table[page] = {};
  }
  harness.RunStep(*backend, {{0, 10}}, reference.get());  // position 60 sees 41 to 60: from page 2
  for (size_t i = static_cast<size_t>(60 * harness.QWidth()); i < sequence.out.size(); ++i) {
    ASSERT_NEAR(sequence.out[i], sequence.expected[i], 1e-3);
  }
}

// Prepared queries are reused across tasks but not across calls, even if the plan and its tiles are the same.
TEST(BackendTest, EveryCallReadsItsOwnQueries) {
  CacheHarness harness({.scheme = "int4", .lengths = {200}}, 4);
  const kernels::IsaTable& unit = *testing::Units().front().table;
  const std::unique_ptr<Backend> backend = harness.CpuBackend(unit);
  harness.RunStep(*backend, {{0, 200}});
  CacheHarness::Sequence& sequence = harness.sequences()[0];
  const SequenceSpan last{.start = 199, .tokens = 1, .pages = sequence.Tables()};
  const int64_t width = harness.QWidth();
  const auto run = [&](Backend& with, Plan& plan, int64_t row) {
    std::vector<float> out(static_cast<size_t>(harness.OutWidth()));
    with.Run(plan, 0, sequence.q.data() + row * width, width, out.data());
    return out;
  };
  const std::unique_ptr<Plan> plan = backend->MakePlan({.sequences = {&last, 1}}, nullptr);
  const std::vector<float> first = run(*backend, *plan, 0);
  const std::vector<float> second = run(*backend, *plan, 1);
  const std::unique_ptr<Backend> fresh = harness.CpuBackend(unit);
  const std::unique_ptr<Plan> of_fresh = fresh->MakePlan({.sequences = {&last, 1}}, nullptr);
  EXPECT_EQ(second, run(*fresh, *of_fresh, 1));
  EXPECT_NE(second, first);
}

// Equal keys give equal weights: the output is the mean of the stored values.
TEST(BackendTest, EqualKeysGiveTheMean) {
  for (const char* scheme : {"fp32", "bf16", "int8", "int4+exact=none"}) {
    CacheHarness harness({.scheme = scheme, .heads = 1, .kv_heads = 1, .head_dim = 32, .lengths = {100}}, 3);
    CacheHarness::Sequence& sequence = harness.sequences()[0];
    for (size_t i = 32; i < sequence.k.size(); ++i) sequence.k[i] = sequence.k[i % 32];
    for (size_t i = 0; i < sequence.v.size(); ++i) sequence.v[i] = static_cast<float>(i / 32);
    for (const testing::Unit& unit : testing::Units()) {
      sequence.start = 0;
      const std::unique_ptr<Backend> backend = harness.CpuBackend(*unit.table);
      harness.RunStep(*backend, {{0, 100}});
      for (size_t i = 0; i < sequence.out.size(); ++i) {
        // Exact pages are bf16; int4 represents constants to the 11 bits of its scale, so sinks and keys differ
        // slightly.
        const double mean = static_cast<double>(i / 32) / 2;
        ASSERT_NEAR(sequence.out[i], mean, 0.01 * mean + 1e-4) << scheme << " " << unit.name << " row " << i / 32;
      }
    }
  }
}

TEST(ArrayAttentionTest, AgreesWithTheReferenceAndChecksShapes) {
  ArrayAttention options{.scheme = "int8", .heads = 4, .kv_heads = 2, .head_dim = 32};
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> q(3 * 128), k(40 * 64), v(40 * 64);
  for (std::vector<float>* values : {&q, &k, &v}) {
    for (float& x : *values) x = normal(random);
  }
  const ArrayAttentionResult cpu = RunArrayAttention(options, q, k, v, 37);
  options.backend = "reference";
  const ArrayAttentionResult reference = RunArrayAttention(options, q, k, v, 37);
  ASSERT_EQ(cpu.out.size(), q.size());
  for (size_t i = 0; i < q.size(); ++i) ASSERT_NEAR(cpu.out[i], reference.out[i], 2e-3);
  EXPECT_GT(cpu.cache_bytes, 40 * 64 * 2);
  EXPECT_THAT(ErrorOf([&] { RunArrayAttention(options, q, k, v, 36); }), HasSubstr("[36, 39) with 40 keys"));
  EXPECT_THAT(ErrorOf([&] { RunArrayAttention(options, q, k, q, 37); }), HasSubstr("v has 384"));
  options.scales.k.mean.assign(64, 0.5F);
  EXPECT_THAT(ErrorOf([&] { RunArrayAttention(options, q, k, v, 37); }), HasSubstr("K has no +mean or +query"));
  options.scheme = "int8+mean";
  EXPECT_EQ(ErrorOf([&] { RunArrayAttention(options, q, k, v, 37); }), "no error");
  options.scales.k.outliers = {1, 2, 3, 4};
  EXPECT_THAT(ErrorOf([&] { RunArrayAttention(options, q, k, v, 37); }), HasSubstr("K has no +outliers"));
  options.scheme = "int9";
  EXPECT_THAT(ErrorOf([&] { RunArrayAttention(options, q, k, v, 37); }), HasSubstr("int9"));
}

TEST(ArrayAttentionTest, RefusesStaticScalesOfFormatsWithoutThem) {
  ArrayAttention options{.scheme = "k=int8,v=fp8_e4m3", .heads = 2, .kv_heads = 2, .head_dim = 32};
  const std::vector<float> q(64, 1.0F), kv(8 * 64, 300.0F);
  options.scales.v.scale = {4, 4};
  EXPECT_EQ(RunArrayAttention(options, q, kv, kv, 7).saturated, 0);
  options.scales.k.scale = {1, 1};
  EXPECT_THAT(ErrorOf([&] { RunArrayAttention(options, q, kv, kv, 7); }),
              AllOf(HasSubstr("scales of K are given, but int8 has no static scales"), HasSubstr("fp8_e5m2")));
  options.scheme = "k=fp8_e4m3,v=int4";
  EXPECT_THAT(ErrorOf([&] { RunArrayAttention(options, q, kv, kv, 7); }), HasSubstr("scales of V"));
}

// The reference's own sink: a key that no value follows.
TEST(Sinks, AreKeysWithoutValues) {
  const std::vector<double> q = {1, 0.5};
  const std::vector<float> keys = {0.2f, -1, 0.7f, 0.4f, 1.5f, 0}, values = {3, 1, -2, 4, 0, 0};
  std::vector<double> with_sink(2), with_key(2);
  kernels::reference::Attend(q, keys.data(), values.data(), 2, {.scale = 0.7, .sink = 0.7 * 1.5}, with_sink);
  kernels::reference::Attend(q, keys.data(), values.data(), 3, {.scale = 0.7}, with_key);
  for (size_t c = 0; c < 2; ++c) EXPECT_NEAR(with_sink[c], with_key[c], 1e-12);
}

}  // namespace
}  // namespace kvanta::attention
