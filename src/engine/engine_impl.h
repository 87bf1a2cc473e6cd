// Implementation of kvanta::Engine. The holder of the step lock owns scheduler, cache and model; other threads enqueue
// requests and aborts under the mutex (docs/engine-contract.md).
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "cache/kv_cache_manager.h"
#include "engine/components.h"
#include "engine/engine_config.h"
#include "engine/grammar_bitmasks.h"
#include "engine/kv_event_log.h"
#include "engine/loop_thread.h"
#include "engine/request_queue.h"
#include "engine/request_state.h"
#include "engine/spec_decode.h"
#include "engine/step_batch.h"
#include "engine/store_tiers.h"
#include "engine/ticket_lock.h"
#include "observe/quality.h"
#include "runner/row_sampler.h"
#include "runner/runner.h"
#include "scheduler/scheduler.h"

namespace kvanta {

class Engine::Impl {
 public:
  explicit Impl(engine::EngineComponents components);
  ~Impl();
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  // See kvanta/engine.h.
  void Add(Request request);
  void Abort(const std::string& id, const std::string& reason);
  bool Step(std::vector<RequestOutput>& outputs);
  void Start(StepCallback callback);
  void Stop(bool drain = false);
  int64_t Logits(std::span<const int32_t> tokens, int chunk_tokens, std::span<float> out, bool use_prefix_cache,
                 std::span<const KvCacheEvent> events = {});
  std::vector<uint8_t> ExportPage(std::span<const int32_t> tokens, int index, int group);
  KvStatistics CollectStatistics(std::span<const int32_t> tokens, std::span<const float> key_means);
  QueryMoments CollectQueryMoments(std::span<const int32_t> tokens, bool weighted,
                                   std::span<const int64_t> context_lengths);
  bool MeasureQuality();
  EngineStats Stats() const;
  std::vector<StepTiming> RecentSteps() const;
  const ModelInfo& Info() const noexcept { return components_.info; }
  const EngineConfig& Config() const noexcept { return components_.config; }
  void ResetPrefixCache();
  void FlushPrefixCache();
  std::vector<KvEvent> TakeKvEvents(double timeout_seconds);
  std::vector<KvEvent> CachedPages();
  std::string CacheIdentity();

 private:
  using RequestState = engine::RequestState;
  using StepBatch = engine::StepBatch;
  class StepLock;

  void CheckRequest(const Request& request) const;
  void CheckEvents(std::span<const KvCacheEvent> events) const;
  void CheckTokens(std::span<const int32_t> tokens, const char* what, const char* field = "") const;
  void CheckSequence(std::span<const int32_t> tokens) const;
  void CheckStopped(const char* what) const;
  void CheckAlone(const char* what) const;
  void Warn(const std::string& message) const noexcept;
  std::vector<int32_t> StopTokens(const Request& request) const;

  // With the step lock. `outputs` has capacity for the last output of every unfinished request (DrainInbox), so that
  // no request's end needs memory.
  bool StepLocked(std::vector<RequestOutput>& outputs);
  void DrainInbox(std::vector<RequestOutput>& outputs);
  void ExpireRequests(double now, std::vector<RequestOutput>& outputs);
  void Schedule(StepBatch& batch, double start, std::vector<RequestOutput>& outputs);
  void BeginStep(StepBatch& batch, double now, std::vector<RequestOutput>& outputs);
  // Finishes all of a pipeline's steps; the next step returns their outputs.
  void FinishStepsInFlight();
  void FinishStep(StepBatch& batch, std::vector<RequestOutput>& outputs);
  void RecordStepSeconds(const StepBatch& batch);
  std::optional<scheduler::StepClock> ClockOf(double start) const;
  void RecordStepTime(const StepBatch& batch);
  void RunChunks(StepBatch& batch, double now);
  void AddItem(StepBatch& batch, const scheduler::Chunk& chunk);
  void SampleRows(StepBatch& batch);
  void PoolRows(StepBatch& batch);
  void AcceptRows(StepBatch& batch, std::vector<RequestOutput>& outputs) noexcept;
  int Accept(RequestState& request, std::span<runner::SampleRow> rows, float min_acceptance, double now,
             std::vector<RequestOutput>& outputs) noexcept;
  FinishReason Append(RequestState& request, runner::SampleRow& row, RequestOutput& output);
  void AdvanceStates(const StepBatch& batch) noexcept;
  void PassHiddenStates(const StepBatch& batch) noexcept;
  void AcceptEmbedding(RequestState& request, std::vector<RequestOutput>& outputs) noexcept;
  void Fail(RequestState& request, FinishReason finish, std::string error,
            std::vector<RequestOutput>& outputs) noexcept;
  void Fail(RequestState& request, const std::exception& error, std::vector<RequestOutput>& outputs) noexcept;
  std::shared_ptr<RequestState> Finish(RequestState& request, FinishReason finish) noexcept;
  std::shared_ptr<RequestState> ReleaseRequest(RequestState& request) noexcept;
  void PinPrefix(const RequestState& request) noexcept;
  bool WorkOnQuality();
  std::vector<observe::LayerProbe> ProbeScales(int64_t tokens);
  // Warns where static scales are 1.0 for want of others, or do not fit a probe's values.
  void CheckScales();
  void MeasureScales();
  // Warns once of values that a step stored as the largest of their format.
  void WarnOfSaturation() noexcept;
  void MakeBackend();
  void OpenTiers();
  void WorkOnLoads();
  bool IsLoading() const noexcept { return tiers_ && tiers_->Loading() > 0; }
  // With the mutex: something for the next step has come.
  bool HasUpdates() const noexcept { return queue_.HasUpdates() || loads_progressed_; }

