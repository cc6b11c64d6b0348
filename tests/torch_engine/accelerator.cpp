// An accelerator for tests, on PyTorch's PrivateUse1: host memory under another type of device.
//
// Its streams are asynchronous: each is a thread with a queue of copies and of marks that events wait for. A copy that
// does not block its caller takes place a delay after its turn, so that whoever forgets to wait reads old values.
// Everything else that torch computes waits for the current stream and is then computed by torch's code for CPUs.
#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/core/TensorBody.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

namespace {

const auto TYPE = c10::DeviceType::PrivateUse1;
const int64_t N_STREAMS = 8;  // beside the default stream; those who ask for more share them

std::atomic<int> delay_us{0};
std::atomic<long> n_queued{0}, n_unpinned{0}, n_pinned{0};

c10::Device device() { return c10::Device(TYPE, 0); }

// What an event waits for.
struct Mark {
  std::mutex guard;
  std::condition_variable changed;
  bool done = false;
  void set() {
    { std::lock_guard<std::mutex> held(guard); done = true; }
    changed.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> held(guard);
    changed.wait(held, [&] { return done; });
  }
  bool query() {
    std::lock_guard<std::mutex> held(guard);
    return done;
  }
};

struct Event { std::shared_ptr<Mark> mark; };

struct Queue {
  std::mutex guard;
  std::condition_variable changed;
  std::deque<std::function<void()>> waiting;
  Queue() { std::thread([this] { run(); }).detach(); }
  void push(std::function<void()> task) {
    { std::lock_guard<std::mutex> held(guard); waiting.push_back(std::move(task)); }
    changed.notify_one();
  }
  void run() {
    while (true) {
      std::function<void()> task;
      {
        std::unique_lock<std::mutex> held(guard);
        changed.wait(held, [&] { return !waiting.empty(); });
        task = std::move(waiting.front());
        waiting.pop_front();
      }
      task();
    }
  }
  std::shared_ptr<Mark> mark() {
    auto mark = std::make_shared<Mark>();
    push([mark] { mark->set(); });
    return mark;
  }
};

std::mutex streams_guard;
std::map<int64_t, Queue*> streams;  // never freed: their threads live as long as the process
std::atomic<int64_t> n_streams{0};
thread_local int64_t current = 0;

Queue& queue(int64_t id) {
  std::lock_guard<std::mutex> held(streams_guard);
  auto& found = streams[id];
  if (!found) found = new Queue();
  return *found;
}

void synchronize(int64_t id) { queue(id).mark()->wait(); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream stream(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, device(), id); }
  static Mark* mark(void* event) { return static_cast<Event*>(event)->mark.get(); }
  c10::DeviceType type() const override { return TYPE; }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return stream(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getNewStream(c10::Device, int = 0) const override { return stream(1 + n_streams++ % N_STREAMS); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool = false) const override { return getNewStream(device); }
  c10::Stream exchangeStream(c10::Stream other) const override {
    auto before = current;
    current = other.id();
    return stream(before);
  }
  void record(void** event, const c10::Stream& on, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event();
    static_cast<Event*>(*event)->mark = queue(on.id()).mark();
  }
  void block(void* event, const c10::Stream& on) const override {
    if (!event) return;
    auto mark = static_cast<Event*>(event)->mark;
    queue(on.id()).push([mark] { mark->wait(); });
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  bool queryEvent(void* event) const override { return !event || mark(event)->query(); }
  void synchronizeEvent(void* event) const override { if (event) mark(event)->wait(); }
  bool queryStream(const c10::Stream& on) const override { return queue(on.id()).mark()->query(); }
  void synchronizeStream(const c10::Stream& on) const override { synchronize(on.id()); }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    for (int64_t id = 0; id <= N_STREAMS; id++) synchronize(id);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    void* memory = std::malloc(n ? n : 1);
    return {memory, memory, &std::free, device()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, std::size_t n) const override { std::memcpy(to, from, n); }
};
DeviceMemory device_memory;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &device_memory);

std::mutex pinned_guard;
std::map<const char*, size_t> pinned;  // of each block that is in use, where it begins, and its bytes

struct PinnedMemory final : c10::Allocator {
  static void release(void* memory) {
    { std::lock_guard<std::mutex> held(pinned_guard); pinned.erase(static_cast<char*>(memory)); }
    std::free(memory);
  }
  c10::DataPtr allocate(size_t n) override {
    void* memory = std::malloc(n ? n : 1);
    n_pinned++;
    std::lock_guard<std::mutex> held(pinned_guard);
    pinned[static_cast<char*>(memory)] = n ? n : 1;
    return {memory, memory, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t n) const override { std::memcpy(to, from, n); }
};
PinnedMemory pinned_memory;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> held(pinned_guard);
    auto at = static_cast<const char*>(data);
    auto after = pinned.upper_bound(at);
    if (after == pinned.begin()) return false;
    auto block = std::prev(after);
    return at < block->first + block->second;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t n) const override {
    auto grown = device_memory.allocate(n);
    std::memcpy(grown.get(), storage.data(), std::min(n, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(grown));
    storage.unsafeGetStorageImpl()->set_nbytes(n);
  }
};
Hooks hooks;

// The same memory as a tensor of the CPU.
at::Tensor on_cpu(const at::Tensor& tensor) {
  auto options = tensor.options().device(at::kCPU);
  return at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), options);
}

at::Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &device_memory, keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &device_memory, keys, c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  auto from = self.detach(), to = dst.detach();
  if (!non_blocking) {
    synchronize(current);
    on_cpu(to).copy_(on_cpu(from));
    return dst;
  }
  n_queued++;
  for (auto& one : {from, to}) if (one.is_cpu() && !one.is_pinned()) n_unpinned++;
  queue(current).push([from, to] {
    std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
    at::NoGradGuard no_grad;
    on_cpu(to).copy_(on_cpu(from));
  });
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  if (dst.sizes() != self.sizes()) const_cast<at::Tensor&>(dst).resize_(self.sizes());
  return copy_from(self, dst, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  synchronize(current);
  return on_cpu(self).item();
}

at::Tensor as_strided(
    const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, size, stride, offset);
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto shape = C10_AS_INTARRAYREF_SLOW(size);
  size_t n = (self.storage_offset() + c10::multiply_integers(shape)) * self.element_size();
  if (n > self.storage().nbytes()) hooks.resizePrivateUse1Bytes(self.storage(), n);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(shape);
  return self;
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto shape = C10_AS_INTARRAYREF_SLOW(size);
  auto strides = C10_AS_INTARRAYREF_SLOW(stride);
  return at::native::set_storage_cpu_(self, storage, offset.expect_int(), shape, strides);
}

void record_stream(at::Tensor&, at::Stream) {}  // this memory is not reused

void compute_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  synchronize(current);
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar));
  m.impl("as_strided", TORCH_FN(as_strided));
  m.impl("resize_", TORCH_FN(resize));
  m.impl("view", TORCH_FN(view));
  m.impl("_reshape_alias", TORCH_FN(reshape_alias));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("record_stream", TORCH_FN(record_stream));
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute_on_cpu>()); }

}  // namespace

extern "C" {
void accelerator_register() { at::RegisterPrivateUse1HooksInterface(&hooks); }
void accelerator_set_delay_us(int us) { delay_us = us; }
long accelerator_queued() { return n_queued; }      // copies that did not block their caller
long accelerator_unpinned() { return n_unpinned; }  // of those, with memory that is not pinned
long accelerator_pinned() { return n_pinned; }      // blocks of pinned memory that were made
}
