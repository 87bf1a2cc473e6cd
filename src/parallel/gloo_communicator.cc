#include "parallel/gloo_communicator.h"

#ifdef KVANTA_HAS_GLOO
#include <fmt/format.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/rendezvous/prefix_store.h>
#include <gloo/transport/tcp/device.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <optional>
#include <sstream>
#include <thread>

#include "kvanta/error.h"
#include "kvanta/rank_lost_error.h"
#include "parallel/rank_files.h"
#include "parallel/tcp_keepalive.h"

namespace kvanta::parallel {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kStart = std::chrono::minutes(2);  // time for processes to start, at least
constexpr milliseconds kLoad = std::chrono::hours(1);
constexpr milliseconds kNextStep = std::chrono::hours(24 * 365);
constexpr milliseconds kPoll(5);
// Bytes of a message. A rank sends one before it reads, and is at most two ahead of a reader: these fit into a socket's
// buffers, so that no two ranks wait for each other to read.
constexpr int64_t kChunk = 32 << 10;
constexpr int kGatherSlot = 0;
constexpr uint64_t kMessageSlot = 1;
constexpr milliseconds kFlush = std::chrono::seconds(5);  // at the end
constexpr size_t kFirstBytes = 4096;  // first part of a broadcast: its length, and most messages whole
constexpr uint64_t kMaxMessageBytes = uint64_t{1} << 30;  // a broadcast; a step's message has a few bytes per page

// Throws RankLostError for a loss that was reported.
void CheckReportedLoss(const GlooConfig& config) {
  const auto loss = FindRankLoss(config.folder, 0, config.size);
  if (loss) throw RankLostError(loss->rank, config.size, loss->reason);
}

// A process's end closes its connections before its parent can tell the reason.
std::optional<RankLoss> WaitForRankLoss(const GlooConfig& config, int begin, int end) {
  constexpr int kPolls = 100;
  for (int i = 0; i < kPolls; ++i) {
    if (i > 0) std::this_thread::sleep_for(kPoll);
    if (auto loss = FindRankLoss(config.folder, begin, end)) return loss;
  }
  return std::nullopt;
}

std::string TimeoutText(const GlooConfig& config) {
  return fmt::format("it did not answer within {} seconds (distributed_timeout_seconds)",
                     std::chrono::duration_cast<std::chrono::seconds>(config.timeout).count());
}

// Names the first line that is not the same.
[[noreturn]] void FailDifferent(const GlooConfig& config, int rank, const std::string& identity) {
  std::istringstream theirs(identity), ours(config.identity);
  std::string their_line, our_line;
  while (their_line == our_line && std::getline(theirs, their_line) && std::getline(ours, our_line)) {
  }
  throw InputError(fmt::format("rank {} of {} has {}, and rank {} has {}; all must have the same", rank, config.size,
                               their_line, config.rank, our_line));
}

// Waits until every rank has published its identity, and compares them.
void WaitForRanks(const GlooConfig& config) {
  WriteRankFile(RankFile(config.folder, config.rank, "ready"), config.identity);
  const milliseconds limit = std::max(kStart, config.timeout);
  const auto deadline = std::chrono::steady_clock::now() + limit;
  for (int rank = 0; rank < config.size;) {
    if (const auto identity = ReadRankFile(RankFile(config.folder, rank, "ready"))) {
      if (*identity != config.identity) FailDifferent(config, rank, *identity);
      ++rank;
      continue;
    }
    if (const auto loss = ReadRankLoss(config.folder, rank)) throw RankLostError(loss->rank, config.size, loss->reason);
    if (std::chrono::steady_clock::now() > deadline) {
      throw ResourceError(fmt::format("rank {} of {} has not come within {} seconds", rank, config.size,
                                      std::chrono::duration_cast<std::chrono::seconds>(limit).count()));
    }
    std::this_thread::sleep_for(kPoll);
  }
}

// Files by which ranks find each other's addresses. Waiting for them ends when a rank is lost: throws RankLostError.
class AddressStore final : public gloo::rendezvous::FileStore {
 public:
  explicit AddressStore(const GlooConfig& config) : FileStore(config.folder), config_(config) {}

