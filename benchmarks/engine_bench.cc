// The whole engine against the machine's limits, measured in the same run: decode at short context as a share of the
// DRAM read bandwidth (each step reads every weight once), prefill as a share of the peak rate of the bf16 dot.
//
//   engine_bench MODEL_FOLDER [--threads N ...] [--prompt 1024] [--decode 64] [--json FILE]
//
// On a shared machine the limits come and go, so both sides take turns: a decode step and a read of memory, a prompt
// and the dot's peak. Figures are medians. Before any is printed, every run must have generated the same tokens.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <functional>
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

// Calls `between` before every decode step.
Run Generate(kvanta::Engine& engine, int prompt_tokens, int decode_tokens, const std::function<void()>& between) {
  kvanta::Request request;
  request.id = "bench";
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
      run.tokens.insert(run.tokens.end(), output.tokens.begin(), output.tokens.end());
      between();
      before = Clock::now();
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
  const kvanta::kernels::IsaTable& isa = kvanta::kernels::SelectIsa(stats.isa.c_str());
  kvanta::kernels::ReadLimit memory(threads, isa);

  std::vector<double> prefill, peaks, steps, reads;
  std::vector<int32_t> long_tokens, short_tokens;
  for (int repeat = 0; repeat < options.repeats; ++repeat) {
    peaks.push_back(kvanta::kernels::MeasureBf16DotPeak(threads, isa));
    const Run long_run = Generate(engine, options.prompt, 0, [] {});
    const Run short_run = Generate(engine, 16, options.decode, [&] { reads.push_back(memory.Now()); });
    if (repeat > 0 && (long_run.tokens != long_tokens || short_run.tokens != short_tokens)) {
      throw kvanta::Error("two runs of the same prompt gave different tokens; no figure is worth printing");
    }
    long_tokens = long_run.tokens;
    short_tokens = short_run.tokens;
    prefill.push_back(long_run.prefill_seconds);
    steps.insert(steps.end(), short_run.step_seconds.begin(), short_run.step_seconds.end());
  }

  const kvanta::ModelInfo& info = engine.Info();
  const double parameters = static_cast<double>(stats.weight_bytes) / 2;
  const double head = static_cast<double>(info.vocab) * info.hidden;  // for the last token only
  const double prompt = options.prompt;
  const double linear_flops = 2 * (prompt * (parameters - head) + head);
  // Causal, scores and values: two products of head_dim for each pair of tokens and head.
  const double attention_flops = 2.0 * info.layers * info.heads * info.head_dim * prompt * (prompt + 1);
  const double flops = linear_flops + attention_flops;
  const double decode_rate = static_cast<double>(stats.weight_bytes) / Median(steps);
  const double prefill_rate = flops / Median(prefill);
  return {{"threads", threads},
          {"isa", stats.isa},
          {"weight_bytes", stats.weight_bytes},
          {"read_gb_s", Median(reads) / 1e9},
          {"bf16_dot_gflop_s", Median(peaks) / 1e9},
          {"decode_tokens_s", 1 / Median(steps)},
          {"decode_gb_s", decode_rate / 1e9},
          {"decode_share_of_bandwidth", decode_rate / Median(reads)},
          {"prefill_tokens", options.prompt},
          {"prefill_attention_flops_share", attention_flops / flops},
          {"prefill_tokens_s", options.prompt / Median(prefill)},
          {"prefill_gflop_s", prefill_rate / 1e9},
          {"prefill_share_of_peak", prefill_rate / Median(peaks)},
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
