#include "kernels/cuda/gpu_communicator.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <stop_token>
#include <thread>
#include <utility>
#include <vector>

#include "base/math.h"
#include "kvanta/error.h"
#include "kvanta/rank_lost_error.h"
#include "parallel/nccl.h"

namespace kvanta::kernels {
namespace {

using parallel::Partition;
using std::chrono::steady_clock;

// Rows are gathered in pieces of about this size, which bounds the memory for them.
constexpr int64_t kGatherBytes = int64_t{32} << 20;
constexpr std::chrono::milliseconds kReportPoll(100);

class GpuCommunicator final : public parallel::Communicator {
 public:
  GpuCommunicator(GpuRanks ranks, std::shared_ptr<const parallel::NcclLibrary> library)
      : gpu_(std::move(ranks.gpu)), host_(std::move(ranks.host)), timeout_(ranks.timeout) {
    if (library == nullptr) {
      host_rows_ = gpu_->device().AllocateHost(kGatherBytes);
      host_own_ = gpu_->device().AllocateHost(kGatherBytes);
      return;
    }
    gathered_ = gpu_->device().Allocate(kGatherBytes);
    nccl_ = std::make_unique<parallel::NcclGroup>(std::move(library), *host_, [gpu = gpu_] { gpu->Select(); });
    gpu_->SetWaitCheck([this](std::chrono::duration<double> waited) { CheckWait(waited); });
    watcher_ = std::jthread([this](const std::stop_token& stop) { WatchLaunches(stop); });
  }
  ~GpuCommunicator() override { gpu_->SetWaitCheck(nullptr); }

  int Rank() const noexcept override { return host_->Rank(); }
  int Size() const noexcept override { return host_->Size(); }
  void Gather(const void* own, std::span<const parallel::Destination> to) noexcept override { host_->Gather(own, to); }
  void ExchangeParts(const uint8_t* own, int64_t stride, std::span<const parallel::Destination> to) noexcept override {
    host_->ExchangeParts(own, stride, to);
  }
  void Broadcast(std::vector<uint8_t>& message) override {
    OrAbort([&] { host_->Broadcast(message); });
  }
  void WaitForAll() override {
    OrAbort([&] { host_->WaitForAll(); });
  }
  void Send(int to, const void* data, int64_t bytes) noexcept override { host_->Send(to, data, bytes); }
  void Receive(int from, void* data, int64_t bytes) noexcept override { host_->Receive(from, data, bytes); }
  void Check() const override {
    if (const std::exception_ptr error = Error()) std::rethrow_exception(error);
    OrAbort([&] { host_->Check(); });
  }
  void CheckReports() override {
    OrAbort([&] { host_->CheckReports(); });
  }
  void ReportLoss(int rank, const std::string& reason) noexcept override { host_->ReportLoss(rank, reason); }
  bool CanCaptureGathers() const noexcept override { return nccl_ != nullptr; }

  void AllGatherColumns(const float* own, int64_t rows, const Partition& columns, float* out) noexcept override {
    ForPieces(own, columns.Size(Rank()), rows, columns, out, &GpuCommunicator::AllGatherOnHost);
  }
  void GatherColumns(const float* own, int64_t rows, const Partition& columns, float* out) noexcept override {
    const bool is_root = Rank() == 0;
    ForPieces(own, is_root ? columns.count : columns.Size(Rank()), rows, columns, is_root ? out : nullptr,
              &GpuCommunicator::GatherOnHost);
  }

 private:
  // Columns of this rank, f32 rows `stride` floats apart, and of all ranks; null: of no interest here.
  struct Piece {
    const float* own;
    int64_t stride;
    int64_t rows;
    float* out;
  };

  // Ends gathers in progress if `call` throws: no other rank may come to them.
  template <class Call>
  void OrAbort(Call call) const {
    try {
      call();
    } catch (const std::exception&) {
      if (nccl_) nccl_->Abort();
      throw;
    }
  }