  using FileStore::wait;
  void wait(const std::vector<std::string>& keys, const milliseconds& timeout) override {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    while (!check(keys)) {
      CheckReportedLoss(config_);
      if (std::chrono::steady_clock::now() > deadline) return FileStore::wait(keys, milliseconds(1));  // its exception
      std::this_thread::sleep_for(kPoll);
    }
  }

 private:
  const GlooConfig& config_;
};

// A message on its way.
struct Outgoing {
  std::vector<uint8_t> data;
  std::unique_ptr<gloo::transport::UnboundBuffer> buffer;
};

// A peer's connections: memory that Gloo sends from and receives into.
struct Peer {
  std::vector<uint8_t> received = std::vector<uint8_t>(kChunk);
  std::unique_ptr<gloo::transport::Buffer> send;
  std::unique_ptr<gloo::transport::Buffer> receive;
  std::deque<Outgoing> outgoing;  // the three above are of gathers
};

class GlooCommunicator final : public Communicator {
 public:
  explicit GlooCommunicator(const GlooConfig& config)
      : config_(config), gathers_(config.rank, config.size), messages_(config.rank, config.size) {
    gloo::transport::tcp::attr address;
    address.hostname = config.address;
    auto device = gloo::transport::tcp::CreateDevice(address);
    AddressStore store(config);
    const std::vector<int> files = OpenFiles();
    for (auto [name, context] : {std::pair("gathers", &gathers_), std::pair("messages", &messages_)}) {
      gloo::rendezvous::PrefixStore names(name, store);
      context->setTimeout(config.timeout);
      context->connectFullMesh(names, device);
    }
    if (config.other_machines) KeepNewConnectionsAlive(files);
    for (int rank = 0; rank < config.size; ++rank) {
      Peer& peer = peers_.emplace_back();
      if (rank == config.rank) continue;
      auto& pair = gathers_.getPair(rank);
      // The thread that waits reads the socket itself: the wake-up of Gloo's own thread takes longer than a message.
      pair->setSync(true, config.busy_poll);
      peer.send = pair->createSendBuffer(kGatherSlot, sent_.data(), sent_.size());
      peer.receive = pair->createRecvBuffer(kGatherSlot, peer.received.data(), peer.received.size());
    }
  }

  // The last messages arrive before the connections close.
  ~GlooCommunicator() override {
    try {
      for (Peer& peer : peers_) {
        for (const Outgoing& message : peer.outgoing) {
          if (!lost_) message.buffer->waitSend(kFlush);
        }
      }
    } catch (const std::exception&) {  // the other end is gone, or does not listen
    }
  }

  int Rank() const noexcept override { return config_.rank; }
  int Size() const noexcept override { return config_.size; }

  void ExchangeParts(const uint8_t* own, int64_t stride, std::span<const Destination> to) noexcept override {
    const Destination& place = to[static_cast<size_t>(config_.rank)];
    if (place.first != own + config_.rank * stride) CopyRows(place, 0, own + config_.rank * stride, place.Bytes());
    Exchange(own, stride, to, false);
  }

  void Gather(const void* own, std::span<const Destination> to) noexcept override {
    Exchange(static_cast<const uint8_t*>(own), 0, to, true);
  }

  void Broadcast(std::vector<uint8_t>& message) override {
    Check();
    try {
      if (config_.rank == 0) {
        SendMessage(message);
      } else {
        ReceiveMessage(message);
      }
    } catch (const std::exception& error) {
      MarkLost(error);
      Check();
    }
  }

  void WaitForAll() override {
    Check();
    try {
      uint8_t ready = 1;
      if (config_.rank != 0) return Post(0, &ready, sizeof(ready));
      for (int rank = 1; rank < config_.size; ++rank) ReceiveBytes(rank, &ready, sizeof(ready), kLoad);
    } catch (const std::exception& error) {
      MarkLost(error);
      Check();
    }
  }

  void Send(int to, const void* data, int64_t bytes) noexcept override {
    if (lost_) return;
    try {
      Post(to, static_cast<const uint8_t*>(data), static_cast<size_t>(bytes));
    } catch (const std::exception& error) {
      MarkLost(error);
    }
  }

