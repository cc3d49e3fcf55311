// A C interface to c10d: a key-value store for the rendezvous, and collectives over Gloo and NCCL.
#define USE_C10D_GLOO
#include "group.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <mutex>
#include <system_error>
#include <vector>

#ifdef __linux__
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#endif

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Logging.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace {

// The longest time that the store's host may be silent.
constexpr int64_t LONGEST_SILENCE_MS = 15'000;

// A process that waits for the store's answer notices a silent host only by the system's TCP timeout. That takes a
// quarter of an hour or more, whatever timeout c10d got. With this, connections to `port` fail after `silence_ms`.
void notice_silence(uint16_t port, int64_t silence_ms) {
#ifdef __linux__
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", ignored)) {
    const int fd = std::atoi(entry.path().filename().c_str());
    sockaddr_storage peer{};
    socklen_t length = sizeof(peer);
    if (getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &length) != 0) continue;
    uint16_t to = 0;
    if (peer.ss_family == AF_INET) to = ntohs(reinterpret_cast<sockaddr_in*>(&peer)->sin_port);
    if (peer.ss_family == AF_INET6) to = ntohs(reinterpret_cast<sockaddr_in6*>(&peer)->sin6_port);
    if (to != port) continue;
    const auto set = [&](int level, int option, int value) { setsockopt(fd, level, option, &value, sizeof(value)); };
    const int seconds = std::max<int>(1, static_cast<int>(silence_ms / 3000));
    set(SOL_SOCKET, SO_KEEPALIVE, 1);
    set(IPPROTO_TCP, TCP_KEEPIDLE, seconds);
    set(IPPROTO_TCP, TCP_KEEPINTVL, seconds);
    set(IPPROTO_TCP, TCP_KEEPCNT, 3);
    set(IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(silence_ms));
  }
#endif
}

void notice_silence(const Store& store, int64_t silence_ms) {
  auto* under = dynamic_cast<c10d::PrefixStore*>(store.get());
  auto* tcp = under ? dynamic_cast<c10d::TCPStore*>(under->getUnderlyingNonPrefixStore().get()) : nullptr;
  if (tcp) notice_silence(tcp->getPort(), silence_ms);
}

using Work = c10::intrusive_ptr<c10d::Work>;

struct Group {
  Backend gloo;  // both null after an abort
  Backend nccl;  // null if tensors on GPUs do not use this group
  // Collectives in progress, by number. Each of them keeps Gloo's connections open, so an abort drops all of them.
  std::map<uint64_t, Work> started;

  Backend& of(const at::Tensor& tensor) {
    auto& backend = tensor.is_cuda() ? nccl : gloo;
    TORCH_CHECK(backend, "no connection for tensors of this device");
    return backend;
  }
};

// At a group's first collective, libtorch's flight recorder writes to a map that all groups share, before it takes its
// lock. Two groups that began over Gloo on two threads at once crashed. Every collective over Gloo begins with this
// mutex held.
std::mutex beginning;

// Calls `start` with the backend for a tensor. A call over NCCL may wait for another rank, so it does not hold the
// mutex.
template <typename Start>
Work begin(Group* group, const at::Tensor& tensor, Start start) {
  std::unique_lock<std::mutex> alone(beginning, std::defer_lock);
  if (!tensor.is_cuda()) alone.lock();
  return start(*group->of(tensor));
}

Work begin_all_reduce(Group* group, const at::Tensor& tensor) {
  std::vector<at::Tensor> tensors{tensor};
  return begin(group, tensor, [&](c10d::Backend& backend) { return backend.allreduce(tensors); });
}

void finish(const Work& work) { TORCH_CHECK(work->wait(), "the collective was aborted"); }

}  // namespace

