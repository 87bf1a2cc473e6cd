// The chunks of a quarter that a warp copies ahead to shared memory. Include the primitives first.
#pragma once

#include "kernels/attention/cuda/chunks.h"
#include "kernels/attention/cuda/staged_cells.h"

namespace kvanta::kernels::cuda {

// In order of positions: kStages chunks of keys and of values are in flight or staged. Exact pages are few and not
// staged.
template <class K, bool kStaged = K::kStaged>
struct ChunkStream {
  static constexpr bool kIsDecoded = false;
  static constexpr bool kQueriesOnM = false;
  using StagedKeys = typename K::StagedKeys;
  using StagedValues = typename K::StagedValues;

  KVANTA_DEVICE ChunkStream(const AttentionParams& params, const QueryTile& tile, int warp_bytes, int lane)
      : of_lane_(static_cast<int>(tile.kv_head * params.k.head_stride) + 16 * lane), stages_(warp_bytes) {}
  // The chunks in [begin, end) that are in [first_staged, end).
  KVANTA_DEVICE void Start(const AttentionParams& params, const SharedPageTable& pages, int begin, int first_staged,
                           int end, int lane) {
    first_ = first_staged;
    end_ = end;
    if (begin >= first_staged && begin < end) OpenPage(params, pages, begin);
    for (int i = 0; i < K::kStages; ++i) {
      FetchKeys(params, begin + i * kChunkTokens, lane);
      FetchValues(params, pages, begin + i * kChunkTokens, lane);
    }
  }
  // The present chunk's, after a wait for the oldest copy.
  KVANTA_DEVICE StagedKeys Keys() const { return {stages_ + stage_}; }
  KVANTA_DEVICE StagedValues Values() const { return {stages_ + stage_ + StagedKeys::kBytes}; }
  static KVANTA_DEVICE void Wait() {
    WaitForCopies<2 * K::kStages - 1>();
    SyncWarp();
  }
  // The keys and, later, the values of the chunk at `position` have been read.
  KVANTA_DEVICE void NextKeys(const AttentionParams& params, int position, int lane) {
    SyncWarp();
    FetchKeys(params, position + K::kStages * kChunkTokens, lane);
  }
  KVANTA_DEVICE void NextValues(const AttentionParams& params, const SharedPageTable& pages, int position, int lane) {
    SyncWarp();
    FetchValues(params, pages, position + K::kStages * kChunkTokens, lane);
  }

 private:
  KVANTA_DEVICE void FetchKeys(const AttentionParams& params, int position, int lane) {
    if (position < end_ && position >= first_) {
      Keys().Fetch(record_, params.k, params.page_size, position & (params.page_size - 1), lane);
    }
    CommitCopies();
  }
  KVANTA_DEVICE void FetchValues(const AttentionParams& params, const SharedPageTable& pages, int position, int lane) {
    const int next = position + kChunkTokens;
    if (position < end_ && position >= first_) {
      Values().Fetch(record_, params.v, params.page_size, position & (params.page_size - 1), lane);
    }
    if (next < end_ && (next & (params.page_size - 1)) == 0) OpenPage(params, pages, next);
    CommitCopies();
    stage_ = stage_ + K::kChunkBytes == K::kStageBytes ? 0 : stage_ + K::kChunkBytes;
  }
  KVANTA_DEVICE void OpenPage(const AttentionParams& params, const SharedPageTable& pages, int position) {
    record_ = params.quantized.Record(pages.QuantizedPage(params, position)) + of_lane_;
  }

  int of_lane_;  // the KV head's offset in a record, of K and V alike, and 16 bytes per lane
  int stages_;
  int stage_ = 0;
  int first_ = 0;
  int end_ = 0;
  const uint8_t* record_ = nullptr;
};
template <class K>
struct ChunkStream<K, false> {
  static constexpr bool kIsDecoded = false;
  static constexpr bool kQueriesOnM = false;
  KVANTA_DEVICE ChunkStream(const AttentionParams& /*params*/, const QueryTile& /*tile*/, int /*warp_bytes*/,
                            int /*lane*/) {}
  static KVANTA_DEVICE int Keys() { return 0; }  // unused
  static KVANTA_DEVICE int Values() { return 0; }
  static KVANTA_DEVICE void Wait() {}
  KVANTA_DEVICE void NextKeys(const AttentionParams& /*params*/, int /*position*/, int /*lane*/) {}
  KVANTA_DEVICE void NextValues(const AttentionParams& /*params*/, const SharedPageTable& /*pages*/, int /*position*/,
                                int /*lane*/) {}
};

}  // namespace kvanta::kernels::cuda
