// c10d's process groups over NCCL, where the build found the headers; else why there are none.
#include "c10d.h"

#ifdef FT_NCCL
#define USE_C10D_NCCL
#define USE_CUDA
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

FT_API char* ft_nccl_missing() {
  if (c10::impl::hasDeviceGuardImpl(at::kCUDA) && c10::impl::VirtualGuardImpl(at::kCUDA).deviceCount() > 0) {
    return nullptr;
  }
  return copy_string("this machine has no CUDA device that this libtorch can use; use gloo");
}

FT_API int ft_group_nccl(
    const Store* store, int32_t rank, int32_t size, int64_t timeout_ms, bool high_priority, Failure* failure,
    Group** group) {
  return guarded(failure, [&] {
    auto options = c10d::ProcessGroupNCCL::Options::create(high_priority);
    options->timeout = std::chrono::milliseconds(timeout_ms);
    auto nccl = c10::make_intrusive<c10d::ProcessGroupNCCL>(*store, rank, size, options);
    auto device = c10::impl::VirtualGuardImpl(at::kCUDA).getDevice();
    *group = new Group{nccl, [nccl] { nccl->abort(); }, device};
  });
}
#else
FT_API char* ft_nccl_missing() {
  return copy_string(FT_NCCL_MISSING);
}

FT_API int ft_group_nccl(const Store*, int32_t, int32_t, int64_t, bool, Failure* failure, Group**) {
  return fail(failure, FT_NCCL_MISSING);
}
#endif
