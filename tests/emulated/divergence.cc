// Divergence of the emulated GPU's logits from the CPU's, for any model: minutes for a real one, a moment for the tiny
// ones of tests/python/test_emulated_gpu.py.
//
//   emulated_divergence MODEL DTYPE KV_CACHE_DTYPE WEIGHT_DTYPE TOKEN ...
//
// Prints KL(CPU || GPU) in nats, mean and maximum over the tokens, and the largest difference of logits as a share of
// the largest logit.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <span>
#include <string>
#include <vector>

#include "emulated/cuda_gpu.h"
#include "engine/engine_impl.h"
#include "runner/divergence.h"

namespace {

std::vector<float> Logits(kvanta::EngineConfig config, const std::string& device, std::span<const int32_t> tokens) {
  config.device = device;
  kvanta::Engine::Impl engine(kvanta::engine::LoadComponents(config, kvanta::testing::MakeEmulatedGpu()));
  std::vector<float> logits(tokens.size() * static_cast<size_t>(engine.Info().vocab));
  engine.Logits(tokens, 0, logits, false);
  return logits;
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
  float difference = 0, largest = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    difference = std::max(difference, std::abs(found[i] - expected[i]));
    largest = std::max(largest, std::abs(expected[i]));
  }
  fmt::print("{} tokens: mean {:.3e}, max {:.3e}, logits {:.3e}\n", tokens.size(),
             sum / static_cast<double>(tokens.size()), max, difference / largest);
}

}  // namespace

int main(int argc, char** argv) {
  try {
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
