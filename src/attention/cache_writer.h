// Append of the host backends: subtracts the mean, transforms and encodes rows as they are written; layers with exact
// pages quantize a page when it closes, layers with ages encode its later levels when it ages, and those with a floor
// when it is demoted. The bytes depend only on positions and values.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>

#include "attention/batch.h"
#include "attention/cell_encoder.h"
#include "base/thread_pool.h"
#include "formats/cell_layout.h"

namespace kvanta::attention {

class CacheWriter {
 public:
  // `config`: returned by CheckConfig. `pool` and `config` must outlive the writer.
  CacheWriter(cache::PagePool& pool, const BackendConfig& config, const RowKernels& kernels = {});

  // k, v: f32 [rows][kv_heads * head_dim], row stride `stride` floats. MLA: k only, see Backend::Append.
  void Write(const Batch& batch, int layer, const float* k, const float* v, int64_t stride,
             ThreadPool& threads) noexcept;

  // Backend::EncodeLevels.
  void EncodeLevels(int group, const uint8_t* quantized, std::span<uint8_t* const> later, ThreadPool& threads) noexcept;

  AppendCounts Counts(int layer) const noexcept;

 private:
  struct AtomicCounts {
    std::atomic<int64_t> values{0}, saturated{0}, nan{0}, blocks{0}, zero_blocks{0};
    void Add(const SideCounts& counts) noexcept;
    SideCounts Read() const noexcept;
  };
  struct LayerCounts {
    AtomicCounts k, v;
  };

  void WriteEntries(const Batch& batch, int layer, const float* k, int64_t stride) noexcept;
  void WriteSide(const PageWrite& write, int layer, int head, formats::SideKind kind, const float* rows,
                 int64_t stride) noexcept;
  void EncodeLevel(const uint8_t* quantized, uint8_t* record, int layer, int head, size_t level,
                   formats::SideKind kind) noexcept;

  cache::PagePool& pool_;
  const BackendConfig& config_;
  const RowKernels kernels_;
  std::unique_ptr<LayerCounts[]> counts_;
};

}  // namespace kvanta::attention
