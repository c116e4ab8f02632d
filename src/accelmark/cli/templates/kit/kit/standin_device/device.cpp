// A stand-in accelerator: PyTorch's PrivateUse1 device over the host's memory and CPU kernels.
//
// An operation is done when its call returns: streams order nothing, and events are times of the host's clock. Faults
// are planted by standin_device/__init__.py; they take effect in begin_work(), end_work() and Memory::allocate().
// Functions of Guard and Hooks that PyTorch 2.4 does not declare yet are not marked override.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <thread>

namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 8;
using Clock = std::chrono::steady_clock;

struct Faults {
  std::atomic<int> device{-1};  // the device that has the fault
  std::atomic<int64_t> hang_after{-1}, lost_after{-1};  // operations before it; -1: never
  std::atomic<double> slow_factor{1.0};  // durations of operations are multiplied by it
};

struct Counters {
  std::atomic<int64_t> used{0}, peak{0}, operations{0}, busy_ns{0};
};

Faults faults;
Counters counters[kMaxDevices];
std::atomic<int> num_devices{1};
std::atomic<int64_t> memory_bytes{int64_t{4} << 30};
thread_local c10::DeviceIndex current = 0;
thread_local c10::StreamId streams[kMaxDevices] = {};
std::atomic<int64_t> next_stream{1};
// Copies to a device from the host on its default stream and on others, waits for events, tensors kept for a stream.
std::atomic<int64_t> copies{0}, copies_on_other_streams{0}, waits{0}, recorded{0};

// Counts an operation of the current device; hangs or fails where that fault is due.
void begin_work() {
  auto number = ++counters[current].operations;
  if (faults.device != current) return;
  if (faults.hang_after >= 0 && number > faults.hang_after)
    while (true) std::this_thread::sleep_for(std::chrono::seconds(1));
  TORCH_CHECK(
      faults.lost_after < 0 || number <= faults.lost_after, "standin:", int(current),
      " does not answer: the device was lost");
}

void end_work(Clock::time_point began) {
  if (faults.device == current && faults.slow_factor > 1.0)
    std::this_thread::sleep_for((Clock::now() - began) * (faults.slow_factor - 1.0));
  counters[current].busy_ns += std::chrono::nanoseconds(Clock::now() - began).count();
}

// ------------------------------------------------------------------------------------------------ memory

struct Block {
  void* data;
  int64_t size;
  c10::DeviceIndex device;
};

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  counters[block->device].used -= block->size;
  std::free(block->data);
  delete block;
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    c10::Device device(kDevice, current);
    if (size == 0) return {nullptr, nullptr, &free_block, device};
    auto bytes = static_cast<int64_t>(size);
    auto& mine = counters[current];
    TORCH_CHECK_WITH(
        OutOfMemoryError, mine.used + bytes <= memory_bytes, "standin out of memory. Tried to allocate ", bytes,
        " bytes; ", mine.used.load(), " of ", memory_bytes.load(), " bytes are in use");
    auto* block = new Block{std::aligned_alloc(64, (size + 63) / 64 * 64), bytes, current};
    auto used = mine.used += bytes;
    for (auto peak = mine.peak.load(); used > peak && !mine.peak.compare_exchange_weak(peak, used);) {}
    return {block->data, block, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
};

Memory memory;
REGISTER_ALLOCATOR(kDevice, &memory);

// Page-locked memory is ordinary memory here; only its addresses are kept.
std::mutex pinned_mutex;
std::set<const void*> pinned;

void free_pinned(void* data) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  pinned.erase(data);
  std::free(data);
}

#ifdef REGISTER_HOST_ALLOCATOR  // newer versions of PyTorch have a class for it
using HostAllocator = at::HostAllocator;
#else
using HostAllocator = c10::Allocator;
#endif

struct PinnedMemory final : HostAllocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = size ? std::aligned_alloc(64, (size + 63) / 64 * 64) : nullptr;
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned.insert(data);
    return {data, data, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
#ifdef REGISTER_HOST_ALLOCATOR
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
#endif
};

PinnedMemory pinned_memory;
#ifdef REGISTER_HOST_ALLOCATOR
REGISTER_HOST_ALLOCATOR(kDevice, &pinned_memory);
#endif

