#include "predict/request_bodies.h"

#include <algorithm>
#include <array>
#include <boost/json/monotonic_resource.hpp>
#include <boost/json/parser.hpp>
#include <boost/json/serialize.hpp>
#include <charconv>
#include <cmath>
#include <limits>
#include <new>

#include "predict/tensors.h"

namespace shoal::predict {

namespace {

constexpr std::string_view kJson = "application/json";
constexpr std::string_view kForm = "application/x-www-form-urlencoded";  // what `curl -d` sends by default
constexpr std::string_view kText = "text/plain";
constexpr std::string_view kCsv = "text/csv";
constexpr std::string_view kArrow = "application/vnd.apache.arrow.stream";
constexpr std::string_view kRaw = "application/octet-stream";
constexpr std::size_t kKeptBytes = 1 << 20;  // of memory, from request to request
constexpr std::size_t kFirstBytes = 1 << 14;

// What stands before the parameters, without blanks, and whether it is `kind` in letters of any case.
bool is_kind(std::string_view content_type, std::string_view kind) noexcept {
  content_type = content_type.substr(0, content_type.find(';'));
  while (content_type.starts_with(' ')) {
    content_type.remove_prefix(1);
  }
  while (content_type.ends_with(' ')) {
    content_type.remove_suffix(1);
  }
  const auto lower = [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; };
  return std::equal(content_type.begin(), content_type.end(), kind.begin(), kind.end(),
                    [&](char a, char b) { return lower(a) == b; });
}

// Memory of a bounded size for parsed JSON.
class BoundedResource final : public boost::container::pmr::memory_resource {
 public:
  explicit BoundedResource(std::size_t limit) : limit_(limit) {}

 private:
  void* do_allocate(std::size_t bytes, std::size_t alignment) override {
    if (bytes > limit_ - std::min(limit_, used_)) {
      throw TooLarge("the body takes more than " + std::to_string(limit_) +
                     " bytes once it is decoded: send fewer examples in a request");
    }
    used_ += bytes;
    return ::operator new(bytes, std::align_val_t(alignment));
  }
  void do_deallocate(void* p, std::size_t bytes, std::size_t alignment) override {
    used_ -= bytes;
    ::operator delete(p, std::align_val_t(alignment));
  }
  bool do_is_equal(const boost::container::pmr::memory_resource& other) const noexcept override {
    return this == &other;
  }

  std::size_t limit_;
  std::size_t used_ = 0;
};

json::value parse_body(std::string_view text, json::storage_ptr memory) {
  json::parse_options how;
  how.numbers = json::number_precision::precise;
  json::parser parser({}, how);
  parser.reset(std::move(memory));
  boost::system::error_code error;
  const std::size_t taken = parser.write_some(text.data(), text.size(), error);
  if (!error && text.find_first_not_of(" \t\r\n", taken) != std::string_view::npos) {
    error = json::make_error_code(json::error::extra_data);
  }
  if (error == json::error::too_deep) {
    throw BadBody("the body is nested too deeply");
  }
  if (error) {
    throw BadBody("the body is malformed (byte " + std::to_string(taken) + "): " + error.message());
  }
  return parser.release();
}

void put_number(std::string& to, double number) {
  std::array<char, 32> digits;
  to.append(digits.data(), std::to_chars(digits.data(), digits.data() + digits.size(), number).ptr);
}

void put_text(std::string& to, std::string_view text) { to += json::serialize(json::string_view(text)); }

void put_list(std::string& to, std::span<const double> numbers) {
  to += '[';
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    if (i > 0) {
      to += ',';
    }
    put_number(to, numbers[i]);
  }
  to += ']';
}

// A number for each example, or a list for each.
void put_rows(std::string& to, std::span<const double> numbers, std::size_t outputs, bool is_multiclass) {
  if (!is_multiclass) {
    return put_list(to, numbers);
  }
  to += '[';
  for (std::size_t i = 0; i < numbers.size(); i += outputs) {
    if (i > 0) {
      to += ',';
    }
    put_list(to, numbers.subspan(i, outputs));
  }
  to += ']';
}

}  // namespace

