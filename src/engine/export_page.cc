// Export of a page of the prefix cache as a file.
#include <fmt/format.h>

#include "engine/engine_impl.h"
#include "formats/page_file.h"
#include "kvanta/error.h"

namespace kvanta {

std::vector<uint8_t> Engine::Impl::ExportPage(std::span<const int32_t> tokens, int index) {
  CheckTokens(tokens, "prefix");
  const StepLock step_lock(*this);
  const cache::PageRef* page = tree_ ? tree_->Peek(tokens, "", index) : nullptr;
  if (page == nullptr) {
    throw InputError(
        fmt::format("page {} of this prefix of {} tokens is not in the prefix cache", index, tokens.size()));
  }
  // A page that every layer reads exactly has only an exact record.
  const bool exact = page->quantized == cache::kNoPage;
  const cache::PageKind kind = exact ? cache::PageKind::kExact : cache::PageKind::kQuantized;
  const cache::PageId id = exact ? page->exact : page->quantized;
  formats::PageHeader header;
  header.model = components_.model_identity;
  header.record = exact ? formats::RecordKind::kExact : formats::RecordKind::kQuantized;
  header.layout = components_.layout;
  if (components_.layout.UsesScales()) header.scales = components_.scales;
  std::vector<uint8_t> record(static_cast<size_t>(store_->RecordBytes(kind)));
  store_->device().CopyOut(record.data(), store_->Base(kind) + id * store_->RecordBytes(kind), record.size());
  return formats::WritePageFile(header, formats::RecordToCanonical(components_.layout, header.record, record));
}

}  // namespace kvanta
