// Greedy generation from token ids:  generate MODEL_FOLDER KV_CACHE_DTYPE TOKEN_ID...
// Prints the new token ids and the size of the cache.
#include <kvanta/engine.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

int main(int argc, char** argv) try {
  if (argc < 4) throw kvanta::InputError("usage: generate MODEL_FOLDER KV_CACHE_DTYPE TOKEN_ID...");
  kvanta::EngineConfig config;
  config.model = argv[1];
  config.kv_cache_dtype = argv[2];
  config.max_num_seqs = 1;
  kvanta::Engine engine(config);

  kvanta::Request request;
  request.id = "first";
  for (int i = 3; i < argc; ++i) request.prompt.push_back(std::atoi(argv[i]));
  request.sampling.temperature = 0;
  request.sampling.max_tokens = 32;
  engine.Add(request);

  std::vector<kvanta::RequestOutput> outputs;
  while (engine.Step(outputs)) {
    for (const kvanta::RequestOutput& output : outputs) {
      if (!output.error.empty()) throw kvanta::Error(output.error);
      for (const int32_t token : output.tokens) std::printf("%d ", token);
    }
  }
  const kvanta::EngineStats stats = engine.Stats();
  std::printf("\n%s cache: %.0f bytes per token, %lld tokens generated\n", argv[2], stats.bytes_per_token,
              static_cast<long long>(stats.generated_tokens));
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "generate: %s\n", error.what());
  return 2;
}
