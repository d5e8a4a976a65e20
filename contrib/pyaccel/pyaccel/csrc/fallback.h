// Every op without a kernel of its own: run the host's kernel on aliases, then give its results back as device tensors.
#pragma once

#include <unordered_set>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/SmallVector.h>

#include "tensors.h"

namespace pyaccel {

// Ops whose result's shape or value the host needs before it can go on.
inline bool waits_by_nature(const std::string& name) {
  static const auto* names = new std::unordered_set<std::string>{
      "aten::nonzero",       "aten::masked_select",      "aten::equal",
      "aten::_unique",       "aten::_unique2",           "aten::unique_dim",
      "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::bincount",
      "aten::is_nonzero",    "aten::_is_all_true",       "aten::_is_any_true",
  };
  return names->contains(name);
}

// One op on its way to the host and back.
class HostCall {
 public:
  HostCall(const c10::OperatorHandle& op, torch::jit::Stack* stack) : op_(op), schema_(op.schema()), stack_(stack) {}

  void run() {
    TORCH_CHECK_NOT_IMPLEMENTED(
        schema_.name().starts_with("aten::") || schema_.name().starts_with("prims::"), op_.operator_name(),
        " has no kernel for ", device_name());
    counters().fallback_ops++;
    replace_arguments();
    if (waits()) {
      counters().device_to_host++;
      host_waits(schema_.name());
    }
    const at::AutoDispatchBelowADInplaceOrView below;
    if (!generator_passed_ && op_.hasTag(at::Tag::nondeterministic_seeded)) {
      draw_from_device_generator();
    } else {
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
    }
    write_back();
    replace_results();
  }

 private:
  struct Argument {
    at::Tensor tensor; // on the device
    at::Tensor host;   // its alias
    bool written;
  };

  // The op takes no generator, so its kernel draws from the host's default one: lend it the device's state.
  void draw_from_device_generator() {
    auto host = at::detail::getDefaultCPUGenerator();
    auto mine = host_generator(default_generator(device_));
    const auto before = host.get_state();
    host.set_state(mine.get_state());
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
    mine.set_state(host.get_state());
    host.set_state(before);
  }

  void replace_arguments() {
    const auto arguments = torch::jit::last(stack_, schema_.arguments().size());
    const size_t begin = stack_->size() - arguments.size();
    for (size_t i = 0; i < arguments.size(); i++) {
      find_device((*stack_)[begin + i]);
    }
    if (device_ < 0) {
      device_ = current_device();
    }
    for (size_t i = 0; i < arguments.size(); i++) {
      const auto& declared = schema_.arguments()[i];
      replace((*stack_)[begin + i], declared, declared.alias_info() != nullptr && declared.alias_info()->isWrite());
    }
  }

  void find_device(const c10::IValue& value) {
    if (value.isTensor()) {
      meet(value.toTensor());
    } else if (value.isTensorList() || value.isOptionalTensorList()) {
      for (const c10::IValue& item : value.toListRef()) {
        if (item.isTensor()) {
          meet(item.toTensor());
        }
      }
    } else if (value.isDevice() && value.toDevice().type() == kDeviceType && value.toDevice().has_index() && device_ < 0) {
      device_ = value.toDevice().index();
    }
  }

  void meet(const at::Tensor& tensor) {
    if (!on_device(tensor)) {
      return;
    }
    TORCH_CHECK(
        !tensor_met_ || device_ == tensor.device().index(), schema_.name(), ": expected all tensors on one device, found ",
        device(device_), " and ", tensor.device());
    device_ = tensor.device().index();
    tensor_met_ = true;
  }

  void replace(c10::IValue& value, const c10::Argument& declared, bool written) {
    if (value.isTensor()) {
      value = alias(value.toTensor(), written, /*is_index=*/false);
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> aliases;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        aliases.push_back(alias(tensor, written, false));
      }
      value = std::move(aliases);
    } else if (value.isOptionalTensorList()) {
      replace_optional_list(value, written);
    } else if (value.isDevice() && value.toDevice().type() == kDeviceType) {
      value = c10::Device(c10::kCPU);
    } else if (value.isGenerator()) {
      TORCH_CHECK(
          value.toGenerator().device().type() == kDeviceType, schema_.name(), ": expected a generator of ", device(device_),
          ", found one of ", value.toGenerator().device());
      value = host_generator(value.toGenerator());
      generator_passed_ = true;
    } else if (value.isNone() && *declared.type() == *c10::getTypePtr<std::optional<at::Generator>>()) {
      value = host_generator(default_generator(device_));
      generator_passed_ = true;
    }
  }

