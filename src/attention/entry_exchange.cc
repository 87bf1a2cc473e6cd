#include "attention/entry_exchange.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace kvanta::attention {
namespace {

constexpr int64_t kExchangeBytes = int64_t{16} << 20;

}  // namespace

EntryExchange::EntryExchange(parallel::Communicator& ranks, const std::vector<LayerView>& layers, int page_size)
    : ranks_(ranks), page_size_(page_size) {
  for (const LayerView& layer : layers) {
    if (layer.scheme->HasEntries()) row_bytes_ = std::max(row_bytes_, SectionsOf(layer).bytes);
  }
  if (row_bytes_ != 0) Reserve(kExchangeBytes / row_bytes_);
}

void EntryExchange::Reserve(int64_t entries) {
  if (entries <= capacity_) return;
  capacity_ = entries;
  received_.resize(static_cast<size_t>(capacity_ * row_bytes_));
  places_.resize(static_cast<size_t>(capacity_));
  firsts_.resize(static_cast<size_t>(capacity_));
}

formats::CellSections EntryExchange::SectionsOf(const LayerView& entries) const noexcept {
  return formats::PlanRows(*entries.scheme->k.format, {.tokens = 1, .head_dim = entries.scheme->k.shape.head_dim});
}

size_t EntryExchange::Gather(const LayerView& entries, std::span<const Row> rows) noexcept {
  const formats::LayerScheme& scheme = *entries.scheme;
  format_ = scheme.k.format;
  sections_ = SectionsOf(entries);
  // Entries of each rank, and where they begin.
  std::array<int64_t, parallel::kMaxRanks> counts{}, begins{};
  const auto ranks = static_cast<size_t>(ranks_.Size());
  size_t taken = 0;
  int64_t total = 0;
  for (const Row& row : rows) {
    if (taken == firsts_.size() || total + row.entries > capacity_) break;
    firsts_[taken++] = total;
    for (int64_t index = 0; index < row.entries; ++index) {
      const auto rank = static_cast<size_t>(RankOf(scheme, row.EntryAt(index)));
      places_[static_cast<size_t>(total++)] = static_cast<int32_t>(counts[rank]++);
    }
  }
  for (size_t rank = 1; rank < ranks; ++rank) begins[rank] = begins[rank - 1] + counts[rank - 1];
  for (size_t i = 0; i < taken; ++i) {
    const Row& row = rows[i];
    for (int64_t index = 0; index < row.entries; ++index) {
      const int64_t entry = row.EntryAt(index);
      const int64_t page = cache::PageOfEntry<int64_t>(entry, scheme.row_tokens, page_size_);
      const int rank = RankOf(scheme, entry);
      int32_t& place = places_[static_cast<size_t>(firsts_[i] + index)];
      place += static_cast<int32_t>(begins[static_cast<size_t>(rank)]);
      if (rank != ranks_.Rank()) continue;
      const uint8_t* cell = entries.View(page, page, row.table[page], 0).record + scheme.KCell(0);
      const int64_t slot = entry % scheme.shape.tokens;
      uint8_t* to = received_.data() + place * sections_.bytes;
      std::memcpy(to + sections_.codes, cell + scheme.k.sections.codes + slot * sections_.row_bytes,
                  static_cast<size_t>(sections_.row_bytes));
      formats::ForEachRowSection<formats::ConstRowSections>(
          *format_, sections_.blocks, [&](auto offset, auto /*section*/, int elements, int bytes) {
            const int64_t of_row = int64_t{elements} * bytes;
            std::memcpy(to + sections_.*offset, cell + scheme.k.sections.*offset + slot * of_row,
                        static_cast<size_t>(of_row));
          });
    }
  }
  std::array<parallel::Destination, parallel::kMaxRanks> to;
  for (size_t rank = 0; rank < ranks; ++rank) {
    to[rank] = {.first = received_.data() + begins[rank] * sections_.bytes,
                .rows = 1,
                .row_bytes = counts[rank] * sections_.bytes};
  }
  ranks_.AllGather(to[static_cast<size_t>(ranks_.Rank())].first, std::span(to).first(ranks));
  return taken;
}

formats::ConstRowSections EntryExchange::RowAt(size_t row, int64_t index) const noexcept {
  const int64_t place = places_[static_cast<size_t>(firsts_[row] + index)];
  return formats::CanonicalRow(*format_, sections_, 0, received_.data() + place * sections_.bytes);
}

}  // namespace kvanta::attention
