// A place where records of closed pages are kept: memory of the host, a folder, or a server that several machines
// share. Its owner checks what comes from it (page_file.h), and has one thread that loads and one that writes; a
// place may hang for a while in the functions that these call, but not in others. Thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/device.h"
#include "kvanta/cache_folder.h"
#include "store/page_file.h"

namespace kvanta::store {

// A record of page `index`.
struct RecordUse {
  RecordId id;
  int64_t index = 0;
};

// A record's token ids and payload, shared by all that write, keep or read them.
struct RecordContent {
  PageKey parent = {};  // key of the page before it; zeros for the first page
  std::vector<int32_t> tokens;
  Buffer payload;  // memory of the host

  std::span<const uint8_t> Payload() const noexcept { return {payload.data(), payload.bytes()}; }
};

// Memory of the host that owns `bytes`.
inline Buffer OwnBytes(std::vector<uint8_t> bytes) {
  const auto owner = std::make_shared<std::vector<uint8_t>>(std::move(bytes));
  return {std::shared_ptr<void>(owner, owner->data()), owner->size()};
}

struct WriteResult {
  int64_t bytes = 0;  // bytes of the payloads that were written
  std::string error;  // the first one's text; empty: all records are there
};

struct RecordToWrite {
  RecordUse use;
  std::span<const uint8_t> header;  // EncodePageHeader(); empty if the place needs none
  std::shared_ptr<const RecordContent> content;
};

struct ReadResult {
  enum class Outcome : uint8_t { kRead, kMissing, kDamaged, kFailed };
  Outcome outcome = Outcome::kMissing;
  std::vector<uint8_t> bytes;                    // kRead: header and payload, not checked
  std::shared_ptr<const RecordContent> content;  // kRead of a place that needs no header: instead of `bytes`
  std::string fault;                             // kDamaged, kFailed
};

class RecordBackend {
 public:
  virtual ~RecordBackend() = default;

  // Option and value, for messages: without passwords.
  virtual std::string Name() const = 0;
  // Name of a record in messages.
  virtual std::string NameOf(const RecordId& id) const = 0;
  // Bytes of records that are best read at once; 0: one at a time.
  virtual int64_t BatchBytes() const noexcept = 0;
  // True if records leave the process's memory, so that a header with a checksum must go with them.
  virtual bool NeedsHeader() const noexcept { return true; }

  // ---- never wait

  // True if this process has seen or written the record and not seen it go.
  virtual bool IsKnown(const RecordId& id) const = 0;
  // True if the record is known, and its time of last use is not of the last moments.
  virtual bool NeedsTouch(const RecordId& id) const = 0;
  // The record will be removed.
  virtual void Invalidate(const RecordId& id) = 0;
  // Fills in what the place knows of its size and connection.
  virtual void Describe(CacheTierStats& stats) const = 0;
  // The process ends: calls of the loading thread should fail now, those of the writing thread after `write_seconds`.
  virtual void EndCalls(double /*write_seconds*/) noexcept {}

  // ---- on the writing thread

  // Called first.
  virtual void Open() = 0;
  // Writes the records that are not there yet, in order.
  virtual WriteResult Write(std::span<const RecordToWrite> records) = 0;
  // Renews times of last use. Within a prefix, earlier pages count as used later, so that they are evicted after those
  // that depend on them.
  virtual void Touch(std::span<const RecordUse> records) = 0;
  // Keeps records[i] until until_ns[i], in nanoseconds since 1970, if the place can: others are evicted before it.
  virtual void Pin(std::span<const RecordUse> records, std::span<const int64_t> until_ns) = 0;
  virtual void Remove(std::span<const RecordId> ids) = 0;

  // ---- on the loading thread

  // Sets found[i] where ids[i] is there; nothing if the place does not answer. Returns the error's text.
  virtual std::string Find(std::span<const RecordId> ids, std::span<uint8_t> found) = 0;
  virtual std::vector<ReadResult> Read(std::span<const RecordId> ids) = 0;
};

// Reports the first error of a failure in one line for the operator, and no further one until it ends. Guarded by its
// owner's mutex.
class ErrorLatch {
 public:
  // place: RecordBackend::Name().
  void Report(const std::string& place, const std::string& what, const std::string& why) {
    if (!std::exchange(reported_, true)) {
      text_ = place + ": " + what + ": " + why + "; the engine goes on without it and tries again";
    }
  }
  void End() { reported_ = false; }
  // Empty: nothing new.
  std::string Take() { return std::exchange(text_, {}); }

 private:
  bool reported_ = false;
  std::string text_;
};

}  // namespace kvanta::store
