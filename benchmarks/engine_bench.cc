// End-to-end benchmark of the engine against the roofline, measured in the same run: decode at short context as a share
// of the memory read bandwidth (each step reads every weight once), prefill as a share of the peak rate of the bf16
// dot.
//
//   engine_bench MODEL_FOLDER [--threads N ...] [--weight-dtypes auto ...] [--prompt 1024] [--decode 64] [--json FILE]
//
// On a shared machine the limits vary, so measurements alternate: a decode step and a read of memory, a prompt and the
// peak of the dot, and, with several weight dtypes, prompt by prompt. Results are medians. All runs must generate the
// same tokens, else nothing is printed.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/option_parser.h"
#include "bench/roofline.h"
#include "kernels/cpu/select.h"
#include "kvanta/engine.h"

namespace {

using Clock = std::chrono::steady_clock;

struct Options {
  std::string model;
  std::vector<int> threads = {1, 2};
  std::vector<std::string> weight_dtypes = {"auto"};
  int prompt = 1024;
  int decode = 64;
  int repeats = 5;
  std::string json;
};

Options ParseArguments(int argc, char** argv) {
  Options options;
  kvanta::OptionParser parser;
  parser.Positional(options.model);
  parser.Option("--threads", options.threads);
  parser.Option("--weight-dtypes", options.weight_dtypes);
  parser.Option("--prompt", options.prompt);
  parser.Option("--decode", options.decode);
  parser.Option("--json", options.json);
  parser.Parse(argc, argv);
  if (options.model.empty())
    throw kvanta::InputError("usage: engine_bench MODEL_FOLDER [--threads N ...] [--json FILE]");
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

// Measurements of one weight dtype.
struct Subject {
  std::unique_ptr<kvanta::Engine> engine;
  std::vector<double> prefill, dot_peaks, steps, reads;
  std::vector<int32_t> long_tokens, short_tokens;
};

std::unique_ptr<kvanta::Engine> MakeEngine(const Options& options, int threads, const std::string& weight_dtype) {
  kvanta::EngineConfig config;
  config.model = options.model;
  config.kv_cache_dtype = "auto";
  config.weight_dtype = weight_dtype;
  config.threads = threads;
  config.max_model_len = options.prompt + options.decode + 2;
  config.max_num_seqs = 1;
  config.max_num_batched_tokens = 1024;
  config.enable_prefix_caching = false;
  return std::make_unique<kvanta::Engine>(config);
}

void MeasureOnce(const Options& options, int threads, kvanta::kernels::ReadLimit& memory, Subject& subject) {
  const kvanta::kernels::IsaTable& isa = kvanta::kernels::SelectIsa(subject.engine->Stats().isa);
  subject.dot_peaks.push_back(kvanta::kernels::MeasureBf16DotPeak(threads, isa));
  const Run long_run = Generate(*subject.engine, options.prompt, 0, [] {});
  const Run short_run = Generate(*subject.engine, 16, options.decode, [&] { subject.reads.push_back(memory.Now()); });
  const bool first = subject.prefill.empty();
  if (!first && (long_run.tokens != subject.long_tokens || short_run.tokens != subject.short_tokens)) {
    throw kvanta::Error("two runs of the same prompt generated different tokens");
  }
  subject.long_tokens = long_run.tokens;
  subject.short_tokens = short_run.tokens;
  subject.prefill.push_back(long_run.prefill_seconds);
  subject.steps.insert(subject.steps.end(), short_run.step_seconds.begin(), short_run.step_seconds.end());
}

nlohmann::json Report(const Options& options, int threads, const Subject& subject) {
  const kvanta::EngineStats stats = subject.engine->Stats();
  const kvanta::ModelInfo& info = subject.engine->Info();
  const double head = static_cast<double>(info.vocab) * info.hidden;  // for the last token only
  const double prompt = options.prompt;
  const double linear_flops = 2 * (prompt * (static_cast<double>(info.parameters) - head) + head);
  // Causal; scores and values: two products of head_dim for each pair of tokens and head.
  const double attention_flops = 2.0 * info.layers * info.heads * info.head_dim * prompt * (prompt + 1);
  const double flops = linear_flops + attention_flops;
  const double decode_rate = static_cast<double>(stats.weight_bytes) / Median(subject.steps);
  const double prefill_rate = flops / Median(subject.prefill);
  return {{"threads", threads},
          {"isa", stats.isa},
          {"weight_dtype", subject.engine->Config().weight_dtype},
          {"weight_bytes", stats.weight_bytes},
          {"read_gb_s", Median(subject.reads) / 1e9},
          {"bf16_dot_gflop_s", Median(subject.dot_peaks) / 1e9},
          {"decode_tokens_s", 1 / Median(subject.steps)},
          {"decode_gb_s", decode_rate / 1e9},
          {"decode_share_of_bandwidth", decode_rate / Median(subject.reads)},
          {"prefill_tokens", options.prompt},
          {"prefill_attention_flops_share", attention_flops / flops},
          {"prefill_tokens_s", options.prompt / Median(subject.prefill)},
          {"prefill_gflop_s", prefill_rate / 1e9},
          {"prefill_share_of_peak", prefill_rate / Median(subject.dot_peaks)},
          {"tokens", subject.short_tokens}};
}

// One row per weight dtype; ratios are to the first one.
std::vector<nlohmann::json> Measure(const Options& options, int threads) {
  std::vector<Subject> subjects;
  for (const std::string& weight_dtype : options.weight_dtypes) {
    subjects.emplace_back().engine = MakeEngine(options, threads, weight_dtype);
  }
  const std::string isa = subjects.front().engine->Stats().isa;
  kvanta::kernels::ReadLimit memory(threads, kvanta::kernels::SelectIsa(isa));
  for (int repeat = 0; repeat < options.repeats; ++repeat) {
    for (Subject& subject : subjects) MeasureOnce(options, threads, memory, subject);
  }
  std::vector<nlohmann::json> rows;
  for (const Subject& subject : subjects) {
    nlohmann::json row = Report(options, threads, subject);
    const nlohmann::json& first = rows.empty() ? row : rows.front();
    const auto times_first = [&](const char* key) { return row[key].get<double>() / first[key].get<double>(); };
    row["decode_times_first"] = times_first("decode_tokens_s");
    row["prefill_times_first"] = times_first("prefill_tokens_s");
    rows.push_back(row);
  }
  return rows;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Options options = ParseArguments(argc, argv);
    nlohmann::json rows = nlohmann::json::array();
    fmt::print("{:>7} {:>8} {:>8} {:>12} {:>10} {:>8} {:>14} {:>12} {:>8}\n", "threads", "isa", "weights",
               "decode tok/s", "GB/s", "share", "prefill tok/s", "GFLOP/s", "share");
    for (const int threads : options.threads) {
      const std::vector<nlohmann::json> measured = Measure(options, threads);
      for (size_t i = 0; i < measured.size(); ++i) {
        const nlohmann::json& row = measured[i];
        if (rows.size() > i && rows[i]["tokens"] != row["tokens"]) {
          throw kvanta::Error("different numbers of threads generated different tokens");
        }
        fmt::print("{:>7} {:>8} {:>8} {:>12.1f} {:>10.1f} {:>7.1f}% {:>14.1f} {:>12.1f} {:>7.1f}%\n", threads,
                   row["isa"].get<std::string>(), row["weight_dtype"].get<std::string>(),
                   row["decode_tokens_s"].get<double>(), row["decode_gb_s"].get<double>(),
                   100 * row["decode_share_of_bandwidth"].get<double>(), row["prefill_tokens_s"].get<double>(),
                   row["prefill_gflop_s"].get<double>(), 100 * row["prefill_share_of_peak"].get<double>());
        std::fflush(stdout);
      }
      for (const nlohmann::json& row : measured) rows.push_back(row);
    }
    if (!options.json.empty()) std::ofstream(options.json) << nlohmann::json({{"rows", rows}}).dump(1) << '\n';
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "engine_bench: {}\n", error.what());
    return 1;
  }
}