  void Receive(int from, void* data, int64_t bytes) noexcept override {
    if (lost_) return;
    try {
      ReceiveBytes(from, static_cast<uint8_t*>(data), static_cast<size_t>(bytes), config_.timeout);
    } catch (const std::exception& error) {
      MarkLost(error);
    }
  }

  void Check() const override {
    if (lost_) throw RankLostError(loss_.rank, config_.size, loss_.reason);
  }
  void CheckReports() override {
    Check();
    CheckReportedLoss(config_);
  }
  void ReportLoss(int rank, const std::string& reason) noexcept override {
    ReportRankLoss(config_.folder, rank, {.rank = rank, .reason = reason});
  }

 private:
  // Chunk by chunk: sends this rank's, of which rank r gets those at `own` + r * stride, then reads the others'.
  void Exchange(const uint8_t* own, int64_t stride, std::span<const Destination> to, bool to_root) noexcept {
    if (lost_) return;
    try {
      const bool receives = !to_root || config_.rank == 0;
      const bool sends = !to_root || config_.rank != 0;
      const int64_t bytes = to[static_cast<size_t>(config_.rank)].Bytes();
      int64_t longest = 0;
      for (const Destination& each : to) longest = std::max(longest, each.Bytes());
      for (int64_t offset = 0; offset < longest; offset += kChunk) {
        if (sends && offset < bytes) SendChunk(own + offset, stride, std::min(kChunk, bytes - offset), to_root);
        if (!receives) continue;
        for (int rank = 0; rank < config_.size; ++rank) {
          const Destination& from = to[static_cast<size_t>(rank)];
          if (rank == config_.rank || offset >= from.Bytes()) continue;
          BeginOp(rank, config_.timeout);
          peers_[static_cast<size_t>(rank)].receive->waitRecv();
          CopyRows(from, offset, peers_[static_cast<size_t>(rank)].received.data(),
                   std::min(kChunk, from.Bytes() - offset));
        }
      }
    } catch (const std::exception& error) {
      MarkLost(error);
    }
  }

  void SendChunk(const uint8_t* data, int64_t stride, int64_t bytes, bool to_root) {
    for (int rank = 0; rank < (to_root ? 1 : config_.size); ++rank) {
      if (rank == config_.rank) continue;
      std::memcpy(sent_.data(), data + rank * stride, static_cast<size_t>(bytes));
      BeginOp(rank, config_.timeout);
      gloo::transport::Buffer& buffer = *peers_[static_cast<size_t>(rank)].send;
      buffer.send(0, static_cast<size_t>(bytes));
      buffer.waitSend();
    }
  }

  // Copies bytes [offset, offset + bytes) of a rank's dense rows to their places.
  static void CopyRows(const Destination& to, int64_t offset, const uint8_t* from, int64_t bytes) noexcept {
    while (bytes > 0) {
      const int64_t row = offset / to.row_bytes, column = offset % to.row_bytes;
      const int64_t some = std::min(bytes, to.row_bytes - column);
      std::memcpy(to.first + row * to.stride + column, from, static_cast<size_t>(some));
      offset += some;
      from += some;
      bytes -= some;
    }
  }

  void SendMessage(const std::vector<uint8_t>& message) {
    const auto length = static_cast<uint64_t>(message.size());
    first_.assign(kFirstBytes, 0);
    const size_t some = std::min(message.size(), kFirstBytes - sizeof(length));
    std::memcpy(first_.data(), &length, sizeof(length));
    if (some > 0) std::memcpy(first_.data() + sizeof(length), message.data(), some);
    for (int rank = 1; rank < config_.size; ++rank) {
      Post(rank, first_.data(), first_.size());
      if (some < message.size()) Post(rank, message.data() + some, message.size() - some);
    }
  }

