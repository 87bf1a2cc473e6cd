#include "bench/x86/products_avx512.h"
// After the products.
#include "bench/roofline_loops.h"

namespace kvanta::kernels {

const RooflineTable& Zen4RooflineTable() {
  return kRooflineTable;
}

}  // namespace kvanta::kernels