bool RequestBodies::takes(std::string_view content_type) noexcept { return !is_kind(content_type, kArrow); }

Features RequestBodies::read(const Request& request, const InputSchema& schema, std::size_t limit) {
  protocol_ = request.protocol;
  builder_.reset(schema, limit);
  try {
    if (protocol_ == Protocol::kTensorFlow) {
      read_tensorflow(request.body, limit);
    } else if (protocol_ == Protocol::kInference) {
      read_inference(request, schema, limit);
    } else if (request.content_type.empty() || is_kind(request.content_type, kJson) ||
               is_kind(request.content_type, kForm)) {
      instances_.read(request.body, "", builder_);
    } else if (is_kind(request.content_type, kText)) {
      if (!schema.takes_lines() || schema.has_columns) {
        throw BadBody("lines of text: " + schema.takes());
      }
      builder_.text(request.body);
    } else if (is_kind(request.content_type, kCsv)) {
      if (!schema.has_columns) {
        throw BadBody("this model has no columns: " + schema.takes());
      }
      builder_.text(request.body);
    } else {
      throw BadBody("a body of " + std::string(request.content_type.substr(0, 80)) + ": send " +
                    std::string(kJson) + ", " + std::string(kText) + ", " + std::string(kCsv) + " or " +
                    std::string(kArrow));
    }
  } catch (const std::invalid_argument& error) {  // of a member, or of the header of csv
    throw BadBody(error.what());
  }
  if (builder_.examples() == 0) {
    const bool is_csv = protocol_ == Protocol::kShoal && is_kind(request.content_type, kCsv);
    const bool is_text = protocol_ == Protocol::kShoal && is_kind(request.content_type, kText);
    throw BadBody(is_csv    ? schema.header ? "no instances: send at least one row"
                                            : "no instances: send at least one row below the header"
                  : is_text ? "no instances: send at least one line"
                            : "no instances: send at least one");
  }
  return builder_.finish();
}

void RequestBodies::read_tensorflow(std::string_view body, std::size_t limit) {
  by_columns_ = false;
  const auto names = [&](std::string_view member) { return body.find(member) != std::string_view::npos; };
  if (names(R"("instances")") &&
      !names(R"("inputs")")) {  // the usual case: rows, and nothing is made of them
    return instances_.read(body, "signature_name", builder_);
  }
  BoundedResource bounded(limit);
  memory_.resize(std::max(memory_.size(), kFirstBytes));
  json::monotonic_resource memory(reinterpret_cast<unsigned char*>(memory_.data()), memory_.size(), &bounded);
  const json::value parsed = parse_body(body, &memory);
  if (!parsed.is_object()) {
    throw BadBody(R"(the body is an object with "instances" or "inputs")");
  }
  const json::object& members = parsed.get_object();
  for (const auto& [name, value] : members) {
    if (name != "instances" && name != "inputs" && name != "signature_name") {
      throw BadBody(in_quotes(name) + R"( is not known: send "instances" or "inputs", and "signature_name")");
    }
  }
  const json::value* const instances = optional_in(members, "instances");
  const json::value* const inputs = optional_in(members, "inputs");
  if ((instances == nullptr) == (inputs == nullptr)) {
    throw BadBody(R"(send either "instances", a list of rows, or "inputs", a list for each column)");
  }
  if (instances != nullptr && !instances->is_array()) {
    throw BadBody(R"("instances" is a list of rows)");
  }
  by_columns_ = inputs != nullptr;
  read_columns(by_columns_ ? *inputs : *instances, builder_);
}

