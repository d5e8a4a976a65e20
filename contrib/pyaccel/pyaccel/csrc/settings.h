// What the device is set to, and what it counted. One of each a process, never destroyed.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/DispatchKey.h>
#include <c10/util/Exception.h>

// Torch has one slot for devices from outside, whose name can be chosen, and one for HPUs, whose name can't.
#ifndef PYACCEL_SLOT
#define PYACCEL_SLOT PrivateUse1
#define PYACCEL_AUTOCAST_SLOT AutocastPrivateUse1
#endif

namespace pyaccel {

constexpr c10::DeviceType kDeviceType = c10::DeviceType::PYACCEL_SLOT;
constexpr c10::DispatchKey kDispatchKey = c10::DispatchKey::PYACCEL_SLOT;
constexpr int kMaxDevices = 16;

inline std::string device_name() {
  return c10::DeviceTypeName(kDeviceType, /*lower_case=*/true);
}

// How strict the device is about reads that make the host wait.
enum Strictness : int64_t {
  kLenient = 0,  // counted only
  kNoReads = 1,  // .item(), nonzero, boolean masks, … are errors
  kNoCopies = 2, // and so is every device-to-host copy outside `planned`
};

struct Settings {
  int64_t devices = 2;
  std::atomic<int64_t> strictness{kLenient};
};

struct Counters {
  std::atomic<int64_t> host_to_device{0};
  std::atomic<int64_t> device_to_host{0};
  std::atomic<int64_t> device_to_device{0}; // between two devices
  std::atomic<int64_t> synchronisations{0};
  std::atomic<int64_t> fallback_ops{0};
};

inline Settings& settings() {
  static auto* the = new Settings();
  return *the;
}

inline Counters& counters() {
  static auto* the = new Counters();
  return *the;
}

// Depth of `planned` regions of this thread: copies there are meant, whatever the strictness.
inline thread_local int64_t planned_depth = 0;

// `what` makes the host wait for the device: counts it, and refuses it in strict mode.
inline void host_waits(const std::string& what) {
  counters().synchronisations++;
  TORCH_CHECK(
      settings().strictness < kNoReads || planned_depth > 0,
      what, " makes the host wait for ", device_name(),
      ", which strict mode forbids; keep the value on the device, or copy it where a copy is planned");
}

inline c10::Device device(c10::DeviceIndex index) {
  return c10::Device(kDeviceType, index);
}

} // namespace pyaccel
