// Engines over a folder of stored pages, for the tests of the prefix cache on disk.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "engine/format_cases.h"
#include "kvanta/cache_folder.h"

namespace kvanta::engine {

namespace fs = std::filesystem;

inline constexpr size_t kVocab = 96;
#ifdef KVANTA_SANITIZED
inline constexpr int kDamages = 12;  // damaged stored pages, of up to six kinds in turn
#else
inline constexpr int kDamages = 60;
#endif

inline EngineConfig StoredConfig(const FormatCase& what, const std::string& folder) {
  EngineConfig config = ConfigOf(what);
  config.kv_cache_dir = folder;
  return config;
}

inline EngineConfig StoredConfig(const std::string& folder) {
  return StoredConfig({"int4", false}, folder);
}

inline bool SameRows(const std::vector<float>& a, const std::vector<float>& b, int64_t from) {
  const size_t first = static_cast<size_t>(from) * kVocab;
  return a.size() == b.size() &&
         std::memcmp(a.data() + first, b.data() + first, (a.size() - first) * sizeof(float)) == 0;
}

struct Scored {
  int64_t cached = 0;
  std::vector<float> logits;
};

template <class AnyEngine>
Scored StoredLogits(AnyEngine& engine, const std::vector<int32_t>& tokens, int chunk = 0) {
  Scored run;
  run.logits.resize(tokens.size() * kVocab);
  run.cached = engine.Logits(tokens, chunk, run.logits, true);
  return run;
}

inline std::vector<fs::path> RecordFiles(const std::string& folder) {
  std::vector<fs::path> files;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.is_regular_file() && entry.path().extension() != ".json") files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  return files;
}

inline Request GreedyRequest(std::string id, std::vector<int32_t> prompt, int max_tokens = 8) {
  return {.id = std::move(id), .prompt = std::move(prompt), .sampling = Greedy(max_tokens)};
}

class DiskTierTest : public ::testing::Test {
 protected:
  // Stores a prompt's pages and returns its logits.
  std::vector<float> Fill(const EngineConfig& config) {
    Engine engine(config);
    return StoredLogits(engine, tokens_).logits;
  }
  std::vector<float> Fill() { return Fill(StoredConfig(folder_.Path())); }

  static std::vector<int32_t> Tokens(uint64_t seed, int64_t count) {
    std::mt19937_64 random(seed);
    return RandomTokens(random, count);
  }

  weights::TempFolder folder_;
  std::vector<int32_t> tokens_ = Tokens(1, 100);
};

}  // namespace kvanta::engine
