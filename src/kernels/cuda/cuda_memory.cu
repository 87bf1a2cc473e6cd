#include "kernels/cuda/cuda_memory.h"

#include <cuda.h>

#include <algorithm>
#include <string>
#include <vector>

#include "kvanta/error.h"

namespace kvanta::kernels {
namespace {

// The driver's functions, asked for at run time: a program that links the driver does not start without one.
struct Driver {
  decltype(&cuMemAddressReserve) reserve = nullptr;
  decltype(&cuMemAddressFree) free = nullptr;
  decltype(&cuMemCreate) create = nullptr;
  decltype(&cuMemRelease) release = nullptr;
  decltype(&cuMemMap) map = nullptr;
  decltype(&cuMemUnmap) unmap = nullptr;
  decltype(&cuMemSetAccess) set_access = nullptr;
  decltype(&cuMemGetAllocationGranularity) granularity = nullptr;
};

template <class Function>
void Find(const char* name, Function& function) {
  constexpr unsigned kVersion = 12000;  // none of these has changed since 10.2
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &found, kVersion, cudaEnableDefault, &result);
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) {
    cudaGetLastError();
    throw ResourceError(std::string("the NVIDIA driver has no ") + name);
  }
  function = reinterpret_cast<Function>(found);
}

const Driver& TheDriver() {
  static const Driver driver = [] {
    Driver found;
    Find("cuMemAddressReserve", found.reserve);
    Find("cuMemAddressFree", found.free);
    Find("cuMemCreate", found.create);
    Find("cuMemRelease", found.release);
    Find("cuMemMap", found.map);
    Find("cuMemUnmap", found.unmap);
    Find("cuMemSetAccess", found.set_access);
    Find("cuMemGetAllocationGranularity", found.granularity);
    return found;
  }();
  return driver;
}

class CudaReservation final : public Reservation {
 public:
  CudaReservation(size_t bytes, int device, cudaStream_t stream)
      : driver_(TheDriver()), bytes_(bytes), stream_(stream) {
    kind_.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    kind_.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    kind_.location.id = device;
    if (driver_.granularity(&unit_, &kind_, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED) != CUDA_SUCCESS || unit_ == 0) {
      throw ResourceError("the NVIDIA driver cannot map memory on this GPU");
    }
    units_.resize(std::max<size_t>(1, (bytes + unit_ - 1) / unit_));
    if (driver_.reserve(&base_, units_.size() * unit_, unit_, 0, 0) != CUDA_SUCCESS) {
      throw ResourceError("cannot reserve " + std::to_string(bytes) + " bytes of the GPU's addresses");
    }
  }
  ~CudaReservation() override {
    cudaStreamSynchronize(stream_);
    for (size_t i = 0; i < units_.size(); ++i) {
      if (units_[i].users != 0) Unmap(i);
    }
    driver_.free(base_, units_.size() * unit_);
  }
  CudaReservation(const CudaReservation&) = delete;
  CudaReservation& operator=(const CudaReservation&) = delete;

  uint8_t* data() const noexcept override { return reinterpret_cast<uint8_t*>(base_); }
  size_t bytes() const noexcept override { return bytes_; }

  bool Commit(size_t offset, size_t bytes) noexcept override {
    const size_t first = offset / unit_;
    const size_t end = (offset + bytes + unit_ - 1) / unit_;
    for (size_t i = first; i < end; ++i) {
      if (units_[i].users == 0 && !Map(i)) {
        for (size_t taken = first; taken < i; ++taken) Leave(taken);
        return false;
      }
      ++units_[i].users;
    }
    return true;
  }

  size_t BytesToCommit(size_t offset, size_t bytes) const noexcept override { return UnitsWith(0, offset, bytes); }
  size_t BytesToRelease(size_t offset, size_t bytes) const noexcept override { return UnitsWith(1, offset, bytes); }

  void Release(size_t offset, size_t bytes) noexcept override {
    const size_t end = (offset + bytes + unit_ - 1) / unit_;
    for (size_t i = offset / unit_; i < end; ++i) Leave(i);
  }

 private:
  struct Unit {
    CUmemGenericAllocationHandle memory = 0;
    int users = 0;  // committed parts that lie in it; mapped if there are any
  };

  // Bytes of the part's granules that have so many users.
  size_t UnitsWith(int users, size_t offset, size_t bytes) const noexcept {
    size_t sum = 0;
    for (size_t i = offset / unit_; i * unit_ < offset + bytes; ++i) sum += units_[i].users == users ? unit_ : 0;
    return sum;
  }

  CUdeviceptr AddressOf(size_t unit) const { return base_ + unit * unit_; }

  bool Map(size_t unit) noexcept {
    CUmemGenericAllocationHandle memory = 0;
    if (driver_.create(&memory, unit_, &kind_, 0) != CUDA_SUCCESS) return false;
    CUmemAccessDesc access{};
    access.location = kind_.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    const bool mapped = driver_.map(AddressOf(unit), unit_, 0, memory, 0) == CUDA_SUCCESS;
    if (!mapped || driver_.set_access(AddressOf(unit), unit_, &access, 1) != CUDA_SUCCESS) {
      if (mapped) driver_.unmap(AddressOf(unit), unit_);
      driver_.release(memory);
      return false;
    }
    units_[unit].memory = memory;
    return true;
  }

  void Unmap(size_t unit) noexcept {
    driver_.unmap(AddressOf(unit), unit_);
    driver_.release(units_[unit].memory);
  }

  void Leave(size_t unit) noexcept {
    if (--units_[unit].users > 0) return;
    cudaStreamSynchronize(stream_);  // kernels that were launched may still read it
    Unmap(unit);
  }

  const Driver& driver_;
  size_t bytes_;
  cudaStream_t stream_;
  CUmemAllocationProp kind_{};
  size_t unit_ = 0;
  CUdeviceptr base_ = 0;
  std::vector<Unit> units_;
};

}  // namespace

std::unique_ptr<Reservation> ReserveCudaMemory(size_t bytes, int device, cudaStream_t stream) {
  return std::make_unique<CudaReservation>(bytes, device, stream);
}

}  // namespace kvanta::kernels
