#include "predict/onnx_runtime.h"

#include <dlfcn.h>

#include <stdexcept>
#include <utility>

namespace shoal::predict {

namespace {

// Places of functions in the table of ONNX Runtime, and the version of the table that has them all.
constexpr std::uint32_t kTableVersion = 11;
constexpr std::size_t kErrorMessage = 2;
constexpr std::size_t kCreateEnvironment = 3;
constexpr std::size_t kCreateSession = 8;  // from bytes
constexpr std::size_t kRun = 9;
constexpr std::size_t kCreateOptions = 10;
constexpr std::size_t kSetSeverity = 22;
constexpr std::size_t kSetThreads = 24;
constexpr std::size_t kInputCount = 30;
constexpr std::size_t kInputName = 36;
constexpr std::size_t kOutputName = 37;
constexpr std::size_t kCreateTensor = 49;  // over memory of the caller
constexpr std::size_t kTensorData = 51;
constexpr std::size_t kElementCount = 64;
constexpr std::size_t kTensorShape = 65;
constexpr std::size_t kCreateMemory = 69;
constexpr std::size_t kFree = 76;
constexpr std::size_t kAllocator = 78;
constexpr std::size_t kReleaseEnvironment = 92;
constexpr std::size_t kReleaseStatus = 93;
constexpr std::size_t kReleaseMemory = 94;
constexpr std::size_t kReleaseSession = 95;
constexpr std::size_t kReleaseValue = 96;
constexpr std::size_t kReleaseShape = 99;
constexpr std::size_t kReleaseOptions = 100;
constexpr std::size_t kSessionMetadata = 111;
constexpr std::size_t kMetadata = 116;
constexpr std::size_t kReleaseMetadata = 118;

constexpr int kErrors = 3;  // severity of what is logged
constexpr int kFloat = 1;
constexpr int kInteger = 7;

// What the library's only symbol returns.
struct Base {
  const void* const* (*functions)(std::uint32_t);
  const char* (*version)();
};

// Something that is released at the end of a block.
template <class Release>
struct Held {
  explicit Held(Release by) : release(std::move(by)) {}
  ~Held() {
    if (what != nullptr) {
      release(what);
    }
  }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

  Release release;
  void* what = nullptr;
};

}  // namespace

template <class... Arguments>
void OnnxRuntime::call(std::size_t function, Arguments... arguments) const {
  using Function = void* (*)(Arguments...);
  void* const status = reinterpret_cast<Function>(const_cast<void*>(functions_[function]))(arguments...);
  if (status != nullptr) {
    using Message = const char* (*)(const void*);
    const std::string message =
        reinterpret_cast<Message>(const_cast<void*>(functions_[kErrorMessage]))(status);
    release(kReleaseStatus, status);
    throw std::runtime_error("ONNX Runtime: " + message);
  }
}

void OnnxRuntime::release(std::size_t function, void* what) const noexcept {
  using Function = void (*)(void*);
  reinterpret_cast<Function>(const_cast<void*>(functions_[function]))(what);
}

std::shared_ptr<const OnnxRuntime> OnnxRuntime::open(const std::string& path) {
  void* library = nullptr;
  if (!path.empty()) {
    library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      throw std::runtime_error(std::string("ONNX Runtime cannot be opened: ") + ::dlerror());
    }
  }
  for (const char* const name : {"libonnxruntime.so.1", "libonnxruntime.so"}) {
    library = library == nullptr ? ::dlopen(name, RTLD_NOW | RTLD_LOCAL) : library;
  }
  if (library == nullptr) {
    return nullptr;
  }
  using GetBase = const Base* (*)();
  const auto base = reinterpret_cast<GetBase>(::dlsym(library, "OrtGetApiBase"));
  const void* const* const functions = base == nullptr ? nullptr : base()->functions(kTableVersion);
  if (functions == nullptr) {
    throw std::runtime_error((path.empty() ? "libonnxruntime.so" : path) +
                             " is no ONNX Runtime of version 1." + std::to_string(kTableVersion) +
                             " or later");
  }
  return std::shared_ptr<const OnnxRuntime>(new OnnxRuntime(functions));
}

OnnxRuntime::OnnxRuntime(const void* const* functions) : functions_(functions) {
  call(kCreateEnvironment, kErrors, "shoal", &environment_);
}

