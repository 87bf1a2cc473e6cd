#include "kernels/cpu/vec16_portable.h"
#include "kernels/linear/cpu/blocks_portable.h"

namespace kvanta::kernels {
namespace {

// Exact dot of 16-bit operands: sum += a0 b0 + a1 b1 in each lane.
struct WideProducts {
  static constexpr int kProducts = 32;  // products of one Add()
  static constexpr int kTerms = 1;      // products per 16-bit operand
  static KVANTA_INLINE Vec16::I Add(Vec16::I sum, Vec16::I a, Vec16::I b) {
    return Each(
        [](I4 s, I4 x, I4 y) __attribute__((always_inline)) { return AddProducts(s, (S8)x, (S8)y); }, sum, a, b);
  }
};
using SubbyteProducts = WideProducts;

}  // namespace
}  // namespace kvanta::kernels

#include "bench/roofline_loops.h"

namespace kvanta::kernels {

const RooflineTable& PortableRooflineTable() {
  return kRooflineTable;
}

}  // namespace kvanta::kernels
