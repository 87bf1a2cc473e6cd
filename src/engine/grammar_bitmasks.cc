#include "engine/grammar_bitmasks.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "runner/token_mask.h"

namespace kvanta::engine {

GrammarBitmasks::GrammarBitmasks(BitmaskFn fill, int64_t vocab)
    : fill_(std::move(fill)), words_(static_cast<size_t>(runner::MaskWords(vocab))) {}

void GrammarBitmasks::Add(RequestState& request) {
  if (request.request.constraint) requests_.push_back(&request);
}

void GrammarBitmasks::Fill() {
  if (requests_.empty()) return;
  masks_.assign(requests_.size() * words_, 0);
  tasks_.assign(requests_.size(), {});
  for (size_t i = 0; i < requests_.size(); ++i) {
    RequestState& request = *requests_[i];
    tasks_[i].constraint = request.request.constraint.get();
    tasks_[i].taken = std::span<const int32_t>(request.tokens).subspan(static_cast<size_t>(request.grammar_tokens));
    tasks_[i].mask = std::span(masks_).subspan(i * words_, words_);
  }
  std::string fault;
  try {
    fill_(tasks_);
  } catch (const std::exception& error) {
    fault = error.what();
  } catch (...) {
    fault = "something that is no std::exception";
  }
  for (size_t i = 0; i < requests_.size(); ++i) {
    requests_[i]->grammar_tokens = static_cast<int64_t>(requests_[i]->tokens.size());
    const std::string& error = fault.empty() ? tasks_[i].error : fault;
    if (error.empty()) continue;
    requests_[i]->invalid_input = fault.empty() && tasks_[i].invalid_input;
    requests_[i]->failure = requests_[i]->invalid_input ? error : fmt::format("the constraint failed: {}", error);
    std::ranges::fill(tasks_[i].mask, 0U);
  }
}

std::span<const uint32_t> GrammarBitmasks::Mask(size_t index) const noexcept {
  return std::span(masks_).subspan(index * words_, words_);
}

}  // namespace kvanta::engine
