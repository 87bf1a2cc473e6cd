#include "base/device.h"

#include <gtest/gtest.h>

#include <cstring>

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
  EXPECT_THROW(Cpu().Allocate(size_t{1} << 50), ResourceError);
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
