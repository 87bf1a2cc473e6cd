#include "bench/arm/products_neon.h"
// After the products.
#include "bench/roofline_loops.h"

namespace kvanta::kernels {

const RooflineTable& NeonRooflineTable() {
  return kRooflineTable;
}

}  // namespace kvanta::kernels
