// The engine on this machine's GPU: divergence of its logits from the CPU's, then a batch's tokens per second with and
// without CUDA graphs, which must give the same tokens.
//
//   gpu_engine_bench MODEL [--formats bf16 int4 ...] [--weights auto int8 int4] [--batches 1 16 64 256]
//                    [--prompt 256] [--tokens 128] [--verified 256] [--device cuda] [--json FILE]
//
// MODEL: a folder in Hugging Face layout, or a Llama's config.json (random weights). --verified: tokens whose logits
// are compared with the CPU's. --device cpu compares the CPU with itself, as a check of this program. Exit status 77
// without a usable GPU.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <random>

#include "base/dtype.h"
#include "base/thread_pool.h"
#include "bench/option_parser.h"
#include "kernels/cuda/cuda_context.h"
#include "kvanta/engine.h"
#include "models/config/config.h"
#include "runner/divergence.h"

namespace {

using namespace kvanta;  // NOLINT(google-build-using-namespace): this program is about it
namespace fs = std::filesystem;

struct Options {
  std::string model;
  std::vector<std::string> formats = {"bf16", "int4"};
  std::vector<std::string> weights = {"bf16", "int8", "int4"};
  std::vector<int> batches = {1, 16, 64, 256};
  int prompt = 256, tokens = 128, verified = 256;
  std::string device = "cuda";
  std::string json;
};

Options ParseArguments(int argc, char** argv) {
  Options options;
  OptionParser parser;
  parser.Positional(options.model);
  parser.Option("--formats", options.formats);
  parser.Option("--weights", options.weights);
  parser.Option("--batches", options.batches);
  parser.Option("--prompt", options.prompt);
  parser.Option("--tokens", options.tokens);
  parser.Option("--verified", options.verified);
  parser.Option("--device", options.device);
  parser.Option("--json", options.json);
  parser.Parse(argc, argv);
  if (options.model.empty())
    throw InputError("MODEL is required: a folder in Hugging Face layout, or the config.json of a Llama");
  return options;
}

// A temporary model folder with random bf16 weights of the config's shapes.
class RandomModel {
 public:
  explicit RandomModel(const std::string& config_file)
      : folder_(fs::temp_directory_path() / fmt::format("kvanta_random_{}", ::getpid())) {
    fs::create_directories(folder_);
    fs::copy_file(config_file, folder_ / "config.json", fs::copy_options::overwrite_existing);
    const models::ModelConfig config = models::ReadConfig(config_file);
    const int64_t q = int64_t{config.heads} * config.head_dim, kv = int64_t{config.kv_heads} * config.head_dim;
    Add("model.embed_tokens.weight", {config.vocab, config.hidden}, 1);
    for (int layer = 0; layer < config.layers; ++layer) {
      const std::string prefix = fmt::format("model.layers.{}.", layer);
      Add(prefix + "input_layernorm.weight", {config.hidden}, 0);
      Add(prefix + "post_attention_layernorm.weight", {config.hidden}, 0);
      Add(prefix + "self_attn.q_proj.weight", {q, config.hidden}, 1);
      Add(prefix + "self_attn.k_proj.weight", {kv, config.hidden}, 1);
      Add(prefix + "self_attn.v_proj.weight", {kv, config.hidden}, 1);
      Add(prefix + "self_attn.o_proj.weight", {config.hidden, q}, 1);
      Add(prefix + "mlp.gate_proj.weight", {config.intermediate_size, config.hidden}, 1);
      Add(prefix + "mlp.up_proj.weight", {config.intermediate_size, config.hidden}, 1);
      Add(prefix + "mlp.down_proj.weight", {config.hidden, config.intermediate_size}, 1);
    }
    Add("model.norm.weight", {config.hidden}, 0);
    if (!config.tied_embeddings) Add("lm_head.weight", {config.vocab, config.hidden}, 1);
    Write();
  }
  ~RandomModel() {
    std::error_code ignored;
    fs::remove_all(folder_, ignored);
  }
  RandomModel(const RandomModel&) = delete;
  RandomModel& operator=(const RandomModel&) = delete;
  std::string Path() const { return folder_.string(); }

 private:
  struct Tensor {
    int64_t count;
    float deviation;  // 0: ones
  };
  static constexpr int64_t kPiece = int64_t{1} << 20;  // values

  // Normal values with standard deviation gain / sqrt(in); ones if gain is 0.
  void Add(const std::string& name, const std::vector<int64_t>& shape, float gain) {
    int64_t count = 1;
    for (const int64_t size : shape) count *= size;
    header_[name] = {{"dtype", "BF16"}, {"shape", shape}, {"data_offsets", {bytes_, bytes_ + 2 * count}}};
    bytes_ += 2 * count;
    tensors_.push_back({count, gain / std::sqrt(static_cast<float>(shape.back()))});
  }

