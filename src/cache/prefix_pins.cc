// Prefixes that are kept for a time.
#include <cmath>

#include "cache/prefix_tree.h"

namespace kvanta::cache {

void PrefixCache::State::ExpirePins(double now) noexcept {
  if (now < next_expiry) return;
  next_expiry = kNoExpiry;
  for (auto at = pinned.begin(); at != pinned.end();) {
    Node& node = **at;
    if (node.pinned_until > now) {
      next_expiry = std::min(next_expiry, node.pinned_until);
      ++at;
      continue;
    }
    at = pinned.erase(at);
    pinned_bytes -= Bytes(node);
    node.pinned_until = 0;
    if (node.children.empty()) {
      Rekey(leaves, node.last_use, node.last_use & ~kPinnedKey);
    } else {
      node.last_use &= ~kPinnedKey;
    }
    VisitRecords(node, [&](int group, PageKind kind, PageId /*page*/) {
      uint64_t& key = DroppableKey(node, group, kind);
      if (key != 0) Rekey(MapOf(node, group, kind), key, key & ~kPinnedKey);
    });
  }
}

void PrefixCache::Pin(std::span<const int32_t> tokens, std::string_view salt, int64_t pages, double seconds,
                      int64_t max_bytes) {
  State& state = *state_;
  const double now = state.clock_of_pins();
  const double until = std::ceil(now + seconds);  // whole seconds bound how often pins are looked through
  state.ExpirePins(now);
  int64_t known = 0;
  Node* last = state.Descend(tokens, salt, pages, known, nullptr);
  if (known == 0) return;
  std::vector<Node*> path(static_cast<size_t>(known));
  for (Node* node = last; node->parent != nullptr; node = node->parent) path[static_cast<size_t>(node->index)] = node;
  size_t kept = 0;
  for (; kept < path.size(); ++kept) {
    Node& node = *path[kept];
    const int64_t bytes = node.pinned_until > 0 ? 0 : state.Bytes(node);
    if (state.pinned_bytes + bytes > max_bytes) break;
    state.pinned.insert(&node);
    state.pinned_bytes += bytes;
    node.pinned_until = std::max(node.pinned_until, until);
  }
  state.next_expiry = std::min(state.next_expiry, until);
  state.Touch(path[std::max<size_t>(kept, 1) - 1]);
  for (Node* node : path) {
    State::VisitRecords(*node, [&](int group, PageKind kind, PageId /*page*/) {
      state.TouchRecord(*node, group, kind);
      if (!state.IsReported(*node, group, kind)) return;
      for (RecordListener* listener : state.listeners) listener->OnPin(State::Record(*node, group, kind), seconds);
    });
  }
}

int64_t PrefixCache::PinnedBytes() noexcept {
  state_->ExpirePins(state_->clock_of_pins());
  return state_->pinned_bytes;
}

}  // namespace kvanta::cache
