#include "kvanta/engine.h"

#include "engine/engine_impl.h"

namespace kvanta {

Engine::Engine(EngineConfig config) : impl_(std::make_unique<Impl>(engine::LoadComponents(std::move(config)))) {}
Engine::~Engine() = default;

void Engine::Add(Request request) {
  impl_->Add(std::move(request));
}
void Engine::Abort(const std::string& id, const std::string& reason) {
  impl_->Abort(id, reason);
}
bool Engine::Step(std::vector<RequestOutput>& outputs) {
  return impl_->Step(outputs);
}
void Engine::Start(StepCallback callback) {
  impl_->Start(std::move(callback));
}
void Engine::Stop(bool drain) {
  impl_->Stop(drain);
}
int64_t Engine::Logits(std::span<const int32_t> tokens, int chunk_tokens, std::span<float> out, bool use_prefix_cache,
                       std::span<const KvCacheEvent> events) {
  return impl_->Logits(tokens, chunk_tokens, out, use_prefix_cache, events);
}
std::vector<uint8_t> Engine::ExportPage(std::span<const int32_t> tokens, int index, int group) {
  return impl_->ExportPage(tokens, index, group);
}
KvStatistics Engine::CollectStatistics(std::span<const int32_t> tokens, std::span<const float> key_means) {
  return impl_->CollectStatistics(tokens, key_means);
}
QueryMoments Engine::CollectQueryMoments(std::span<const int32_t> tokens, bool weighted,
                                         std::span<const int64_t> context_lengths) {
  return impl_->CollectQueryMoments(tokens, weighted, context_lengths);
}
bool Engine::MeasureQuality() {
  return impl_->MeasureQuality();
}
EngineStats Engine::Stats() const {
  return impl_->Stats();
}
std::vector<StepTiming> Engine::RecentSteps() const {
  return impl_->RecentSteps();
}
const ModelInfo& Engine::Info() const {
  return impl_->Info();
}
const EngineConfig& Engine::Config() const {
  return impl_->Config();
}
std::string Engine::CacheIdentity() const {
  return impl_->CacheIdentity();
}
void Engine::ResetPrefixCache() {
  impl_->ResetPrefixCache();
}
void Engine::FlushPrefixCache() {
  impl_->FlushPrefixCache();
}

std::vector<KvEvent> Engine::TakeKvEvents(double timeout_seconds) {
  return impl_->TakeKvEvents(timeout_seconds);
}
std::vector<KvEvent> Engine::CachedPages() {
  return impl_->CachedPages();
}

}  // namespace kvanta
