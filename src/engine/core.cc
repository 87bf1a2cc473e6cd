#include "engine/core.h"

#include <fmt/format.h>

#include <algorithm>
#include <random>
#include <system_error>

#include "base/quote.h"
#include "engine/turn.h"
#include "kvanta/error.h"

namespace kvanta::engine {
namespace {

constexpr int64_t kMostLogitRows = 256;  // at once: bounds the logits' memory
constexpr int64_t kProbeTokens = 64;

bool PoisonByDefault() {
#ifdef NDEBUG
  return false;
#else
  return true;
#endif
}

// Seeds of requests without their own: from the engine's seed and the id, so that a run can be repeated.
uint64_t DeriveSeed(uint64_t seed, const std::string& id) {
  uint64_t hash = 0xCBF29CE484222325ULL ^ seed;
  for (const char c : id) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001B3ULL;
  hash = (hash ^ (hash >> 30)) * 0xBF58476D1CE4E5B9ULL;
  hash = (hash ^ (hash >> 27)) * 0x94D049BB133111EBULL;
  return hash ^ (hash >> 31);
}

}  // namespace

Core::Core(Parts parts) : parts_(std::move(parts)), demand_(parts_.layout, CommonWindow(parts_.model->Config())) {
  EngineConfig& config = parts_.config;
  CheckConfig(config);
  demand_.prefixes_stay = config.enable_prefix_caching;
  const CacheSize size = SizeCache(config, demand_, parts_.model->Config().max_position, Cpu().AvailableBytes());
  if (!size.warning.empty()) Warn(size.warning);
  config.max_model_len = std::min(size.max_model_len, parts_.positions);
  config.kv_cache_memory_bytes = size.budget_bytes;
  config.poison_unused = config.poison_unused.value_or(PoisonByDefault());
  store_ = std::make_unique<cache::PageStore>(
      Cpu(), parts_.layout,
      cache::PageStoreConfig{.budget_bytes = size.budget_bytes, .poison_unused = *config.poison_unused});
  if (config.enable_prefix_caching) tree_ = std::make_unique<cache::PrefixTree>(*store_, config.page_size);
  scheduler_ = std::make_unique<scheduler::Scheduler>(
      scheduler::SchedulerConfig{.max_sequences = config.max_num_seqs,
                                 .max_step_tokens = config.max_num_batched_tokens,
                                 .page_size = config.page_size},
      *store_, tree_.get(), demand_);
  const int64_t logit_rows = std::clamp<int64_t>(config.max_num_seqs, 16, kMostLogitRows);
  runner_ = std::make_unique<runner::Runner>(*parts_.model, config.max_num_batched_tokens, logit_rows);
  row_sampler_ = std::make_unique<runner::RowSampler>(*parts_.threads);
  measure_scales_ = config.calculate_kv_scales && !parts_.scales_given && HasStaticScales(parts_.layout);
  MakeBackend();  // checks the scales, which the probe relies on
  if (!measure_scales_ && !parts_.scales_given && HasStaticScales(parts_.layout)) WarnAboutUnitScales();
  const std::lock_guard lock(mutex_);
  RefreshStats();
}

Core::~Core() {
  Stop();
}

void Core::MakeBackend() {
  auto fresh = parts_.make_backend(*store_, {.layers = parts_.model->AttentionLayers(), .scales = parts_.scales});
  const std::lock_guard lock(mutex_);  // Stats() reads it
  backend_ = std::move(fresh);
}

void Core::Warn(const std::string& message) const {
  try {
    if (parts_.config.on_warning) parts_.config.on_warning(message);
  } catch (...) {  // a listener's fault must not end a step or the loop
  }
}

// Says what the lack of scales costs on this model: random tokens are enough to see values beyond the format's range.
void Core::WarnAboutUnitScales() {
  std::mt19937 random(1);
  std::vector<int32_t> tokens(static_cast<size_t>(std::min(kProbeTokens, parts_.config.max_model_len)));
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % static_cast<uint32_t>(parts_.info.vocab));
  const auto probe = ProbeKv(*parts_.model, parts_.make_backend, parts_.layout, parts_.scales, tokens,
                             parts_.config.max_num_batched_tokens);
  int64_t values = 0;
  int64_t above = 0;
  for (size_t layer = 0; layer < probe.size(); ++layer) {
    for (const auto& [side, seen] : {std::pair(&parts_.layout.layers[layer].k, &probe[layer].k),
                                     std::pair(&parts_.layout.layers[layer].v, &probe[layer].v)}) {
      if (!IsStatic(*side)) continue;
      values += seen->values;
      above += seen->above_unit;
    }
  }
  Warn(fmt::format(
      "no KV scales were given: layers {} use 1.0; {:.4f} % of the values of a probe of {} tokens "
      "saturated; see quantization_param_path and calculate_kv_scales",
      StaticLayers(parts_.layout), 100.0 * static_cast<double>(above) / static_cast<double>(values), tokens.size()));
}

void Core::MeasureScales(std::span<const int32_t> tokens) {
  const auto probe = ProbeKv(*parts_.model, parts_.make_backend, parts_.layout, parts_.scales, tokens,
                             parts_.config.max_num_batched_tokens);
  ApplyProbe(probe, parts_.layout, parts_.scales);
  MakeBackend();
  measure_scales_ = false;
  float least = INFINITY;
  float most = 0;
  for (const formats::LayerScales& layer : parts_.scales) {
    for (const auto* side : {&layer.k, &layer.v}) {
      for (const float scale : side->scale) {
        least = std::min(least, scale);
        most = std::max(most, scale);
      }
    }
  }
  Warn(fmt::format("KV scales of layers {} measured on the first {} tokens and frozen: from {:.6g} to {:.6g}",
                   StaticLayers(parts_.layout),
                   std::min<int64_t>(kMostProbedTokens, static_cast<int64_t>(tokens.size())), least, most));
}

