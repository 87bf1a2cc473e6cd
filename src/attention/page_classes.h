// Classes of a sequence's pages, by which attention to latents is divided among ranks (docs/adr/0093). Page j is of
// class j mod `of`. The result of a class, its KV splits combined in ascending order, does not depend on ranks, nor
// does the tree in which results of classes are combined: that of classes first, first + step, ... is
//   Tree(first, step) = step == of ? class `first` : Tree(first, 2 * step) + Tree(first + step, 2 * step)
// and rank r of n computes Tree(r, n), which is a part of Tree(0, 1).
#pragma once

#include <cstdint>

namespace kvanta::attention {

inline constexpr int kLatentClasses = 4;

// Classes first, first + step, ... of a layer: those of this rank.
struct PageClasses {
  int of = 1;  // a power of two; 1: all pages are of one class
  int first = 0;
  int step = 1;  // number of ranks; divides `of`

  bool operator==(const PageClasses&) const = default;
  int Own() const noexcept { return of / step; }
  // Index, among the own classes, of the one after `index` in the order of the tree's leaves; Own(): none.
  int Next(int index) const noexcept {
    for (int bit = Own() / 2; bit > 0; bit /= 2) {
      if ((index & bit) == 0) return index | bit;
      index &= ~bit;
    }
    return Own();
  }
};

// Tree(first, step) over anything: leaf(node, depth) puts the result of a class, or of a rank where `leaf_step` is
// their number, into accumulator `depth`, and combine(depth) adds accumulator depth + 1 to it. Depths are 0 to
// kTreeDepth - 1.
inline constexpr int kTreeDepth = 3;
template <class Leaf, class Combine>
void ReduceTree(int first, int step, int leaf_step, int depth, const Leaf& leaf, const Combine& combine) noexcept {
  if (step == leaf_step) return leaf(first, depth);
  ReduceTree(first, 2 * step, leaf_step, depth, leaf, combine);
  ReduceTree(first + step, 2 * step, leaf_step, depth + 1, leaf, combine);
  combine(depth);
}

}  // namespace kvanta::attention
