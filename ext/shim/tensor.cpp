// Failures, lists of tensors, storage, bytes, the fused optimizer, and what libtorch says of itself.
#include "shim.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <torch/version.h>

#include <algorithm>
#include <cstring>
#ifdef __GLIBC__
#include <malloc.h>
#endif

char* copy_string(const std::string& text) {
  auto copy = static_cast<char*>(std::malloc(text.size() + 1));
  if (copy) std::memcpy(copy, text.c_str(), text.size() + 1);
  return copy;
}

// Neither c10d nor Gloo has a type for a timeout, but all their messages name it. Gloo also says "timeout" to whoever
// waits in a group that is broken for another's timeout, or by an abort.
int fail(Failure* failure, const std::string& message) {
  if (message.find("Application timeout caused pair closure") != std::string::npos) {
    failure->message = copy_string("the group was aborted, or broken by the timeout of another of its operations");
    return FAILED;
  }
  failure->message = copy_string(message);
  std::string lower = message;
  std::transform(lower.begin(), lower.end(), lower.begin(), [](unsigned char c) { return std::tolower(c); });
  bool timed_out = lower.find("timed out") != std::string::npos || lower.find("timeout") != std::string::npos;
  return timed_out ? TIMED_OUT : FAILED;
}

FT_API void ft_string_free(char* text) {
  std::free(text);
}

FT_API void ft_callback_fail(Sink* sink, const char* message, size_t length, void* payload, DropFn drop) {
  sink->message.assign(message, length);
  sink->payload = std::make_shared<Owned>(payload, drop);
}

FT_API List* ft_list_new() {
  return new List;
}

FT_API void ft_list_free(List* list) {
  delete list;
}

FT_API void ft_list_push(List* list, const Tensor* tensor) {
  list->push_back(tensor ? *tensor : Tensor());
}

FT_API size_t ft_list_len(const List* list) {
  return list->size();
}

FT_API Tensor* ft_list_get(const List* list, size_t index) {
  const auto& tensor = (*list)[index];
  return tensor.defined() ? new Tensor(tensor) : nullptr;
}

static c10::StorageImpl* storage_of(const Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

static c10::StorageImpl* resizable_storage(const Tensor& tensor) {
  auto storage = storage_of(tensor);
  TORCH_CHECK(storage, "the tensor has no storage");
  TORCH_CHECK(storage->resizable() && storage->allocator(), "the storage belongs to someone else; copy the tensor");
  return storage;
}

static bool released(const c10::StorageImpl& storage) {
  return storage.nbytes() > 0 && !const_cast<c10::StorageImpl&>(storage)._mutable_data_ptr_no_checks();
}

// From 2.12 on a storage can refuse to give its pointer; before, reading a released one is a crash.
template <class Storage>
auto refuse(Storage* storage, int) -> decltype(storage->clear_data_ptr_access_error_msg_()) {
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_("the storage was released; refill it first");
}
template <class Storage>
void refuse(Storage*, long) {}

template <class Storage>
auto allow(Storage* storage, int) -> decltype(storage->clear_data_ptr_access_error_msg_()) {
  storage->clear_data_ptr_access_error_msg_();
}
template <class Storage>
void allow(Storage*, long) {}

FT_API size_t ft_storage_nbytes(const Tensor* tensor) {
  auto storage = storage_of(*tensor);
  return storage && !released(*storage) ? storage->nbytes() : 0;
}

FT_API bool ft_storage_released(const Tensor* tensor) {
  auto storage = storage_of(*tensor);
  return storage && released(*storage);
}

FT_API size_t ft_storage_id(const Tensor* tensor) {
  return reinterpret_cast<size_t>(storage_of(*tensor));
}

// A released storage keeps its size, so that views of it can be made and `refill` knows how much to take.
FT_API int ft_storage_release(const Tensor* tensor, Failure* failure) {
  return guarded(failure, [&] {
    auto storage = resizable_storage(*tensor);
    if (storage->nbytes() == 0 || released(*storage)) return;
    storage->set_data_ptr_noswap(at::DataPtr(nullptr, storage->device()));
    refuse(storage, 0);
  });
}

FT_API int ft_storage_refill(const Tensor* tensor, Failure* failure) {
  return guarded(failure, [&] {
    auto storage = resizable_storage(*tensor);
    if (!released(*storage)) return;
    c10::DeviceGuard device(storage->device());
    storage->set_data_ptr_noswap(storage->allocator()->allocate(storage->nbytes()));
    allow(storage, 0);
  });
}

static void overwrite(const Tensor& destination, const Tensor& source) {
  TORCH_CHECK(
      destination.sizes() == source.sizes(), "cannot overwrite ", destination.sizes(), " with ", source.sizes());
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView no_version_bump;
  destination.copy_(source);
}

FT_API int ft_overwrite(const Tensor* destination, const Tensor* source, Failure* failure) {
  return guarded(failure, [&] { overwrite(*destination, *source); });
}

FT_API int ft_set_data(const Tensor* destination, const Tensor* source, Failure* failure) {
  return guarded(failure, [&] { destination->set_data(*source); });
}

FT_API uint64_t ft_version(const Tensor* tensor) {
  return tensor->defined() && !tensor->is_inference() ? tensor->_version() : 0;
}

static void check_bytes(const Tensor& tensor, size_t length) {
  size_t expected = tensor.numel() * tensor.element_size();
  TORCH_CHECK(length == expected, length, " bytes for a tensor of ", expected);
}

FT_API int ft_read(const Tensor* tensor, uint8_t* bytes, size_t length, Failure* failure) {
  return guarded(failure, [&] {
    check_bytes(*tensor, length);
    at::NoGradGuard no_grad;
    auto plain = tensor->detach().resolve_conj().resolve_neg().cpu().contiguous();
    if (length) std::memcpy(bytes, plain.const_data_ptr(), length);
  });
}

FT_API int ft_write(const Tensor* tensor, const uint8_t* bytes, size_t length, Failure* failure) {
  return guarded(failure, [&] {
    check_bytes(*tensor, length);
    if (!length) return;
    bool direct = tensor->device().is_cpu() && tensor->is_contiguous() && !tensor->is_conj() && !tensor->is_neg();
    auto plain = direct ? *tensor : at::empty(tensor->sizes(), tensor->options().device(at::kCPU).requires_grad(false));
    std::memcpy(plain.data_ptr(), bytes, length);
    if (!direct) overwrite(*tensor, plain);
  });
}

FT_API int ft_fused_adamw(
    const List* params, const List* grads, const List* exp_avgs, const List* exp_avg_sqs, const List* state_steps,
    double lr, double beta1, double beta2, double weight_decay, double eps, bool maximize, Failure* failure) {
  return guarded(failure, [&] {
    at::NoGradGuard no_grad;
    at::_fused_adamw_(
        *params, *grads, *exp_avgs, *exp_avg_sqs, {}, *state_steps, lr, beta1, beta2, weight_decay, eps,
        /*amsgrad=*/false, maximize);
  });
}

FT_API void ft_malloc_trim() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

FT_API const char* ft_torch_version() {
  return TORCH_VERSION;
}

FT_API bool ft_cxx11_abi() {
#if _GLIBCXX_USE_CXX11_ABI
  return true;
#else
  return false;
#endif
}

FT_API char* ft_parallel_info() {
  return copy_string(at::get_parallel_info());
}

FT_API void ft_set_deterministic(bool value) {
  at::globalContext().setDeterministicAlgorithms(value, /*warn_only=*/false);
}

FT_API bool ft_deterministic() {
  return at::globalContext().deterministicAlgorithms();
}
