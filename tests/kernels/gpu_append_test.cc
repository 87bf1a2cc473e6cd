// Append kernels against the formats' encoders: every format, both sides, values of every sign, exponent and upper
// mantissa must give the same cell bytes.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <iterator>
#include <random>

#include "emulated/gpus.h"
#include "formats/bit_allocation.h"
#include "formats/cell.h"
#include "formats/cell_layout.h"
#include "formats/klt_levels.h"
#include "kernels/attention/cuda/kernel_list.h"

namespace kvanta::kernels::cuda {
namespace {

using formats::CellSections;
using formats::CellShape;
using formats::Format;
using formats::SideKind;

class GpuAppendTest : public testing::GpuTestBase, public ::testing::WithParamInterface<std::string> {
 protected:
  void SetUp() override { Start(GetParam()); }

  // Appends rows of one KV head, one record per page. `x`: f32 [tokens][head_dim], whole pages.
  void Check(const Format& format, SideKind kind, int head_dim, const std::vector<float>& x) {
    constexpr int kPage = 64;
    constexpr float kScale = 0.37F;
    const CellShape shape{.tokens = kPage, .head_dim = head_dim};
    const CellSections sections = formats::PlanCell(format, shape);
    const formats::BitAllocation allocation = formats::IsAllocated(format.code)
                                                  ? formats::DefaultAllocation(head_dim, format.code_bits)
                                                  : formats::BitAllocation{};
    const int tokens = static_cast<int>(x.size()) / head_dim;
    const int pages = tokens / kPage;
    std::vector<uint8_t> expected(static_cast<size_t>(pages * sections.bytes), 0xFF);
    std::vector<Slot> slots;
    formats::EncodeCounts counts;
    formats::RowBuffer buffer;
    for (int token = 0; token < tokens; ++token) {
      slots.push_back({.quantized = token / kPage, .offset = token % kPage, .row = token});
      format.encode_row(x.data() + int64_t{token} * head_dim, head_dim, {kScale, &allocation}, buffer.Sections(),
                        counts);
      formats::StoreRow(kind, format, shape, sections, token % kPage, buffer.Sections(),
                        expected.data() + token / kPage * sections.bytes);
    }
    const Buffer rows = Upload(x), device_slots = Upload(slots), scale = Upload(std::vector<float>{kScale});
    const Buffer cells = Upload(std::vector<uint8_t>(expected.size(), 0xFF));
    const Buffer sums = Upload(std::vector<AppendSums>(1));
    const Buffer mapping =
        Upload(std::vector<SlotMapping>{{.slots = device_slots.as<Slot>(), .count = static_cast<int32_t>(tokens)}});
    AppendParams params;
    params.rows = rows.as<float>();
    params.stride = head_dim;
    params.slot_mapping = mapping.as<SlotMapping>();
    params.max_slots = tokens;
    params.kv_heads = 1;
    params.row_dim = head_dim;
    params.head_dim = head_dim;
    params.page_size = kPage;
    params.is_key = kind == SideKind::kK;
    params.scale = scale.as<float>();
    const Buffer levels = Upload(LevelsOf(format)), allocations = Upload(std::vector{allocation});
    params.levels = levels.as<formats::TrellisLevelTable>();
    params.allocations = allocations.as<formats::BitAllocation>();
    params.quantized = {cells.data(), sections.bytes};
    params.cell = {.codes = sections.codes,
                   .block_scales = sections.block_scales,
                   .block_offsets = sections.block_offsets,
                   .token_scales = sections.token_scales,
                   .token_offsets = sections.token_offsets};
    params.sums = sums.as<AppendSums>();
    gpu_->Append(FindAppend(format), {.sides = {params}});
    gpu_->device().Synchronize();
    std::vector<uint8_t> found(expected.size());
    gpu_->device().CopyOut(found.data(), cells.data(), found.size());
    AppendSums counted;
    gpu_->device().CopyOut(&counted, sums.data(), sizeof(counted));
    const std::string name = fmt::format("{} {} {}", format.name, head_dim, params.is_key ? "k" : "v");
    ASSERT_EQ(found, expected) << name;
    EXPECT_EQ(counted.values, counts.values) << name;
    EXPECT_EQ(counted.saturated, counts.saturated) << name;
    EXPECT_EQ(counted.nan, counts.nan) << name;
  }

 private:
  static std::vector<formats::TrellisLevelTable> LevelsOf(const Format& format) {
    if (formats::IsTrellis(format.code)) return {formats::kTrellisLevels[format.code_bits - formats::kMinTrellisBits]};
    return {std::begin(formats::kKltLevels.widths), std::end(formats::kKltLevels.widths)};
  }
};

INSTANTIATE_TEST_SUITE_P(Gpus, GpuAppendTest, ::testing::ValuesIn(testing::Gpus()),
                         [](const auto& param) { return param.param; });

TEST_P(GpuAppendTest, EveryFormatSideAndKindOfValue) {
  std::mt19937 random(3);
  // One canonical NaN: sign and payload of a NaN after arithmetic differ between GPU and CPU.
  std::vector<float> every;
  for (uint32_t upper = 0; upper < 0x10000; ++upper) {
    const float x = std::bit_cast<float>(static_cast<uint32_t>((upper << 16U) | (random() & 0xffffU)));
    every.push_back(std::isnan(x) ? std::bit_cast<float>(0x7fffffffU) : x);
  }
  std::shuffle(every.begin(), every.end(), random);
#ifdef KVANTA_SANITIZED
  every.resize(64 * 128);
#endif
  constexpr int kSearchedValues = 64 * 128;  // by searches, which take long
  std::normal_distribution<float> normal;
  for (const Format& named : formats::All()) {
    for (const SideKind kind : {SideKind::kK, SideKind::kV}) {
      const Format& format = formats::OnSide(named, kind == SideKind::kK);
      ASSERT_GE(FindAppend(format), 0) << format.name;
      // Formats with channel scales: attention/gpu_test.cc. Latents have key order only.
      if (format.scaling.token_group != 0) continue;
      if (format.latents == formats::MlaSupport::kRequired && kind == SideKind::kV) continue;
      const bool searches = formats::IsTrellis(format.code) || formats::IsAllocated(format.code);
      if (searches && kind == SideKind::kV && named.value_side != nullptr)
        continue;  // t3 and t2, which come on their own
      if (formats::IsAllocated(format.code) && kind == SideKind::kV) continue;
      Check(format, kind, 128, searches ? std::vector(every.begin(), every.begin() + kSearchedValues) : every);
      for (const int head_dim : {64, 96, 256}) {
        std::vector<float> rows(static_cast<size_t>(head_dim * 64));
        for (float& x : rows) x = normal(random);
        Check(format, kind, head_dim, rows);
      }
    }
  }
}

}  // namespace
}  // namespace kvanta::kernels::cuda
