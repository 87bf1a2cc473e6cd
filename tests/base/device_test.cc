#include "base/device.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "base/quote.h"
#include "kvanta/error.h"

namespace kvanta {
namespace {

TEST(CpuDevice, AllocatesAlignedZeros) {
  for (const size_t bytes : {size_t{1}, size_t{1000}, size_t{5} << 20}) {
    const Buffer buffer = Cpu().Allocate(bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % 64, 0U);
    EXPECT_EQ(buffer.bytes(), bytes);
    EXPECT_EQ(buffer.data()[0], 0);
    EXPECT_EQ(buffer.data()[bytes - 1], 0);
  }
}

TEST(CpuDevice, RefusesMoreThanThereIs) {
  try {
    Cpu().Allocate(size_t{1} << 50);
    FAIL() << "a petabyte was allocated";
  } catch (const ResourceError& error) {
    EXPECT_EQ(std::string(error.what()).find("1024.0 TiB of memory requested, "), 0U) << error.what();
  }
}

TEST(FormatBytes, ChoosesTheUnit) {
  EXPECT_EQ(FormatBytes(0), "0 B");
  EXPECT_EQ(FormatBytes(1023), "1023 B");
  EXPECT_EQ(FormatBytes(1536), "1.5 KiB");
  EXPECT_EQ(FormatBytes(19398656), "18.5 MiB");
  EXPECT_EQ(FormatBytes(int64_t{24} << 30), "24.0 GiB");
}

TEST(CpuDevice, ReservationGivesMemoryBackButKeepsNeighbours) {
  const auto reservation = Cpu().Reserve(size_t{8} << 20);
  std::memset(reservation->data(), 1, reservation->bytes());
  reservation->Release(100, 3 * 4096);
  EXPECT_EQ(reservation->data()[99], 1);
  EXPECT_EQ(reservation->data()[4096], 0);  // an OS page wholly inside was dropped
  EXPECT_EQ(reservation->data()[100 + 3 * 4096], 1);
}

TEST(CpuDevice, AvailableBytes) {
  EXPECT_GT(Cpu().AvailableBytes(), 1 << 20);
}

}  // namespace
}  // namespace kvanta
