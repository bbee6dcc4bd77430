// c10d's stores, and its process groups over Gloo.
#include "c10d.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <limits>

using std::chrono::milliseconds;

FT_API int ft_store_tcp(
    const char* host, uint16_t port, bool is_server, int64_t world_size, int64_t timeout_ms, Failure* failure,
    Store** store) {
  return guarded(failure, [&] {
    c10d::TCPStoreOptions options;
    options.port = port;
    options.isServer = is_server;
    if (world_size >= 0) options.numWorkers = world_size;
    options.timeout = milliseconds(timeout_ms);
    *store = new Store(c10::make_intrusive<c10d::TCPStore>(host, options));
  });
}

FT_API Store* ft_store_hash() {
  return new Store(c10::make_intrusive<c10d::HashStore>());
}

FT_API void ft_store_free(Store* store) {
  delete store;
}

FT_API uint16_t ft_store_port(const Store* store) {
  auto tcp = dynamic_cast<c10d::TCPStore*>(store->get());
  return tcp ? tcp->getPort() : 0;
}

FT_API int ft_store_prefix(const Store* store, const char* prefix, size_t length, Failure* failure, Store** out) {
  return guarded(failure, [&] {
    *out = new Store(c10::make_intrusive<c10d::PrefixStore>(std::string(prefix, length), *store));
  });
}

FT_API int ft_store_set(
    const Store* store, const char* key, size_t key_length, const uint8_t* value, size_t length, Failure* failure) {
  return guarded(failure, [&] {
    (*store)->set(std::string(key, key_length), std::vector<uint8_t>(value, value + length));
  });
}

FT_API int ft_store_get(
    const Store* store, const char* key, size_t key_length, uint8_t** value, size_t* length, Failure* failure) {
  return guarded(failure, [&] {
    auto bytes = (*store)->get(std::string(key, key_length));
    *value = reinterpret_cast<uint8_t*>(copy_string(std::string(bytes.begin(), bytes.end())));
    TORCH_CHECK(*value, "out of memory for ", bytes.size(), " bytes");
    *length = bytes.size();
  });
}

FT_API int ft_store_add(
    const Store* store, const char* key, size_t key_length, int64_t amount, int64_t* sum, Failure* failure) {
  return guarded(failure, [&] { *sum = (*store)->add(std::string(key, key_length), amount); });
}

FT_API int ft_store_wait(
    const Store* store, const char* const* keys, const size_t* key_lengths, size_t count, int64_t timeout_ms,
    Failure* failure) {
  return guarded(failure, [&] {
    std::vector<std::string> list;
    for (size_t i = 0; i < count; i++) list.emplace_back(keys[i], key_lengths[i]);
    (*store)->wait(list, milliseconds(timeout_ms));
  });
}

FT_API int ft_store_check(const Store* store, const char* key, size_t key_length, bool* found, Failure* failure) {
  return guarded(failure, [&] { *found = (*store)->check({std::string(key, key_length)}); });
}

FT_API int ft_store_delete(const Store* store, const char* key, size_t key_length, bool* found, Failure* failure) {
  return guarded(failure, [&] { *found = (*store)->deleteKey(std::string(key, key_length)); });
}

FT_API int ft_store_num_keys(const Store* store, int64_t* count, Failure* failure) {
  return guarded(failure, [&] { *count = (*store)->getNumKeys(); });
}

using Gloo = c10d::ProcessGroupGloo;

// c10d has no abort for Gloo; but a message that is late breaks all of its group's connections and wakes whoever waits
// on them, here and at the other end. A peer whose connection is broken already cannot be late, so each is tried.
static void abort_gloo(Gloo& gloo) {
  for (int peer = 0; peer < gloo.getSize(); peer++) {
    if (peer == gloo.getRank()) continue;
    try {
      List nothing{at::empty({1}, at::kByte)};
      gloo.recv(nothing, peer, std::numeric_limits<int>::max())->wait(milliseconds(1));
    } catch (const std::exception&) {
    }
  }
}

FT_API int ft_group_gloo(
    const Store* store, int32_t rank, int32_t size, int64_t timeout_ms, const char* interface, const char* hostname,
    Failure* failure, Group** group) {
  return guarded(failure, [&] {
    auto options = Gloo::Options::create(milliseconds(timeout_ms));
    options->devices.push_back(
        interface      ? Gloo::createDeviceForInterface(interface)
            : hostname ? Gloo::createDeviceForHostname(hostname)
                       : Gloo::createDefaultDevice());
    auto gloo = c10::make_intrusive<Gloo>(*store, rank, size, options);
    *group = new Group{gloo, [gloo] { abort_gloo(*gloo); }, at::kCPU};
  });
}

FT_API void ft_group_free(Group* group) {
  delete group;
}

FT_API int ft_group_abort(const Group* group, Failure* failure) {
  return guarded(failure, [&] { group->abort(); });
}

struct Work {
  c10::intrusive_ptr<c10d::Work> work;
  List tensors;
};

