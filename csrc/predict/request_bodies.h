// RequestBodies: a body of bytes to examples, and probabilities to the body of an answer, in each protocol.
//
//   protocol     request                                            answer
//   shoal        {"instances": [...]}, lines of text, rows of csv   {"version": 1, "probabilities": [...]}
//   TensorFlow   {"instances": [...]} or {"inputs": ...}            {"predictions": [...]} or {"outputs": [...]}
//   inference    {"inputs": [tensor, ...]}, with raw data           {"outputs": [tensor]}, with raw data
//
// docs/serving.md specifies them.
//
// Threads: a RequestBodies is working memory of one caller at a time.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "predict/example_builder.h"
#include "predict/json_instances.h"

namespace shoal::predict {

enum class Protocol : std::uint8_t { kShoal, kTensorFlow, kInference };

struct Request {
  Protocol protocol = Protocol::kShoal;
  std::string_view body = {};
  std::string_view content_type = {};  // of the shoal protocol
  std::string_view json_bytes =
      {};                      // of the inference protocol: the bytes of JSON before raw data; empty: all
  bool is_multiclass = false;  // the model
};

struct Answer {
  std::string body;
  std::string_view content_type;
  std::size_t json_bytes = 0;  // of the inference protocol, if raw data follow the JSON; else 0
};

class RequestBodies {
 public:
  // Whether read() takes bodies of this content type in the shoal protocol: all but Arrow.
  static bool takes(std::string_view content_type) noexcept;

  // The features of a request's examples, which take `limit` bytes at most; they are valid until the next
  // call. Throws BadBody, BadExample, TooLarge.
  Features read(const Request& request, const InputSchema& schema, std::size_t limit);

  const ExampleBuilder& builder() const noexcept { return builder_; }

  // Writes the answer to the request that was read last. `outputs` numbers for each example; `name` is the
  // model's.
  void write(std::uint64_t version, std::string_view name, std::span<const double> probabilities,
             std::size_t outputs, bool is_multiclass, Answer& into) const;

  // Returns the memory that a large request has left.
  void trim();

 private:
  void read_tensorflow(std::string_view body, std::size_t limit);
  void read_inference(const Request& request, const InputSchema& schema, std::size_t limit);

  ExampleBuilder builder_;
  JsonInstances instances_;
  std::vector<std::byte> memory_;  // of parsed JSON

  // What the answer depends on.
  Protocol protocol_ = Protocol::kShoal;
  bool by_columns_ = false;  // TensorFlow
  bool is_raw_ = false;      // inference
  std::string id_;
};

// The name of the output in the inference protocol.
constexpr std::string_view output_name(bool is_multiclass) noexcept {
  return is_multiclass ? "probabilities" : "probability";
}

}  // namespace shoal::predict
