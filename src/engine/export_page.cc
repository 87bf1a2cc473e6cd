// Export of a page of the prefix cache as a file.
#include <fmt/format.h>

#include <algorithm>

#include "engine/cache_identity.h"
#include "engine/engine_impl.h"
#include "kvanta/error.h"
#include "store/page_file.h"

namespace kvanta {

std::vector<uint8_t> Engine::Impl::ExportPage(std::span<const int32_t> tokens, int index, int group) {
  CheckAlone("ExportPage");
  CheckTokens(tokens, "prefix");
  if (group < 0 || group >= cache_->pool.Groups()) {
    throw InputError(fmt::format("group = {}: the KV cache groups are 0 to {}", group, cache_->pool.Groups() - 1));
  }
  if (cache_->spec.groups[static_cast<size_t>(group)].IsRecurrent()) {
    throw InputError(fmt::format("group = {}: the states of recurrent layers are not exported", group));
  }
  const StepLock step_lock(*this);
  const std::span<const cache::PageRef> records =
      cache_->prefix ? cache_->prefix->Peek(tokens, "", index) : std::span<const cache::PageRef>();
  const cache::PageRef page = records.empty() ? cache::PageRef{} : records[static_cast<size_t>(group)];
  if (page == cache::PageRef{}) {
    throw InputError(
        fmt::format("page {} of this prefix of {} tokens is not in the prefix cache", index, tokens.size()));
  }
  // A page that every layer reads exactly has only its exact record, one that has aged perhaps that of a later level.
  const cache::PageKind kind =
      *std::ranges::find_if(cache::kPageKinds, [&](cache::PageKind each) { return page.Of(each) != cache::kNoPage; });
  std::vector<uint8_t> record(static_cast<size_t>(cache_->pool.RecordBytes(group, kind)));
  cache_->pool.device().CopyOut(record.data(), cache_->pool.Record(group, kind, page.Of(kind)), record.size());
  const std::string identity = engine::CacheIdentity(components_);
  const store::PageKey identity_key = store::IdentityKey(identity);
  store::RecordId id{store::RootKey(identity_key, ""), group, kind};
  const auto page_size = static_cast<size_t>(cache_->spec.page_size);
  std::span<const int32_t> page_tokens;
  for (size_t each = 0; each <= static_cast<size_t>(index); ++each) {
    page_tokens = tokens.subspan(each * page_size, page_size);
    id.key = store::ChildKey(id.key, page_tokens);
  }
  std::vector<uint8_t> file = store::EncodePageHeader(identity_key, id, page_tokens, record, identity);
  file.insert(file.end(), record.begin(), record.end());
  return file;
}

}  // namespace kvanta
