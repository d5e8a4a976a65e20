// Generators, and the hooks through which torch finds them, the devices and pinned memory.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/HPUHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>

#include "streams.h"

namespace pyaccel {

// A generator of the device's own state. It draws what a host generator with the same seed draws.
struct Generator final : c10::GeneratorImpl {
  Generator(c10::DeviceIndex index, at::Generator host)
      : c10::GeneratorImpl(pyaccel::device(index), c10::DispatchKeySet(kDispatchKey)), host(std::move(host)) {}

  void set_current_seed(uint64_t seed) override {
    host.set_current_seed(seed);
  }
  uint64_t current_seed() const override {
    return host.current_seed();
  }
  uint64_t seed() override {
    return host.seed();
  }
  void set_offset(uint64_t offset) override {
    host.set_offset(offset);
  }
  uint64_t get_offset() const override {
    return host.get_offset();
  }
  void set_state(const c10::TensorImpl& state) override {
    host.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.unsafeGetGeneratorImpl()->get_state();
  }
  c10::GeneratorImpl* clone_impl() const override {
    return new Generator(device_.index(), host.clone());
  }

  at::Generator host;
};

inline at::Generator new_generator(c10::DeviceIndex index) {
  return at::make_generator<Generator>(index, at::detail::createCPUGenerator());
}

inline const at::Generator& default_generator(c10::DeviceIndex index) {
  static auto* the = [] {
    auto* all = new std::vector<at::Generator>();
    for (c10::DeviceIndex i = 0; i < kMaxDevices; i++) {
      all->push_back(new_generator(i));
    }
    return all;
  }();
  return the->at(index);
}

inline void resize_storage(const c10::Storage& storage, size_t bytes) {
  at::native::resize_bytes_cpu(block_of(*storage.unsafeGetStorageImpl()).host.get(), bytes);
  follow_host(*storage.unsafeGetStorageImpl());
}

template <typename Interface>
struct Hooks final : Interface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  void init() const override {}
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(settings().devices);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current_device();
  }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    this_threads_device = checked(index);
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return std::exchange(this_threads_device, checked(index));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? current_device() : exchangeDevice(index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index < 0 ? current_device() : checked(index));
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return new_generator(index < 0 ? current_device() : checked(index));
  }
  c10::Device getDeviceFromPtr(void* pointer) const override {
    for (c10::DeviceIndex i = 0; i < deviceCount(); i++) {
      if (memory(i).owns(pointer)) {
        return device(i);
      }
    }
    TORCH_CHECK(false, pointer, " isn't an address of ", device_name());
  }
  bool isPinnedPtr(const void* pointer) const override {
    return PinnedAllocator::owns(pointer);
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const { // overrides in one of the interfaces
    resize_storage(storage, bytes);
  }
};

// The HPU slot's hooks are made by torch, when it first needs them.
inline void register_hooks() {
  if constexpr (kDeviceType == c10::DeviceType::PrivateUse1) {
    at::RegisterPrivateUse1HooksInterface(new Hooks<at::PrivateUse1HooksInterface>());
  } else {
    at::HPUHooksRegistry()->Register(
        "HPUHooks", [](at::HPUHooksArgs) -> std::unique_ptr<at::HPUHooksInterface> {
          return std::make_unique<Hooks<at::HPUHooksInterface>>();
        });
  }
}

} // namespace pyaccel
