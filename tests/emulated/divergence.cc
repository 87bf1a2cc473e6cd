// Divergence of the emulated GPU's logits from the CPU's for a real model. Not a test: it takes minutes.
//
//   emulated_divergence MODEL KV_CACHE_DTYPE WEIGHT_DTYPE TOKEN ...
//
// Prints KL(CPU || GPU) in nats: mean and maximum over the tokens.
#include <fmt/format.h>

#include <algorithm>
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
  config.kv_cache_dtype = args[2];
  config.weight_dtype = args[3];
  std::vector<int32_t> tokens;
  for (const char* arg : args.subspan(4)) tokens.push_back(std::stoi(arg));
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
  fmt::print("{} tokens: mean {:.3e}, max {:.3e}\n", tokens.size(), sum / static_cast<double>(tokens.size()), max);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc < 5) throw kvanta::InputError("usage: emulated_divergence MODEL KV_CACHE_DTYPE WEIGHT_DTYPE TOKEN ...");
    Compare({argv, static_cast<size_t>(argc)});
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "emulated_divergence: {}\n", error.what());
    return 1;
  }
}
