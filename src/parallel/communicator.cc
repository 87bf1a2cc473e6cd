#include "parallel/communicator.h"

#include <array>

namespace kvanta::parallel {
namespace {

std::array<Destination, kMaxRanks> Columns(int64_t rows, const Partition& columns, float* out) noexcept {
  std::array<Destination, kMaxRanks> to;
  for (int rank = 0; rank < columns.ranks; ++rank) {
    to[static_cast<size_t>(rank)] = {.first = reinterpret_cast<uint8_t*>(out + columns.Begin(rank)),
                                     .rows = rows,
                                     .row_bytes = columns.Size(rank) * static_cast<int64_t>(sizeof(float)),
                                     .stride = columns.count * static_cast<int64_t>(sizeof(float))};
  }
  return to;
}

}  // namespace

void Communicator::AllToAll(const uint8_t* own, int64_t part_bytes, uint8_t* received) noexcept {
  std::array<Destination, kMaxRanks> to;
  for (int rank = 0; rank < Size(); ++rank) {
    uint8_t* place = rank == Rank() ? const_cast<uint8_t*>(own) : received;  // already there: not written
    to[static_cast<size_t>(rank)] = {.first = place + rank * part_bytes, .rows = 1, .row_bytes = part_bytes};
  }
  ExchangeParts(own, part_bytes, std::span(to).first(static_cast<size_t>(Size())));
}

void Communicator::AllGatherColumns(const float* own, int64_t rows, const Partition& columns, float* out) noexcept {
  const auto to = Columns(rows, columns, out);
  AllGather(own, std::span(to).first(static_cast<size_t>(columns.ranks)));
}

void Communicator::GatherColumns(const float* own, int64_t rows, const Partition& columns, float* out) noexcept {
  const auto to = Columns(rows, columns, out);
  Gather(own, std::span(to).first(static_cast<size_t>(columns.ranks)));
}

}  // namespace kvanta::parallel
