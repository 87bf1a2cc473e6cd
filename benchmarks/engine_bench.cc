// The whole engine against the machine's limits, measured in the same run: decode at short context as a share of the
// DRAM read bandwidth (each step reads every weight once), prefill as a share of the peak rate of the bf16 dot.
//
//   engine_bench MODEL_FOLDER [--threads N ...] [--prompt 1024] [--decode 64] [--json FILE]
//
// Before it prints a figure it checks that every run generated the same tokens.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "kernels/cpu/machine_limits.h"
#include "kernels/cpu/select.h"
#include "kvanta/engine.h"

namespace {

using Clock = std::chrono::steady_clock;

struct Options {
  std::string model;
  std::vector<int> threads;
  int prompt = 1024;
  int decode = 64;
  int repeats = 5;
  std::string json;
};

Options ParseArguments(int argc, char** argv) {
  Options options;
  std::string flag;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word.starts_with("--")) {
      flag = word;
    } else if (flag == "--threads") {
      options.threads.push_back(std::stoi(word));
    } else if (flag == "--prompt") {
      options.prompt = std::stoi(word);
    } else if (flag == "--decode") {
      options.decode = std::stoi(word);
    } else if (flag == "--json") {
      options.json = word;
    } else if (flag.empty() && options.model.empty()) {
      options.model = word;
    } else {
      throw kvanta::InputError(fmt::format("unknown option {} {}", flag, word));
    }
  }
  if (options.model.empty())
    throw kvanta::InputError("usage: engine_bench MODEL_FOLDER [--threads N ...] [--json FILE]");
  if (options.threads.empty()) options.threads = {1, 2};
  return options;
}

struct Run {
  double prefill_seconds = 0;        // until the first token
  std::vector<double> step_seconds;  // of the decode steps
  std::vector<int32_t> tokens;
};

Run Generate(kvanta::Engine& engine, int prompt_tokens, int decode_tokens, const std::string& id) {
  kvanta::Request request;
  request.id = id;
  for (int i = 0; i < prompt_tokens; ++i) request.prompt.push_back(1 + i * 7919 % (engine.Info().vocab - 1));
  request.sampling.temperature = 0;
  request.sampling.max_tokens = decode_tokens + 1;
  request.sampling.ignore_eos = true;
  engine.Add(request);

  Run run;
  std::vector<kvanta::RequestOutput> outputs;
  auto before = Clock::now();
  while (engine.Step(outputs)) {
    const auto now = Clock::now();
    const double seconds = std::chrono::duration<double>(now - before).count();
    for (const kvanta::RequestOutput& output : outputs) {
      if (!output.error.empty()) throw kvanta::Error(output.error);
      if (output.tokens.empty()) continue;
      if (run.tokens.empty()) {
        run.prefill_seconds = seconds;
      } else {
        run.step_seconds.push_back(seconds);
      }
      before = now;
      run.tokens.insert(run.tokens.end(), output.tokens.begin(), output.tokens.end());
    }
  }
  return run;
}

double Median(std::vector<double> values) {
  std::ranges::sort(values);
  return values.at(values.size() / 2);
}

nlohmann::json Measure(const Options& options, int threads) {
  kvanta::EngineConfig config;
  config.model = options.model;
  config.kv_cache_dtype = "auto";
  config.threads = threads;
  config.max_model_len = options.prompt + options.decode + 2;
  config.max_num_seqs = 1;
  config.max_num_batched_tokens = 1024;
  config.enable_prefix_caching = false;
  kvanta::Engine engine(config);
  const kvanta::EngineStats stats = engine.Stats();

  std::vector<double> prefill;
  std::vector<double> decode;
  std::vector<int32_t> long_tokens;
  std::vector<int32_t> short_tokens;
  for (int repeat = 0; repeat < options.repeats; ++repeat) {
    const Run long_run = Generate(engine, options.prompt, 0, fmt::format("prefill-{}", repeat));
    const Run short_run = Generate(engine, 16, options.decode, fmt::format("decode-{}", repeat));
    if (repeat > 0 && (long_run.tokens != long_tokens || short_run.tokens != short_tokens)) {
      throw kvanta::Error("two runs of the same prompt gave different tokens; no figure is worth printing");
    }
    long_tokens = long_run.tokens;
    short_tokens = short_run.tokens;
    prefill.push_back(long_run.prefill_seconds);
    decode.push_back(Median(short_run.step_seconds));
  }

  const kvanta::kernels::IsaTable& isa = kvanta::kernels::SelectIsa(stats.isa.c_str());
  const double limits_bandwidth = kvanta::kernels::MeasureReadBandwidth(threads, isa);
  const double limits_dot = kvanta::kernels::MeasureBf16DotPeak(threads, isa);
  // Multiply-adds of the linear layers alone; attention and the rest make the true share a little larger.
  const double parameters = static_cast<double>(stats.weight_bytes) / 2;
  const double head = static_cast<double>(engine.Info().vocab) * engine.Info().hidden;
  const double flops = 2 * (options.prompt * (parameters - head) + head);
  const double prefill_best = *std::ranges::min_element(prefill);
  const double decode_best = *std::ranges::min_element(decode);
  return {{"threads", threads},
          {"isa", stats.isa},
          {"weight_bytes", stats.weight_bytes},
          {"read_gb_s", limits_bandwidth},
          {"bf16_dot_gflop_s", limits_dot},
          {"decode_tokens_s", 1 / decode_best},
          {"decode_gb_s", static_cast<double>(stats.weight_bytes) / decode_best / 1e9},
          {"decode_share_of_bandwidth", static_cast<double>(stats.weight_bytes) / decode_best / 1e9 / limits_bandwidth},
          {"prefill_tokens", options.prompt},
          {"prefill_tokens_s", options.prompt / prefill_best},
          {"prefill_gflop_s", flops / prefill_best / 1e9},
          {"prefill_share_of_peak", flops / prefill_best / 1e9 / limits_dot},
          {"tokens", short_tokens}};
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Options options = ParseArguments(argc, argv);
    nlohmann::json rows = nlohmann::json::array();
    fmt::print("{:>7} {:>10} {:>12} {:>10} {:>8} {:>14} {:>12} {:>8}\n", "threads", "isa", "decode tok/s", "GB/s",
               "share", "prefill tok/s", "GFLOP/s", "share");
    for (const int threads : options.threads) {
      const nlohmann::json row = Measure(options, threads);
      if (!rows.empty() && rows.front()["tokens"] != row["tokens"]) {
        throw kvanta::Error("different numbers of threads gave different tokens; no figure is worth printing");
      }
      fmt::print("{:>7} {:>10} {:>12.1f} {:>10.1f} {:>7.1f}% {:>14.1f} {:>12.1f} {:>7.1f}%\n", threads,
                 row["isa"].get<std::string>(), row["decode_tokens_s"].get<double>(), row["decode_gb_s"].get<double>(),
                 100 * row["decode_share_of_bandwidth"].get<double>(), row["prefill_tokens_s"].get<double>(),
                 row["prefill_gflop_s"].get<double>(), 100 * row["prefill_share_of_peak"].get<double>());
      std::fflush(stdout);
      rows.push_back(row);
    }
    if (!options.json.empty()) std::ofstream(options.json) << nlohmann::json({{"rows", rows}}).dump(1) << '\n';
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "engine_bench: {}\n", error.what());
    return 1;
  }
}
