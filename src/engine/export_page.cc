// Export of a page of the prefix cache as a file.
#include <fmt/format.h>

#include "engine/engine_impl.h"
#include "formats/page_file.h"
#include "kvanta/error.h"

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
  // A page that every layer reads exactly has only its exact record.
  const cache::PageKind kind = page.quantized == cache::kNoPage ? cache::PageKind::kExact : cache::PageKind::kQuantized;
  const cache::PageId id = page.Of(kind);
  formats::PageHeader header;
  header.model = components_.model_identity;
  header.record = kind == cache::PageKind::kExact ? formats::RecordKind::kExact : formats::RecordKind::kQuantized;
  header.layout = components_.layout;
  header.group = group;
  if (components_.layout.UsesScales()) header.scales = components_.scales;
  std::vector<uint8_t> record(static_cast<size_t>(cache_->pool.RecordBytes(group, kind)));
  cache_->pool.device().CopyOut(record.data(), cache_->pool.Record(group, kind, id), record.size());
  return formats::WritePageFile(header, formats::RecordToCanonical(components_.layout, group, header.record, record));
}

}  // namespace kvanta
