// URLs and replies of Redis servers, and records among their values: refused by the errors that callers expect, or
// used.
#include <algorithm>
#include <span>
#include <string>
#include <vector>

#include "fuzz/fuzz_input.h"
#include "store/redis_client.h"
#include "store/redis_server.h"

using namespace kvanta;  // NOLINT(google-build-using-namespace)

namespace {

// The replies in pieces of several sizes, as a network delivers them.
void ReadReplies(std::span<const uint8_t> bytes) {
  if (bytes.empty()) return;
  const size_t piece = bytes[0] % 64 + 1;
  bytes = bytes.subspan(1);
  store::ReplyReader reader;
  reader.AllowBytes(4096);
  const store::PageKey identity = store::IdentityKey("model");
  const store::RecordId id{.key = identity};
  const std::vector<int32_t> tokens = {1, 2};
  try {
    while (!bytes.empty()) {
      const size_t size = std::min(piece, bytes.size());
      reader.Feed(bytes.first(size));
      bytes = bytes.subspan(size);
      while (const store::Reply reply = reader.Take()) {
        for (size_t i = 0; reply->type == REDIS_REPLY_ARRAY && i < reply->elements; ++i) {
          const redisReply& value = *reply->element[i];
          if (value.type != REDIS_REPLY_STRING) continue;
          const std::span<const uint8_t> record(reinterpret_cast<const uint8_t*>(value.str), value.len);
          ReadRecord(record, identity, id, tokens, 8);
        }
      }
    }
  } catch (const store::ConnectionError&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::span<const uint8_t> rest(data + 1, size - 1);
  if (data[0] == 'u') {
    fuzz::MustReadOrRefuse([&] { store::CheckServerUrl(std::string(fuzz::Text(rest))); });
  } else {
    ReadReplies(rest);
  }
  return 0;
}
