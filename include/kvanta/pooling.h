// Pooling of a request that asks for an embedding of its prompt instead of new tokens.
#pragma once

#include <cstdint>

namespace kvanta {

// Hidden states that are pooled: the mean over all tokens, or the last token's.
enum class PoolingType : uint8_t { kMean, kLast };

// The order of operations: pool, project by the dense modules of sentence-transformers in the model's folder, truncate,
// normalize.
struct PoolingParams {
  PoolingType pooling_type = PoolingType::kLast;
  bool normalize = true;  // to an L2 norm of 1
  int dimensions = 0;     // first channels kept (Matryoshka representations); 0: all

  // Throws InputError naming the field, its value and the range.
  void Validate(int embedding_size) const;

  // Calls visit(name, pointer to member) for every field. Bindings derive from this list.
  template <class Visitor>
  static void VisitFields(Visitor&& visit) {
    visit("pooling_type", &PoolingParams::pooling_type);
    visit("normalize", &PoolingParams::normalize);
    visit("dimensions", &PoolingParams::dimensions);
  }
};

}  // namespace kvanta
