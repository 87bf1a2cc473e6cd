// Error of an engine of several processes (EngineConfig::tensor_parallel_size, pipeline_parallel_size).
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "kvanta/error.h"

namespace kvanta {

// A rank is lost. Ranks hold no state that another one has, so no later request succeeds either. Python:
// kvanta.RankLostError (a ResourceError); a server ends.
class RankLostError : public ResourceError {
 public:
  RankLostError(int rank, int ranks, std::string reason)
      : ResourceError("rank " + std::to_string(rank) + " of " + std::to_string(ranks) +
                      " is lost, and the engine ends: " + reason),
        rank_(rank),
        reason_(std::make_shared<const std::string>(std::move(reason))) {}

  int Rank() const noexcept { return rank_; }
  const std::string& Reason() const noexcept { return *reason_; }

 private:
  int rank_;
  std::shared_ptr<const std::string> reason_;  // an exception is copied without throwing
};

}  // namespace kvanta