// ------------------------------------------------------------------------------- devices, streams, events

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device getDevice() const override { return {kDevice, current}; }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(num_devices); }

  static c10::Device indexed(c10::Device device) {
    return device.has_index() ? device : c10::Device(kDevice, current);
  }
  c10::Stream getStream(c10::Device device) const noexcept override {
    device = indexed(device);
    return c10::Stream(c10::Stream::UNSAFE, device, streams[device.index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, indexed(device));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return c10::Stream(c10::Stream::UNSAFE, indexed(device), next_stream++);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    auto before = getStream(stream.device());
    streams[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(c10::DeviceIndex) const {}

  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = new Clock::time_point;
    *static_cast<Clock::time_point*>(*event) = Clock::now();
  }
  void block(void*, const c10::Stream&) const override { ++waits; }
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Clock::time_point*>(event);
  }
  double elapsedTime(void* begin, void* end, c10::DeviceIndex) const override {
    std::chrono::duration<double, std::milli> passed =
        *static_cast<Clock::time_point*>(end) - *static_cast<Clock::time_point*>(begin);
    return passed.count();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const { return true; }
  bool isAvailable() const { return num_devices > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(num_devices); }
  void setCurrentDevice(c10::DeviceIndex device) const override { current = device; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return std::exchange(current, device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool isPinnedPtr(const void* data) const {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    return pinned.count(data) > 0;
  }
};

// --------------------------------------------------------------------------------------------- operations

// Returns a tensor of the CPU in the memory of a device's tensor.
at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != kDevice) return tensor;
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

at::Tensor to_device(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.to(c10::Device(kDevice, current)) : tensor;
}

at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(Guard::indexed(device.value_or(c10::Device(kDevice))));
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(Guard::indexed(device.value_or(c10::Device(kDevice))));
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  c10::DeviceGuard guard(from.device().type() == kDevice ? from.device() : to.device());
  auto began = Clock::now();
  begin_work();
  if (from.is_cpu()) ++(streams[current] ? copies_on_other_streams : copies);
  on_host(to).copy_(on_host(from));
  end_work(began);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) { return at::_local_scalar_dense(on_host(tensor)); }

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto* implementation = self.unsafeGetTensorImpl();
  implementation->set_sizes_contiguous(sizes);
  auto needed = (implementation->storage_offset() + implementation->numel()) * self.dtype().itemsize();
  auto* storage = implementation->unsafe_storage().unsafeGetStorageImpl();
  if (needed > storage->nbytes()) {
    c10::DeviceGuard guard(self.device());
    auto data = memory.allocate(needed);
    if (storage->nbytes()) std::memcpy(data.get(), storage->data(), storage->nbytes());
    storage->set_data_ptr(std::move(data));
    storage->set_nbytes(needed);
  }
  if (format) implementation->empty_tensor_restride(*format);
  return self;
}

at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups) {
  c10::DeviceGuard guard(input.device());
  auto began = Clock::now();
  begin_work();
  auto result = at::convolution_symint(
      on_host(input), on_host(weight), bias ? std::optional(on_host(*bias)) : bias, stride, padding, dilation, transposed,
      output_padding, groups);
  end_work(began);
  return to_device(result);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups, std::array<bool, 3> needed) {
  c10::DeviceGuard guard(input.device());
  auto began = Clock::now();
  begin_work();
  std::vector<c10::SymInt> bias_sizes{transposed ? groups * weight.sym_size(1) : weight.sym_size(0)};
  auto [of_input, of_weight, of_bias] = at::convolution_backward_symint(
      on_host(gradient), on_host(input), on_host(weight), at::OptionalSymIntArrayRef(bias_sizes), stride, padding, dilation,
      transposed, output_padding, groups, needed);
  end_work(began);
  return {to_device(of_input), to_device(of_weight), to_device(of_bias)};
}

// The fallback does not copy running statistics back, which the operator's schema does not declare as written.
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(
    const at::Tensor& input, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& mean, const std::optional<at::Tensor>& variance, bool training, double momentum,
    double epsilon) {
  c10::DeviceGuard guard(input.device());
  auto began = Clock::now();
  begin_work();
  auto host = [](const std::optional<at::Tensor>& tensor) { return tensor ? std::optional(on_host(*tensor)) : tensor; };
  auto [output, saved_mean, saved_deviation] = at::native_batch_norm(
      on_host(input), host(weight), host(bias), host(mean), host(variance), training, momentum, epsilon);
  end_work(began);
  return {to_device(output), to_device(saved_mean), to_device(saved_deviation)};
}

// The CPU's kernel of PyTorch 2.4 does not write to ``result`` in half precision.
at::Tensor& mean(
    const at::Tensor& tensor, at::OptionalIntArrayRef dims, bool keep_dims, std::optional<at::ScalarType> dtype,
    at::Tensor& result) {
  c10::DeviceGuard guard(tensor.device());
  auto began = Clock::now();
  begin_work();
  on_host(result).copy_(at::mean(on_host(tensor), dims, keep_dims, dtype));
  end_work(began);
  return result;
}

