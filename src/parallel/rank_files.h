// Small files in a folder, by which ranks find each other and tell why one is lost: rank-N.ready, rank-N.error.
// python/kvanta/engine/rank_nodes.py copies them between machines, and writes and reads those of losses, too.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace kvanta::parallel {

std::string RankFile(const std::string& folder, int rank, std::string_view suffix);
// None while there is no such file.
std::optional<std::string> ReadRankFile(const std::string& path);
// Written whole or not at all. Throws ResourceError.
void WriteRankFile(const std::string& path, const std::string& text);

// A rank that is lost, and why.
struct RankLoss {
  int rank = 0;
  std::string reason;
};

// Reports to the others why `rank` ends, unless it was reported before: by `loss`, its own or that of another rank
// without which it cannot go on. The first line of rank-N.error is the number of the lost rank, the rest is the reason.
void ReportRankLoss(const std::string& folder, int rank, const RankLoss& loss) noexcept;
// The loss that was reported for `rank`; none before.
std::optional<RankLoss> ReadRankLoss(const std::string& folder, int rank);
// The first one of those for ranks [begin, end).
std::optional<RankLoss> FindRankLoss(const std::string& folder, int begin, int end);

}  // namespace kvanta::parallel
