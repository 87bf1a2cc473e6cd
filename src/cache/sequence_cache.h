// One sequence's pages: owns the references, knows which records the next step needs (block_table.h) and what may go
// after it. Pages that close are offered to the prefix tree, and an equal page of the tree replaces the own one.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "cache/block_table.h"
#include "cache/prefix_tree.h"

namespace kvanta::cache {

// What the layout and the model demand of every sequence's pages.
struct PageRequirements {
  explicit PageRequirements(const formats::CacheLayout& layout, int64_t sliding_window = 0);

  int page_size = 64;
  int64_t page_bytes = 0;
  int64_t exact_page_bytes = 0;
  bool quantized_while_open = true;  // some layer writes the quantized record directly
  bool exact_while_open = false;     // some layer keeps its open page exact
  int exact_behind = 0;              // closed pages before the open one that some layer reads exactly: 0 or 1
  int quantized_from = 0;            // first page that needs a quantized record when closed
  int sink_pages = 0;                // pages below keep their exact record
  int64_t sliding_window = 0;        // the widest of all layers; 0 when a layer sees everything
  bool prefixes_stay = false;  // a prefix tree keeps what falls behind the window: it evicts leaves, not ancestors

  bool NeedsQuantized(int64_t page, bool closed) const noexcept {
    return quantized_while_open || (closed && page >= quantized_from);
  }
  // `active`: the page holds a position of the step.
  bool NeedsExact(int64_t page, bool active) const noexcept {
    return exact_while_open && (active || page < sink_pages);
  }
  // Most bytes that a sequence of `tokens` tokens holds in a step of at most `step_pages` pages.
  int64_t MaxBytes(int64_t tokens, int64_t step_pages = 1) const noexcept;
};

enum class Sharing : uint8_t {
  kShared,   // takes pages from the prefix tree and offers its own
  kPrivate,  // only makes the tree evict
};

class SequenceCache {
 public:
  // `tree` may be null: nothing is shared or evicted. Both must outlive it.
  SequenceCache(PagePool& store, PrefixTree* tree, const PageRequirements& demand, std::string salt,
                Sharing sharing = Sharing::kShared);
  ~SequenceCache();
  SequenceCache(const SequenceCache&) = delete;
  SequenceCache& operator=(const SequenceCache&) = delete;

  // Takes the longest cached prefix of `tokens` in whole pages that leaves at least one token to compute, and whose
  // last pages' exact records are there where the next query reads them. Only when empty. Returns Length().
  int64_t MatchPrefix(std::span<const int32_t> tokens);

  // Bytes that Reserve(count) would take.
  int64_t BytesToReserve(int64_t count) const noexcept;
  // Records for the next `count` tokens, evicting from the tree where needed: all, or none and false.
  bool Reserve(int64_t count);
  // The reserved tokens are written: tokens[0, Length() + reserved) are the sequence's. Closed pages go to the tree.
  void Commit(std::span<const int32_t> tokens);
  // Gives every reference back; empty afterwards.
  void Clear() noexcept;
  // The same, at the end of the sequence of these tokens: the tree may keep what lets a longer one go on from here.
  void Finish(std::span<const int32_t> tokens);

  int64_t Length() const noexcept { return length_; }  // tokens whose K and V are in the cache
  int64_t Reserved() const noexcept { return reserved_; }
  const PageRef* Pages() const noexcept { return pages_.data(); }
  int64_t PageCount() const noexcept { return static_cast<int64_t>(pages_.size()); }

 private:
  void Drop(PageKind kind, PageId& page) noexcept;
  void FreeBehindWindow() noexcept;
  PageRef Share(std::span<const int32_t> tokens, int64_t index, PageRef page);
  void ShareExact(std::span<const int32_t> tokens, int64_t index);

  PagePool& store_;
  PrefixTree* tree_;
  PageRequirements demand_;
  std::string salt_;
  Sharing sharing_;
  BlockTable pages_;
  int64_t length_ = 0;
  int64_t reserved_ = 0;
  int64_t behind_window_ = 0;  // pages below were freed
  int64_t exact_miss_ = -1;    // a page whose exact record would have made the last prefix hit longer
};

}  // namespace kvanta::cache