OnnxRuntime::~OnnxRuntime() { release(kReleaseEnvironment, environment_); }

OnnxGraph::OnnxGraph(std::shared_ptr<const OnnxRuntime> runtime, std::string_view model)
    : runtime_(std::move(runtime)) {
  const OnnxRuntime& of = *runtime_;
  Held options([&](void* what) { of.release(kReleaseOptions, what); });
  of.call(kCreateOptions, &options.what);
  of.call(kSetThreads, options.what, 1);
  of.call(kSetSeverity, options.what, kErrors);
  Held session([&](void* what) { of.release(kReleaseSession, what); });
  of.call(kCreateSession, of.environment_, static_cast<const void*>(model.data()), model.size(), options.what,
          &session.what);
  Held memory([&](void* what) { of.release(kReleaseMemory, what); });
  of.call(kCreateMemory, 0, 0, &memory.what);  // of the usual allocator, of the usual kind
  session_ = session.what;
  std::size_t count = 0;
  of.call(kInputCount, static_cast<const void*>(session_), &count);
  for (std::size_t i = 0; i < count; ++i) {
    inputs_.push_back(name_of(kInputName, i));
  }
  output_ = name_of(kOutputName, 0);
  memory_ = std::exchange(memory.what, nullptr);
  session.what = nullptr;
}

OnnxGraph::~OnnxGraph() {
  runtime_->release(kReleaseMemory, memory_);
  runtime_->release(kReleaseSession, session_);
}

std::string OnnxGraph::name_of(std::size_t function, std::size_t number) const {
  void* allocator = nullptr;
  runtime_->call(kAllocator, &allocator);
  char* name = nullptr;
  runtime_->call(function, static_cast<const void*>(session_), number, allocator, &name);
  std::string found(name);
  runtime_->call(kFree, allocator, static_cast<void*>(name));
  return found;
}

std::string OnnxGraph::metadata(const char* key) const {
  Held all([&](void* what) { runtime_->release(kReleaseMetadata, what); });
  runtime_->call(kSessionMetadata, static_cast<const void*>(session_), &all.what);
  void* allocator = nullptr;
  runtime_->call(kAllocator, &allocator);
  char* text = nullptr;
  runtime_->call(kMetadata, static_cast<const void*>(all.what), allocator, key, &text);
  if (text == nullptr) {
    return "";
  }
  std::string found(text);
  runtime_->call(kFree, allocator, static_cast<void*>(text));
  return found;
}

std::vector<float> OnnxGraph::run(std::span<const OnnxInput> inputs) const {
  const OnnxRuntime& of = *runtime_;
  const auto free = [&of](void* what) { of.release(kReleaseValue, what); };
  std::vector<std::unique_ptr<Held<decltype(free)>>> held;
  std::vector<const void*> values;
  std::vector<const char*> names;
  float nothing = 0.0F;  // where an empty tensor is
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const OnnxInput& input = inputs[i];
    std::size_t bytes = input.is_float ? sizeof(float) : sizeof(std::int64_t);
    for (const std::int64_t size : input.shape) {
      bytes *= static_cast<std::size_t>(size);
    }
    held.push_back(std::make_unique<Held<decltype(free)>>(free));
    of.call(kCreateTensor, static_cast<const void*>(memory_),
            bytes == 0 ? static_cast<void*>(&nothing) : const_cast<void*>(input.data), bytes,
            input.shape.data(), input.shape.size(), input.is_float ? kFloat : kInteger, &held.back()->what);
    values.push_back(held.back()->what);
    names.push_back(inputs_[i].c_str());
  }
  Held output(free);
  const char* const wanted = output_.c_str();
  of.call(kRun, session_, static_cast<const void*>(nullptr), names.data(), values.data(), values.size(),
          &wanted, std::size_t{1}, &output.what);
  Held shape([&](void* what) { of.release(kReleaseShape, what); });
  of.call(kTensorShape, static_cast<const void*>(output.what), &shape.what);
  std::size_t count = 0;
  of.call(kElementCount, static_cast<const void*>(shape.what), &count);
  void* data = nullptr;
  of.call(kTensorData, output.what, &data);
  const auto* const numbers = static_cast<const float*>(data);
  return {numbers, numbers + count};
}

}  // namespace shoal::predict
