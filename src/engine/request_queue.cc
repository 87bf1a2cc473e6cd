#include "engine/request_queue.h"

#include <algorithm>
#include <iterator>

namespace kvanta::engine {

void RequestQueue::Add(std::shared_ptr<RequestState> request) {
  const size_t ends = outputs_.size() + ids_.size() + 1;
  if (outputs_.capacity() < ends) outputs_.reserve(std::max(ends, 2 * outputs_.capacity()));
  added_.push_back(std::move(request));
  try {
    ids_.insert(added_.back()->request.id);
  } catch (...) {
    added_.pop_back();
    throw;
  }
}

std::shared_ptr<RequestState> RequestQueue::Take(const std::string& id) noexcept {
  const auto place = std::ranges::find(
      added_, id, [](const auto& state) -> auto& { return state->request.id; });
  if (place == added_.end()) return nullptr;
  std::shared_ptr<RequestState> request = std::move(*place);
  added_.erase(place);
  return request;
}

void RequestQueue::Release(const std::string& id) noexcept {
  ids_.erase(id);
  std::erase_if(aborts_, [&](const PendingAbort& abort) { return abort.id == id; });
}

void RequestQueue::TakeOutputs(std::vector<RequestOutput>& to) {
  to.reserve(to.size() + outputs_.size() + ids_.size());
  std::ranges::move(outputs_, std::back_inserter(to));
  outputs_.clear();
}

}  // namespace kvanta::engine
