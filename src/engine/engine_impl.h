// The engine behind Engine's public face. One thread at a time has the turn: it alone touches scheduler, cache and
// model; everyone else leaves a note under the mutex (docs/engine-contract.md).
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "cache/kv_cache_manager.h"
#include "engine/components.h"
#include "engine/engine_config.h"
#include "engine/grammar_bitmasks.h"
#include "engine/quality.h"
#include "engine/request_state.h"
#include "runner/row_sampler.h"
#include "runner/runner.h"
#include "scheduler/scheduler.h"

namespace kvanta::engine {

class Core {
 public:
  explicit Core(EngineComponents components);
  ~Core();
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;

  // As in kvanta/engine.h.
  void Add(Request request);
  void Abort(const std::string& id, const std::string& reason);
  bool Step(std::vector<RequestOutput>& outputs);
  void Start(StepCallback callback);
  void Stop(bool drain = false);
  int64_t Logits(std::span<const int32_t> tokens, int chunk_tokens, std::span<float> out, bool use_prefix_cache);
  std::vector<uint8_t> ExportPage(std::span<const int32_t> tokens, int index, int group);
  KvStatistics CollectStatistics(std::span<const int32_t> tokens, std::span<const float> key_means);
  bool MeasureQuality();
  EngineStats Stats() const;
  std::vector<StepTiming> RecentSteps() const;
  const ModelInfo& Info() const noexcept { return components_.info; }
  const EngineConfig& Config() const noexcept { return components_.config; }
  void ResetPrefixCache();

 private:
  class StepLock;
  // A row of the step's hidden states whose logits are wanted: to sample, or for the log-probability of the prompt's
  // next token.
  struct LogitsRow {
    RequestState* request;
    int64_t row;
    int64_t prompt_position;  // of the token that the row predicts; -1: sample
    int mask = -1;            // of masks_
  };
  struct Sampled {
    RequestState* request;
    int32_t token;
    std::vector<TokenLogprob> logprobs;
  };
  struct PendingAbort {  // an abort
    std::string id, reason;
  };

  void CheckRequest(const Request& request) const;
  void CheckTokens(std::span<const int32_t> tokens, const char* what) const;
  void CheckSequence(std::span<const int32_t> tokens) const;
  void CheckStopped(const char* what) const;
  void Warn(const std::string& message) const;
  std::vector<int32_t> StopTokens(const Request& request) const;

  // With the turn.
  bool StepLocked(std::vector<RequestOutput>& outputs);
  bool WorkOnQuality();
  void DrainInbox(std::vector<RequestOutput>& outputs);
  void ExpireRequests(double now, std::vector<RequestOutput>& outputs);
  void Fail(RequestState& request, FinishReason finish, std::string error, std::vector<RequestOutput>& outputs);
  void RunChunks(std::span<const scheduler::Chunk> chunks, double now);
  runner::SampleRow UseOf(const LogitsRow& want) const;
  void SampleRows();
  void Accept(Sampled& sampled, double now, std::vector<RequestOutput>& outputs);
  void Finish(RequestState& request, FinishReason finish);
  void ReleaseRequest(RequestState& request);
  void MeasureScales(std::span<const int32_t> tokens);
  void WarnAboutUnitScales();
  void MakeBackend();

  // With the mutex, and either with the turn or while nobody has it.
  void AbortNow(const PendingAbort& abort);
  void CountFinish(FinishReason finish) noexcept;
  void RefreshStats();
  // With the mutex.
  void CheckQueueCapacity();

  void Loop(const std::stop_token& stop, const StepCallback& callback);
  void RecordStepTiming(StepTiming cost);

  EngineComponents components_;
  std::unique_ptr<cache::KvCacheManager> cache_;
  std::unique_ptr<attention::Backend> backend_;
  std::unique_ptr<scheduler::Scheduler> scheduler_;
  std::unique_ptr<runner::Runner> runner_;
  std::unique_ptr<runner::RowSampler> row_sampler_;
  bool measure_scales_ = false;  // on the first prompt

  // Of the step, kept for their memory.
  std::vector<scheduler::Chunk> chunks_;
  std::vector<runner::RunItem> items_;
  std::vector<LogitsRow> requested_;
  std::vector<int64_t> rows_;
  std::vector<runner::SampleRow> uses_;
  std::vector<runner::RowTask> tasks_;
  std::vector<Sampled> sampled_;
  std::unique_ptr<GrammarBitmasks> masks_;
  std::unique_ptr<QualityMonitor> quality_;  // null unless wanted

  std::unordered_map<std::string, std::unique_ptr<RequestState>> requests_;  // handed to the scheduler
  std::unordered_map<const scheduler::Sequence*, RequestState*> by_sequence_;
  EngineStats counters_;                // of the turn's owner
  double next_deadline_ = kNoDeadline;  // not after the first of requests_

  std::atomic<double> seconds_callback_ = 0;  // written by the loop alone

  mutable std::mutex mutex_;  // never held during a forward pass
  std::condition_variable step_lock_released_;
  std::condition_variable_any work_available_;
  bool busy_ = false;      // someone has the turn
  bool started_ = false;   // the own thread runs
  bool draining_ = false;  // it ends with the last request
  int64_t refused_ = 0;
  std::vector<std::unique_ptr<RequestState>> inbox_;  // added, not yet seen by the scheduler
  std::vector<PendingAbort> aborts_;                  // noted while someone had the turn
  std::unordered_set<std::string> ids_;               // unfinished
  std::vector<RequestOutput> pending_;                // outputs that the next step gives out
  EngineStats stats_;
  std::deque<StepTiming> recent_steps_;
  std::jthread thread_;
  std::thread::id loop_thread_;
  std::mutex join_mutex_;
};

}  // namespace kvanta::engine
