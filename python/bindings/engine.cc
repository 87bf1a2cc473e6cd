#include "kvanta/engine.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "constraint.h"
#include "engine/ranks.h"
#include "fields.h"
#include "kv_cache_event.h"
#include "output_queue.h"
#include "shared_callable.h"
#include "stats.h"

namespace nb = nanobind;

namespace kvanta::python {
namespace {

using nb::literals::operator""_a;

using ReleaseGil = nb::call_guard<nb::gil_scoped_release>;

using LogitsOut = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Wraps a callable whose exceptions do not reach the engine.
template <typename... Arguments>
std::function<void(Arguments...)> WrapCallback(nb::callable callable) {
  return [shared = ShareCallable(std::move(callable))](Arguments... arguments) {
    const nb::gil_scoped_acquire gil;
    try {
      (*shared)(arguments...);
    } catch (nb::python_error& error) {
      error.discard_as_unraisable("kvanta callback");
    }
  };
}

// Wraps a callable whose exceptions, KeyboardInterrupt among them, end the engine's constructor and reach its caller.
std::function<void()> PythonStart(nb::callable callable) {
  return [shared = ShareCallable(std::move(callable))] {
    const nb::gil_scoped_acquire gil;
    (*shared)();
  };
}

void BindConfig(nb::module_& module) {
  nb::class_<EngineConfig> config(module, "EngineConfig", "See include/kvanta/engine.h.");
  EngineConfig::VisitOptions(FieldBinder<EngineConfig>{config});
  config.def(nb::init<>())
      .def(
          "set_on_warning",
          [](EngineConfig& self, nb::callable callback) {
            self.on_warning = WrapCallback<const std::string&>(std::move(callback));
          },
          "callback"_a, nb::sig("def set_on_warning(self, callback: collections.abc.Callable[[str], object]) -> None"),
          "`callback` is called with one line at a time, possibly on the engine's thread.")
      .def(
          "set_start_ranks",
          [](EngineConfig& self, nb::callable start) { self.start_ranks = PythonStart(std::move(start)); }, "start"_a,
          nb::sig("def set_start_ranks(self, start: collections.abc.Callable[[], object]) -> None"),
          "`start` is called once, before the engine waits for the other ranks.")
      .def(
          "set_fill_masks",
          [](EngineConfig& self, nb::callable fill) { self.fill_masks = PythonBitmaskFn(std::move(fill)); }, "fill"_a,
          nb::sig("def set_fill_masks(self, fill: collections.abc.Callable[[list[typing.Any], list[list[int]], "
                  "numpy.typing.NDArray[numpy.uint32]], list[Exception | None]]) -> None"),
          "`fill(states, taken, masks)` is called once per step with the states of the constrained requests, the "
          "tokens sampled for each since the last call, and masks [states, words] to fill; it returns an error or None "
          "for each. See kvanta.constraints.structured_output.fill_masks.");
}

void BindOutputs(nb::module_& module) {
  nb::enum_<FinishReason>(module, "FinishReason")
      .value("NONE", FinishReason::kNone)
      .value("STOP", FinishReason::kStop)
      .value("LENGTH", FinishReason::kLength)
      .value("ABORT", FinishReason::kAbort)
      .value("ERROR", FinishReason::kError)
      .value("TIMEOUT", FinishReason::kTimeout);
  nb::class_<RequestTimes>(module, "RequestTimes", "Seconds as time.monotonic() counts them; 0.0: not yet.")
      .def_ro("added", &RequestTimes::added)
      .def_ro("scheduled", &RequestTimes::scheduled)
      .def_ro("first_token", &RequestTimes::first_token)
      .def_ro("last_token", &RequestTimes::last_token);
  nb::class_<TokenLogprob>(module, "TokenLogprob")
      .def_ro("token", &TokenLogprob::token)
      .def_ro("logprob", &TokenLogprob::logprob)
      .def_ro("rank", &TokenLogprob::rank);
  nb::class_<KvCacheRecord>(module, "KvCacheRecord", "What a sequence was computed with, with a kv_cache_floor.")
      .def_ro("pages", &KvCacheRecord::pages)
      .def_ro("events", &KvCacheRecord::events)
      .def_ro("is_replayable", &KvCacheRecord::is_replayable);
  nb::class_<RequestOutput>(module, "EngineOutput", "One request's output of one step.")
      .def_ro("id", &RequestOutput::id)
      .def_ro("tokens", &RequestOutput::tokens)
      .def_ro("logprobs", &RequestOutput::logprobs)
      .def_ro("prompt_logprobs", &RequestOutput::prompt_logprobs)
      .def_prop_ro(
          "embedding",
          [](const RequestOutput& self) {
            return ToNumpy(std::vector<float>(self.embedding), {self.embedding.size()});
          },
          nb::sig("def embedding(self) -> numpy.typing.NDArray[numpy.float32]"), "A copy.")
      .def_ro("finish", &RequestOutput::finish)
      .def_ro("stop_token", &RequestOutput::stop_token)
      .def_ro("draft_tokens", &RequestOutput::draft_tokens)
      .def_ro("accepted_tokens", &RequestOutput::accepted_tokens)
      .def_ro("cached_tokens", &RequestOutput::cached_tokens)
      .def_ro("preemptions", &RequestOutput::preemptions)
      .def_ro("kv_cache", &RequestOutput::kv_cache)
      .def_ro("times", &RequestOutput::times)
      .def_ro("error", &RequestOutput::error)
      .def_ro("invalid_input", &RequestOutput::invalid_input)
      .def_ro("lost_rank", &RequestOutput::lost_rank);
}

// Owns an engine and the queue of its outputs. Destroying an Engine waits for its thread, which may wait for the GIL to
// deliver a callback: the GIL is released first.
struct EngineOwner {
  explicit EngineOwner(EngineConfig config) : engine(std::make_unique<Engine>(std::move(config))) {}
  ~EngineOwner() {
    nb::gil_scoped_release release;
    if (const auto open = Queue()) open->Close();
    engine.reset();
  }
  EngineOwner(const EngineOwner&) = delete;
  EngineOwner& operator=(const EngineOwner&) = delete;

