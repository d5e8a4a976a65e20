// Streams and events. Kernels run at once; what a stream holds back are the two things that a host can get wrong:
//
// - a non-blocking copy to the host arrives only when somebody waits for it (until then its target holds junk);
// - a non-blocking copy from pinned memory reads it until somebody waits: a change before that is an error then.
//
// Work is numbered across all streams, so that "everything before" is one comparison and a wait never points forward.
#pragma once

#include <chrono>
#include <cstring>
#include <deque>
#include <limits>
#include <map>
#include <mutex>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"

namespace pyaccel {

using StreamKey = std::pair<c10::DeviceIndex, c10::StreamId>;

inline StreamKey key_of(const c10::Stream& stream) {
  return {stream.device_index(), stream.id()};
}

// A copy that the host hasn't waited for.
struct PendingCopy {
  uint64_t number;
  at::Tensor host;
  at::Tensor values; // contiguous; to the host: what arrives; from the host: what was there when the copy was issued
  bool to_host;
};

// Work of this stream after `number` waits for work of `other` up to `until`.
struct StreamWait {
  uint64_t number;
  StreamKey other;
  uint64_t until;
};

struct EventState {
  StreamKey stream;
  uint64_t until;
  std::chrono::steady_clock::time_point at;
};

class Streams {
 public:
  void copy_later(const c10::Stream& stream, at::Tensor host, at::Tensor values, bool to_host) {
    std::lock_guard lock(mutex_);
    auto& queue = queues_[key_of(stream)];
    queue.bytes += values.nbytes();
    queue.copies.push_back({++number_, std::move(host), std::move(values), to_host});
    while (queue.bytes > kMostBytesHeldBack) { // a device gets on with it, waited for or not
      finish_first(queue);
    }
  }

  EventState mark(const c10::Stream& stream) {
    std::lock_guard lock(mutex_);
    return {key_of(stream), number_, std::chrono::steady_clock::now()};
  }

  void wait_for(const c10::Stream& stream, const EventState& event) {
    std::lock_guard lock(mutex_);
    queues_[key_of(stream)].waits.push_back({++number_, event.stream, event.until});
  }

  // Whether the work is done. Where it isn't, it will be by the next time somebody asks.
  bool query(StreamKey stream, uint64_t until = kEverything) {
    std::lock_guard lock(mutex_);
    const bool done = !unfinished(stream, until);
    finish_locked(stream, until);
    return done;
  }

  void finish(StreamKey stream, uint64_t until = kEverything) {
    std::lock_guard lock(mutex_);
    finish_locked(stream, until);
  }

  void finish_device(c10::DeviceIndex index) {
    std::lock_guard lock(mutex_);
    std::vector<StreamKey> keys;
    for (const auto& [key, queue] : queues_) {
      if (key.first == index) {
        keys.push_back(key);
      }
    }
    for (const auto& key : keys) {
      finish_locked(key, kEverything);
    }
  }

  c10::StreamId next_id() {
    std::lock_guard lock(mutex_);
    return ++last_id_;
  }

 private:
  static constexpr uint64_t kEverything = std::numeric_limits<uint64_t>::max();
  static constexpr size_t kMostBytesHeldBack = size_t{64} << 20;

  struct Queue {
    std::deque<PendingCopy> copies;
    std::vector<StreamWait> waits;
    size_t bytes = 0;
  };

  bool unfinished(StreamKey stream, uint64_t until) {
    const auto& queue = queues_[stream];
    if (!queue.copies.empty() && queue.copies.front().number <= until) {
      return true;
    }
    return std::any_of(queue.waits.begin(), queue.waits.end(), [&](const StreamWait& wait) {
      return wait.number <= until && unfinished(wait.other, wait.until);
    });
  }

  void finish_locked(StreamKey stream, uint64_t until) {
    auto& queue = queues_[stream];
    std::vector<StreamWait> due;
    std::erase_if(queue.waits, [&](const StreamWait& wait) {
      if (wait.number > until) {
        return false;
      }
      due.push_back(wait);
      return true;
    });
    for (const auto& wait : due) {
      finish_locked(wait.other, wait.until);
    }
    while (!queue.copies.empty() && queue.copies.front().number <= until) {
      finish_first(queue);
    }
  }