void Core::CheckTokens(std::span<const int32_t> tokens, const char* what) const {
  if (tokens.empty()) throw InputError(fmt::format("the {} is empty: at least one token is needed", what));
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < 0 || tokens[i] >= parts_.info.vocab) {
      throw InputError(fmt::format("token {} at position {} of the {}: the model's ids are 0 to {}", tokens[i], i, what,
                                   parts_.info.vocab - 1));
    }
  }
}

void Core::CheckRequest(const Request& request) const {
  CheckTokens(request.prompt, "prompt");
  request.sampling.Validate(parts_.info.vocab);
  if (static_cast<int64_t>(request.prompt.size()) >= parts_.config.max_model_len) {
    throw InputError(fmt::format("the prompt has {} tokens: with one token to generate, max_model_len = {} allows {}",
                                 request.prompt.size(), parts_.config.max_model_len, parts_.config.max_model_len - 1));
  }
}

std::vector<int32_t> Core::StopTokens(const SamplingParams& params) const {
  std::vector<int32_t> stops = params.stop_token_ids;
  if (!params.ignore_eos) {
    for (const int32_t token : parts_.info.eos_token_ids) {
      if (token >= 0 && token < parts_.info.vocab) stops.push_back(token);
    }
  }
  std::sort(stops.begin(), stops.end());
  stops.erase(std::unique(stops.begin(), stops.end()), stops.end());
  return stops;
}

void Core::Add(Request request) {
  CheckRequest(request);
  const uint64_t seed = request.sampling.seed.value_or(DeriveSeed(parts_.config.seed, request.id));
  std::vector<int32_t> stops = StopTokens(request.sampling);
  auto state =
      std::make_unique<RequestState>(std::move(request), std::move(stops), seed, *store_, tree_.get(), demand_);
  const std::lock_guard lock(mutex_);
  if (!ids_.insert(state->request.id).second) {
    throw InputError(fmt::format("request id {} is in use by an unfinished request", Quote(state->request.id)));
  }
  inbox_.push_back(std::move(state));
  noted_.notify_all();
}

RequestOutput Core::OutputOf(const RequestState& request) const {
  RequestOutput output;
  output.id = request.request.id;
  output.cached_tokens = static_cast<int>(std::max<int64_t>(0, request.sequence.cached_tokens));
  return output;
}

void Core::Forget(RequestState& request) {
  scheduler_->Remove(request.sequence);
  by_sequence_.erase(&request.sequence);
  const std::string id = request.request.id;
  requests_.erase(id);
}

void Core::AbortNow(const std::string& id) {
  if (ids_.erase(id) == 0) return;
  const auto waiting =
      std::find_if(inbox_.begin(), inbox_.end(), [&](const auto& state) { return state->request.id == id; });
  RequestOutput output;
  if (waiting != inbox_.end()) {
    output = OutputOf(**waiting);
    inbox_.erase(waiting);
  } else {
    RequestState& request = *requests_.at(id);
    output = OutputOf(request);
    Forget(request);
  }
  output.finish = FinishReason::kAbort;
  pending_.push_back(std::move(output));
}

void Core::Abort(const std::string& id) {
  const std::lock_guard lock(mutex_);
  if (busy_) {
    if (ids_.contains(id)) aborts_.push_back(id);
    return;
  }
  AbortNow(id);
  RefreshStats();
  noted_.notify_all();
}

void Core::RefuseWhileStarted(const char* what) const {
  const std::lock_guard lock(mutex_);
  if (started_) throw InputError(fmt::format("{} while the engine's own thread runs: Stop() it first", what));
}

void Core::Start(StepCallback callback) {
  if (!callback) throw InputError("Start needs a callback");
  const std::lock_guard lock(mutex_);
  if (started_) throw InputError("Start while the engine's own thread runs: Stop() it first");
  try {
    thread_ =
        std::jthread([this, callback = std::move(callback)](const std::stop_token& stop) { Loop(stop, callback); });
  } catch (const std::system_error& error) {
    throw ResourceError(fmt::format("the engine's own thread cannot start: {}", error.what()));
  }
  started_ = true;
}

void Core::Stop() {
  if (!thread_.joinable()) return;
  thread_.request_stop();
  if (thread_.get_id() == std::this_thread::get_id()) return;  // from the callback: the loop ends after it
  thread_.join();
  const std::lock_guard lock(mutex_);
  started_ = false;
}

void Core::Loop(const std::stop_token& stop, const StepCallback& callback) {
  std::vector<RequestOutput> outputs;
  while (!stop.stop_requested()) {
    bool worked = false;
    {
      const Turn turn(*this);
      worked = StepWithTurn(outputs);
    }
    if (!outputs.empty()) {
      try {
        callback(outputs);
      } catch (const std::exception& error) {
        Warn(fmt::format("the step callback threw: {}", error.what()));
      } catch (...) {
        Warn("the step callback threw something that is no std::exception");
      }
    }
    if (worked) continue;
    std::unique_lock lock(mutex_);
    noted_.wait(lock, stop, [&] { return !inbox_.empty() || !pending_.empty(); });
  }
}

bool Core::Step(std::vector<RequestOutput>& outputs) {
  RefuseWhileStarted("Step");
  const Turn turn(*this);
  return StepWithTurn(outputs);
}

void Core::ResetPrefixCache() {
  const Turn turn(*this);
  if (tree_) tree_->Clear();
}

}  // namespace kvanta::engine