  // With the mutex, and with the step lock or while nobody has it.
  void AbortNow(engine::RequestQueue::PendingAbort abort) noexcept;
  void CountFinish(FinishReason finish) noexcept;
  void RefreshStats() noexcept;
  // With the mutex.
  void CheckQueueCapacity();

  void Loop(const std::stop_token& stop, const StepCallback& callback);
  bool LoopStep(const StepCallback& callback, std::vector<RequestOutput>& outputs);
  // With the step lock.
  void HoldPrompts(std::vector<RequestOutput>& outputs) noexcept;
  void RecordStepTiming(StepTiming timing);

  engine::EngineComponents components_;
  std::unique_ptr<cache::KvCacheManager> cache_;
  std::unique_ptr<attention::Backend> backend_;
  std::unique_ptr<scheduler::Scheduler> scheduler_;
  std::unique_ptr<runner::Runner> runner_;
  std::unique_ptr<runner::RowSampler> row_sampler_;
  std::shared_ptr<store::HostArena> host_memory_;  // null without kv_offload_bytes
  std::unique_ptr<engine::StoreTiers> tiers_;      // null without any tier
  std::unique_ptr<engine::KvEventLog> kv_events_;  // null without kv_events_queue_size
  bool saturation_warned_ = false;
  bool has_states_ = false;  // of recurrent layers

  engine::StepsInFlight steps_;
  double last_step_end_ = 0;
  bool serves_ = false;                            // the engine's own thread runs the step
  std::optional<engine::SpecDecode> spec_decode_;  // none without components_.proposer
  std::unique_ptr<engine::GrammarBitmasks> masks_;
  std::unique_ptr<observe::QualityMonitor> quality_;  // null without quality_sample_rate

  // Requests that the scheduler has, by id.
  std::unordered_map<std::string_view, std::shared_ptr<RequestState>> requests_;
  EngineStats counters_;                        // guarded by the step lock
  double next_deadline_ = engine::kNoDeadline;  // not after the first of requests_

  std::atomic<double> seconds_callback_ = 0;  // written by the loop alone

  mutable std::mutex mutex_;  // never held during a forward pass
  engine::TicketLock step_lock_;
  std::condition_variable_any work_available_;
  engine::LoopThread loop_thread_;
  bool draining_ = false;          // the loop ends with the last request
  bool loads_progressed_ = false;  // since the last step
  engine::RequestQueue queue_;
  int64_t refused_ = 0;
  EngineStats stats_;
  std::deque<StepTiming> recent_steps_;

  // Outputs that wait until pages are written, with the role prefill. Of the thread that runs steps.
  struct HeldOutputs {
    store::RecordStore::Writes writes;
    std::vector<RequestOutput> outputs;
  };
  std::deque<HeldOutputs> held_;
};

// Grants scheduler, cache and model to one thread, in the order of requests. Releasing it carries out the aborts of the
// meantime.
class Engine::Impl::StepLock {
 public:
  explicit StepLock(Impl& impl) : impl_(impl) {
    std::unique_lock lock(impl_.mutex_);
    impl_.step_lock_.Lock(lock);
  }
  ~StepLock() {
    const std::lock_guard lock(impl_.mutex_);
    for (engine::RequestQueue::PendingAbort& abort : impl_.queue_.TakeAborts()) impl_.AbortNow(std::move(abort));
    impl_.RefreshStats();
    impl_.step_lock_.Unlock();
  }
  StepLock(const StepLock&) = delete;
  StepLock& operator=(const StepLock&) = delete;

 private:
  Impl& impl_;
};

}  // namespace kvanta