  static void finish_first(Queue& queue) {
    // Whoever waits may have left the inference mode that the copy was issued in.
    const at::AutoDispatchBelowADInplaceOrView below;
    const PendingCopy copy = std::move(queue.copies.front());
    queue.copies.pop_front();
    queue.bytes -= copy.values.nbytes();
    if (copy.to_host) {
      copy.host.copy_(copy.values);
      return;
    }
    const auto now = copy.host.contiguous();
    TORCH_CHECK(
        std::memcmp(now.const_data_ptr(), copy.values.const_data_ptr(), now.nbytes()) == 0,
        "pinned memory was changed before the non-blocking copy from it was waited for; "
        "synchronise first, or keep two buffers");
  }

  std::mutex mutex_;
  std::map<StreamKey, Queue> queues_;
  uint64_t number_ = 0;
  c10::StreamId last_id_ = 0;
};

inline Streams& streams() {
  static auto* the = new Streams();
  return *the;
}

inline thread_local c10::DeviceIndex this_threads_device = 0;
inline thread_local std::array<c10::StreamId, kMaxDevices> this_threads_streams{};

inline c10::DeviceIndex current_device() {
  return this_threads_device;
}

inline c10::DeviceIndex checked(c10::DeviceIndex index) {
  TORCH_CHECK(
      index >= 0 && index < settings().devices, "there is no ", device_name(), ":", int(index), "; there are ",
      settings().devices);
  return index;
}

inline c10::Stream current_stream(c10::DeviceIndex index) {
  return c10::Stream(c10::Stream::UNSAFE, device(index), this_threads_streams.at(index));
}

struct DeviceGuardImpl final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kDeviceType;
  }
  c10::Device exchangeDevice(c10::Device to) const override {
    const auto before = getDevice();
    setDevice(to);
    return before;
  }
  c10::Device getDevice() const override {
    return device(current_device());
  }
  void setDevice(c10::Device to) const override {
    if (to.has_index()) {
      this_threads_device = checked(to.index());
    }
  }
  void uncheckedSetDevice(c10::Device to) const noexcept override {
    this_threads_device = to.has_index() ? to.index() : this_threads_device;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(settings().devices);
  }

  c10::Stream getStream(c10::Device of) const override {
    return current_stream(index_of(of));
  }
  c10::Stream getDefaultStream(c10::Device of) const override {
    return c10::Stream(c10::Stream::DEFAULT, device(index_of(of)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool) const override {
    return getNewStream(of, 0);
  }
  c10::Stream getNewStream(c10::Device of, int) const override {
    return c10::Stream(c10::Stream::UNSAFE, device(index_of(of)), streams().next_id());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = current_stream(stream.device_index());
    this_threads_streams.at(stream.device_index()) = stream.id();
    return before;
  }

  bool queryStream(const c10::Stream& stream) const override {
    return streams().query(key_of(stream));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    counters().synchronisations++;
    streams().finish(key_of(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    counters().synchronisations++;
    streams().finish_device(index);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new EventState();
    }
    *static_cast<EventState*>(*event) = streams().mark(stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      streams().wait_for(stream, *static_cast<EventState*>(event));
    }
  }
  bool queryEvent(void* event) const override {
    const auto* state = static_cast<EventState*>(event);
    return state == nullptr || streams().query(state->stream, state->until);
  }
  void synchronizeEvent(void* event) const override {
    counters().synchronisations++;
    if (const auto* state = static_cast<EventState*>(event)) {
      streams().finish(state->stream, state->until);
    }
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<EventState*>(event);
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    const std::chrono::duration<double, std::milli> elapsed =
        static_cast<EventState*>(to)->at - static_cast<EventState*>(from)->at;
    return elapsed.count();
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}

 private:
  static c10::DeviceIndex index_of(c10::Device of) {
    return of.has_index() ? checked(of.index()) : current_device();
  }
};

} // namespace pyaccel
