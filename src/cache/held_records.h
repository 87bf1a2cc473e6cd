// Records of a prefix that are kept from eviction for a sequence that has no pages yet.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/page_pool.h"

namespace kvanta::cache {

class HeldRecords {
 public:
  // `pool` must outlive the object.
  explicit HeldRecords(PagePool& pool) noexcept : pool_(pool) {}
  ~HeldRecords() { Release(); }
  HeldRecords(const HeldRecords&) = delete;
  HeldRecords& operator=(const HeldRecords&) = delete;

  // Adds a reference to a record.
  void Hold(int group, PageKind kind, PageId page) {
    records_.push_back({.group = group, .kind = kind, .page = page});
    pool_.Retain(group, kind, page);
    bytes_ += pool_.RecordBytes(group, kind);
  }
  // Makes room for `count` more records.
  void Reserve(size_t count) { records_.reserve(records_.size() + count); }
  // Takes over the caller's reference to a record, for which there must be room.
  void Adopt(int group, PageKind kind, PageId page) noexcept {
    records_.push_back({.group = group, .kind = kind, .page = page});
    bytes_ += pool_.RecordBytes(group, kind);
  }
  void Release() noexcept {
    for (const RecordId& record : records_) pool_.Release(record.group, record.kind, record.page);
    records_.clear();
    bytes_ = 0;
  }
  int64_t Bytes() const noexcept { return bytes_; }

 private:
  PagePool& pool_;
  std::vector<RecordId> records_;
  int64_t bytes_ = 0;
};

}  // namespace kvanta::cache
