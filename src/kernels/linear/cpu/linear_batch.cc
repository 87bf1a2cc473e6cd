#include "kernels/linear/cpu/linear_batch.h"

#include <algorithm>
#include <array>

#include "kernels/cpu/task_split.h"

namespace kvanta::kernels {
namespace {

constexpr size_t kMaxProducts = 64;

// Consecutive products whose packed rows fit the context's buffer together.
class ProductBatch {
 public:
  // Adds the first of `products`, and as many more as fit. Products of equal x share its packed rows.
  explicit ProductBatch(std::span<const LinearProduct> products)
      : threads_(*products.front().layer->Context().threads) {
    const Buffer& buffer = products.front().layer->Context().packed_x;
    int64_t used = 0;
    for (const LinearProduct& product : products.first(std::min(products.size(), kMaxProducts))) {
      if (product.rows > product.layer->BlockRows()) break;
      Part& part = parts_[count_];
      const bool shares = count_ > 0 && IsSameInput(products[count_ - 1], product);
      const int64_t bytes = shares ? 0 : product.layer->PackedBytes(product.rows);
      if (used + bytes > static_cast<int64_t>(buffer.bytes())) break;
      part.packed_x = shares ? parts_[count_ - 1].packed_x : buffer.data() + used;
      part.packs = !shares;
      part.end_task = (count_ == 0 ? 0 : parts_[count_ - 1].end_task) + product.layer->Tasks(product.rows);
      used += bytes;
      values_ += shares ? 0 : product.rows * product.layer->In();
      ++count_;
    }
    products_ = products.first(count_);
  }

  size_t Count() const noexcept { return count_; }

  void Forward() noexcept {
    auto pack = [&](int64_t index, int) {
      const LinearProduct& product = products_[static_cast<size_t>(index)];
      const Part& part = parts_[static_cast<size_t>(index)];
      if (part.packs) product.layer->PackRows(product.x, product.rows, 0, product.rows, part.packed_x);
    };
    if (values_ < kMinTaskValues) {
      for (size_t index = 0; index < count_; ++index) pack(static_cast<int64_t>(index), 0);
    } else {
      threads_.ForEach(static_cast<int64_t>(count_), pack);
    }
    auto multiply = [&](int64_t task, int) {
      size_t index = 0;
      while (parts_[index].end_task <= task) ++index;
      const LinearProduct& product = products_[index];
      const int64_t first = index == 0 ? 0 : parts_[index - 1].end_task;
      product.layer->Multiply(parts_[index].packed_x, product.rows, task - first, parts_[index].end_task - first,
                              product.y, product.layer->Out());
    };
    threads_.ForEach(parts_[count_ - 1].end_task, multiply);
  }

 private:
  struct Part {
    uint8_t* packed_x = nullptr;
    bool packs = false;
    int64_t end_task = 0;  // its tasks end here; they begin where those of the part before end
  };
  static bool IsSameInput(const LinearProduct& a, const LinearProduct& b) noexcept {
    return a.x == b.x && a.rows == b.rows && a.layer->SharesPackedRows(*b.layer);
  }

  ThreadPool& threads_;
  std::span<const LinearProduct> products_;
  std::array<Part, kMaxProducts> parts_;
  size_t count_ = 0;
  int64_t values_ = 0;  // to pack
};

}  // namespace

void ForwardBatch(std::span<const LinearProduct> products) noexcept {
  while (!products.empty()) {
    ProductBatch batch(products);
    if (batch.Count() <= 1) {
      const LinearProduct& product = products.front();
      product.layer->Forward(product.x, product.rows, product.y, product.layer->Out(), nullptr);
    } else {
      batch.Forward();
    }
    products = products.subspan(std::max<size_t>(batch.Count(), 1));
  }
}

}  // namespace kvanta::kernels
