// Device tensors and their host aliases: the same sizes, strides and bytes under the other device's name.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

#include "runtime.h"

namespace pyaccel {

inline bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kDeviceType;
}

inline void copy_geometry(const at::Tensor& from, const at::Tensor& to) {
  auto* impl = to.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(from.sizes(), from.strides(), from.storage_offset());
  impl->_set_conj(from.is_conj());
  impl->_set_neg(from.is_neg());
}

// What a kernel of the host computes on in place of a device tensor.
inline at::Tensor host_alias(const at::Tensor& tensor) {
  TORCH_CHECK(
      tensor.unsafeGetTensorImpl()->has_storage(), "a ", device_name(), " tensor without storage (",
      tensor.layout(), ") isn't supported");
  c10::Storage bytes(block_of(*tensor.storage().unsafeGetStorageImpl()).host);
  auto alias = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, std::move(bytes), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  copy_geometry(tensor, alias);
  return alias;
}

// A device tensor of another's storage, laid out like `like`. Autograd tells views by the base's key set.
inline at::Tensor view_of(const at::Tensor& base, const at::Tensor& like) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), like.dtype());
  copy_geometry(like, view);
  return view;
}

// A device storage for bytes that a host kernel has just made. Throws c10::OutOfMemoryError over the limit.
inline c10::Storage adopt_storage(const c10::Storage& made, c10::DeviceIndex index) {
  auto host = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(made.unsafeGetStorageImpl());
  const auto bytes = host->nbytes();
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, wrap_host(std::move(host), index), allocator(), /*resizable=*/true));
}

inline at::Tensor adopt(const at::Tensor& made, c10::Storage storage) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(kDispatchKey), made.dtype());
  copy_geometry(made, tensor);
  return tensor;
}

inline at::Tensor adopt(const at::Tensor& made, c10::DeviceIndex index) {
  return made.defined() ? adopt(made, adopt_storage(made.storage(), index)) : made;
}

} // namespace pyaccel
