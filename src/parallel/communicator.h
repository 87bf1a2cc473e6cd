// Ranks: processes that compute one model together, each with a part of its weights and of the cache. A communicator
// moves values between them and never adds any up, so that results do not depend on the number of ranks
// (docs/adr/0052).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace kvanta::parallel {

inline constexpr int kMaxRanks = 16;

// Division of `count` rows or columns into consecutive parts, one per rank.
struct Partition {
  int64_t count = 0;
  int ranks = 1;

  constexpr int64_t Begin(int rank) const noexcept { return count * rank / ranks; }
  constexpr int64_t Size(int rank) const noexcept { return Begin(rank + 1) - Begin(rank); }
  constexpr int RankOf(int64_t index) const noexcept { return static_cast<int>(((index + 1) * ranks - 1) / count); }
};

// Consecutive KV heads of a rank.
struct KvHeads {
  int first = 0;
  int count = 0;
};

// The KV heads that the query heads of a rank read. The number of ranks divides `heads`, or is a multiple of it, so
// that consecutive ranks have the same KV head.
constexpr KvHeads KvHeadsOfRank(int heads, int rank, int ranks) noexcept {
  if (ranks > heads) return {.first = rank * heads / ranks, .count = 1};
  return {.first = rank * (heads / ranks), .count = heads / ranks};
}

// Place of a rank's dense [rows][row_bytes] in a receiver's memory.
struct Destination {
  uint8_t* first = nullptr;
  int64_t rows = 0;
  int64_t row_bytes = 0;
  int64_t stride = 0;  // in bytes

  int64_t Bytes() const noexcept { return rows * row_bytes; }
};

// The only rank: nothing to communicate. Other communicators: gloo_communicator.h. All ranks must make the same calls
// in the same order. Gathers and Receive return undefined values after a rank is lost; Check() then throws.
class Communicator {
 public:
  Communicator() = default;
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  virtual int Rank() const noexcept { return 0; }
  virtual int Size() const noexcept { return 1; }
  bool IsSingleRank() const noexcept { return Size() == 1; }
  Partition PartitionOf(int64_t count) const noexcept { return {count, Size()}; }
  KvHeads OwnKvHeads(int heads) const noexcept { return KvHeadsOfRank(heads, Rank(), Size()); }

  // Every rank gets every rank's bytes, its own included unless they are there already. `to`: one for each rank; `own`
  // has as many bytes as this rank's says.
  void AllGather(const void* own, std::span<const Destination> to) noexcept {
    ExchangeParts(static_cast<const uint8_t*>(own), 0, to);
  }
  // The same for rank 0 alone.
  virtual void Gather(const void* /*own*/, std::span<const Destination> /*to*/) noexcept {}
  // Sends part r of `own`, [ranks][part_bytes], to rank r, and receives the part of each other rank in its place in
  // `received`, [ranks][part_bytes]; this rank's own part stays where it is.
  void AllToAll(const uint8_t* own, int64_t part_bytes, uint8_t* received) noexcept;
  // Gives rank 0's message to the others, which wait for it without limit. Rank 0 does not wait for them. Throws
  // RankLostError once a rank is lost.
  virtual void Broadcast(std::vector<uint8_t>& /*message*/) {}
  // Rank 0 waits until the others have come here, too, for up to an hour: ranks load at different speeds. Throws
  // RankLostError.
  virtual void WaitForAll() {}
  // Sends `bytes` to one rank, which receives as many, in the order of sending; comes back with a copy on its way.
  virtual void Send(int /*to*/, const void* /*data*/, int64_t /*bytes*/) noexcept {}
  virtual void Receive(int /*from*/, void* /*data*/, int64_t /*bytes*/) noexcept {}
  // Throws RankLostError once a rank is lost.
  virtual void Check() const {}
  // The same, and looks whether a loss has been reported: for waits that are not the communicator's.
  virtual void CheckReports() {}
  // Tells all processes that a rank is lost, for waits that are not the communicator's.
  virtual void ReportLoss(int /*rank*/, const std::string& /*reason*/) noexcept {}
  // True if a CUDA graph may hold gathers, which are then launches of the GPU.
  virtual bool CanCaptureGathers() const noexcept { return true; }

  // AllGather and AllToAll: rank r gets the bytes at `own` + r * stride.
  virtual void ExchangeParts(const uint8_t* /*own*/, int64_t /*stride*/, std::span<const Destination> /*to*/) noexcept {
  }

  // own: f32 [rows][part] dense, this rank's columns -> out: f32 [rows][columns.count] on every rank. Memory of the
  // model's device, as all that blocks of a model gather.
  virtual void AllGatherColumns(const float* own, int64_t rows, const Partition& columns, float* out) noexcept;
  // The same for rank 0 alone, whose own columns are in `out` already.
  virtual void GatherColumns(const float* own, int64_t rows, const Partition& columns, float* out) noexcept;
};

}  // namespace kvanta::parallel
