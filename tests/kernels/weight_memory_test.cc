// WeightMemory: parts of large pieces are disjoint and outlive the object that allocated them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "kernels/linear/cpu/packed_linear.h"

namespace kvanta::kernels {
namespace {

TEST(WeightMemory, PartsAreDisjointZeroedAndOutliveTheObject) {
  std::optional<WeightMemory> memory(std::in_place);
  // Tiny and large parts are allocated separately; 3 MiB parts need several pieces; odd sizes must not break the
  // alignment of the next part.
  std::vector<Buffer> parts;
  for (const size_t bytes : {size_t{100}, (size_t{64} << 10) + 1, size_t{100'001}, size_t{5} << 20}) {
    parts.push_back(memory->Take(bytes));
    ASSERT_EQ(parts.back().bytes(), bytes);
  }
  for (int i = 0; i < 8; ++i) parts.push_back(memory->Take(size_t{3} << 20));
  memory.reset();
  for (size_t i = 0; i < parts.size(); ++i) {
    const Buffer& part = parts[i];
    EXPECT_EQ(reinterpret_cast<uintptr_t>(part.data()) % 64, 0U);
    EXPECT_TRUE(std::all_of(part.data(), part.data() + part.bytes(), [](uint8_t byte) { return byte == 0; })) << i;
    std::fill_n(part.data(), part.bytes(), static_cast<uint8_t>(i + 1));
  }
  for (size_t i = 0; i < parts.size(); ++i) {
    const Buffer& part = parts[i];
    const auto value = static_cast<uint8_t>(i + 1);
    EXPECT_TRUE(std::all_of(part.data(), part.data() + part.bytes(), [&](uint8_t byte) { return byte == value; })) << i;
  }
}

}  // namespace
}  // namespace kvanta::kernels
