// The engine: takes and gives token ids. Thread-safe: Add, Abort, Stats from any thread. See docs/engine-contract.md.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kvanta/constraint.h"
#include "kvanta/error.h"
#include "kvanta/kv_scheme.h"
#include "kvanta/sampling.h"

namespace kvanta {

struct EngineConfig {
  std::string model;                    // folder in Hugging Face layout
  std::string kv_cache_dtype = "auto";  // scheme text, see KvScheme::Parse; "auto": the checkpoint's, else the dtype's
  std::string kv_cache_dtype_layers;    // see ParseLayerSchemes
  std::vector<std::string> kv_cache_dtype_skip_layers;  // layers kept at the model's dtype: indices, "sliding_window"
  std::string quantization_param_path;                  // scale file, two schemas (docs/scales.md)
  bool calculate_kv_scales = false;                     // static scales from the first prompt
  std::string dtype = "auto";                           // weights: "auto", "bfloat16", "float16", "float32"
  std::string weight_dtype = "auto";                    // "auto": dtype's; "bf16", "int8", "int4" (docs/weights.md)
  int64_t max_model_len = 0;                            // tokens per sequence; 0: the model's own limit
  int max_num_seqs = 64;                                // running at once
  int max_num_batched_tokens = 512;                     // tokens per step; at least page_size
  int max_queued_requests = 0;                          // waiting to run; more are refused. 0: any number
  int page_size = 64;                                   // 16, 32, 64, 128
  int64_t kv_cache_memory_bytes = 0;  // 0: what max_num_seqs full sequences need, at most 40 % of available memory
  bool enable_prefix_caching = true;
  int threads = 0;              // 0: all CPUs of the affinity mask
  std::string device = "auto";  // "auto", "cpu", "cuda"
  // On a GPU: launches one by one, where steps of decode alone would be recorded and begun by one call.
  bool enforce_eager = false;
  std::string isa = "auto";  // "auto", "avx512", "avx2", "portable"; environment KVANTA_ISA wins over auto
  uint64_t seed = 0;         // of requests without their own
  // Share of the finished requests, in [0, 1], whose served distribution is compared with an exact cache's while the
  // engine is idle (EngineStats::quality).
  double quality_sample_rate = 0;
  bool profile = false;               // EngineStats::profile
  std::optional<bool> poison_unused;  // fill unused cache memory with NaN; default: debug builds only
  BitmaskFn fill_masks;               // of requests with a constraint; kvanta/constraint.h
  // Told what an operator should know: scales that were guessed or measured, limits that were cut. May be called from
  // the engine's thread; must not call the engine. The library itself never prints.
  std::function<void(const std::string&)> on_warning;
};

struct Request {
  std::string id = {};               // unique among unfinished requests
  std::vector<int32_t> prompt = {};  // at least one token
  SamplingParams sampling = {};
  std::string cache_salt = {};                       // isolates prefix sharing
  int priority = 0;                                  // smaller runs first
  std::shared_ptr<TokenConstraint> constraint = {};  // needs EngineConfig::fill_masks; null: any token
  double timeout_seconds = 0;                        // since Add; ends with kTimeout when they are over. 0: none
};

enum class FinishReason : uint8_t { kNone, kStop, kLength, kAbort, kError, kTimeout };

struct TokenLogprob {
  int32_t token = 0;
  float logprob = 0;
  int rank = 0;  // 1: most likely
};

// When things happened to a request: seconds of std::chrono::steady_clock (on Linux also Python's time.monotonic()); 0:
// not yet. first_token and last_token are the ends of the steps that made them.
struct RequestTimes {
  double added = 0, scheduled = 0, first_token = 0, last_token = 0;
};

// One request's news of one step.
struct RequestOutput {
  std::string id;
  std::vector<int32_t> tokens;                             // new tokens (0 or 1 today)
  std::vector<std::vector<TokenLogprob>> logprobs;         // per new token: the chosen one first, then the most likely
  std::vector<std::vector<TokenLogprob>> prompt_logprobs;  // once, with the first token; entry 0 is empty
  FinishReason finish = FinishReason::kNone;
  std::optional<int32_t> stop_token;  // the token that stopped it, if one did
  int cached_tokens = 0;              // prompt tokens taken from the prefix cache
  int preemptions = 0;                // times that its pages were taken and computed again
  RequestTimes times;
  std::string error;  // with kError and kTimeout: why; with kAbort: the reason that Abort was given
};

struct LayerStats {
  std::string scheme;
  int64_t page_bytes = 0;               // of this layer in a quantized record
  std::vector<float> k_scale, v_scale;  // live static scales, read back from the attention backend; empty if unused
  int64_t k_values = 0, k_saturated = 0, k_nan = 0;
  int64_t v_values = 0, v_saturated = 0, v_nan = 0;
  // Scales of blocks, or of rows where these have one, and those that are zero: their values are read as zeros. None
  // where the format has no such scale, or a zero point beside it, or shares it among tokens.
  int64_t k_blocks = 0, k_zero_blocks = 0, v_blocks = 0, v_zero_blocks = 0;
};

// KL(exact cache || served cache) in nats at every generated token of the sampled requests; 2,048 tokens of each at
// most.
struct QualityStats {
  int64_t requests = 0, tokens = 0;  // compared
  int64_t pending = 0;               // requests that wait for idle time
  int64_t skipped = 0;               // sampled, but too many waited, the prompt was too long, or memory was short
  double kl_sum = 0, kl_max = 0;     // mean: kl_sum / tokens
};

// One operation of the model: "attention", "append", "norm", "linear q_proj|k_proj|v_proj", ...
struct ProfileRow {
  std::string name;
  double seconds = 0;
  int64_t calls = 0;
};

// A KV cache group: layers of the same visibility and page rule, which share a block table and page pools.
struct CacheGroupStats {
  std::string visibility;  // "full", "sliding_window=1024", "chunked=8192"
  std::vector<int> layers;
  int64_t page_bytes = 0, exact_page_bytes = 0;  // one record, all layers of the group
  int64_t pages_used = 0, exact_pages_used = 0;
};

struct EngineStats {
  int64_t running = 0, waiting = 0, preemptions = 0, steps = 0;
  int64_t prompt_tokens = 0, cached_tokens = 0, generated_tokens = 0;  // computed; taken from the prefix cache; sampled
  int64_t prefix_queries = 0;                                          // prompt tokens that were looked up there
  int64_t prefix_evictions = 0;                                        // pages that it gave up for others
  int64_t finished_stop = 0, finished_length = 0, finished_abort = 0, finished_error = 0, finished_timeout = 0;
  int64_t refused = 0;  // by Add with QueueFullError
  int64_t page_size = 0;
  int64_t page_bytes = 0, exact_page_bytes = 0;  // one record, all layers
  double bytes_per_token = 0;                    // page_bytes / page_size
  // Of the group that uses most; free: how many more pages of all groups fit.
  int64_t pages_used = 0, pages_free = 0, exact_pages_used = 0;
  std::vector<CacheGroupStats> groups;
  int64_t cache_used_bytes = 0, cache_budget_bytes = 0;
  int64_t cache_evictable_bytes = 0;  // of the used ones, those that only the prefix cache holds
  int64_t prefix_pages = 0;           // pages held by the prefix cache
  int64_t weight_bytes = 0;
  std::string backend, isa, device;
  int threads = 0;
  // Inside steps: all of it; the model, logits included; choosing chunks; asking for masks; sampling. Beside them: the
  // callback of Start().
  double seconds_total = 0, seconds_forward = 0, seconds_schedule = 0, seconds_masks = 0, seconds_sample = 0;
  double seconds_callback = 0;
  std::vector<ProfileRow> profile;  // parts of seconds_forward, with EngineConfig::profile
  QualityStats quality;
  std::vector<LayerStats> layers;
};

// A step of the engine's own thread: how many requests got a token, and its time outside the model, the callback
// included.
struct StepTiming {
  int sequences = 0;
  float outside_seconds = 0;
};

// What a model is, for planners and front ends.
struct ModelInfo {
  std::string architecture, dtype;
  int layers = 0, hidden = 0, heads = 0, kv_heads = 0, head_dim = 0, vocab = 0;
  int rope_dim =
      0;  // 0: K and V are apart; else both are one latent of head_dim (MLA), and a key has these channels more
  int64_t max_position = 0;
  int64_t parameters = 0, weight_bytes = 0;  // from the shapes; bytes as kept, norms and biases as f32
  std::vector<int> sliding_window;           // per layer; 0: none
  std::vector<int32_t> eos_token_ids;
  std::string declared_kv_cache;  // scheme that the checkpoint declares, "" if none
  std::string hash;               // of the weights, as scale files carry it; "" where no weights were read
};

// Bytes of a cache, without building one (same code that lays out the engine's).
struct CachePlan {
  std::vector<CacheGroupStats> groups;  // without counts of pages
  double bits_per_element = 0;
  int64_t page_bytes = 0, exact_page_bytes = 0;
  int64_t exact_pages_per_sequence = 0;  // open page + sink
  double bytes_per_token = 0;
  // Most that one sequence of max_model_len tokens holds (0: the model's limit): whole pages, exact pages, and of
  // layers with a window only the pages that it covers.
  int64_t sequence_bytes = 0;
};

// Both need no weights: `model` may be a folder, or the path of a config.json. Throw InputError.
ModelInfo ReadModelInfo(const std::string& model, const std::string& dtype = "auto",
                        const std::string& weight_dtype = "auto");
CachePlan PlanCacheBytes(const EngineConfig& config);

// Magnitudes and moments of the keys and values of a text, for calibration. Side 0 is K after RoPE, 1 is V. Figures of
// several texts add up: counts and sums by +, amax by max.
struct KvStatistics {
  int64_t tokens = 0;
  int layers = 0, kv_heads = 0, head_dim = 0;
  std::vector<float> edges;        // [bins + 1]: histogram[..][i] counts magnitudes in [edges[i], edges[i + 1])
  std::vector<int64_t> histogram;  // [layers][2][kv_heads][bins]; the first and last bin also take what lies beyond
  std::vector<float> amax;         // [layers][2][kv_heads][head_dim], as all below
  std::vector<double> sum, square_sum;
};

// One callback per step, on the engine's thread, with every request's news. Must not call Engine methods that wait.
using StepCallback = std::function<void(std::span<const RequestOutput>)>;

class Engine {
 public:
  // Loads the model and reserves the cache. Throws InputError / ResourceError.
  explicit Engine(EngineConfig config);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Validates and queues. Throws InputError (empty prompt, token id out of range, prompt longer than the model or than
  // the whole cache, duplicate id, bad sampling parameter), QueueFullError (max_queued_requests wait already), and
  // ResourceError while Stop() drains.
  void Add(Request request);
  // Ends a request; its last output has FinishReason::kAbort and the reason. Unknown ids are ignored.
  void Abort(const std::string& id, const std::string& reason = "");

  // Either drive the loop yourself: one step on the calling thread; false when there was nothing to do ...
  bool Step(std::vector<RequestOutput>& outputs);
  // ... or let the engine's thread do it. Stop() waits for the step in progress; with drain, until every request has
  // ended, and nothing is added meanwhile.
  void Start(StepCallback callback);
  void Stop(bool drain = false);

  // Logits of a whole sequence, teacher-forced through the paged, quantized cache, f32 [tokens][vocab] into `out`,
  // in chunks of at most `chunk_tokens` tokens (0, or more than it: max_num_batched_tokens); they do not change a bit.
  // With use_prefix_cache, whole pages of a cached prefix are not computed again: returns their number of tokens, whose
  // rows of `out` are left as they were (0 otherwise), and closed pages are offered to the cache. Not while Start()ed.
  int64_t Logits(std::span<const int32_t> tokens, int chunk_tokens, std::span<float> out,
                 bool use_prefix_cache = false);

  // Canonical bytes (docs/formats.md, "Page files") of page `index` of a cached prefix, of the layers of one KV cache
  // group (EngineStats::groups); throws InputError if not cached.
  std::vector<uint8_t> ExportPage(std::span<const int32_t> tokens, int index, int group = 0);

  // Statistics of the keys and values of `tokens`, at most max_model_len, as one sequence through a cache of exact
  // pages of its own; nothing is kept. key_means: f32 [layers][kv_heads][head_dim] to subtract from K first, or empty.
  // Not while Start()ed. Throws InputError also when a key or value is not finite.
  KvStatistics CollectStatistics(std::span<const int32_t> tokens, std::span<const float> key_means = {});

  // One chunk of the comparisons that quality_sample_rate asks for; false when none is left. The engine's own thread
  // does it while it has nothing else to do; not while Start()ed.
  bool MeasureQuality();

  EngineStats Stats() const;
  // The last ones, at most 4,096, the oldest first.
  std::vector<StepTiming> RecentSteps() const;
  const ModelInfo& Info() const;
  const EngineConfig& Config() const;  // with "auto" and 0 resolved
  // Drops every cached prefix that no running request uses.
  void ResetPrefixCache();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kvanta
