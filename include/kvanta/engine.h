// The inference engine: token ids in, token ids out. Contract: docs/engine-contract.md.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kvanta/constraint.h"
#include "kvanta/error.h"
#include "kvanta/kv_events.h"
#include "kvanta/kv_scheme.h"
#include "kvanta/pooling.h"
#include "kvanta/rank_lost_error.h"
#include "kvanta/sampling.h"
#include "kvanta/stats.h"

namespace kvanta {

struct EngineConfig {
  std::string model;                    // folder in Hugging Face layout
  std::string kv_cache_dtype = "auto";  // scheme text, see KvScheme::Parse; "auto": the checkpoint's, else the dtype's
  std::string kv_cache_dtype_layers;    // see ParseLayerSchemes
  std::vector<std::string> kv_cache_dtype_skip_layers;  // layers kept at the model's dtype: indices, "sliding_window"
  std::string quantization_param_path;                  // scale file, two schemas (docs/scales.md)
  bool calculate_kv_scales = false;                     // static scales from a probe at the start
  // Scheme text of the keys of indexers (sparse attention, docs/models.md); "auto": unquantized where latents are, else
  // "fp8". Quantized keys are rotated (+hadamard) unless the text says -hadamard.
  std::string indexer_cache_dtype = "auto";
  // Code of the states of recurrent layers at multiples of state_grid tokens, where prefix hits continue: "float32"
  // (states are never rounded), "bfloat16", "int8", "int4" (docs/formats.md). With a code, every run rounds there.
  std::string state_cache_dtype = "float32";
  int64_t state_grid = 1024;          // a multiple of page_size
  std::string dtype = "auto";         // weights: "auto", "bfloat16", "float16", "float32"
  std::string weight_dtype = "auto";  // "auto": dtype's, a GGUF file's own; "bf16", "int8", "int4"
  int64_t max_model_len = 0;          // tokens per sequence; 0: the model's own limit
  // Tokens that end a text in addition to those of config.json and generation_config.json: the tokenizer's.
  std::vector<int32_t> eos_token_ids;
  int max_num_seqs = 64;             // sequences that run at once
  int max_num_batched_tokens = 512;  // tokens per step; at least page_size
  // Milliseconds that a step may take while a sequence decodes, so that prompts do not stall its stream, and four times
  // as many while none does (docs/serve.md). 0: no limit but max_num_batched_tokens. Without a value, while the
  // engine's own thread runs steps: the larger of twice what the step takes without prompts and 40 more than that.
  std::optional<double> max_step_ms;
  // Order of prompts: "shortest": the shortest remaining prompt first, but none waits for others longer than
  // max_prompt_delay; "fcfs": in order of arrival, as without a time limit. A smaller Request::priority always comes
  // first.
  std::string scheduling_policy = "shortest";
  double max_prompt_delay = 0;   // seconds; 0: four times what the prompt takes alone
  std::string fair_by = "none";  // "none"; else each Request::user gets an equal share of the tokens
  // Prompts that are computed at the same time. Prompts of more tokens than the threshold are long; a step computes at
  // most as many tokens of each as the threshold. 0: no limit.
  int max_num_partial_prefills = 0, max_long_partial_prefills = 0;
  int64_t long_prefill_token_threshold = 0;
  int max_queued_requests = 0;        // waiting requests, above which Add refuses; 0: no limit
  int page_size = 64;                 // tokens: 16, 32, 64, 128
  int64_t kv_cache_memory_bytes = 0;  // 0: what max_num_seqs full sequences need, at most 40 % of available memory
  bool enable_prefix_caching = true;
  // With device "cuda": page-locked memory of the host that keeps copies of closed pages, so that those evicted from
  // the GPU's memory need not be computed again (docs/prefix-cache.md). Taken at the start. 0: none.
  int64_t kv_offload_bytes = 0;
  // Folder in which closed pages outlive the process (docs/prefix-cache.md); several engines may share it. Empty: none.
  std::string kv_cache_dir;
  int64_t kv_cache_dir_bytes = int64_t{16} << 30;  // limit of the folder's files; least recently used ones go first
  // Server that keeps closed pages for several machines: redis://[[user]:password@]host[:port][/database], or rediss://
  // with TLS. Empty: none. Config() has it without user and password.
  std::string kv_store;
  int kv_store_ttl = 0;  // seconds that the server keeps a page after its last use; 0: its own
  // Role of an engine that shares kv_cache_dir or kv_store with others: "both"; "prefill": requests end with their
  // first token, as soon as their prompt's pages are stored; "decode": stored pages are always loaded, even where
  // computing would be faster.
  std::string role = "both";
  double max_cache_ttl = 0;  // limit of SamplingParams::cache_ttl, seconds; 0: no request may set it
  // Changes of the prefix cache that are kept for TakeKvEvents. After an overflow it starts over with all pages. 0:
  // none.
  int64_t kv_events_queue_size = 0;
  int threads = 0;              // 0: one per CPU of the affinity mask and the cgroup's quota
  std::string device = "auto";  // "auto", "cpu", "cuda"
  bool enforce_eager = false;   // on a GPU: no CUDA graphs for decode steps
  std::string isa = "auto";     // a unit's name (docs/support.md) or "auto", which environment KVANTA_ISA overrides
  uint64_t seed = 0;            // for requests without a seed of their own
  // Speculative decoding (docs/speculation.md): JSON with vLLM's keys, such as
  // {"method": "ngram", "num_speculative_tokens": 4}, or {"model": FOLDER} of a draft model; empty: none. Tokens and
  // log-probabilities keep their bits.
  std::string speculative_config;
  // Share of the finished requests, in [0, 1], whose served distribution is compared with an exact cache's while the
  // engine is idle (EngineStats::quality).
  double quality_sample_rate = 0;
  // Ranks: several processes (docs/parallel.md). With tensor parallelism, each computes with a part of the weights and
  // of the KV heads of every layer, on device "cuda" with a GPU of its own; with pipeline parallelism, with some of the
  // layers.
  // kv_cache_memory_bytes and threads apply to each process. Rank 0 is an Engine, the others call RunRank() with the
  // same options.
  int tensor_parallel_size = 1;
  int pipeline_parallel_size = 1;
  // Ranks of tensor parallelism that divide the pages of latents (MLA), which each would otherwise keep whole: 1 or
  // tensor_parallel_size.
  int decode_context_parallel_size = 1;
  // Ranks divide the experts of a layer instead of the outputs of each expert. No effect without experts or ranks.
  bool enable_expert_parallel = false;
  // Seconds after which a rank that is alive but does not answer is treated as lost.
  int distributed_timeout_seconds = 120;
  // Machines that the ranks are divided among, in the order of ranks, and this one's number. Those that start the ranks
  // (python/kvanta/engine/rank_nodes.py) connect to node 0 at master_addr and copy what appears in rank_folder.
  int nnodes = 1;
  int node_rank = 0;
  std::string master_addr = "127.0.0.1";
  int master_port = 29501;
  int rank = 0;
  std::string rank_folder;                 // where the ranks find each other: empty at the start, and private to them
  std::string rank_address = "127.0.0.1";  // this machine's address, at which the other ranks reach this one
  bool profile = false;                    // measures EngineStats::profile
  std::optional<bool> poison_unused;       // fill unused cache memory with NaN; default: debug builds only
  BitmaskFn fill_masks;                    // masks of requests with a constraint (kvanta/constraint.h)
  // Called once by rank 0 before it waits for the other ranks, after options and model were checked.
  std::function<void()> start_ranks;
  // Operator warnings: default or measured scales, reduced limits. May be called on the engine's thread; must not call
  // the engine. The library itself never prints.
  std::function<void(const std::string&)> on_warning;

