// The C face of c10d: a key-value store for the rendezvous, and collectives over Gloo and NCCL.
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

// How long a machine that holds the store may say nothing at all.
constexpr int64_t LONGEST_SILENCE_MS = 15'000;

// Whoever waits for the store's answer waits as long as the system takes a silent machine for a slow one: a quarter of an hour and more, whatever
// time was given. Connections to `port` are given up after `silence_ms` instead.
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
  Backend nccl;  // null where no tensor of a GPU goes this way
  // What is under way, by number. Whoever holds one of them holds Gloo's connections open: an abort lets go of all.
  std::map<uint64_t, Work> started;

  Backend& of(const at::Tensor& tensor) {
    auto& backend = tensor.is_cuda() ? nccl : gloo;
    TORCH_CHECK(backend, "no connection for tensors of this device");
    return backend;
  }
};

// libtorch's flight recorder notes a group at its first collective in a map that all groups of the process share, before it takes its lock: groups
// on two threads that began at once over Gloo crashed. Whatever begins over Gloo holds this one.
std::mutex beginning;

// What `start` begins with the connection for a tensor. What begins over NCCL may wait for another rank, and is not held up.
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

// `*port` is the port asked for, 0 for any; as host, the one that was bound comes back in it.
char* ds_store_open(const char* host, uint16_t* port, bool is_host, int64_t timeout_ms, const char* prefix, Store** out) {
  return caught([&] {
    // What c10d warns of, a key that nobody sets in time, is an answer here; what it cannot do it throws.
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

// Waits for the key. `*bytes` is to be freed with `free`.
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

// A connection of its own to the same keys: a wait on one holds up no other.
char* ds_store_clone(Store* store, Store** out) {
  return caught([&] {
    *out = new Store((*store)->clone());
    notice_silence(*store, std::min<int64_t>((*store)->getTimeout().count(), LONGEST_SILENCE_MS));
  });
}

// From here on a silent host is given up after so long.
char* ds_store_notice_silence(Store* store, int64_t silence_ms) {
  return caught([&] { notice_silence(*store, silence_ms); });
}

// Makes a GPU the calling thread's current one, so that what names none does not take memory on the first.
char* ds_device_set(int index) {
  return caught([&] {
    const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(index));
    c10::impl::getDeviceGuardImpl(at::kCUDA)->setDevice(device);
  });
}

// `address` is this host's, as the other ranks reach it.
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

// Connects GPU `device` of each rank; returns when all have. What it gives back may be made on one thread and used on another.
char* ds_nccl_open(Store* store, int rank, int world_size, int64_t timeout_ms, int device, Backend** out) {
  return caught([&] {
    Store keys = c10::make_intrusive<c10d::PrefixStore>("nccl", *store);
    *out = new Backend(open_nccl(keys, rank, world_size, Milliseconds(timeout_ms), device));
  });
}

// What `ds_nccl_open` gave, not yet a group's.
void ds_nccl_free(Backend* nccl) { delete nccl; }

// From now on the group's tensors on GPUs go this way. Takes `nccl` over.
void ds_group_take_nccl(Group* group, Backend* nccl) {
  group->nccl = std::move(*nccl);
  delete nccl;
}

// Gives up what is under way and closes all connections: ranks that wait for this one learn of it so.
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

// The same without waiting for it. The tensor is not to be touched before `ds_group_finish` has returned for the number that comes back.
char* ds_group_all_reduce_start(Group* group, at::Tensor* tensor, uint64_t* number) {
  return caught([&] {
    auto work = begin_all_reduce(group, *tensor);
    // No two groups have the same.
    static std::atomic<uint64_t> next{0};
    *number = next++;
    group->started.emplace(*number, std::move(work));
  });
}

// Waits until a collective is over; on a GPU has what is asked of it from now on wait.
char* ds_group_finish(Group* group, uint64_t number) {
  return caught([&] {
    auto work = group->started.extract(number);
    TORCH_CHECK(work, "the collective was aborted, or is another group's");
    finish(work.mapped());
  });
}

// The tensor is contiguous.
char* ds_group_broadcast(Group* group, at::Tensor* tensor, int root) {
  return caught([&] {
    // As bytes: Gloo does not know every kind.
    std::vector<at::Tensor> tensors{tensor->detach().view({-1}).view(at::kByte)};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    finish(begin(group, *tensor, [&](c10d::Backend& backend) { return backend.broadcast(tensors, options); }));
  });
}

// `output` is `[world size, …]` of `input`'s kind and device.
char* ds_group_all_gather(Group* group, at::Tensor* output, at::Tensor* input) {
  return caught([&] {
    std::vector<std::vector<at::Tensor>> outputs{output->unbind(0)};
    std::vector<at::Tensor> inputs{*input};
    finish(begin(group, *input, [&](c10d::Backend& backend) { return backend.allgather(outputs, inputs); }));
  });
}
}