  void ForPieces(const float* own, int64_t stride, int64_t rows, const Partition& columns, float* out,
                 void (GpuCommunicator::*gather_on_host)(const Piece&, const Partition&)) noexcept {
    const auto row_bytes = RoundUp(columns.count, int64_t{Size()}) * static_cast<int64_t>(sizeof(float));
    const int64_t at_once = std::max<int64_t>(1, kGatherBytes / row_bytes);
    try {
      for (int64_t first = 0; first < rows && !Error(); first += at_once) {
        const Piece piece{.own = own + first * stride,
                          .stride = stride,
                          .rows = std::min(at_once, rows - first),
                          .out = out == nullptr ? nullptr : out + first * columns.count};
        if (nccl_) {
          GatherOnGpu(piece, columns);
        } else {
          (this->*gather_on_host)(piece, columns);
        }
      }
    } catch (const std::exception&) {  // of copies; the other ranks see this one end
      const std::lock_guard lock(mutex_);
      error_ = std::current_exception();
    }
  }
  std::exception_ptr Error() const {
    const std::lock_guard lock(mutex_);
    return error_;
  }

  // NCCL gathers parts of one size, rank after rank.
  void GatherOnGpu(const Piece& piece, const Partition& columns) noexcept {
    const int64_t own_columns = columns.Size(Rank()), widest = CeilDiv(columns.count, int64_t{Size()});
    const int64_t part = piece.rows * widest;
    auto* const gathered = gathered_.as<float>();
    const bool is_dense = piece.rows == 1 || piece.stride == own_columns;
    const float* own = piece.own;
    if (!is_dense || own_columns < widest) {
      float* const place = gathered + Rank() * part;
      if (own_columns > 0) {
        gpu_->Run(cuda::CopyOp{.x = own,
                               .x_stride = piece.stride,
                               .ids = nullptr,
                               .rows = piece.rows,
                               .width = own_columns,
                               .out = place,
                               .out_stride = own_columns});
      }
      own = place;
    }
    const bool is_row = piece.out != nullptr && piece.rows == 1 && columns.count % Size() == 0;
    gpu_->AllGather(*nccl_, own, is_row ? piece.out : gathered, static_cast<size_t>(part) * sizeof(float));
    if (piece.out == nullptr || is_row) return;
    gpu_->Run(cuda::JoinColumnsOp{
        .x = gathered, .rank_stride = part, .columns = columns, .rows = piece.rows, .out = piece.out});
  }

  void AllGatherOnHost(const Piece& piece, const Partition& columns) {
    auto *const own = host_own_.as<float>(), *const all = host_rows_.as<float>();
    gpu_->device().CopyOut(own, piece.own, Bytes(piece.rows, columns.Size(Rank())));
    host_->AllGatherColumns(own, piece.rows, columns, all);
    gpu_->device().CopyIn(piece.out, all, Bytes(piece.rows, columns.count));
  }

  void GatherOnHost(const Piece& piece, const Partition& columns) {
    auto *const own = host_own_.as<float>(), *const all = host_rows_.as<float>();
    if (piece.out == nullptr) {
      gpu_->device().CopyOut(own, piece.own, Bytes(piece.rows, columns.Size(Rank())));
      return host_->GatherColumns(own, piece.rows, columns, nullptr);
    }
    gpu_->device().CopyOut(all, piece.out, Bytes(piece.rows, columns.count));  // with rank 0's columns
    host_->GatherColumns(all, piece.rows, columns, all);
    gpu_->device().CopyIn(piece.out, all, Bytes(piece.rows, columns.count));
  }

  static size_t Bytes(int64_t rows, int64_t columns) noexcept {
    return static_cast<size_t>(rows * columns) * sizeof(float);
  }