  // Values are drawn from a table of normal ones: a large model has thousands of millions.
  void Write() {
    std::vector<float> normals(1 << 16);
    std::mt19937 random(17);
    std::normal_distribution<float> normal;
    for (float& x : normals) x = normal(random);
    const std::string header = header_.dump();
    const uint64_t size = header.size();
    std::ofstream file(folder_ / "model.safetensors", std::ios::binary);
    file.write(reinterpret_cast<const char*>(&size), sizeof(size)) << header;
    ThreadPool threads(0);
    std::vector<uint16_t> values, table(normals.size());
    uint64_t seed = 0;
    for (const Tensor& tensor : tensors_) {
      values.assign(static_cast<size_t>(tensor.count), FloatToBf16(1));
      if (tensor.deviation != 0) {
        for (size_t i = 0; i < table.size(); ++i) table[i] = FloatToBf16(normals[i] * tensor.deviation);
        auto fill = [&](int64_t piece, int /*worker*/) {
          std::mt19937_64 indices(seed + static_cast<uint64_t>(piece));
          for (int64_t i = piece * kPiece; i < std::min(tensor.count, (piece + 1) * kPiece); i += 4) {
            uint64_t bits = indices();
            for (int64_t j = i; j < std::min(tensor.count, i + 4); ++j, bits >>= 16U) {
              values[static_cast<size_t>(j)] = table[bits & 0xffffU];
            }
          }
        };
        const int64_t pieces = (tensor.count + kPiece - 1) / kPiece;
        threads.ForEach(pieces, fill);
        seed += static_cast<uint64_t>(pieces);
      }
      file.write(reinterpret_cast<const char*>(values.data()), static_cast<std::streamsize>(values.size() * 2));
    }
  }

  fs::path folder_;
  int64_t bytes_ = 0;
  std::vector<Tensor> tensors_;
  nlohmann::json header_;
};

std::vector<int32_t> RandomTokens(int count, int vocab, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % static_cast<uint32_t>(vocab));
  return tokens;
}

EngineConfig Config(const Options& options, const std::string& model, const std::string& format,
                    const std::string& weights, const std::string& device) {
  EngineConfig config;
  config.model = model;
  config.kv_cache_dtype = format;
  config.dtype = "bfloat16";
  config.weight_dtype = weights;
  config.device = device;
  config.max_num_seqs = *std::max_element(options.batches.begin(), options.batches.end());
  config.max_model_len = options.prompt + options.tokens + 64;
  config.max_num_batched_tokens = 8192;  // prompts of many requests end before the first request does
  return config;
}

std::vector<float> Logits(Engine& engine, const std::vector<int32_t>& tokens) {
  std::vector<float> logits(tokens.size() * static_cast<size_t>(engine.Info().vocab));
  engine.Logits(tokens, 0, logits);
  return logits;
}

struct Decoding {
  double step = 0;   // seconds, the median of steps of decode alone
  double total = 0;  // seconds
  std::map<std::string, std::vector<int32_t>> tokens;
};

Decoding Decode(const Options& options, int batch, Engine& engine) {
  for (int i = 0; i < batch; ++i) {
    Request request{.id = std::to_string(i), .prompt = RandomTokens(options.prompt, engine.Info().vocab, 100U + i)};
    request.sampling.temperature = i % 2 == 0 ? 0.0F : 1.0F;
    request.sampling.max_tokens = options.tokens;
    request.sampling.ignore_eos = true;
    engine.Add(request);
  }
  // Every request has a token, none has ended.
  using Clock = std::chrono::steady_clock;
  Decoding result;
  std::vector<RequestOutput> outputs;
  std::vector<double> steps;
  const auto begin = Clock::now();
  for (;;) {
    const auto start = Clock::now();
    if (!engine.Step(outputs)) break;
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    if (std::ssize(outputs) == batch && engine.Stats().running == batch) steps.push_back(seconds);
    for (const RequestOutput& output : outputs) {
      auto& tokens = result.tokens[output.id];
      tokens.insert(tokens.end(), output.tokens.begin(), output.tokens.end());
    }
  }
  result.total = std::chrono::duration<double>(Clock::now() - begin).count();
  std::sort(steps.begin(), steps.end());
  if (!steps.empty()) result.step = steps[steps.size() / 2];
  return result;
}

