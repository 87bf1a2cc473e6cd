// Divergence of the emulated GPU's logits from the CPU's, for any model: minutes for a real one, a moment for the tiny
// ones of tests/python/test_emulated_gpu.py.
//
//   emulated_divergence MODEL DTYPE KV_CACHE_DTYPE WEIGHT_DTYPE TOKEN ...
//   emulated_divergence --embed MODEL KV_CACHE_DTYPE TOKEN ...
//   emulated_divergence --bits PAGE_SIZE MODEL TOKEN ...
//   emulated_divergence --rank RANK RANKS FOLDER MODEL KV_CACHE_DTYPE TOKEN ...
//
// Prints KL(CPU || GPU) in nats, mean and maximum over the tokens, and the largest difference of logits as a share of
// the largest logit. --embed: prints the latter of embeddings, means over the tokens in float32, and checks that a
// batch does not change a bit. --bits: checks on the GPU alone that neither chunks nor prefix hits, batches in graphs
// or drafts change a bit, and prints how many drafts were accepted. --rank: one process of tensor parallelism, each
// with a GPU of its own and an empty FOLDER for all; rank 0 prints the bits of the logits and the tokens of two
// requests.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <exception>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "emulated/cuda_gpu.h"
#include "emulated/guarded_device.h"
#include "engine/engine_impl.h"
#include "engine/ranks.h"
#include "engine/scripted_proposer.h"
#include "runner/divergence.h"

namespace {

std::vector<float> Logits(kvanta::EngineConfig config, const std::string& device, std::span<const int32_t> tokens) {
  config.device = device;
  kvanta::Engine::Impl engine(kvanta::engine::LoadComponents(config, kvanta::testing::MakeEmulatedGpu()));
  std::vector<float> logits(tokens.size() * static_cast<size_t>(engine.Info().vocab));
  engine.Logits(tokens, 0, logits, false);
  return logits;
}

using kvanta::engine::Collected;
using kvanta::engine::Greedy;

void Require(bool is_true, const char* what) {
  if (!is_true) throw kvanta::ResourceError(what);
}

// Largest difference as a share of the largest value.
double LargestShare(std::span<const float> expected, std::span<const float> found) {
  float difference = 0, largest = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    difference = std::max(difference, std::abs(found[i] - expected[i]));
    largest = std::max(largest, std::abs(expected[i]));
  }
  return double{difference} / double{largest};
}

// Embeddings of all tokens, and of all but the last seven, in one batch or one after the other.
std::vector<float> Embeddings(kvanta::EngineConfig config, const char* device, std::span<const int32_t> tokens,
                              bool together) {
  config.device = device;
  kvanta::Engine::Impl engine(kvanta::engine::LoadComponents(config, kvanta::testing::MakeEmulatedGpu()));
  std::vector<float> embeddings;
  const auto run = [&] {
    for (const auto& [id, found] : kvanta::engine::RunAll(engine)) {
      Require(!found.embedding.empty(), "a request ended without an embedding");
      embeddings.insert(embeddings.end(), found.embedding.begin(), found.embedding.end());
    }
  };
  for (const size_t count : {tokens.size(), tokens.size() - 7}) {
    engine.Add({.id = count == tokens.size() ? "a" : "b",
                .prompt = {tokens.begin(), tokens.begin() + static_cast<int64_t>(count)},
                .pooling = kvanta::PoolingParams{.pooling_type = kvanta::PoolingType::kMean, .normalize = false}});
    if (!together) run();
  }
  if (together) run();
  return embeddings;
}

void CompareEmbeddings(std::span<char*> args) {
  kvanta::EngineConfig config;
  config.model = args[2];
  config.dtype = "float32";
  config.kv_cache_dtype = args[3];
  std::vector<int32_t> tokens;
  for (const char* arg : args.subspan(4)) tokens.push_back(std::stoi(arg));
  Require(tokens.size() > 7, "a batch needs more than 7 tokens");
  config.max_model_len = std::ssize(tokens);
  const std::vector<float> found = Embeddings(config, "cuda", tokens, true);
  Require(Embeddings(config, "cuda", tokens, false) == found, "a batch changes bits");
  fmt::print("{} tokens: embeddings {:.3e}\n", tokens.size(),
             LargestShare(Embeddings(config, "cpu", tokens, true), found));
}