// Returns the device of an operation: that of its first argument with one.
c10::Device device_of(const c10::OperatorHandle& operation, const torch::jit::Stack& stack) {
  for (const auto& value : torch::jit::last(stack, operation.schema().arguments().size())) {
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().device().type() == kDevice)
      return value.toTensor().device();
    if (value.isTensorList() && !value.toTensorVector().empty() && value.toTensorVector()[0].device().type() == kDevice)
      return value.toTensorVector()[0].device();
    if (value.isDevice() && value.toDevice().type() == kDevice) return Guard::indexed(value.toDevice());
  }
  return {kDevice, current};
}

void on_cpu(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  c10::DeviceGuard guard(device_of(operation, *stack));
  auto began = Clock::now();
  begin_work();
  at::native::cpu_fallback(operation, stack);
  end_work(began);
}

void record_stream(at::Tensor&, c10::Stream) { ++recorded; }

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("unfold", &at::native::unfold);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("resize_", &resize);
  library.impl("set_.source_Tensor", &at::native::set_tensor_);
  library.impl("set_.source_Storage", &at::native::set_);
  library.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar);
  library.impl("record_stream", &record_stream);
  library.impl("mean.out", &mean);
  library.impl("native_batch_norm", &batch_norm);
  library.impl("convolution_overrideable", &convolution);
  library.impl("convolution_backward_overrideable", &convolution_backward);
}

// Under autocast, products and convolutions run in its type, norms and losses in fp32, everything else as it is called.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(conv1d, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(conv2d, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
  KERNEL_PRIVATEUSEONE(cross_entropy_loss, fp32)
}

// -------------------------------------------------------------------------------------------- collectives

struct Finished final : c10d::Work {
  explicit Finished(std::vector<at::Tensor> tensors)
      : future(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors())), tensors(tensors) {
    future->markCompleted(c10::IValue(std::move(tensors)));
  }
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  std::vector<at::Tensor> result() override { return tensors; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
  c10::intrusive_ptr<c10::ivalue::Future> future;
  std::vector<at::Tensor> tensors;
};

std::vector<at::Tensor> all_on_host(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> found;
  for (const auto& tensor : tensors) found.push_back(on_host(tensor));
  return found;
}

// Runs the collectives of data-parallel training with gloo, in the memory of the device's tensors.
struct Collectives final : c10d::Backend {
  using Pending = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

  Collectives(c10::intrusive_ptr<c10d::Backend> gloo) : Backend(gloo->getRank(), gloo->getSize()), gloo(gloo) {}
  const std::string getBackendName() const override { return "standin"; }

  Pending allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto host = all_on_host(tensors);
    return finish(gloo->allreduce(host, options), tensors);
  }
  Pending broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto host = all_on_host(tensors);
    return finish(gloo->broadcast(host, options), tensors);
  }
  Pending allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    std::vector<Tensors> all;
    for (const auto& tensors : outputs) all.push_back(all_on_host(tensors));
    auto host = all_on_host(inputs);
    return finish(gloo->allgather(all, host, options), outputs.front());
  }
  Pending barrier(const c10d::BarrierOptions&) override {
    c10d::BarrierOptions options;
    return finish(gloo->barrier(options), {});
  }

 private:
  static Pending finish(Pending work, Tensors tensors) {
    work->wait();
    return c10::make_intrusive<Finished>(std::move(tensors));
  }
  c10::intrusive_ptr<c10d::Backend> gloo;
};

// Older versions of PyTorch refuse collectives of tensors with gradients without it.
TORCH_LIBRARY_IMPL(c10d, AutogradPrivateUse1, library) {
  for (const char* name : {"allreduce_", "broadcast_", "allgather_", "barrier"})
    library.impl(name, torch::CppFunction::makeFallthrough());
}

}  // namespace

PYBIND11_MODULE(_device, module) {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  module.def("set_devices", [](int count, int64_t bytes) { num_devices = count, memory_bytes = bytes; });
  module.def("plant", [](int device, int64_t hang_after, int64_t lost_after, double slow_factor) {
    faults.hang_after = hang_after, faults.lost_after = lost_after, faults.slow_factor = slow_factor;
    faults.device = device;
  });
  module.def("memory", [](int device) {
    return std::make_pair(counters[device].used.load(), counters[device].peak.load());
  });
  module.def("reset_peak", [](int device) { counters[device].peak = counters[device].used.load(); });
  module.def("work", [](int device) {
    return std::make_pair(counters[device].operations.load(), counters[device].busy_ns.load());
  });
  module.def("stream_counts", [] {
    return std::map<std::string, int64_t>{
        {"streams", next_stream - 1}, {"copies", copies}, {"copies_on_other_streams", copies_on_other_streams},
        {"waits", waits}, {"recorded", recorded}};
  });
  module.def("current_device", [] { return int(current); });
  module.def("set_device", [](int device) { current = static_cast<c10::DeviceIndex>(device); });
  module.def("collectives", [](c10::intrusive_ptr<c10d::Backend> gloo) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Collectives>(gloo);
  });
}
