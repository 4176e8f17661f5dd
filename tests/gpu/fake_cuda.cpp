// What a CPU build of torch lacks to trace CUDA tensors that hold no data.
//
// Autograd asks for the device's guard and stream, and scaled_dot_product_attention for
// the fused kernel to take. Nothing here computes: a kernel called for "cuda" still fails.
#include <ATen/Context.h>
#include <ATen/SDPBackend.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

// One device with one stream, on which everything has happened already.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Device device() { return c10::Device(c10::DeviceType::CUDA, 0); }
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, device()); }

  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Device getDevice() const override { return device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Stream getStream(c10::Device) const override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const override { return stream(); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void record(
      void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag)
      const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};

// Autograd looks for "the accelerator" as soon as a gradient lives on one.
struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return false; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return false; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  int getNumGPUs() const override { return 0; }
};

// The first backend in torch's order that is enabled and knows the call. A CUDA build
// asks more (head sizes, alignment): a test should enable the one backend it wants.
int64_t attention_backend(
    const at::Tensor& query, const at::Tensor&, const at::Tensor& value,
    const std::optional<at::Tensor>& mask, double, bool, std::optional<double>,
    bool grouped) {
  auto& context = at::globalContext();
  const bool half = query.scalar_type() == at::kHalf ||
      query.scalar_type() == at::kBFloat16;
  const bool fused = query.dim() == 4 && query.sym_size(-1) == value.sym_size(-1);
  for (const at::SDPBackend backend : context.sDPPriorityOrder()) {
    const bool usable =
        (backend == at::SDPBackend::flash_attention && context.userEnabledFlashSDP() &&
         half && fused && !mask) ||
        (backend == at::SDPBackend::efficient_attention &&
         context.userEnabledMemEfficientSDP() && fused && !grouped) ||
        (backend == at::SDPBackend::math && context.userEnabledMathSDP());
    if (usable) {
      return static_cast<int64_t>(backend);
    }
  }
  return static_cast<int64_t>(at::SDPBackend::error);
}

} // namespace

namespace at {
// torch creates its hooks once, by this name, when they are first asked for.
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)
} // namespace at

// Returns 1 if CUDA tensors can be traced now, 0 if the hooks were asked for too early.
extern "C" int gcpass_install_fake_cuda() {
  static Guard guard;
  c10::impl::registerDeviceGuard(c10::DeviceType::CUDA, &guard);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&attention_backend);
  return at::detail::getCUDAHooks().hasCUDA() ? 1 : 0;
}