void Compare(std::span<char*> args) {
  kvanta::EngineConfig config;
  config.model = args[1];
  config.dtype = args[2];
  config.kv_cache_dtype = args[3];
  config.weight_dtype = args[4];
  std::vector<int32_t> tokens;
  for (const char* arg : args.subspan(5)) tokens.push_back(std::stoi(arg));
  config.max_model_len = std::ssize(tokens);
  config.max_num_seqs = 1;
  const std::vector<float> expected = Logits(config, "cpu", tokens), found = Logits(config, "cuda", tokens);
  const size_t vocab = expected.size() / tokens.size();
  double sum = 0, max = 0;
  for (size_t row = 0; row < tokens.size(); ++row) {
    const double kl = kvanta::runner::KlDivergence(std::span(expected).subspan(row * vocab, vocab),
                                                   std::span(found).subspan(row * vocab, vocab));
    sum += kl;
    max = std::max(max, kl);
  }
  fmt::print("{} tokens: mean {:.3e}, max {:.3e}, logits {:.3e}\n", tokens.size(),
             sum / static_cast<double>(tokens.size()), max, LargestShare(expected, found));
}

constexpr int kNewTokens = 7;

kvanta::EngineConfig ConfigOfBits(const char* page_size, const char* model, size_t tokens) {
  kvanta::EngineConfig config;
  config.model = model;
  config.device = "cuda";
  config.kv_cache_dtype = "bf16";
  config.page_size = std::stoi(page_size);
  config.max_num_batched_tokens = 64;
  config.max_num_seqs = 4;
  config.max_model_len = std::max<int64_t>(96, static_cast<int64_t>(tokens) + kNewTokens);
  config.poison_unused = true;
  return config;
}

kvanta::Request RequestFor(std::span<const int32_t> tokens, size_t prompt) {
  return {.id = std::to_string(prompt),
          .prompt = {tokens.begin(), tokens.begin() + prompt},
          .sampling = Greedy(kNewTokens)};
}

// Each token is the first of the largest logits of all tokens before it, computed at once.
void CheckTokens(kvanta::Engine::Impl& engine, const kvanta::Request& request, const Collected& found) {
  Require(std::ssize(found.tokens) == kNewTokens, "a request ended early");
  std::vector<int32_t> tokens = request.prompt;
  tokens.insert(tokens.end(), found.tokens.begin(), found.tokens.end());
  const std::vector<float> logits = kvanta::engine::ColdLogits(engine, tokens);
  const size_t vocab = logits.size() / tokens.size();
  for (size_t i = request.prompt.size(); i < tokens.size(); ++i) {
    const auto row = logits.begin() + static_cast<int64_t>((i - 1) * vocab);
    const auto best = std::max_element(row, row + static_cast<int64_t>(vocab));
    Require(best - row == tokens[i], "a step's token differs from that of the logits of a whole prompt");
  }
}