  // Calls visit(name, pointer to member, limits...) for every option but the callbacks. limits: the smallest valid
  // value and the largest one, each only if it exists. Bindings and checks derive from this list.
  template <class Visitor>
  static void VisitOptions(Visitor&& visit) {
    visit("model", &EngineConfig::model);
    visit("kv_cache_dtype", &EngineConfig::kv_cache_dtype);
    visit("kv_cache_dtype_layers", &EngineConfig::kv_cache_dtype_layers);
    visit("kv_cache_dtype_skip_layers", &EngineConfig::kv_cache_dtype_skip_layers);
    visit("quantization_param_path", &EngineConfig::quantization_param_path);
    visit("calculate_kv_scales", &EngineConfig::calculate_kv_scales);
    visit("indexer_cache_dtype", &EngineConfig::indexer_cache_dtype);
    visit("state_cache_dtype", &EngineConfig::state_cache_dtype);
    visit("state_grid", &EngineConfig::state_grid, 1);
    visit("dtype", &EngineConfig::dtype);
    visit("weight_dtype", &EngineConfig::weight_dtype);
    visit("max_model_len", &EngineConfig::max_model_len, 0);
    visit("eos_token_ids", &EngineConfig::eos_token_ids);
    visit("max_num_seqs", &EngineConfig::max_num_seqs, 1);
    visit("max_num_batched_tokens", &EngineConfig::max_num_batched_tokens);
    visit("max_step_ms", &EngineConfig::max_step_ms);
    visit("scheduling_policy", &EngineConfig::scheduling_policy);
    visit("max_prompt_delay", &EngineConfig::max_prompt_delay, 0);
    visit("fair_by", &EngineConfig::fair_by);
    visit("max_num_partial_prefills", &EngineConfig::max_num_partial_prefills, 0);
    visit("max_long_partial_prefills", &EngineConfig::max_long_partial_prefills, 0);
    visit("long_prefill_token_threshold", &EngineConfig::long_prefill_token_threshold, 0);
    visit("max_queued_requests", &EngineConfig::max_queued_requests, 0);
    visit("page_size", &EngineConfig::page_size);
    visit("kv_cache_memory_bytes", &EngineConfig::kv_cache_memory_bytes, 0);
    visit("enable_prefix_caching", &EngineConfig::enable_prefix_caching);
    visit("kv_offload_bytes", &EngineConfig::kv_offload_bytes, 0);
    visit("kv_cache_dir", &EngineConfig::kv_cache_dir);
    visit("kv_cache_dir_bytes", &EngineConfig::kv_cache_dir_bytes, 1);
    visit("kv_store", &EngineConfig::kv_store);
    visit("kv_store_ttl", &EngineConfig::kv_store_ttl, 0);
    visit("role", &EngineConfig::role);
    visit("max_cache_ttl", &EngineConfig::max_cache_ttl, 0, 86400);
    visit("kv_events_queue_size", &EngineConfig::kv_events_queue_size, 0);
    visit("threads", &EngineConfig::threads, 0);
    visit("device", &EngineConfig::device);
    visit("enforce_eager", &EngineConfig::enforce_eager);
    visit("isa", &EngineConfig::isa);
    visit("seed", &EngineConfig::seed);
    visit("speculative_config", &EngineConfig::speculative_config);
    visit("quality_sample_rate", &EngineConfig::quality_sample_rate, 0, 1);
    visit("tensor_parallel_size", &EngineConfig::tensor_parallel_size, 1, 16);
    visit("pipeline_parallel_size", &EngineConfig::pipeline_parallel_size, 1, 16);
    visit("decode_context_parallel_size", &EngineConfig::decode_context_parallel_size, 1, 16);
    visit("enable_expert_parallel", &EngineConfig::enable_expert_parallel);
    visit("distributed_timeout_seconds", &EngineConfig::distributed_timeout_seconds, 1);
    visit("nnodes", &EngineConfig::nnodes, 1, 16);
    visit("node_rank", &EngineConfig::node_rank, 0);
    visit("master_addr", &EngineConfig::master_addr);
    visit("master_port", &EngineConfig::master_port, 0, 65535);
    visit("rank", &EngineConfig::rank, 0);
    visit("rank_folder", &EngineConfig::rank_folder);
    visit("rank_address", &EngineConfig::rank_address);
    visit("profile", &EngineConfig::profile);
    visit("poison_unused", &EngineConfig::poison_unused);
  }
};

struct Request {
  std::string id = {};               // unique among unfinished requests
  std::vector<int32_t> prompt = {};  // at least one token
  // Tokens that an engine has already generated for this request, which continues after them as if it had never been
  // interrupted: with the same seed, the tokens that follow have the same bits. Outputs have only the new tokens, and
  // no prompt_logprobs.
  std::vector<int32_t> generated = {};
  SamplingParams sampling = {};
  // An embedding instead of tokens; of `sampling`, only skip_reading_prefix_cache has an effect then.
  std::optional<PoolingParams> pooling = {};
  std::string cache_salt = {};                       // isolates prefix sharing
  int priority = 0;                                  // smaller runs first
  std::string user = {};                             // with EngineConfig::fair_by
  std::shared_ptr<TokenConstraint> constraint = {};  // needs EngineConfig::fill_masks; null: any token
  double timeout_seconds = 0;                        // since Add; then the request ends with kTimeout. 0: none
};

enum class FinishReason : uint8_t { kNone, kStop, kLength, kAbort, kError, kTimeout };

// Times of a request's events: seconds of std::chrono::steady_clock (on Linux also Python's time.monotonic()); 0: not
// yet. first_token and last_token are the ends of the steps that sampled them.
struct RequestTimes {
  double added = 0, scheduled = 0, first_token = 0, last_token = 0;
};

// One request's output of one step.
struct RequestOutput {
  std::string id;
  std::vector<int32_t> tokens;                             // new tokens: 0 or 1, and more where drafts are accepted
  std::vector<std::vector<TokenLogprob>> logprobs;         // per new token: the sampled one first, then the most likely
  std::vector<std::vector<TokenLogprob>> prompt_logprobs;  // once, with the first token or kStop; entry 0 is empty
  std::vector<float> embedding;                            // with pooling: once, with kStop
  FinishReason finish = FinishReason::kNone;
  std::optional<int32_t> stop_token;  // the stop token that ended it, if one did
  int draft_tokens = 0;               // draft tokens that the step verified
  int accepted_tokens = 0;            // number of draft tokens among `tokens`; they come first
  int cached_tokens = 0;              // prompt tokens taken from the prefix cache
  int preemptions = 0;                // times that its pages were freed and computed again
  // With precision by pressure: what the tokens so far were computed with.
  std::optional<KvCacheRecord> kv_cache;
  RequestTimes times;
  std::string error;             // reason: with kError and kTimeout; with kAbort the one passed to Abort
  bool invalid_input = false;    // with kError: caused by the request (MaskTask::invalid_input), not by the engine
  std::optional<int> lost_rank;  // with kError: the rank without which the engine cannot continue (RankLostError)
};

// Properties of a model, for planners and front ends.
struct ModelInfo {
  std::string architecture, dtype;
  int layers = 0;  // in the cache: without those that use K and V of earlier layers
  int hidden = 0, heads = 0, kv_heads = 0, head_dim = 0, vocab = 0;  // those of most layers
  int rope_dim = 0;  // above 0: K and V share one latent of head_dim (MLA), and a key has these channels in addition
  int64_t max_position = 0;
  int64_t parameters = 0, weight_bytes = 0;      // from the shapes; bytes as stored, norms and biases as f32
  std::vector<int> sliding_window;               // per layer; 0: none
  std::vector<std::pair<int, int>> layer_heads;  // per layer: KV heads, and the channels of each
  std::vector<int32_t> eos_token_ids;
  bool has_lm_head = true;              // false: texts can be embedded, and none generated
  int embedding_size = 0;               // channels of an embedding: `hidden`, or those of the last dense module
  std::string declared_kv_cache;        // scheme that the checkpoint declares, or those of its layers; "" if none
  std::string declared_kv_cache_error;  // reason why a declared one cannot be had, so that "auto" is an error
  std::string hash;                     // hash of the weights, as in scale files; "" where no weights were read
};

// Bytes of a cache (with several ranks, of the largest one), computed by the code that lays out the engine's cache.
struct CachePlan {
  std::string kv_cache_dtype;           // what the name stands for in this model: "mla_int4" for int4 with MLA
  std::vector<CacheGroupStats> groups;  // without counts of pages
  double bits_per_element = 0;
  int64_t page_bytes = 0, exact_page_bytes = 0;
  int64_t exact_pages_per_sequence = 0;  // open page + sink
  double floor_bytes_per_token = 0;      // with precision by pressure, of pages at the floor; else 0
  double bytes_per_token = 0;            // with ages, like bits_per_element, the mean of max_model_len tokens
  // Largest size of one sequence of max_model_len tokens (0: the model's limit): whole pages, exact pages, and for
  // layers with a window only the pages that it covers.
  int64_t sequence_bytes = 0;
  // A draft model's cache, which the figures above leave out: a page, and the bytes of a sequence outside its pages.
  int64_t draft_page_bytes = 0, draft_exact_bytes = 0;
  // Inputs of recurrent layers that are kept of the draft tokens of a step, outside the cache.
  int64_t draft_state_bytes = 0;
};

// Both need no weights: `model` may be a folder, or the path of a config.json. Throw InputError.
ModelInfo ReadModelInfo(const std::string& model, const std::string& dtype = "auto",
                        const std::string& weight_dtype = "auto");
CachePlan PlanCacheBytes(const EngineConfig& config);

// Beginning of the names of the decoder's tensors in a folder's weights: "model.", "language_model.model.", ...
// Throws InputError.
std::string DecoderPrefix(const std::string& model);

struct MissingMatrices {
  std::string fingerprint;      // hash of the model's weights; "": nothing is missing
  bool eigen_channels = false;  // klt3 or klt2 needs these
};

// Matrices of +query that an engine of this configuration needs, and that neither quantization_param_path nor the
// checkpoint gives. Throws InputError.
MissingMatrices MissingQueryMatrices(const EngineConfig& config);

// Serves a rank above 0; returns when rank 0's Engine ends. Throws InputError / ResourceError, RankLostError when
// another rank is lost.
void RunRank(EngineConfig config);

// Called once per step on the engine's thread, with the outputs of all requests. Must not call methods that wait for a
// step.
using StepCallback = std::function<void(std::span<const RequestOutput>)>;

// Thread-safe: Add, Abort, Stop, Stats, RecentSteps, ExportPage, ResetPrefixCache, FlushPrefixCache, TakeKvEvents and
// CachedPages may be called from any thread.
class Engine {
 public:
  // Loads the model and reserves the cache. Throws InputError / ResourceError.
  explicit Engine(EngineConfig config);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Validates and queues. Throws InputError (empty prompt, token id out of range, prompt longer than the model or than
  // the whole cache, duplicate id, bad sampling or pooling parameter), QueueFullError (max_queued_requests are
  // waiting), and ResourceError while Stop() drains.
  void Add(Request request);
  // Ends a request; its last output has FinishReason::kAbort and the reason. Unknown ids are ignored.
  void Abort(const std::string& id, const std::string& reason = "");

  // Runs one step on the calling thread; false when there was nothing to do.
  bool Step(std::vector<RequestOutput>& outputs);
  // Runs steps on the engine's own thread until Stop(), which waits for the step in progress; with drain, until every
  // request has ended, and Add is refused meanwhile.
  void Start(StepCallback callback);
  void Stop(bool drain = false);

  // Logits of a whole sequence, teacher-forced through the paged, quantized cache, f32 [tokens][vocab] into `out`,
  // in chunks of at most `chunk_tokens` tokens (0, or above it: max_num_batched_tokens), which do not change a bit.
  // With use_prefix_cache, whole pages of a cached prefix are not computed again, and closed pages are offered to the
  // cache. With `events` (SamplingParams::kv_cache_events), pages are read from the levels that these say, and nothing
  // from the prefix cache. Returns the number of tokens from there, whose rows of `out` are left unchanged. Throws
  // InputError after Start().
  int64_t Logits(std::span<const int32_t> tokens, int chunk_tokens, std::span<float> out, bool use_prefix_cache = false,
                 std::span<const KvCacheEvent> events = {});

  // Page file (docs/formats.md, "Page files") of page `index` of a cached prefix without a salt, of the layers of one
  // KV cache group (EngineStats::groups), with its identity; throws InputError if not cached.
  std::vector<uint8_t> ExportPage(std::span<const int32_t> tokens, int index, int group = 0);

  // Statistics of the keys and values of `tokens`, at most max_model_len, as one sequence through an unquantized cache
  // of its own, freed afterwards. key_means: f32 [layers][kv_heads][head_dim] to subtract from K first, or empty.
  // Throws InputError after Start(), and when a key or value is not finite.
  KvStatistics CollectStatistics(std::span<const int32_t> tokens, std::span<const float> key_means = {});

  // Second moments of the keys and queries of `tokens`, collected likewise. weighted: also those of weighted queries,
  // which only klt3 and klt2 need and which take 50 % more time. context_lengths: keys and queries are averaged over
  // all RoPE positions of contexts of these lengths, with equal weights; empty: RoPE at the tokens' own positions.
  // Throws InputError after Start(), for a model with latents (MLA), and when a key or query is not finite.
  QueryMoments CollectQueryMoments(std::span<const int32_t> tokens, bool weighted = true,
                                   std::span<const int64_t> context_lengths = {});

  // Computes one chunk of the comparisons of quality_sample_rate; false when none is left. The engine's own thread does
  // so while it is idle. Throws InputError after Start().
  bool MeasureQuality();

  EngineStats Stats() const;
  // Timings of the last steps, at most 4,096, the oldest first.
  std::vector<StepTiming> RecentSteps() const;
  const ModelInfo& Info() const;
  const EngineConfig& Config() const;  // with "auto" and 0 resolved
  // JSON of what the bytes of pages depend on besides token ids: weights, formats, scales, version of the arithmetic.
  // Scales that are still to be measured are not in it.
  std::string CacheIdentity() const;
  // Drops every cached prefix in kv_cache_memory_bytes that no running request uses; tiers below it keep theirs.
  void ResetPrefixCache();
  // Waits until all closed pages are in kv_offload_bytes, kv_cache_dir and kv_store, or cannot be written; 10 s for a
  // write that hangs.
  void FlushPrefixCache();
  // Changes of the prefix cache in memory since the last call, the oldest first; waits at most timeout_seconds for one.
  // After a gap (more than kv_events_queue_size of them): kCleared, and every page. Applied in order, they give the
  // pages of the cache. Throws InputError without kv_events_queue_size.
  std::vector<KvEvent> TakeKvEvents(double timeout_seconds = 0);
  // Every page of the prefix cache in memory, after the step in progress, as kStored; parents first. Throws likewise.
  std::vector<KvEvent> CachedPages();

  class Impl;  // engine/engine_impl.h

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvanta
