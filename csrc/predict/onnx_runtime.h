// OnnxRuntime: ONNX Runtime, where its library is found at run time, by its C interface. OnnxGraph: a graph in it.
//
// Nothing of ONNX Runtime is compiled or linked: the library is opened, and its functions are taken from the
// table that it returns, whose order later versions keep.
//
// Threads: any number may run a graph at the same time; each run computes in the thread that calls it. The library
// stays open until the process ends.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace shoal::predict {

class OnnxRuntime {
 public:
  // Opens the library in a file, or, if `path` is empty, that which the system's loader finds: null if it finds
  // none. std::runtime_error: the file is no such library.
  static std::shared_ptr<const OnnxRuntime> open(const std::string& path);

  ~OnnxRuntime();
  OnnxRuntime(const OnnxRuntime&) = delete;
  OnnxRuntime& operator=(const OnnxRuntime&) = delete;

 private:
  friend class OnnxGraph;
  explicit OnnxRuntime(const void* const* functions);

  template <class... Arguments>
  void call(std::size_t function, Arguments... arguments) const;
  void release(std::size_t function, void* what) const noexcept;

  const void* const* functions_;
  void* environment_ = nullptr;
};

// A tensor of 4-byte floats or 8-byte integers.
struct OnnxInput {
  const void* data = nullptr;
  bool is_float = true;
  std::vector<std::int64_t> shape;
};

class OnnxGraph {
 public:
  // `model`: the bytes of a file of ONNX. std::runtime_error: it is none that this version runs.
  OnnxGraph(std::shared_ptr<const OnnxRuntime> runtime, std::string_view model);
  ~OnnxGraph();
  OnnxGraph(const OnnxGraph&) = delete;
  OnnxGraph& operator=(const OnnxGraph&) = delete;

  const std::vector<std::string>& inputs() const noexcept { return inputs_; }
  // What the file says of itself under a key; empty if it says nothing.
  std::string metadata(const char* key) const;
  // The numbers of the first output; one input for each of inputs(). std::runtime_error.
  std::vector<float> run(std::span<const OnnxInput> inputs) const;

 private:
  std::string name_of(std::size_t function, std::size_t number) const;

  std::shared_ptr<const OnnxRuntime> runtime_;
  void* memory_ = nullptr;
  void* session_ = nullptr;
  std::vector<std::string> inputs_;
  std::string output_;
};

}  // namespace shoal::predict