  // Null before StartWithQueue. From any thread, with or without the GIL.
  std::shared_ptr<OutputQueue> Queue() const {
    const std::lock_guard lock(mutex);
    return queue;
  }

  std::unique_ptr<Engine> engine;
  mutable std::mutex mutex;
  std::shared_ptr<OutputQueue> queue;  // guarded by `mutex`
};

void Add(EngineOwner& owner, std::string id, std::vector<int32_t> prompt, SamplingParams sampling,
         std::string cache_salt, int priority, double timeout_seconds, const ConstraintHandle* constraint,
         std::optional<PoolingParams> pooling, std::vector<int32_t> generated, std::string user) {
  owner.engine->Add({.id = std::move(id),
                     .prompt = std::move(prompt),
                     .generated = std::move(generated),
                     .sampling = std::move(sampling),
                     .pooling = pooling,
                     .cache_salt = std::move(cache_salt),
                     .priority = priority,
                     .user = std::move(user),
                     .constraint = constraint == nullptr ? nullptr : constraint->constraint,
                     .timeout_seconds = timeout_seconds});
}

std::optional<std::vector<RequestOutput>> Step(EngineOwner& owner) {
  std::vector<RequestOutput> outputs;
  if (!owner.engine->Step(outputs)) return std::nullopt;
  return outputs;
}

void Start(EngineOwner& owner, nb::callable callback) {
  auto wrapped = WrapCallback<nb::list>(std::move(callback));
  const nb::gil_scoped_release release;
  owner.engine->Start([wrapped = std::move(wrapped)](std::span<const RequestOutput> outputs) {
    const nb::gil_scoped_acquire gil;
    nb::list list;
    for (const RequestOutput& output : outputs) list.append(nb::cast(RequestOutput(output), nb::rv_policy::move));
    wrapped(std::move(list));
  });
}

int StartWithQueue(EngineOwner& owner) {
  auto queue = std::make_shared<OutputQueue>();
  const std::lock_guard lock(owner.mutex);  // a Stop() that finds the engine started finds its queue, too
  owner.engine->Start([queue](std::span<const RequestOutput> outputs) { queue->Push(outputs); });
  owner.queue = queue;
  return queue->Descriptor();
}

std::vector<RequestOutput> PopOutputs(EngineOwner& owner, size_t limit) {
  const auto queue = owner.Queue();
  return queue ? queue->Pop(limit) : std::vector<RequestOutput>();
}

void Stop(EngineOwner& owner, bool drain) {
  const auto queue = owner.Queue();
  if (!drain && queue) queue->Close();
  owner.engine->Stop(drain);
}

std::vector<std::pair<int, float>> RecentSteps(const EngineOwner& owner) {
  std::vector<std::pair<int, float>> steps;
  for (const StepTiming& step : owner.engine->RecentSteps()) steps.emplace_back(step.sequences, step.outside_seconds);
  return steps;
}

void Logits(EngineOwner& owner, const TokenVector& tokens, int chunk_tokens, const LogitsOut& out,
            bool use_prefix_cache, const std::vector<KvCacheEvent>& events) {
  nb::gil_scoped_release release;
  owner.engine->Logits({tokens.data(), tokens.size()}, chunk_tokens, {out.data(), out.size()}, use_prefix_cache,
                       events);
}

// The arrays of KvStatistics with their shapes.
nb::dict Statistics(EngineOwner& owner, const TokenVector& tokens, const std::optional<Array3f>& key_means) {
  KvStatistics found;
  {
    nb::gil_scoped_release release;
    const std::span<const float> means =
        key_means ? std::span<const float>(key_means->data(), key_means->size()) : std::span<const float>();
    found = owner.engine->CollectStatistics({tokens.data(), tokens.size()}, means);
  }
  const auto layers = static_cast<size_t>(found.layers), heads = static_cast<size_t>(found.kv_heads);
  const auto channels = static_cast<size_t>(found.head_dim);
  const size_t edges = found.edges.size();
  nb::dict result;
  result["tokens"] = found.tokens;
  result["edges"] = ToNumpy(std::move(found.edges), {edges});
  result["histogram"] = ToNumpy(std::move(found.histogram), {layers, 2, heads, edges - 1});
  result["amax"] = ToNumpy(std::move(found.amax), {layers, 2, heads, channels});
  result["sum"] = ToNumpy(std::move(found.sum), {layers, 2, heads, channels});
  result["square_sum"] = ToNumpy(std::move(found.square_sum), {layers, 2, heads, channels});
  return result;
}

// The arrays of QueryMoments with their shapes.
nb::dict Moments(EngineOwner& owner, const TokenVector& tokens, bool weighted,
                 const std::vector<int64_t>& context_lengths) {
  QueryMoments found;
  {
    nb::gil_scoped_release release;
    found = owner.engine->CollectQueryMoments({tokens.data(), tokens.size()}, weighted, context_lengths);
  }
  const auto layers = static_cast<size_t>(found.layers), heads = static_cast<size_t>(found.kv_heads);
  const auto channels = static_cast<size_t>(found.head_dim);
  nb::dict result;
  result["tokens"] = found.tokens;
  result["amax"] = ToNumpy(std::move(found.amax), {layers, 2, heads});
  result["key_sum"] = ToNumpy(std::move(found.key_sum), {layers, heads, channels});
  result["key_moment"] = ToNumpy(std::move(found.key_moment), {layers, heads, channels, channels});
  result["query_moment"] = ToNumpy(std::move(found.query_moment), {layers, heads, channels, channels});
  if (weighted) {
    result["weighted_query_moment"] =
        ToNumpy(std::move(found.weighted_query_moment), {layers, heads, channels, channels});
  }
  return result;
}

nb::bytes ExportPage(EngineOwner& owner, const TokenVector& tokens, int index, int group) {
  std::vector<uint8_t> bytes;
  {
    nb::gil_scoped_release release;
    bytes = owner.engine->ExportPage({tokens.data(), tokens.size()}, index, group);
  }
  return nb::bytes(bytes.data(), bytes.size());
}

}  // namespace

void BindEngine(nb::module_& module) {
  BindConfig(module);
  BindOutputs(module);
  module.def("rank_count", &engine::RankCount, "config"_a, "Processes of an engine with this configuration.");
  module.def("check_nodes", &engine::CheckNodes, "config"_a, "Raises InputError for numbers that do not fit together.");
  module.def("engine_metrics", &EngineMetrics, nb::sig("def engine_metrics() -> list[tuple[str, str, str, str, str]]"),
             "(path in Engine.stats(), \"gauge\" or \"counter\", name, help, path of a field without which there is no "
             "metric) of the statistics that are metrics as they are.");
  module.def("run_rank", &RunRank, "config"_a, ReleaseGil(), "Serves a rank above 0, until rank 0's Engine ends.");
  nb::class_<EngineOwner>(module, "Engine", "See include/kvanta/engine.h. Calls that may take long release the GIL.")
      .def(nb::init<EngineConfig>(), "config"_a, ReleaseGil())
      .def("add", &Add, "id"_a, "prompt"_a, "sampling"_a, "cache_salt"_a = "", "priority"_a = 0,
           "timeout_seconds"_a = 0.0, "constraint"_a.none() = nb::none(), "pooling"_a.none() = nb::none(),
           "generated"_a = std::vector<int32_t>(), "user"_a = "", ReleaseGil(),
           "Queues a request. Raises InputError, QueueFullError, or ResourceError while stop(drain=True) waits.")
      .def(
          "abort",
          [](EngineOwner& owner, const std::string& id, const std::string& reason) { owner.engine->Abort(id, reason); },
          "id"_a, "reason"_a = "", ReleaseGil(), "Frees its pages at once, or after the step in progress.")
      .def("step", &Step, ReleaseGil(),
           "Runs one step on this thread: its outputs, or None when there was nothing to do.")
      .def("start", &Start, "callback"_a,
           nb::sig("def start(self, callback: collections.abc.Callable[[list[EngineOutput]], object]) -> None"),
           "Runs the engine's own thread; `callback` is called once per step, with the outputs of all requests.")
      .def("start_with_queue", &StartWithQueue, ReleaseGil(),
           "As start, with a queue instead of a callback. Returns a file descriptor that is readable while "
           "pop_outputs has outputs; it is closed with the engine.")
      .def("pop_outputs", &PopOutputs, "limit"_a,
           "Takes the oldest outputs from the queue, at most `limit`. The engine waits while the queue is full.")
      .def("stop", &Stop, "drain"_a = false, ReleaseGil(),
           "Waits for the step in progress; with `drain`, until every request has ended.")
      // Without conversion: the copy of an `out` would be filled, and other dtypes of `tokens` would be cut to int32.
      .def("logits", &Logits, "tokens"_a.noconvert(), "chunk_tokens"_a, "out"_a.noconvert(),
           "use_prefix_cache"_a = false, "events"_a = std::vector<KvCacheEvent>{},
           "Fills `out`, float32 [tokens, vocab].")
      .def("statistics", &Statistics, "tokens"_a.noconvert(), "key_means"_a.none() = nb::none(),
           nb::sig("def statistics(self, tokens: numpy.typing.NDArray[numpy.int32], "
                   "key_means: numpy.typing.NDArray[numpy.float32] | None = None) -> dict[str, typing.Any]"),
           "KvStatistics of include/kvanta/stats.h as a dictionary of numpy arrays.")
      .def("query_moments", &Moments, "tokens"_a.noconvert(), "weighted"_a = true,
           "context_lengths"_a = std::vector<int64_t>(),
           nb::sig("def query_moments(self, tokens: numpy.typing.NDArray[numpy.int32], weighted: bool = True, "
                   "context_lengths: collections.abc.Sequence[int] = ()) -> dict[str, typing.Any]"),
           "QueryMoments of include/kvanta/stats.h as a dictionary of numpy arrays.")
      .def(
          "measure_quality", [](EngineOwner& owner) { return owner.engine->MeasureQuality(); }, ReleaseGil(),
          "One chunk of the comparisons of quality_sample_rate; False when none is left.")
      .def("export_page", &ExportPage, "tokens"_a.noconvert(), "index"_a, "group"_a = 0,
           "Page file of a page of a cached prefix, of the layers of one KV cache group.")
      .def(
          "stats", [](const EngineOwner& owner) { return StatsDict(owner.engine->Stats()); },
          nb::sig("def stats(self) -> dict[str, typing.Any]"))
      .def("recent_steps", &RecentSteps,
           "Timings of the last steps of the engine's own thread, at most 4,096: requests that got tokens, and seconds "
           "outside the model, the callback included.")
      .def(
          "reset_prefix_cache", [](EngineOwner& owner) { owner.engine->ResetPrefixCache(); }, ReleaseGil())
      .def(
          "flush_prefix_cache", [](EngineOwner& owner) { owner.engine->FlushPrefixCache(); }, ReleaseGil(),
          "Waits until all closed pages are in the tiers below the memory, or cannot be written.")
      .def(
          "take_kv_events",
          [](EngineOwner& owner, double timeout_seconds) { return owner.engine->TakeKvEvents(timeout_seconds); },
          "timeout_seconds"_a = 0.0, ReleaseGil(),
          "Changes of the prefix cache since the last call; after a gap CLEARED and every page.")
      .def(
          "cached_pages", [](EngineOwner& owner) { return owner.engine->CachedPages(); }, ReleaseGil(),
          "Every page of the prefix cache in memory, as STORED.")
      .def_prop_ro("cache_identity", [](const EngineOwner& owner) { return owner.engine->CacheIdentity(); })
      .def_prop_ro("info", [](const EngineOwner& owner) { return owner.engine->Info(); })
      .def_prop_ro("config", [](const EngineOwner& owner) { return owner.engine->Config(); });
}

}  // namespace kvanta::python