struct Divergence {
  double mean = 0, max = 0, top1 = 0;
};
Divergence DivergenceFromCpu(const Options& options, const std::string& model, const std::string& format,
                             const std::string& weights, Engine& gpu) {
  const std::vector<int32_t> tokens = RandomTokens(std::min(options.prompt, options.verified), gpu.Info().vocab, 3);
  const std::vector<float> found = Logits(gpu, tokens);
  Engine cpu(Config(options, model, format, weights, "cpu"));
  const std::vector<float> expected = Logits(cpu, tokens);
  const auto vocab = static_cast<size_t>(gpu.Info().vocab);
  Divergence result;
  for (size_t row = 0; row < tokens.size(); ++row) {
    const auto a = std::span(expected).subspan(row * vocab, vocab), b = std::span(found).subspan(row * vocab, vocab);
    const double kl = runner::KlDivergence(a, b);
    result.mean += kl / static_cast<double>(tokens.size());
    result.max = std::max(result.max, kl);
    const bool same = std::ranges::max_element(a) - a.begin() == std::ranges::max_element(b) - b.begin();
    result.top1 += same ? 1.0 / static_cast<double>(tokens.size()) : 0.0;
  }
  // Far above rounding differences (docs/adr/0016), far below a faulty kernel's divergence.
  constexpr double kMaxDivergence = 1e-2;
  if (!(result.mean < kMaxDivergence)) {
    throw ResourceError(fmt::format("{} with {} weights: mean KL(CPU || GPU) is {}; expected below {}", format, weights,
                                    result.mean, kMaxDivergence));
  }
  return result;
}

void Measure(const Options& options, const std::string& model, const std::string& format, const std::string& weights,
             nlohmann::json& rows) {
  const auto begin = std::chrono::steady_clock::now();
  auto gpu = std::make_unique<Engine>(Config(options, model, format, weights, options.device));
  const double start = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  const Divergence kl = DivergenceFromCpu(options, model, format, weights, *gpu);
  fmt::print("{:<16} weights {:<5} started in {:.2f} s; KL mean {:.2e}, max {:.2e}, top-1 {:.3f}\n", format, weights,
             start, kl.mean, kl.max, kl.top1);
  std::vector<Decoding> runs;
  for (const int batch : options.batches) runs.push_back(Decode(options, batch, *gpu));
  const EngineStats stats = gpu->Stats();
  gpu.reset();  // one cache at a time
  EngineConfig eager_config = Config(options, model, format, weights, options.device);
  eager_config.enforce_eager = true;
  Engine eager_engine(eager_config);
  for (size_t i = 0; i < runs.size(); ++i) {
    const int batch = options.batches[i];
    const Decoding eager = Decode(options, batch, eager_engine);
    if (eager.tokens != runs[i].tokens) {
      throw ResourceError(fmt::format("{} with {} weights: CUDA graphs change tokens", format, weights));
    }
    const auto rate = [&](const Decoding& run) { return run.step > 0 ? batch / run.step : 0.0; };
    fmt::print(
        "  decode of {:>3}: {:8.3f} ms a step, {:8.0f} tokens/s; eager {:8.3f} ms, {:8.0f} tokens/s; with prompts "
        "{:6.2f} s\n",
        batch, runs[i].step * 1e3, rate(runs[i]), eager.step * 1e3, rate(eager), runs[i].total);
    rows.push_back({{"format", format},
                    {"weights", weights},
                    {"backend", stats.backend},
                    {"batch", batch},
                    {"prompt", options.prompt},
                    {"tokens", options.tokens},
                    {"start_seconds", start},
                    {"kl_mean", kl.mean},
                    {"kl_max", kl.max},
                    {"top1", kl.top1},
                    {"decode_step_ms", runs[i].step * 1e3},
                    {"decode_tokens_per_second", rate(runs[i])},
                    {"eager_step_ms", eager.step * 1e3},
                    {"eager_tokens_per_second", rate(eager)},
                    {"seconds", runs[i].total},
                    {"weight_bytes", stats.weight_bytes}});
  }
}

void Run(const Options& options) {
  std::unique_ptr<RandomModel> random;
  if (!fs::is_directory(options.model)) random = std::make_unique<RandomModel>(options.model);
  const std::string model = random ? random->Path() : options.model;
  nlohmann::json rows = nlohmann::json::array();
  for (const std::string& format : options.formats) {
    for (const std::string& weights : options.weights) Measure(options, model, format, weights, rows);
  }
  if (!options.json.empty()) std::ofstream(options.json) << rows.dump(1) << '\n';
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Options options = ParseArguments(argc, argv);
    if (const std::string missing = kernels::MissingForCuda(); options.device == "cuda" && !missing.empty()) {
      fmt::print("skipped: {}\n", missing);
      return 77;
    }
    Run(options);
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "gpu_engine_bench: {}\n", error.what());
    return 1;
  }
}