  // The kernels of a gather run until all ranks take part.
  void CheckWait(std::chrono::duration<double> waited) {
    const std::lock_guard lock(mutex_);
    if (error_) std::rethrow_exception(error_);
    const auto now = steady_clock::now();
    if (now < next_check_) return;
    next_check_ = now + kReportPoll;
    try {
      CheckReports();
      if (const std::string error = nccl_->AsyncError(); !error.empty()) throw ResourceError(error);
      if (waited < timeout_) return;
      const int lost = (Rank() + 1) % Size();
      const std::string reason = fmt::format(
          "it or another one did not take part in a gather of their GPUs within {} seconds "
          "(distributed_timeout_seconds)",
          timeout_.count());
      ReportLoss(lost, reason);
      throw RankLostError(lost, Size(), reason);
    } catch (const std::exception&) {
      error_ = std::current_exception();
      nccl_->Abort();
      throw;
    }
  }

  // A launch waits while the GPU's queue is full, for as long as a gather in it. Where that takes long, checks as waits
  // do: the launch then returns, and Check() throws.
  void WatchLaunches(const std::stop_token& stop) {
    std::mutex mutex;
    std::condition_variable_any stopped;
    std::unique_lock lock(mutex);
    while (!stop.stop_requested()) {
      stopped.wait_for(lock, stop, kReportPoll, [] { return false; });
      const std::chrono::duration<double> launching = gpu_->LaunchTime();
      if (launching < kReportPoll) continue;
      try {
        CheckWait(launching);
      } catch (const std::exception&) {  // kept in error_
      }
    }
  }

  const std::shared_ptr<CudaContext> gpu_;
  const std::shared_ptr<parallel::Communicator> host_;
  const std::chrono::seconds timeout_;
  steady_clock::time_point next_check_;
  Buffer gathered_;              // with nccl_: f32 [ranks][rows][columns of the widest part]
  Buffer host_own_, host_rows_;  // without: f32 [rows][columns of this rank], [rows][columns]
  // Null: gathers pass through the host. Destroyed first, since freeing memory waits for gathers in progress.
  std::unique_ptr<parallel::NcclGroup> nccl_;
  mutable std::mutex mutex_;  // of error_ and next_check_
  std::exception_ptr error_;
  std::jthread watcher_;
};

// The rank's reason for not using NCCL; "" if it can.
std::string LoadOrExplain(const std::string& name, std::shared_ptr<const parallel::NcclLibrary>& library) {
  if (name.empty()) return "gathers of this GPU pass through the host";
  try {
    library = parallel::LoadNccl(name);
    return "";
  } catch (const ResourceError& error) {
    return error.what();
  }
}

// The first rank that cannot use NCCL, of all ranks that call this; -1: none.
int FirstWithoutNccl(parallel::Communicator& ranks, bool has_nccl) {
  std::array<uint8_t, parallel::kMaxRanks> have{};
  std::array<parallel::Destination, parallel::kMaxRanks> to;
  const auto size = static_cast<size_t>(ranks.Size());
  for (size_t rank = 0; rank < size; ++rank) to[rank] = {.first = &have[rank], .rows = 1, .row_bytes = 1};
  const uint8_t own = has_nccl ? 1 : 0;
  ranks.AllGather(&own, std::span(to).first(size));
  ranks.Check();
  const auto found = std::find(have.begin(), have.begin() + ranks.Size(), 0);
  return found == have.begin() + ranks.Size() ? -1 : static_cast<int>(found - have.begin());
}

}  // namespace

std::shared_ptr<parallel::Communicator> MakeGpuCommunicator(GpuRanks ranks) {
  const std::string name = ranks.gpu->NcclLibrary();
  std::shared_ptr<const parallel::NcclLibrary> library;
  std::string missing = LoadOrExplain(name, library);
  const int without = FirstWithoutNccl(*ranks.host, library != nullptr);
  if (without >= 0) library = nullptr;
  if (without >= 0 && ranks.host->Rank() == 0 && ranks.on_warning && !name.empty()) {
    if (without > 0) missing = fmt::format("rank {} of {} cannot load NCCL", without, ranks.host->Size());
    ranks.on_warning(fmt::format(
        "{}. Until then ranks exchange activations through the host's memory, and decode steps are no CUDA graphs",
        missing));
  }
  return std::make_shared<GpuCommunicator>(std::move(ranks), std::move(library));
}

}  // namespace kvanta::kernels