namespace {

// The same memory under a variable of its own: what c10d writes is none of autograd's concern. Kinds of one byte that
// backends do not know travel as bytes.
Tensor plain(const Tensor& tensor, bool reduces) {
  TORCH_CHECK(tensor.defined(), "an undefined tensor");
  TORCH_CHECK(tensor.is_contiguous(), "a tensor of strides ", tensor.strides(), "; make it contiguous");
  auto data = tensor.variable_data();
  if (reduces || data.element_size() != 1 || data.scalar_type() == at::kChar) return data;
  return data.view(at::kByte);
}

List plain(const List& list, bool reduces) {
  List out;
  for (const auto& tensor : list) out.push_back(plain(tensor, reduces));
  return out;
}

c10d::ReduceOp reduce_op(int code) {
  using Op = c10d::ReduceOp;
  static const Op::RedOpType codes[] = {Op::SUM, Op::PRODUCT, Op::MIN, Op::MAX};
  return codes[code];
}

template <class Start>
int start(Failure* failure, Work** work, List tensors, Start&& start) {
  return guarded(failure, [&] {
    at::NoGradGuard no_grad;
    auto handle = std::make_unique<Work>();
    handle->tensors = std::move(tensors);
    handle->work = start();
    TORCH_CHECK(handle->work, "the backend gave no work");
    *work = handle.release();
  });
}

} // namespace

FT_API int ft_group_collective(
    const Group* group, int which, const List* outputs, const List* inputs, int reduce, int32_t root,
    Failure* failure, Work** work) {
  return start(failure, work, {}, [&]() -> c10::intrusive_ptr<c10d::Work> {
    auto& backend = *group->backend;
    // As `Collective` in `collectives.rs`.
    enum {
      ALL_REDUCE, ALL_GATHER_INTO, ALL_GATHER, REDUCE_SCATTER_FROM, REDUCE_SCATTER, BROADCAST, REDUCE, GATHER, SCATTER
    };
    bool reduces = which == ALL_REDUCE || which == REDUCE_SCATTER_FROM || which == REDUCE_SCATTER || which == REDUCE;
    auto outs = plain(*outputs, reduces), ins = plain(*inputs, reduces);
    std::vector<List> lists;
    c10d::AllreduceOptions all_reduce;
    c10d::ReduceScatterOptions reduce_scatter;
    c10d::ReduceOptions to_root;
    c10d::BroadcastOptions broadcast;
    c10d::GatherOptions gather;
    c10d::ScatterOptions scatter;
    all_reduce.reduceOp = reduce_scatter.reduceOp = to_root.reduceOp = reduce_op(reduce);
    to_root.rootRank = broadcast.rootRank = gather.rootRank = scatter.rootRank = root;
    switch (which) {
      case ALL_REDUCE: return backend.allreduce(outs, all_reduce);
      case ALL_GATHER_INTO: return backend._allgather_base(outs[0], ins[0]);
      case ALL_GATHER: lists.push_back(outs); return backend.allgather(lists, ins);
      case REDUCE_SCATTER_FROM: return backend._reduce_scatter_base(outs[0], ins[0], reduce_scatter);
      case REDUCE_SCATTER: lists.push_back(ins); return backend.reduce_scatter(outs, lists, reduce_scatter);
      case BROADCAST: return backend.broadcast(outs, broadcast);
      case REDUCE: return backend.reduce(outs, to_root);
      case GATHER: if (!outs.empty()) lists.push_back(outs); return backend.gather(lists, ins, gather);
      case SCATTER: if (!ins.empty()) lists.push_back(ins); return backend.scatter(outs, lists, scatter);
    }
    TORCH_CHECK(false, "no collective ", which);
  });
}

FT_API int ft_group_all_to_all(
    const Group* group, const Tensor* output, const Tensor* input, const int64_t* output_splits,
    const int64_t* input_splits, size_t count, Failure* failure, Work** work) {
  return start(failure, work, {*output, *input}, [&] {
    auto out = plain(*output, false), in = plain(*input, false);
    std::vector<int64_t> out_splits(output_splits, output_splits + count);
    std::vector<int64_t> in_splits(input_splits, input_splits + count);
    return group->backend->alltoall_base(out, in, out_splits, in_splits);
  });
}

FT_API int ft_group_transfer(
    const Group* group, const Tensor* tensor, bool send, int32_t peer, int32_t tag, Failure* failure, Work** work) {
  return start(failure, work, {*tensor}, [&] {
    List list{plain(*tensor, false)};
    return send ? group->backend->send(list, peer, tag) : group->backend->recv(list, peer, tag);
  });
}

FT_API int ft_group_barrier(const Group* group, Failure* failure, Work** work) {
  return start(failure, work, {}, [&] {
    c10d::BarrierOptions options;
    if (!group->device.is_cpu()) options.device = group->device;
    return group->backend->barrier(options);
  });
}

FT_API int ft_work_wait(const Work* work, int64_t timeout_ms, Failure* failure) {
  return guarded(failure, [&] {
    TORCH_CHECK(work->work->wait(milliseconds(timeout_ms)), "the operation was aborted");
  });
}

FT_API bool ft_work_completed(const Work* work) {
  try {
    return work->work->isCompleted();
  } catch (...) {
    // A failure that `wait` is going to report.
    return true;
  }
}

FT_API void ft_work_free(Work* work) {
  delete work;
}
