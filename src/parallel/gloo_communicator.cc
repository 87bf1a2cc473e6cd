#include "parallel/gloo_communicator.h"

#ifdef KVANTA_HAS_GLOO
#include <fmt/format.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/rendezvous/prefix_store.h>
#include <gloo/transport/tcp/device.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <thread>

#include "base/quote.h"
#include "kvanta/error.h"

namespace kvanta::parallel {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kTimeout = std::chrono::minutes(2);  // of ranks that live but do not answer
constexpr milliseconds kNextStep = std::chrono::hours(24 * 365);
constexpr milliseconds kPoll(5);
// Bytes of a message. A rank sends one before it reads, and is at most two ahead of a reader: these fit into a socket's
// buffers, so that no two ranks wait for each other to read.
constexpr int64_t kChunk = 32 << 10;
constexpr int kGatherSlot = 0;
constexpr uint64_t kBroadcastSlot = 1;
constexpr size_t kFirstBytes = 4096;  // of a broadcast: its length, and most messages whole

std::string FilePath(const std::string& folder, int rank, std::string_view suffix) {
  return fmt::format("{}/rank-{}.{}", folder, rank, suffix);
}

std::optional<std::string> ReadText(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// Written whole or not at all.
void WriteText(const std::string& path, const std::string& text) {
  const std::string unfinished = path + ".new";
  std::ofstream file(unfinished, std::ios::binary);
  file << text;
  file.close();
  std::error_code error;
  std::filesystem::rename(unfinished, path, error);
  if (!file || error) throw ResourceError(fmt::format("{}: cannot be written", Quote(path)));
}

// A process's end closes its connections before its parent can tell the reason.
std::string LostText(const GlooConfig& config, int rank, const std::string& fallback) {
  constexpr int kPolls = 100;
  std::optional<std::string> reason;
  for (int i = 0; i < kPolls && !reason; ++i) {
    if (i > 0) std::this_thread::sleep_for(kPoll);
    reason = ReadText(FilePath(config.folder, rank, "error"));
  }
  return fmt::format("rank {} of {} is lost, and the engine ends: {}", rank, config.size, reason.value_or(fallback));
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

// Waits until every rank has told its identity, and compares them.
void WaitForRanks(const GlooConfig& config) {
  WriteText(FilePath(config.folder, config.rank, "ready"), config.identity);
  const auto deadline = std::chrono::steady_clock::now() + kTimeout;
  for (int rank = 0; rank < config.size;) {
    if (const auto identity = ReadText(FilePath(config.folder, rank, "ready"))) {
      if (*identity != config.identity) FailDifferent(config, rank, *identity);
      ++rank;
      continue;
    }
    if (ReadText(FilePath(config.folder, rank, "error"))) throw ResourceError(LostText(config, rank, ""));
    if (std::chrono::steady_clock::now() > deadline) {
      throw ResourceError(fmt::format("rank {} of {} has not come within {} seconds", rank, config.size,
                                      std::chrono::duration_cast<std::chrono::seconds>(kTimeout).count()));
    }
    std::this_thread::sleep_for(kPoll);
  }
}

// A peer's connection for gathers: memory that Gloo sends from and receives into.
struct Peer {
  std::vector<uint8_t> received = std::vector<uint8_t>(kChunk);
  std::unique_ptr<gloo::transport::Buffer> send;
  std::unique_ptr<gloo::transport::Buffer> receive;
};

class GlooCommunicator final : public Communicator {
 public:
  explicit GlooCommunicator(const GlooConfig& config)
      : config_(config), gathers_(config.rank, config.size), broadcasts_(config.rank, config.size) {
    gloo::transport::tcp::attr address;
    address.hostname = "127.0.0.1";
    auto device = gloo::transport::tcp::CreateDevice(address);
    gloo::rendezvous::FileStore store(config.folder);
    for (auto [name, context] : {std::pair("gathers", &gathers_), std::pair("broadcasts", &broadcasts_)}) {
      gloo::rendezvous::PrefixStore names(name, store);
      context->setTimeout(kTimeout);
      context->connectFullMesh(names, device);
    }
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

  int Rank() const noexcept override { return config_.rank; }
  int Size() const noexcept override { return config_.size; }

  void AllGather(const void* own, std::span<const Destination> to) noexcept override {
    CopyRows(to[static_cast<size_t>(config_.rank)], 0, static_cast<const uint8_t*>(own),
             to[static_cast<size_t>(config_.rank)].Bytes());
    Exchange(static_cast<const uint8_t*>(own), to, false);
  }

  void Gather(const void* own, std::span<const Destination> to) noexcept override {
    Exchange(static_cast<const uint8_t*>(own), to, true);
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
      Lose(asked_, error.what());
      Check();
    }
  }

  void Check() const override {
    if (lost_) throw ResourceError(failure_);
  }

 private:
  // Chunk by chunk: sends this rank's, then reads the others'.
  void Exchange(const uint8_t* own, std::span<const Destination> to, bool to_root) noexcept {
    if (lost_) return;
    try {
      const bool receives = !to_root || config_.rank == 0;
      const bool sends = !to_root || config_.rank != 0;
      const int64_t bytes = to[static_cast<size_t>(config_.rank)].Bytes();
      int64_t longest = 0;
      for (const Destination& each : to) longest = std::max(longest, each.Bytes());
      for (int64_t offset = 0; offset < longest; offset += kChunk) {
        if (sends && offset < bytes) Send(own + offset, std::min(kChunk, bytes - offset), to_root);
        if (!receives) continue;
        for (int rank = 0; rank < config_.size; ++rank) {
          const Destination& from = to[static_cast<size_t>(rank)];
          if (rank == config_.rank || offset >= from.Bytes()) continue;
          asked_ = rank;
          peers_[static_cast<size_t>(rank)].receive->waitRecv();
          CopyRows(from, offset, peers_[static_cast<size_t>(rank)].received.data(),
                   std::min(kChunk, from.Bytes() - offset));
        }
      }
    } catch (const std::exception& error) {
      Lose(asked_, error.what());
    }
  }

  void Send(const uint8_t* data, int64_t bytes, bool to_root) {
    std::memcpy(sent_.data(), data, static_cast<size_t>(bytes));
    for (int rank = 0; rank < (to_root ? 1 : config_.size); ++rank) {
      if (rank == config_.rank) continue;
      asked_ = rank;
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
    for (const auto& [data, bytes] : {std::pair(const_cast<const uint8_t*>(first_.data()), first_.size()),
                                      std::pair(message.data() + some, message.size() - some)}) {
      if (bytes == 0) continue;
      const auto buffer = broadcasts_.createUnboundBuffer(const_cast<uint8_t*>(data), bytes);
      for (int rank = 1; rank < config_.size; ++rank) {
        asked_ = rank;
        buffer->send(rank, kBroadcastSlot);
      }
      for (int rank = 1; rank < config_.size; ++rank) buffer->waitSend(kTimeout);
    }
  }

  void ReceiveMessage(std::vector<uint8_t>& message) {
    asked_ = 0;
    uint64_t length = 0;
    first_.resize(kFirstBytes);
    Receive(first_.data(), kFirstBytes, kNextStep);
    std::memcpy(&length, first_.data(), sizeof(length));
    message.resize(length);
    const size_t some = std::min(message.size(), kFirstBytes - sizeof(length));
    if (some > 0) std::memcpy(message.data(), first_.data() + sizeof(length), some);
    if (some < message.size()) Receive(message.data() + some, message.size() - some, kTimeout);
  }

  void Receive(uint8_t* data, size_t bytes, milliseconds limit) {
    const auto buffer = broadcasts_.createUnboundBuffer(data, bytes);
    buffer->recv(0, kBroadcastSlot);
    buffer->waitRecv(limit);
  }

  void Lose(int rank, const char* reason) noexcept {
    lost_ = true;
    try {
      failure_ = LostText(config_, rank, reason);
    } catch (...) {
      failure_.clear();  // no memory for the text
    }
  }

  const GlooConfig config_;
  gloo::rendezvous::Context gathers_, broadcasts_;
  std::vector<uint8_t> sent_ = std::vector<uint8_t>(kChunk);
  std::vector<uint8_t> first_;
  std::vector<Peer> peers_;  // [ranks]; this rank's is empty
  int asked_ = 0;            // rank of the operation in progress
  bool lost_ = false;
  std::string failure_;
};

}  // namespace

std::unique_ptr<Communicator> JoinGloo(const GlooConfig& config) {
  WaitForRanks(config);
  try {
    return std::make_unique<GlooCommunicator>(config);
  } catch (const gloo::Exception& error) {
    throw ResourceError(fmt::format("ranks cannot connect: {}", error.what()));
  }
}

void ReportLostRank(const std::string& folder, int rank, const std::string& reason) noexcept {
  try {
    WriteText(FilePath(folder, rank, "error"), reason);
  } catch (const std::exception&) {  // the others then report the closed connection
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

void ReportLostRank(const std::string& /*folder*/, int /*rank*/, const std::string& /*reason*/) noexcept {}

std::string MissingForGloo() {
  return "this build has no Gloo (KVANTA_GLOO=OFF, or it was not found)";
}

}  // namespace kvanta::parallel
#endif
