// Plan of a step on a GPU.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/batch.h"
#include "attention/gpu_compressed.h"
#include "attention/gpu_schedule.h"
#include "attention/gpu_sparse.h"
#include "attention/step_metadata.h"
#include "kernels/attention/cuda/attention_params.h"

namespace kvanta::attention {

// Offsets in a plan's metadata header: per KV cache group the slots of new rows and of closed pages, the same of
// EntryRows, AttentionMetadata per layer shape, of single tiles and of tile groups, the table of states, and what
// GpuSparse and GpuCompressed have.
constexpr size_t RowSlotsOffset(int slots) {
  return 2 * static_cast<size_t>(slots) * sizeof(kernels::cuda::SlotMapping);
}
constexpr size_t ClosedSlotsOffset(int slots) {
  return RowSlotsOffset(slots) + sizeof(kernels::cuda::SlotMapping);
}

// Compressed entries that have the same slots.
struct EntryRows {
  int group = 0;
  int row_tokens = 1;  // of an entry
  int of_page = 1;     // entries

  bool operator==(const EntryRows&) const = default;
};

// Layers that share a schedule and a block table.
struct LayerShape {
  WorkShape work;
  bool has_tiles = true;  // else the rows of keys, of entries, or ones that are copied
  int group = 0;
  GpuPartition partition;
  bool operator==(const LayerShape&) const = default;
};

// A step of one KV cache group.
struct GroupStep {
  std::vector<kernels::cuda::Slot> row_slots, closed_slots;  // for Append
  std::vector<kernels::cuda::PageIds> pages;                 // the sequences' block tables
  std::vector<int32_t> first_pages;                          // [sequence], index in pages
  int32_t max_closed_slots = 0;                              // Append's grid size
};

class GpuPlan final : public Plan {
 public:
  uint64_t Version() const noexcept override { return version; }
  template <class T>
  const T* DevicePointer(size_t offset) const noexcept {
    return reinterpret_cast<const T*>(metadata.Address() + offset);
  }

  Batch batch;
  std::vector<GpuSchedule> schedules;  // by layer shape
  std::vector<GroupStep> groups;
  std::vector<std::vector<kernels::cuda::Slot>> entry_slots;  // by EntryRows
  GpuSparsePlan sparse;
  GpuCompressedPlan compressed;
  StepMetadata metadata;
  std::vector<int32_t> first_segments;                    // StateTable's
  size_t segments_offset = 0, first_segments_offset = 0;  // of StateTable's arrays in the metadata
  int64_t max_sequences = 0;
  bool is_decode = false;  // a token of each sequence
  GpuSplitResults results;
  // Grid sizes: bounds of new rows and, by layer shape, tiles and the query rows of a tile.
  int32_t max_rows = 0;
  std::vector<int32_t> max_tiles;
  std::vector<int32_t> tile_rows;
  std::vector<ScheduleLists> lists;
  uint64_t backend = 0;  // version of the backend that made it
  uint64_t version = 0;
};

}  // namespace kvanta::attention