  // Gloo sends when the receiver asks for the message.
  void Post(int to, const uint8_t* data, size_t bytes) {
    BeginOp(to, config_.timeout);
    std::deque<Outgoing>& outgoing = peers_[static_cast<size_t>(to)].outgoing;
    Outgoing message;
    // More than a pipeline with a step in each rank has on its way: the oldest one has arrived.
    if (std::ssize(outgoing) >= int64_t{3} * (config_.size + 1)) {
      outgoing.front().buffer->waitSend(config_.timeout);
      message.data = std::move(outgoing.front().data);
      outgoing.pop_front();
    }
    message.data.assign(data, data + bytes);
    message.buffer = messages_.createUnboundBuffer(message.data.data(), bytes);
    outgoing.push_back(std::move(message));
    outgoing.back().buffer->send(to, kMessageSlot);
  }

  void ReceiveMessage(std::vector<uint8_t>& message) {
    uint64_t length = 0;
    first_.resize(kFirstBytes);
    ReceiveBytes(0, first_.data(), kFirstBytes, kNextStep);
    std::memcpy(&length, first_.data(), sizeof(length));
    if (length > kMaxMessageBytes) throw ResourceError(fmt::format("a message of {} bytes is too long", length));
    message.resize(length);
    const size_t some = std::min(message.size(), kFirstBytes - sizeof(length));
    if (some > 0) std::memcpy(message.data(), first_.data() + sizeof(length), some);
    if (some < message.size()) ReceiveBytes(0, message.data() + some, message.size() - some, config_.timeout);
  }

  void ReceiveBytes(int from, uint8_t* data, size_t bytes, milliseconds limit) {
    BeginOp(from, limit);
    const auto buffer = messages_.createUnboundBuffer(data, bytes);
    buffer->recv(from, kMessageSlot);
    buffer->waitRecv(limit);
  }

  // Begins an operation in which `rank` has to take part within `limit`.
  void BeginOp(int rank, milliseconds limit) noexcept {
    peer_ = rank;
    answer_by_ = std::chrono::steady_clock::now() + limit;
  }

  // peer_ did not take part in the operation in progress.
  void MarkLost(const std::exception& error) noexcept {
    loss_.rank = peer_;
    try {
      const std::string_view text = error.what();
      const bool is_silent = std::chrono::steady_clock::now() >= answer_by_;
      // Gloo has one type for all errors of a connection; TCP's own timeout is in its text alone, as the system has it.
      if (text.find(std::strerror(ETIMEDOUT)) != text.npos) {
        ReportLoss(peer_, "its machine does not answer, or the network failed");
      } else if (is_silent) {
        ReportLoss(peer_, TimeoutText(config_));
      }
      loss_ = WaitForRankLoss(config_, peer_, peer_ + 1).value_or(RankLoss{peer_, std::string(text)});
    } catch (...) {  // no memory for the text
    }
    lost_ = true;  // CheckReports of another thread reads loss_
  }

  const GlooConfig config_;
  gloo::rendezvous::Context gathers_, messages_;
  std::vector<uint8_t> sent_ = std::vector<uint8_t>(kChunk);
  std::vector<uint8_t> first_;
  std::vector<Peer> peers_;                          // [ranks]; this rank's is empty
  int peer_ = 0;                                     // rank that the operation in progress waits for
  std::chrono::steady_clock::time_point answer_by_;  // end of peer_'s time
  std::atomic<bool> lost_ = false;
  RankLoss loss_;
};

}  // namespace

std::unique_ptr<Communicator> JoinGloo(const GlooConfig& config) {
  WaitForRanks(config);
  try {
    return std::make_unique<GlooCommunicator>(config);
  } catch (const gloo::Exception& error) {
    if (const auto loss = WaitForRankLoss(config, 0, config.size)) {
      throw RankLostError(loss->rank, config.size, loss->reason);
    }
    throw ResourceError(fmt::format("ranks cannot connect: {}", error.what()));
  }
}

std::string MissingForGloo() {
  return "";
}

}  // namespace kvanta::parallel

#else
#include "kvanta/error.h"

namespace kvanta::parallel {

std::unique_ptr<Communicator> JoinGloo(const GlooConfig& /*config*/) {
  throw InputError(MissingForGloo());
}

std::string MissingForGloo() {
  return "this build has no Gloo (KVANTA_GLOO=OFF, or it was not found)";
}

}  // namespace kvanta::parallel
#endif
