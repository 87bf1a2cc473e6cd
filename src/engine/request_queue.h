// Requests on their way to the step lock's holder, and last outputs on their way back.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "engine/request_state.h"
#include "kvanta/engine.h"

namespace kvanta::engine {

// Guarded by a mutex of the caller, who holds it in every call. Memory for the last output of every unfinished request
// is reserved when it is added, so that no request's end needs any.
class RequestQueue {
 public:
  struct PendingAbort {
    std::string id, reason;
  };

  // The id is that of an unfinished request: one that waits here, or one that the scheduler has.
  bool Contains(const std::string& id) const { return ids_.contains(id); }
  bool HasUnfinished() const noexcept { return !ids_.empty(); }
  int64_t Waiting() const noexcept { return std::ssize(added_); }
  bool HasOutputs() const noexcept { return !outputs_.empty(); }
  bool HasUpdates() const noexcept { return !added_.empty() || !outputs_.empty(); }

  // Throws std::bad_alloc before anything has changed. The id must not be in use.
  void Add(std::shared_ptr<RequestState> request);
  // Takes all requests that wait here, the oldest first: calls take(request) for each.
  template <class Take>
  void TakeAll(Take&& take) {
    for (std::shared_ptr<RequestState>& request : added_) take(request);
    added_.clear();
  }
  // Takes one of them; null if the scheduler has it.
  std::shared_ptr<RequestState> Take(const std::string& id) noexcept;
  // Frees the id of a request that has ended. A pending abort must not end a later request of the same id.
  void Release(const std::string& id) noexcept;

  // Aborts that were enqueued while the step lock was held.
  void AddAbort(PendingAbort abort) { aborts_.push_back(std::move(abort)); }
  std::vector<PendingAbort> TakeAborts() noexcept { return std::exchange(aborts_, {}); }

  // An output that the next step gives out.
  void AddOutput(RequestOutput output) noexcept { outputs_.push_back(std::move(output)); }
  // Appends these to `to`, which gets capacity for the last output of every unfinished request, too.
  void TakeOutputs(std::vector<RequestOutput>& to);

 private:
  std::vector<std::shared_ptr<RequestState>> added_;
  std::vector<PendingAbort> aborts_;
  std::unordered_set<std::string> ids_;
  std::vector<RequestOutput> outputs_;  // has capacity for one more of every unfinished request
};

}  // namespace kvanta::engine
