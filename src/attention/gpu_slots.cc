#include "attention/gpu_slots.h"

#include "cache/visibility.h"

namespace kvanta::attention {
namespace {

using kernels::cuda::Slot;

void FillTokenSlots(const std::vector<PageWrite>& writes, int page_size, GroupStep& group) {
  group.row_slots.clear();
  group.closed_slots.clear();
  for (const PageWrite& write : writes) {
    const auto slot_at = [&](int offset) {
      return Slot{
          .quantized = write.page.quantized,
          .exact = write.page.exact,
          .offset = offset,
          .row = offset < write.first_slot ? -1 : static_cast<int32_t>(write.first_row + offset - write.first_slot)};
    };
    for (int i = write.first_slot; i < write.last_slot; ++i) group.row_slots.push_back(slot_at(i));
    if (write.last_slot != page_size || write.page.quantized == cache::kNoPage) continue;
    for (int i = 0; i < page_size; ++i) group.closed_slots.push_back(slot_at(i));
  }
}

void FillEntrySlots(const Batch& batch, const EntryRows& entries, int page_size, std::vector<Slot>& slots) {
  slots.clear();
  for (const SequenceRows& sequence : batch.sequences) {
    const cache::PageRef* table = sequence.span.pages[entries.group];
    const int64_t end = sequence.End() / entries.row_tokens;
    for (int64_t entry = sequence.span.start / entries.row_tokens; entry < end; ++entry) {
      const int64_t last_token = (entry + 1) * entries.row_tokens - 1;
      const int64_t page = cache::PageOfEntry<int64_t>(entry, entries.row_tokens, page_size);
      slots.push_back({.quantized = table[page].quantized,
                       .offset = static_cast<int32_t>(entry % entries.of_page),
                       .row = static_cast<int32_t>(sequence.first_row + last_token - sequence.span.start)});
    }
  }
}

}  // namespace

void FillSlots(const std::vector<EntryRows>& entries, int page_size, GpuPlan& plan) {
  plan.groups.resize(plan.batch.writes.size());
  for (size_t g = 0; g < plan.groups.size(); ++g) FillTokenSlots(plan.batch.writes[g], page_size, plan.groups[g]);
  plan.entry_slots.resize(entries.size());
  for (size_t i = 0; i < entries.size(); ++i) {
    FillEntrySlots(plan.batch, entries[i], page_size, plan.entry_slots[i]);
  }
}

void FillPages(int page_size, GpuPlan& plan) {
  for (size_t g = 0; g < plan.groups.size(); ++g) {
    GroupStep& group = plan.groups[g];
    group.pages.clear();
    group.first_pages.clear();
    for (const SequenceRows& sequence : plan.batch.sequences) {
      group.first_pages.push_back(static_cast<int32_t>(group.pages.size()));
      const cache::PageRef* table = sequence.span.pages[g];
      for (int64_t page = 0; page * page_size < sequence.End(); ++page) {
        group.pages.push_back({table[page].quantized, table[page].exact});
      }
    }
  }
}

}  // namespace kvanta::attention
