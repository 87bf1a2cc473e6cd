#include "store/resolver.h"

#include <fmt/format.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "store/socket.h"

namespace kvanta::store {

struct Resolver::Lookup {
  std::string host, service;
  std::mutex mutex;
  std::condition_variable ended;
  bool done = false;
  int error = 0;
  addrinfo* first = nullptr;

  bool HasFailed() {
    const std::lock_guard lock(mutex);
    return done && error != 0;
  }
  ~Lookup() {
    if (first != nullptr) freeaddrinfo(first);
  }
};

namespace {

int LookUp(const std::string& host, const std::string& service, int flags, addrinfo** first) {
  addrinfo hints = {};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  return getaddrinfo(host.c_str(), service.c_str(), &hints, first);
}

}  // namespace

Addresses Resolver::Resolve(const std::string& host, int port, double deadline) {
  const std::string service = std::to_string(port);
  addrinfo* numeric = nullptr;
  if (LookUp(host, service, AI_NUMERICHOST, &numeric) == 0) return {numeric, &freeaddrinfo};
  if (!pending_ || pending_->host != host || pending_->service != service || pending_->HasFailed()) {
    auto lookup = std::make_shared<Lookup>();
    lookup->host = host;
    lookup->service = service;
    try {
      std::thread([lookup] {
        addrinfo* first = nullptr;
        const int error = LookUp(lookup->host, lookup->service, 0, &first);
        const std::lock_guard lock(lookup->mutex);
        lookup->error = error;
        lookup->first = first;
        lookup->done = true;
        lookup->ended.notify_all();
      }).detach();
    } catch (const std::system_error& error) {
      throw ConnectionError(error.code().message());
    }
    pending_ = std::move(lookup);
  }
  {
    std::unique_lock lock(pending_->mutex);
    const auto left = std::chrono::duration<double>(deadline - Now());
    if (!pending_->ended.wait_for(lock, left, [this] { return pending_->done; })) {
      throw ConnectionError("the name of the host was not resolved in time");
    }
  }
  const std::shared_ptr<Lookup> lookup = std::exchange(pending_, nullptr);
  if (lookup->error != 0) throw ConnectionError(fmt::format("the name of the host: {}", gai_strerror(lookup->error)));
  return {lookup, lookup->first};
}

}  // namespace kvanta::store