extern "C" {

// `*port` is the port to use, 0 for any; the host gets the bound port back.
char* ds_store_open(const char* host, uint16_t* port, bool is_host, int64_t timeout_ms, const char* prefix, Store** out) {
  return caught([&] {
    // c10d warns about a key that is not set in time, which is an expected answer here. It throws its errors.
    FLAGS_caffe2_log_level = std::max(FLAGS_caffe2_log_level, static_cast<int>(c10::GLOG_ERROR));
    c10d::TCPStoreOptions options;
    options.port = *port;
    options.isServer = is_host;
    options.waitWorkers = false;
    options.timeout = Milliseconds(timeout_ms);
    auto store = c10::make_intrusive<c10d::TCPStore>(host, options);
    *port = store->getPort();
    notice_silence(*port, std::min<int64_t>(timeout_ms, LONGEST_SILENCE_MS));
    *out = new Store(c10::make_intrusive<c10d::PrefixStore>(prefix, store));
  });
}

void ds_store_free(Store* store) { delete store; }

char* ds_store_set(Store* store, const char* key, const uint8_t* bytes, size_t length) {
  return caught([&] { (*store)->set(key, std::vector<uint8_t>(bytes, bytes + length)); });
}

// Waits for the key. The caller frees `*bytes` with `free`.
char* ds_store_get(Store* store, const char* key, int64_t timeout_ms, uint8_t** bytes, size_t* length) {
  return caught([&] {
    (*store)->wait({key}, Milliseconds(timeout_ms));
    auto value = (*store)->get(key);
    *length = value.size();
    *bytes = static_cast<uint8_t*>(std::malloc(value.size() + 1));
    TORCH_CHECK(*bytes, "out of memory");
    std::memcpy(*bytes, value.data(), value.size());
  });
}

// Opens another connection to the same keys, so that a wait on one does not block the other.
char* ds_store_clone(Store* store, Store** out) {
  return caught([&] {
    *out = new Store((*store)->clone());
    notice_silence(*store, std::min<int64_t>((*store)->getTimeout().count(), LONGEST_SILENCE_MS));
  });
}

// From now on connections to a silent host fail after `silence_ms`.
char* ds_store_notice_silence(Store* store, int64_t silence_ms) {
  return caught([&] { notice_silence(*store, silence_ms); });
}

// Makes a GPU the calling thread's current one, so that calls without a device do not allocate on the first GPU.
char* ds_device_set(int index) {
  return caught([&] {
    const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(index));
    c10::impl::getDeviceGuardImpl(at::kCUDA)->setDevice(device);
  });
}

// `address` is this host's address, as the other ranks reach it.
char* ds_group_open(Store* store, const char* address, int rank, int world_size, int64_t timeout_ms, Group** out) {
  return caught([&] {
    const Milliseconds timeout(timeout_ms);
    auto options = c10d::ProcessGroupGloo::Options::create(timeout);
    options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(address));
    Group group;
    Store gloo_store = c10::make_intrusive<c10d::PrefixStore>("gloo", *store);
    group.gloo = c10::make_intrusive<c10d::ProcessGroupGloo>(gloo_store, rank, world_size, options);
    *out = new Group(std::move(group));
  });
}

void ds_group_free(Group* group) { delete group; }

// Connects GPU `device` of each rank and returns when all ranks have connected. The backend may be created on one
// thread and used on another.
char* ds_nccl_open(Store* store, int rank, int world_size, int64_t timeout_ms, int device, Backend** out) {
  return caught([&] {
    Store keys = c10::make_intrusive<c10d::PrefixStore>("nccl", *store);
    *out = new Backend(open_nccl(keys, rank, world_size, Milliseconds(timeout_ms), device));
  });
}

// Frees a backend of `ds_nccl_open` that no group has taken.
void ds_nccl_free(Backend* nccl) { delete nccl; }

// From now on the group's tensors on GPUs use NCCL. Takes ownership of `nccl`.
void ds_group_take_nccl(Group* group, Backend* nccl) {
  group->nccl = std::move(*nccl);
  delete nccl;
}

// Drops the collectives in progress and closes all connections, so that ranks that wait for this one fail.
char* ds_group_abort(Group* group) {
  return caught([&] {
    group->started.clear();
    group->gloo.reset();
    if (group->nccl) group->nccl->abort();
    group->nccl.reset();
  });
}

char* ds_group_all_reduce(Group* group, at::Tensor* tensor) {
  return caught([&] { finish(begin_all_reduce(group, *tensor)); });
}

// Starts an all-reduce without waiting for it. Do not touch the tensor before `ds_group_finish` has returned for
// `*number`.
char* ds_group_all_reduce_start(Group* group, at::Tensor* tensor, uint64_t* number) {
  return caught([&] {
    auto work = begin_all_reduce(group, *tensor);
    // Numbers are unique across groups.
    static std::atomic<uint64_t> next{0};
    *number = next++;
    group->started.emplace(*number, std::move(work));
  });
}

// Waits for a collective. On a GPU the current stream waits, not the host.
char* ds_group_finish(Group* group, uint64_t number) {
  return caught([&] {
    auto work = group->started.extract(number);
    TORCH_CHECK(work, "the collective was aborted, or is another group's");
    finish(work.mapped());
  });
}

// The tensor must be contiguous.
char* ds_group_broadcast(Group* group, at::Tensor* tensor, int root) {
  return caught([&] {
    // As bytes, because Gloo does not support every dtype.
    std::vector<at::Tensor> tensors{tensor->detach().view({-1}).view(at::kByte)};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    finish(begin(group, *tensor, [&](c10d::Backend& backend) { return backend.broadcast(tensors, options); }));
  });
}

// `output` is `[world size, …]`, with the dtype and device of `input`.
char* ds_group_all_gather(Group* group, at::Tensor* output, at::Tensor* input) {
  return caught([&] {
    std::vector<std::vector<at::Tensor>> outputs{output->unbind(0)};
    std::vector<at::Tensor> inputs{*input};
    finish(begin(group, *input, [&](c10d::Backend& backend) { return backend.allgather(outputs, inputs); }));
  });
}
}