  void replace_optional_list(c10::IValue& value, bool written) {
    c10::List<std::optional<at::Tensor>> aliases;
    for (const c10::IValue& item : value.toListRef()) {
      aliases.push_back(item.isTensor() ? std::optional(alias(item.toTensor(), written, true)) : std::nullopt);
    }
    value = std::move(aliases);
  }

  static at::Generator host_generator(const at::Generator& generator) {
    return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->host;
  }

  // Host scalars come along as kernel arguments, and host indices are copied; anything else on the host is a mistake.
  at::Tensor alias(const at::Tensor& tensor, bool written, bool is_index) {
    if (!tensor.defined()) {
      return tensor;
    }
    if (!on_device(tensor)) {
      if (is_index && tensor.device().is_cpu()) {
        counters().host_to_device++;
        masks_ |= tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte;
        return tensor;
      }
      TORCH_CHECK(
          !tensor_met_ || (tensor.device().is_cpu() && tensor.dim() == 0 && !written), schema_.name(),
          ": expected all tensors on one device, found ", device(device_), " and ", tensor.device());
      return tensor;
    }
    masks_ |= is_index && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte);
    arguments_.push_back({tensor, host_alias(tensor), written});
    return arguments_.back().host;
  }

  // `x[mask]` has to count the mask; `x[mask] = scalar` has not.
  bool waits() const {
    const auto& name = schema_.name();
    if (masks_) {
      const bool fills = name != "aten::index" && arguments_.size() > 0 && fills_with_scalar();
      return !fills;
    }
    if (name == "aten::repeat_interleave") {
      return torch::jit::last(stack_, schema_.arguments().size()).back().isNone(); // no output_size
    }
    return waits_by_nature(name);
  }

  bool fills_with_scalar() const {
    const auto& values = torch::jit::last(stack_, schema_.arguments().size())[2];
    return values.isTensor() && values.toTensor().numel() == 1;
  }

  // What a kernel did to an argument beyond its bytes: resized it, gave it other sizes.
  void write_back() {
    for (const auto& argument : arguments_) {
      if (argument.written) {
        follow_host(*argument.tensor.storage().unsafeGetStorageImpl());
        if (!argument.host.sizes().equals(argument.tensor.sizes()) ||
            !argument.host.strides().equals(argument.tensor.strides()) ||
            argument.host.storage_offset() != argument.tensor.storage_offset()) {
          copy_geometry(argument.host, argument.tensor);
        }
      }
    }
  }

  void replace_results() {
    const size_t count = schema_.returns().size();
    for (size_t i = stack_->size() - count; i < stack_->size(); i++) {
      auto& value = (*stack_)[i];
      if (value.isTensor()) {
        value = result(value.toTensor());
      } else if (value.isTensorList()) {
        std::vector<at::Tensor> results;
        for (const at::Tensor& tensor : value.toTensorVector()) {
          results.push_back(result(tensor));
        }
        value = std::move(results);
      }
    }
  }

  at::Tensor result(const at::Tensor& made) {
    if (!made.defined() || !made.device().is_cpu()) {
      return made;
    }
    const auto* storage = made.storage().unsafeGetStorageImpl();
    for (const auto& argument : arguments_) {
      if (argument.host.is_same(made)) {
        return argument.tensor;
      }
    }
    for (const auto& argument : arguments_) {
      if (argument.host.storage().unsafeGetStorageImpl() == storage) {
        return view_of(argument.tensor, made);
      }
    }
    for (const auto& [host, adopted] : adopted_) {
      if (host == storage) {
        return adopt(made, adopted);
      }
    }
    adopted_.emplace_back(storage, adopt_storage(made.storage(), device_));
    return adopt(made, adopted_.back().second);
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack* stack_;
  c10::DeviceIndex device_ = -1;
  bool tensor_met_ = false;
  bool masks_ = false;
  bool generator_passed_ = false;
  c10::SmallVector<Argument, 4> arguments_;
  c10::SmallVector<std::pair<const c10::StorageImpl*, c10::Storage>, 2> adopted_;
};

inline void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  HostCall(op, stack).run();
}

} // namespace pyaccel
