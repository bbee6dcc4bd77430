// CUDA's streams, events and memory statistics, over the interfaces that need no header of CUDA.
#include "shim.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <dlfcn.h>

static c10::impl::VirtualGuardImpl guard() {
  return c10::impl::VirtualGuardImpl(at::kCUDA);
}

static c10::Device cuda(int32_t index) {
  auto count = guard().deviceCount();
  TORCH_CHECK(index >= 0 && index < count, "no CUDA device ", index, "; there are ", count);
  return c10::Device(at::kCUDA, index);
}

static c10::Stream stream(int32_t index, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, cuda(index), id);
}

FT_API void ft_load_cuda(const char* path) {
  if (c10::impl::hasDeviceGuardImpl(at::kCUDA)) return;
  if (dlopen("libcuda.so.1", RTLD_LAZY)) dlopen(path, RTLD_NOW | RTLD_GLOBAL | RTLD_NODELETE);
}

FT_API int32_t ft_cuda_device_count() {
  return c10::impl::hasDeviceGuardImpl(at::kCUDA) ? guard().deviceCount() : 0;
}

// The driver has been loaded by then, and its interface in C is stable.
FT_API int ft_cuda_name(int32_t device, char** name, Failure* failure) {
  return guarded(failure, [&] {
    auto index = cuda(device).index();
    auto driver = dlopen("libcuda.so.1", RTLD_LAZY);
    TORCH_CHECK(driver, "no CUDA driver");
    auto get_device = reinterpret_cast<int (*)(int*, int)>(dlsym(driver, "cuDeviceGet"));
    auto get_name = reinterpret_cast<int (*)(char*, int, int)>(dlsym(driver, "cuDeviceGetName"));
    int handle = 0;
    char text[256] = "";
    TORCH_CHECK(get_device && get_name && get_device(&handle, index) == 0, "the CUDA driver does not know the device");
    TORCH_CHECK(get_name(text, sizeof text - 1, handle) == 0, "the CUDA driver gave no name");
    *name = copy_string(text);
  });
}

FT_API int ft_cuda_synchronize(int32_t device, Failure* failure) {
  return guarded(failure, [&] { guard().synchronizeDevice(cuda(device).index()); });
}

FT_API int ft_cuda_stream_new(int32_t device, bool high_priority, int64_t* id, Failure* failure) {
  return guarded(failure, [&] { *id = guard().getStreamFromGlobalPool(cuda(device), high_priority).id(); });
}

FT_API int ft_cuda_stream_current(int32_t device, int64_t* id, Failure* failure) {
  return guarded(failure, [&] { *id = guard().getStream(cuda(device)).id(); });
}

FT_API int ft_cuda_stream_set(int32_t device, int64_t id, int64_t* previous, Failure* failure) {
  return guarded(failure, [&] { *previous = guard().exchangeStream(stream(device, id)).id(); });
}

FT_API int ft_cuda_stream_synchronize(int32_t device, int64_t id, Failure* failure) {
  return guarded(failure, [&] { stream(device, id).synchronize(); });
}

FT_API int ft_cuda_stream_record_tensor(int32_t device, int64_t id, const Tensor* tensor, Failure* failure) {
  return guarded(failure, [&] {
    if (tensor->device().is_cuda()) guard().recordDataPtrOnStream(tensor->storage().data_ptr(), stream(device, id));
  });
}

FT_API int ft_cuda_event_record(int32_t device, int64_t id, bool timing, Failure* failure, c10::Event** event) {
  return guarded(failure, [&] {
    auto flag = timing ? c10::EventFlag::BACKEND_DEFAULT : c10::EventFlag::PYTORCH_DEFAULT;
    auto made = std::make_unique<c10::Event>(at::kCUDA, flag);
    made->record(stream(device, id));
    *event = made.release();
  });
}

FT_API int ft_cuda_event_block(const c10::Event* event, int32_t device, int64_t id, Failure* failure) {
  return guarded(failure, [&] { event->block(stream(device, id)); });
}

FT_API int ft_cuda_event_synchronize(const c10::Event* event, Failure* failure) {
  return guarded(failure, [&] { event->synchronize(); });
}

FT_API int ft_cuda_event_query(const c10::Event* event, bool* done, Failure* failure) {
  return guarded(failure, [&] { *done = event->query(); });
}

FT_API int ft_cuda_event_elapsed(const c10::Event* start, const c10::Event* end, double* ms, Failure* failure) {
  return guarded(failure, [&] { *ms = start->elapsedTime(*end); });
}

FT_API void ft_cuda_event_free(c10::Event* event) {
  delete event;
}

FT_API int ft_cuda_memory(int32_t device, int64_t* stats, Failure* failure) {
  return guarded(failure, [&] {
    auto allocator = c10::getDeviceAllocator(at::kCUDA);
    auto index = cuda(device).index();
    std::fill(stats, stats + 4, 0);
    // Before the first tensor there is nothing to tell.
    if (!allocator->initialized()) return;
    auto all = allocator->getDeviceStats(index);
    stats[0] = all.allocated_bytes[0].current;
    stats[1] = all.allocated_bytes[0].peak;
    stats[2] = all.reserved_bytes[0].current;
    stats[3] = all.reserved_bytes[0].peak;
  });
}

FT_API int ft_cuda_reset_peak(int32_t device, Failure* failure) {
  return guarded(failure, [&] {
    auto allocator = c10::getDeviceAllocator(at::kCUDA);
    auto index = cuda(device).index();
    if (allocator->initialized()) allocator->resetPeakStats(index);
  });
}
