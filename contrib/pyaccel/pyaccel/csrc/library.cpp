// The kernels that are the device's own, everything's registration, and the knobs that Python turns.
#include <torch/library.h>

#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/view_native.h>

#include "fallback.h"

namespace pyaccel {
namespace {

c10::DeviceGuard guard_for(std::optional<c10::Device> wanted) {
  return c10::DeviceGuard(wanted.value_or(c10::Device(kDeviceType)));
}

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> where,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const auto guard = guard_for(where);
  return at::detail::empty_generic(
      size, allocator(), c10::DispatchKeySet(kDispatchKey), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> where, std::optional<bool>) {
  const auto guard = guard_for(where);
  return at::detail::empty_strided_generic(
      size, stride, allocator(), c10::DispatchKeySet(kDispatchKey), c10::dtype_or_default(dtype));
}

void wait_for_current_stream(c10::DeviceIndex index) {
  streams().finish(key_of(current_stream(index)));
}

void fill_with_junk(const at::Tensor& host) {
  if (host.is_floating_point() || host.is_complex()) {
    host.fill_(std::numeric_limits<double>::quiet_NaN());
  } else {
    host.fill_(host.scalar_type() == at::kBool ? 1 : 0x5a);
  }
}

void copy_to_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  counters().device_to_host++;
  TORCH_CHECK(
      settings().strictness < kNoCopies || planned_depth > 0, "a copy of ", from.sizes(), " ", from.dtype(), " from ", from.device(),
      " to the host that isn't planned, which strict mode forbids");
  const auto index = from.device().index();
  if (!non_blocking) {
    counters().synchronisations++;
    wait_for_current_stream(index);
    to.copy_(host_alias(from));
    return;
  }
  auto values = at::empty_like(to, at::MemoryFormat::Contiguous);
  values.copy_(host_alias(from));
  fill_with_junk(to);
  streams().copy_later(current_stream(index), to, std::move(values), /*to_host=*/true);
}

void copy_from_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  counters().host_to_device++;
  const auto index = to.device().index();
  host_alias(to).copy_(from);
  if (!non_blocking) {
    counters().synchronisations++;
    wait_for_current_stream(index);
  } else if (from.nbytes() > 0 && PinnedAllocator::owns(from.const_data_ptr())) {
    streams().copy_later(current_stream(index), from, from.clone(at::MemoryFormat::Contiguous), /*to_host=*/false);
  }
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const at::AutoDispatchBelowADInplaceOrView below;
  if (!on_device(to)) {
    copy_to_host(from, to, non_blocking);
  } else if (!on_device(from)) {
    copy_from_host(from, to, non_blocking);
  } else {
    counters().device_to_device += from.device() != to.device();
    host_alias(to).copy_(host_alias(from));
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, /*non_blocking=*/false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  counters().device_to_host++;
  host_waits("reading one value (.item(), bool(), int(), float(), an index)");
  wait_for_current_stream(self.device().index());
  return host_alias(self).item();
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  const auto strides = stride.size() == size.size() ? c10::DimVector(stride) : c10::contiguous_strides(size);
  at::native::checkSetStorage(self, std::move(source), offset, size, at::IntArrayRef(strides));
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(size, strides, offset);
  const auto needed = at::detail::computeStorageNbytes(size, strides, self.dtype().itemsize(), offset);
  if (self.numel() > 0 && needed > self.storage().nbytes()) {
    resize_storage(self.storage(), needed);
  }
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const auto elements = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage(self, std::move(source), 0, {elements}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return self.is_same(source) ? self
                              : set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  c10::Storage none(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), 0, allocator(), /*resizable=*/true));
  return set_storage(self, std::move(none), 0, {0}, {});
}

