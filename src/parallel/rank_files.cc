#include "parallel/rank_files.h"

#include <fmt/format.h>

#include <charconv>
#include <exception>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "base/quote.h"
#include "kvanta/error.h"

namespace kvanta::parallel {

std::string RankFile(const std::string& folder, int rank, std::string_view suffix) {
  return fmt::format("{}/rank-{}.{}", folder, rank, suffix);
}

std::optional<std::string> ReadRankFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

void WriteRankFile(const std::string& path, const std::string& text) {
  const std::string unfinished = path + ".new";
  std::ofstream file(unfinished, std::ios::binary);
  file << text;
  file.close();
  std::error_code error;
  std::filesystem::rename(unfinished, path, error);
  if (!file || error) throw ResourceError(fmt::format("{}: cannot be written", Quote(path)));
}

std::optional<RankLoss> ReadRankLoss(const std::string& folder, int rank) {
  const std::optional<std::string> text = ReadRankFile(RankFile(folder, rank, "error"));
  if (!text) return std::nullopt;
  RankLoss loss{.rank = rank, .reason = text->substr(text->find('\n') + 1)};
  std::from_chars(text->data(), text->data() + text->size(), loss.rank);
  return loss;
}

std::optional<RankLoss> FindRankLoss(const std::string& folder, int begin, int end) {
  for (int rank = begin; rank < end; ++rank) {
    if (auto loss = ReadRankLoss(folder, rank)) return loss;
  }
  return std::nullopt;
}

void ReportRankLoss(const std::string& folder, int rank, const RankLoss& loss) noexcept {
  try {
    const std::string path = RankFile(folder, rank, "error");
    if (!ReadRankFile(path)) WriteRankFile(path, fmt::format("{}\n{}", loss.rank, loss.reason));
  } catch (const std::exception&) {  // the others then report the closed connection
  }
}

}  // namespace kvanta::parallel
