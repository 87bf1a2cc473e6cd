// Compressed entries whose pages ranks divide: those that the rows of a step attend to, from the ranks that have them.
// Every rank has all queries' positions and choices, so that none needs to ask (docs/adr/0095).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/layer_view.h"
#include "cache/visibility.h"
#include "parallel/communicator.h"

namespace kvanta::attention {

class EntryExchange {
 public:
  // layers: those with entries are used. All arguments outlive it.
  EntryExchange(parallel::Communicator& ranks, const std::vector<LayerView>& layers, int page_size);

  // Entries that a row attends to: the first ones, or those chosen.
  struct Row {
    const cache::PageRef* table = nullptr;  // of the group of entries
    std::span<const int32_t> chosen;        // empty: all
    int64_t entries = 0;

    int64_t EntryAt(int64_t index) const noexcept {
      return chosen.empty() ? index : chosen[static_cast<size_t>(index)];
    }
  };
  // Makes room for steps whose rows attend to up to `entries`.
  void Reserve(int64_t entries);
  // Gets the entries of as many rows, from the first on, as there is room for, and returns how many. On all ranks at
  // once, with the same rows.
  size_t Gather(const LayerView& entries, std::span<const Row> rows) noexcept;
  // The canonical row of an entry of row `row` of the last Gather.
  formats::ConstRowSections RowAt(size_t row, int64_t index) const noexcept;

 private:
  // Section offsets of an entry on its own.
  formats::CellSections SectionsOf(const LayerView& entries) const noexcept;
  int RankOf(const formats::LayerScheme& scheme, int64_t entry) const noexcept {
    return static_cast<int>(cache::PageOfEntry<int64_t>(entry, scheme.row_tokens, page_size_) % ranks_.Size());
  }

  parallel::Communicator& ranks_;
  const int page_size_;
  int64_t row_bytes_ = 0;                    // of the largest entry
  int64_t capacity_ = 0;                     // entries
  std::vector<uint8_t> received_;            // [capacity]: each rank's in turn
  std::vector<int32_t> places_;              // [capacity]: of the rows' entries, one row after the other, in received_
  std::vector<int64_t> firsts_;              // [rows]: index of a row's first entry in places_
  const formats::Format* format_ = nullptr;  // with the next one: of the last Gather
  formats::CellSections sections_;
};

}  // namespace kvanta::attention
