// Two requests at once, streamed by the engine's own thread:  concurrent MODEL_FOLDER KV_CACHE_DTYPE TOKEN_ID...
// Prints a line per new token: the request's id, then the token's.
#include <kvanta/engine.h>

#include <cstdio>
#include <cstdlib>
#include <latch>
#include <span>
#include <string>
#include <vector>

int main(int argc, char** argv) try {
  if (argc < 4) throw kvanta::InputError("usage: concurrent MODEL_FOLDER KV_CACHE_DTYPE TOKEN_ID...");
  kvanta::EngineConfig config;
  config.model = argv[1];
  config.kv_cache_dtype = argv[2];
  config.on_warning = [](const std::string& line) { std::fprintf(stderr, "%s\n", line.c_str()); };
  std::vector<int32_t> prompt;
  for (int i = 3; i < argc; ++i) prompt.push_back(std::atoi(argv[i]));

  std::latch running(2);
  kvanta::Engine engine(config);
  engine.Start([&running](std::span<const kvanta::RequestOutput> outputs) {  // once per step; must not wait for long
    for (const kvanta::RequestOutput& output : outputs) {
      for (const int32_t token : output.tokens) std::printf("%s %d\n", output.id.c_str(), token);
      if (!output.error.empty()) std::fprintf(stderr, "%s: %s\n", output.id.c_str(), output.error.c_str());
      if (output.finish != kvanta::FinishReason::kNone) running.count_down();
    }
  });
  engine.Add({.id = "greedy", .prompt = prompt, .sampling = {.max_tokens = 16, .temperature = 0}});
  engine.Add({.id = "sampled", .prompt = prompt, .sampling = {.max_tokens = 16, .temperature = 0.8, .seed = 7}});
  running.wait();  // every accepted request ends, with an error at worst
  engine.Stop();
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "concurrent: %s\n", error.what());
  return 2;
}
