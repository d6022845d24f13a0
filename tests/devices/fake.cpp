// Two devices of a torch backend called "fake". Their memory is the host's, and the CPU's kernels compute on it, but a tensor knows
// its device, and an operation on tensors of different devices is an error. Copies from one fake device to the other are errors too:
// CUDA makes them, and so hides that memory was opened on the wrong device.

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_cpu_dispatch.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>

namespace {

constexpr c10::DeviceType kFake = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 2;
thread_local c10::DeviceIndex current = 0;

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = bytes ? std::malloc(bytes) : nullptr;
    return {memory, memory, std::free, c10::Device(kFake, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return std::free;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

Allocator allocator;
const bool allocator_is_known = (c10::SetAllocator(kFake, &allocator), true);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kFake;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device old(kFake, current);
    setDevice(device);
    return old;
  }
  c10::Device getDevice() const override {
    return {kFake, current};
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "there is no device ", device);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current = device.index() < 0 ? 0 : device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return kDevices;
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::OptionalDeviceGuard guard(storage.device());
    auto memory = allocator.allocate(bytes);
    if (memory.get() && storage.data())
      std::memcpy(memory.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

Hooks hooks;
const bool hooks_are_known = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   dtype.value_or(at::kFloat), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           dtype.value_or(at::kFloat));
}

// The same memory as a tensor of the host.
at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.device().type() != kFake)
    return tensor;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  TORCH_CHECK(from.device().type() != to.device().type() || from.device() == to.device(), "a copy from ", from.device(), " to ",
              to.device());
  on_host(to).copy_(on_host(from));
  return to;
}

const at::Tensor& resize(const at::Tensor& tensor, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  const size_t bytes = (tensor.storage_offset() + c10::multiply_integers(size)) * tensor.itemsize();
  if (bytes > tensor.storage().nbytes())
    hooks.resizePrivateUse1Bytes(tensor.storage(), bytes);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return tensor;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  return copy_from(from, resize(to, from.sizes(), std::nullopt), false);
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  return on_host(tensor).item();
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  TORCH_CHECK(tensor.device() == storage.device(), "a tensor on ", tensor.device(), " on memory of ", storage.device());
  return at::cpu::set_(tensor, storage, offset, size, stride);
}

at::Tensor& set_whole_storage(at::Tensor& tensor, at::Storage storage) {
  const auto count = static_cast<int64_t>(storage.nbytes() / tensor.itemsize());
  return set_storage(tensor, storage, 0, {count}, {1});
}

// Every other operation: on one device, by the CPU's kernel.
void compute(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  std::optional<c10::Device> found;
  auto check = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || (tensor.device().is_cpu() && tensor.dim() == 0))
      return;
    TORCH_CHECK(!found || *found == tensor.device(), "Expected all tensors to be on the same device, but ", op.schema().name(),
                " has some on ", *found, " and ", tensor.device());
    found = tensor.device();
  };
  for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (value.isTensor())
      check(value.toTensor());
    else if (value.isTensorList())
      for (const at::Tensor& tensor : value.toTensorVector())
        check(tensor);
  }
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&compute>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", [](const at::Tensor& tensor, at::IntArrayRef size, at::IntArrayRef stride,
                                std::optional<int64_t> offset) { return at::cpu::as_strided(tensor, size, stride, offset); });
  library.impl("view", [](const at::Tensor& tensor, at::IntArrayRef size) { return at::cpu::view(tensor, size); });
  library.impl("resize_", &resize);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
}

// Memory of a device as another process would map it for a device of its own, like cudaIpcOpenMemHandle.
at::Tensor open(int64_t address, int64_t bytes, int64_t device) {
  const c10::Device target(kFake, static_cast<c10::DeviceIndex>(device));
  auto options = at::TensorOptions().dtype(at::kByte).device(target);
  return at::from_blob(reinterpret_cast<void*>(address), {bytes}, {1}, 0, [](void*) {}, options, target);
}

// For torch.fake, the Python module of the device.
TORCH_LIBRARY(fake, library) {
  library.def("current_device() -> int", []() { return static_cast<int64_t>(current); });
  library.def("set_device(int index) -> ()", [](int64_t index) { current = static_cast<c10::DeviceIndex>(index); });
  library.def("open(int address, int bytes, int device) -> Tensor", &open);
}

} // namespace