void CheckBits(std::span<char*> args) {
  std::vector<int32_t> tokens;
  for (const char* arg : args.subspan(4)) tokens.push_back(std::stoi(arg));
  const kvanta::EngineConfig config = ConfigOfBits(args[2], args[3], tokens.size());
  const auto gpu = kvanta::testing::MakeEmulatedGpu();
  kvanta::Engine::Impl engine(kvanta::engine::LoadComponents(config, gpu));
  const std::vector<float> logits = kvanta::engine::ColdLogits(engine, tokens);
  Require(kvanta::engine::ColdLogits(engine, tokens, 5) == logits, "chunks of 5 tokens change bits");
  std::vector<float> again = logits;
  engine.Logits(tokens, 0, again, true);
  Require(engine.Logits(tokens, 7, again, true) >= 16, "no prefix was found");
  Require(again == logits, "a prefix hit changes bits");
  engine.ResetPrefixCache();
  const size_t prompts[] = {tokens.size() / 2, tokens.size() - 3};
  for (const size_t prompt : prompts) engine.Add(RequestFor(tokens, prompt));
  std::map<std::string, Collected> found = kvanta::engine::RunAll(engine);
  const auto& device = dynamic_cast<kvanta::testing::GuardedDevice&>(gpu->device());
  Require(device.Replays() > 3, "no graph was replayed");
  kvanta::EngineConfig with_drafts = config;
  with_drafts.speculative_config = R"({"method": "ngram", "num_speculative_tokens": 4})";
  kvanta::engine::EngineComponents components = kvanta::engine::LoadComponents(with_drafts, gpu);
  components.draft_cost = 0.0F;
  const kvanta::engine::SpeculatingEngine drafting(std::move(components), 0.2);
  for (const size_t prompt : prompts) {
    const kvanta::Request request = RequestFor(tokens, prompt);
    CheckTokens(engine, request, found[request.id]);
    drafting.Teach(request, found[request.id]);
    drafting.engine->Add(request);
  }
  std::map<std::string, Collected> drafted = kvanta::engine::RunAll(*drafting.engine);
  for (const size_t prompt : prompts) {
    const std::string id = std::to_string(prompt);
    Require(drafted[id].tokens == found[id].tokens, "drafts change tokens");
  }
  fmt::print("{} drafts accepted\n", drafting.engine->Stats().accepted_tokens);
}

// A sampled and a greedy request, in one batch.
void PrintBits(kvanta::Engine::Impl& engine, std::span<const int32_t> tokens) {
  const std::vector<float> logits = kvanta::engine::ColdLogits(engine, tokens);
  Require(kvanta::engine::ColdLogits(engine, tokens, 5) == logits, "chunks of 5 tokens change bits");
  for (const float logit : logits) fmt::print("{:08x}\n", std::bit_cast<uint32_t>(logit));
  kvanta::Request sampled = RequestFor(tokens, tokens.size() / 2);
  sampled.sampling.temperature = 1;
  sampled.sampling.seed = 3;
  engine.Add(sampled);
  engine.Add(RequestFor(tokens, tokens.size() - 3));
  for (const auto& [id, found] : kvanta::engine::RunAll(engine)) {
    Require(std::ssize(found.tokens) == kNewTokens, "a request ended early");
    fmt::print("{}: {}\n", id, fmt::join(found.tokens, " "));
  }
}

void RunAsRank(std::span<char*> args) {
  kvanta::EngineConfig config = ConfigOfBits("32", args[5], args.size());  // which every format divides
  config.rank = std::stoi(args[2]);
  config.tensor_parallel_size = std::stoi(args[3]);
  config.rank_folder = args[4];
  config.kv_cache_dtype = args[6];
  config.threads = 1;
  std::vector<int32_t> tokens;
  for (const char* arg : args.subspan(7)) tokens.push_back(std::stoi(arg));
  const auto gpu = kvanta::testing::MakeEmulatedGpu();
  if (config.rank > 0) return kvanta::engine::RunRank(config, gpu);
  kvanta::Engine::Impl engine(kvanta::engine::LoadComponents(config, gpu));
  PrintBits(engine, tokens);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc > 4 && std::string_view(argv[1]) == "--embed") {
      CompareEmbeddings({argv, static_cast<size_t>(argc)});
      return 0;
    }
    if (argc > 4 && std::string_view(argv[1]) == "--bits") {
      CheckBits({argv, static_cast<size_t>(argc)});
      return 0;
    }
    if (argc > 7 && std::string_view(argv[1]) == "--rank") {
      RunAsRank({argv, static_cast<size_t>(argc)});
      return 0;
    }
    if (argc < 6) {
      throw kvanta::InputError("usage: emulated_divergence MODEL DTYPE KV_CACHE_DTYPE WEIGHT_DTYPE TOKEN ...");
    }
    Compare({argv, static_cast<size_t>(argc)});
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "emulated_divergence: {}\n", error.what());
    return 1;
  }
}
