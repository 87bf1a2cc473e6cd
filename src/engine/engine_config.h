// Resolution of an EngineConfig for a model: dtypes, one scheme per layer, layout of pages, size of the cache. Engine
// and planners share it, so that the engine allocates what a plan says.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cache/kv_cache_spec.h"
#include "formats/scheme.h"
#include "kernels/linear/linear.h"
#include "kvanta/engine.h"
#include "models/config/config.h"
#include "store/host_arena.h"
#include "weights/safetensors.h"

namespace kvanta::engine {

// dtype of the weights; "auto": the checkpoint's. Throws InputError with the alternatives.
DType ResolveDType(const std::string& dtype, const models::ModelConfig& model);
// Storage of weights: weight_dtype, or the dtype where that is "auto". Throws InputError with the alternatives.
kernels::WeightType ResolveWeights(const std::string& weight_dtype, DType dtype);
// True if quantized weights of a checkpoint stay as they are.
bool KeepsQuantized(const std::string& weight_dtype, DType dtype) noexcept;

// True if weights keep the types of their GGUF file: where neither dtype nor weight_dtype asks for another.
bool KeepsTypes(const std::string& dtype, const std::string& weight_dtype, const weights::Checkpoint& checkpoint);

// Scheme text of a cache at a weight dtype: "bf16", "fp16", "fp32".
std::string_view UnquantizedScheme(DType dtype) noexcept;

// Scheme of layers without an override of their own. Throws InputError.
KvScheme ResolveBaseScheme(const EngineConfig& config, const models::ModelConfig& model, DType dtype);

// Scheme of the keys of indexers, rotated where they are quantized. Throws InputError.
KvScheme ResolveIndexerScheme(const EngineConfig& config, const models::ModelConfig& model, DType dtype);

// One scheme per layer of the cache: base ("auto": declared by the checkpoint, else the dtype's), layer overrides,
// skipped layers; then those of indexers.
std::vector<KvScheme> ResolveSchemes(const EngineConfig& config, const models::ModelConfig& model, DType dtype);

// groups: each layer's KV cache group; empty: GroupsOf().
formats::CacheLayout PlanLayout(const std::vector<KvScheme>& schemes, const models::ModelConfig& model, int page_size,
                                const formats::StateRounding& states, const std::vector<int>& groups = {});

// Each layer's KV cache group: by visibility and page rule, keys of indexers apart from the others.
std::vector<int> GroupsOf(const std::vector<KvScheme>& schemes, const models::ModelConfig& model);

// Throws InputError.
formats::StateRounding StateRoundingOf(const EngineConfig& config);

// Each layer's visibility.
std::vector<cache::Visibility> LayerVisibility(const models::ModelConfig& model);

// Checks that need no model: throws InputError on values out of range and unknown devices.
void CheckConfig(const EngineConfig& config);

struct CacheSize {
  int64_t budget_bytes = 0;
  int64_t max_model_len = 0;
  std::string warning;  // if max_model_len was reduced; else ""
};

// The caches of the model and, if there is one, of its draft model.
struct CacheSpecs {
  const cache::KvCacheSpec& target;
  const cache::KvCacheSpec* draft = nullptr;

  // Maximum bytes of a sequence, as KvCacheSpec has them.
  int64_t MaxBytes(int64_t tokens, int64_t step_pages = 1) const noexcept {
    return target.MaxBytes(tokens, step_pages) + (draft != nullptr ? draft->MaxBytes(tokens, step_pages) : 0);
  }
  int64_t MinCacheBytes(int64_t tokens) const noexcept {
    return target.MinCacheBytes(tokens) + (draft != nullptr ? draft->MinCacheBytes(tokens) : 0);
  }
  // Part of `budget_bytes` for the draft model: so that both caches hold the same tokens, in sequences of `tokens`.
  int64_t DraftBytes(int64_t budget_bytes, int64_t tokens) const noexcept;
};

// available_bytes: what the device can give. Throws InputError (the caller's figures) or ResourceError (the machine's).
CacheSize SizeCache(const EngineConfig& config, const CacheSpecs& specs, int64_t model_max_position,
                    int64_t available_bytes);

// Memory of kv_offload_bytes; null without. Throws InputError (too few for a page) or ResourceError (the machine's).
std::shared_ptr<store::HostArena> ReserveHostMemory(const EngineConfig& config, const formats::CacheLayout& layout,
                                                    Device& device);

// Rows of logits that are computed at once: bounds their memory.
int64_t MaxLogitRows(const EngineConfig& config) noexcept;

ModelInfo MakeModelInfo(const models::ModelConfig& model, DType dtype, const std::string& weight_dtype);

}  // namespace kvanta::engine
