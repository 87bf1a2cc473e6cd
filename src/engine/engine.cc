#include "kvanta/engine.h"

#include "engine/engine_impl.h"

namespace kvanta {

struct Engine::State {
  engine::Core core;
};

Engine::Engine(EngineConfig config) : state_(new State{engine::Core(engine::LoadComponents(std::move(config)))}) {}
Engine::~Engine() = default;

void Engine::Add(Request request) {
  state_->core.Add(std::move(request));
}
void Engine::Abort(const std::string& id, const std::string& reason) {
  state_->core.Abort(id, reason);
}
bool Engine::Step(std::vector<RequestOutput>& outputs) {
  return state_->core.Step(outputs);
}
void Engine::Start(StepCallback callback) {
  state_->core.Start(std::move(callback));
}
void Engine::Stop(bool drain) {
  state_->core.Stop(drain);
}
int64_t Engine::Logits(std::span<const int32_t> tokens, int chunk_tokens, std::span<float> out, bool use_prefix_cache) {
  return state_->core.Logits(tokens, chunk_tokens, out, use_prefix_cache);
}
std::vector<uint8_t> Engine::ExportPage(std::span<const int32_t> tokens, int index, int group) {
  return state_->core.ExportPage(tokens, index, group);
}
KvStatistics Engine::CollectStatistics(std::span<const int32_t> tokens, std::span<const float> key_means) {
  return state_->core.CollectStatistics(tokens, key_means);
}
bool Engine::MeasureQuality() {
  return state_->core.MeasureQuality();
}
EngineStats Engine::Stats() const {
  return state_->core.Stats();
}
std::vector<StepTiming> Engine::RecentSteps() const {
  return state_->core.RecentSteps();
}
const ModelInfo& Engine::Info() const {
  return state_->core.Info();
}
const EngineConfig& Engine::Config() const {
  return state_->core.Config();
}
void Engine::ResetPrefixCache() {
  state_->core.ResetPrefixCache();
}

}  // namespace kvanta