at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups) {
  counters().fallback_ops++;
  const auto host_bias = bias.has_value() && bias->defined() ? std::optional(host_alias(*bias)) : std::nullopt;
  const at::AutoDispatchBelowADInplaceOrView below;
  return adopt(
      at::convolution(host_alias(input), host_alias(weight), host_bias, stride, padding, dilation, transposed, output_padding, groups),
      input.device().index());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef stride, at::IntArrayRef padding,
    at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  counters().fallback_ops++;
  const auto index = input.device().index();
  const int64_t bias_size = grad.size(1);
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto [d_input, d_weight, d_bias] = at::convolution_backward(
      host_alias(grad), host_alias(input), host_alias(weight), at::IntArrayRef(bias_size), stride, padding, dilation, transposed,
      output_padding, groups, mask);
  return {adopt(d_input, index), adopt(d_weight, index), adopt(d_bias, index)};
}

void record_stream(at::Tensor&, at::Stream) {}

// ---- the knobs: torch.ops.pyaccel.* ----

void configure(int64_t devices, int64_t memory_bytes, int64_t reservation_bytes) {
  TORCH_CHECK_VALUE(devices >= 1 && devices <= kMaxDevices, "devices must be 1 to ", kMaxDevices, ", not ", devices);
  settings().devices = devices;
  for (c10::DeviceIndex i = 0; i < kMaxDevices; i++) {
    memory(i).set_limit(memory_bytes);
    memory(i).set_reservation(reservation_bytes);
  }
}

std::vector<int64_t> memory_of(int64_t index) {
  auto& of = memory(checked(index));
  const auto stats = of.stats();
  const auto& held = stats.allocated_bytes[0];
  return {held.current, held.peak, static_cast<int64_t>(of.limit()), stats.num_ooms};
}

std::vector<int64_t> read_counters() {
  const auto& c = counters();
  return {c.host_to_device, c.device_to_host, c.device_to_device, c.synchronisations, c.fallback_ops};
}

void reset_counters() {
  auto& c = counters();
  c.host_to_device = c.device_to_host = c.device_to_device = c.synchronisations = c.fallback_ops = 0;
}

} // namespace

C10_REGISTER_GUARD_IMPL(PYACCEL_SLOT, DeviceGuardImpl);

TORCH_LIBRARY(pyaccel, m) {
  c10::SetAllocator(kDeviceType, allocator());
  register_hooks();
  m.def("configure", &configure);
  m.def("device_count", []() -> int64_t { return settings().devices; });
  m.def("current_device", []() -> int64_t { return current_device(); });
  m.def("set_device", [](int64_t index) { this_threads_device = checked(index); });
  m.def("synchronize", [](int64_t index) { DeviceGuardImpl().synchronizeDevice(checked(index)); });
  m.def("current_stream", [](int64_t index) { return current_stream(checked(index)); });
  m.def("default_stream", [](int64_t index) { return DeviceGuardImpl().getDefaultStream(device(checked(index))); });
  m.def("set_stream", [](at::Stream stream) { DeviceGuardImpl().exchangeStream(stream); });
  m.def("memory", &memory_of);
  m.def("set_memory_limit", [](int64_t index, int64_t bytes) { memory(checked(index)).set_limit(bytes); });
  m.def("reset_peak", [](int64_t index) { memory(checked(index)).reset_peak(); });
  m.def("counters", &read_counters);
  m.def("reset_counters", &reset_counters);
  m.def("strictness", []() -> int64_t { return settings().strictness; });
  m.def("set_strictness", [](int64_t level) { settings().strictness = level; });
  m.def("plan", [](int64_t deeper) { planned_depth += deeper; });
  m.def("planned", []() -> bool { return planned_depth > 0; });
  m.def("seed", [](int64_t index, int64_t seed) {
    auto generator = default_generator(checked(index));
    generator.set_current_seed(seed);
  });
  m.def("initial_seed", [](int64_t index) -> int64_t { return default_generator(checked(index)).current_seed(); });
  m.def("rng_state", [](int64_t index) { return default_generator(checked(index)).get_state(); });
  m.def("set_rng_state", [](int64_t index, at::Tensor state) {
    auto generator = default_generator(checked(index));
    generator.set_state(state);
  });
}

TORCH_LIBRARY_IMPL(_, PYACCEL_SLOT, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PYACCEL_SLOT, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("record_stream", &record_stream);
}

// The aliases carry the conjugate and negative bits, so a copy needs no separate resolving.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(_, PYACCEL_AUTOCAST_SLOT, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

} // namespace pyaccel