void RequestBodies::read_inference(const Request& request, const InputSchema& schema, std::size_t limit) {
  std::size_t size = request.body.size();
  if (!request.json_bytes.empty()) {
    const auto [end, fault] = std::from_chars(request.json_bytes.data(),
                                              request.json_bytes.data() + request.json_bytes.size(), size);
    if (fault != std::errc{} || end != request.json_bytes.data() + request.json_bytes.size() ||
        size > request.body.size()) {
      throw BadBody("a header of " + std::string(request.json_bytes.substr(0, 20)) + " bytes in a body of " +
                    std::to_string(request.body.size()));
    }
  }
  BoundedResource bounded(limit);
  memory_.resize(std::max(memory_.size(), kFirstBytes));
  json::monotonic_resource memory(reinterpret_cast<unsigned char*>(memory_.data()), memory_.size(), &bounded);
  const json::value parsed = parse_body(request.body.substr(0, size), &memory);
  if (!parsed.is_object()) {
    throw BadBody(R"(the body is an object with "inputs")");
  }
  const json::object& members = parsed.get_object();
  const auto is_set = [](const json::object& of, std::string_view name) {
    const json::value* const parameters = optional_in(of, "parameters");
    return parameters != nullptr && parameters->is_object() && flag_in(parameters->get_object(), name, false);
  };
  const json::value* const id = optional_in(members, "id");
  id_ = id == nullptr ? std::string() : text_of(*id, "id");
  is_raw_ = false;
  const json::value* const outputs = optional_in(members, "outputs");
  if (outputs == nullptr || (outputs->is_array() && outputs->get_array().empty())) {
    is_raw_ = is_set(members, "binary_data_output");
  } else {
    for (const json::value& one : array_in(members, "outputs")) {
      if (!one.is_object()) {
        throw BadBody("an output is not an object");
      }
      const std::string name = text_in(one.get_object(), "name");
      if (name != output_name(request.is_multiclass)) {
        throw BadBody("there is no output " + in_quotes(name) + ": it is " +
                      in_quotes(output_name(request.is_multiclass)));
      }
      is_raw_ = is_raw_ || is_set(one.get_object(), "binary_data");
    }
  }
  read_tensors(array_in(members, "inputs"), request.body.substr(size), schema, builder_);
}

void RequestBodies::write(std::uint64_t version, std::string_view name, std::span<const double> probabilities,
                          std::size_t outputs, bool is_multiclass, Answer& into) const {
  std::string& to = into.body;
  to.clear();
  into.content_type = kJson;
  into.json_bytes = 0;
  if (protocol_ == Protocol::kShoal) {
    to += R"({"version":)" + std::to_string(version) + R"(,"probabilities":)";
    put_rows(to, probabilities, outputs, is_multiclass);
    to += '}';
    return;
  }
  if (protocol_ == Protocol::kTensorFlow) {
    to += by_columns_ ? R"({"outputs":)" : R"({"predictions":)";
    put_rows(to, probabilities, outputs, is_multiclass);
    to += '}';
    return;
  }
  to += R"({"model_name":)";
  put_text(to, name);
  to += R"(,"model_version":")" + std::to_string(version) + R"(","id":)";
  put_text(to, id_);
  to += R"(,"outputs":[{"name":")";
  to += output_name(is_multiclass);
  to += R"(","shape":[)" + std::to_string(probabilities.size() / outputs);
  if (is_multiclass) {
    to += ',' + std::to_string(outputs);
  }
  to += R"(],"datatype":"FP64",)";
  if (!is_raw_) {
    to += R"("data":)";
    put_list(to, probabilities);
    to += "}]}";
    return;
  }
  to += R"("parameters":{"binary_data_size":)" + std::to_string(probabilities.size_bytes()) + "}}]}";
  into.json_bytes = to.size();
  into.content_type = kRaw;
  to.append(reinterpret_cast<const char*>(probabilities.data()), probabilities.size_bytes());
}

void RequestBodies::trim() {
  if (builder_.bytes() > kKeptBytes) {
    builder_ = ExampleBuilder();
  }
  if (memory_.size() > kKeptBytes) {
    memory_ = {};
  }
}

}  // namespace shoal::predict
