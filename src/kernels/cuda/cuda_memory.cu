#include "kernels/cuda/cuda_memory.h"

#include <cuda.h>

#include <algorithm>
#include <string>
#include <vector>

#include "kvanta/error.h"

namespace kvanta::kernels {
namespace {

// Driver functions, resolved at run time: a program linked to the driver would not start without one.
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
  constexpr unsigned kVersion = 12000;  // unchanged since 10.2
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &found, kVersion, cudaEnableDefault, &result);
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) {
    cudaGetLastError();
    throw ResourceError(std::string("the NVIDIA driver lacks ") + name);
  }
  function = reinterpret_cast<Function>(found);
}

const Driver& GetDriver() {
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
      : driver_(GetDriver()), bytes_(bytes), stream_(stream) {
    properties_.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties_.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties_.location.id = device;
    if (driver_.granularity(&granule_bytes_, &properties_, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED) != CUDA_SUCCESS ||
        granule_bytes_ == 0) {
      throw ResourceError("the NVIDIA driver cannot map memory on this GPU");
    }
    granules_.resize(std::max<size_t>(1, (bytes + granule_bytes_ - 1) / granule_bytes_));
    if (driver_.reserve(&base_, granules_.size() * granule_bytes_, granule_bytes_, 0, 0) != CUDA_SUCCESS) {
      throw ResourceError("cannot reserve " + std::to_string(bytes) + " bytes of the GPU's addresses");
    }
  }
  ~CudaReservation() override {
    cudaStreamSynchronize(stream_);
    for (size_t i = 0; i < granules_.size(); ++i) {
      if (granules_[i].users != 0) Unmap(i);
    }
    driver_.free(base_, granules_.size() * granule_bytes_);
  }
  CudaReservation(const CudaReservation&) = delete;
  CudaReservation& operator=(const CudaReservation&) = delete;

  uint8_t* data() const noexcept override { return reinterpret_cast<uint8_t*>(base_); }
  size_t bytes() const noexcept override { return bytes_; }

  bool Commit(size_t offset, size_t bytes) noexcept override {
    const size_t first = offset / granule_bytes_;
    const size_t end = (offset + bytes + granule_bytes_ - 1) / granule_bytes_;
    for (size_t i = first; i < end; ++i) {
      if (granules_[i].users == 0 && !Map(i)) {
        for (size_t committed = first; committed < i; ++committed) Unuse(committed);
        return false;
      }
      ++granules_[i].users;
    }
    return true;
  }

  size_t BytesToCommit(size_t offset, size_t bytes) const noexcept override { return GranuleBytes(0, offset, bytes); }
  size_t BytesToRelease(size_t offset, size_t bytes) const noexcept override { return GranuleBytes(1, offset, bytes); }
  size_t Granularity() const noexcept override { return granule_bytes_; }

  void Release(size_t offset, size_t bytes) noexcept override {
    const size_t end = (offset + bytes + granule_bytes_ - 1) / granule_bytes_;
    for (size_t i = offset / granule_bytes_; i < end; ++i) Unuse(i);
  }

 private:
  struct Granule {
    CUmemGenericAllocationHandle memory = 0;
    int users = 0;  // committed parts in it; mapped while above 0
  };

  // Bytes of the part's granules with `users` users.
  size_t GranuleBytes(int users, size_t offset, size_t bytes) const noexcept {
    size_t sum = 0;
    for (size_t i = offset / granule_bytes_; i * granule_bytes_ < offset + bytes; ++i)
      sum += granules_[i].users == users ? granule_bytes_ : 0;
    return sum;
  }

  CUdeviceptr AddressOf(size_t granule) const { return base_ + granule * granule_bytes_; }

  bool Map(size_t granule) noexcept {
    CUmemGenericAllocationHandle memory = 0;
    if (driver_.create(&memory, granule_bytes_, &properties_, 0) != CUDA_SUCCESS) return false;
    CUmemAccessDesc access{};
    access.location = properties_.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    const bool mapped = driver_.map(AddressOf(granule), granule_bytes_, 0, memory, 0) == CUDA_SUCCESS;
    if (!mapped || driver_.set_access(AddressOf(granule), granule_bytes_, &access, 1) != CUDA_SUCCESS) {
      if (mapped) driver_.unmap(AddressOf(granule), granule_bytes_);
      driver_.release(memory);
      return false;
    }
    granules_[granule].memory = memory;
    return true;
  }

  void Unmap(size_t granule) noexcept {
    driver_.unmap(AddressOf(granule), granule_bytes_);
    driver_.release(granules_[granule].memory);
  }

  void Unuse(size_t granule) noexcept {
    if (--granules_[granule].users > 0) return;
    cudaStreamSynchronize(stream_);  // launched kernels may still read it
    Unmap(granule);
  }

  const Driver& driver_;
  size_t bytes_;
  cudaStream_t stream_;
  CUmemAllocationProp properties_{};
  size_t granule_bytes_ = 0;
  CUdeviceptr base_ = 0;
  std::vector<Granule> granules_;
};

}  // namespace

std::unique_ptr<Reservation> ReserveCudaMemory(size_t bytes, int device, cudaStream_t stream) {
  return std::make_unique<CudaReservation>(bytes, device, stream);
}

}  // namespace kvanta::kernels
