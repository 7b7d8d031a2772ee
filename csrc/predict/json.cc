#include "predict/json.h"

#include <boost/json/parse.hpp>
#include <stdexcept>

namespace shoal::predict {

namespace {

[[noreturn]] void refuse(std::string_view name, const char* what) {
  throw std::invalid_argument(in_quotes(name) + " " + what);
}

}  // namespace

std::string in_quotes(std::string_view text) {
  constexpr std::size_t kMost = 80;
  std::string found("'");
  found.append(text.substr(0, kMost));
  found.append(text.size() > kMost ? "'..." : "'");
  return found;
}

json::value parse_json(std::string_view text) {
  boost::system::error_code error;
  json::parse_options options;
  options.numbers = json::number_precision::precise;
  json::value found = json::parse(text, error, {}, options);
  if (error) {
    throw std::invalid_argument("JSON: " + error.message());
  }
  return found;
}

const json::value& member(const json::object& of, std::string_view name) {
  const json::value* const found = of.if_contains(name);
  if (found == nullptr) {
    refuse(name, "is missing");
  }
  return *found;
}

std::uint64_t count_of(const json::value& value, std::string_view name) {
  if (value.is_uint64()) {
    return value.get_uint64();
  }
  if (!value.is_int64() || value.get_int64() < 0) {
    refuse(name, "is not a whole number of 0 or more");
  }
  return static_cast<std::uint64_t>(value.get_int64());
}

double number_of(const json::value& value, std::string_view name) {
  if (value.is_int64()) {
    return static_cast<double>(value.get_int64());
  }
  if (value.is_uint64()) {
    return static_cast<double>(value.get_uint64());
  }
  if (!value.is_double()) {
    refuse(name, "is not a number");
  }
  return value.get_double();
}

std::string text_of(const json::value& value, std::string_view name) {
  if (!value.is_string()) {
    refuse(name, "is not a text");
  }
  return std::string(value.get_string());
}

std::uint64_t count_in(const json::object& of, std::string_view name) {
  return count_of(member(of, name), name);
}

double number_in(const json::object& of, std::string_view name) { return number_of(member(of, name), name); }

std::string text_in(const json::object& of, std::string_view name) { return text_of(member(of, name), name); }

const json::array& array_in(const json::object& of, std::string_view name) {
  const json::value& found = member(of, name);
  if (!found.is_array()) {
    refuse(name, "is not a list");
  }
  return found.get_array();
}

const json::object& object_in(const json::object& of, std::string_view name) {
  const json::value& found = member(of, name);
  if (!found.is_object()) {
    refuse(name, "is not an object");
  }
  return found.get_object();
}

std::vector<double> numbers_in(const json::object& of, std::string_view name) {
  std::vector<double> found;
  const json::value& value = member(of, name);
  if (!value.is_array()) {
    found.push_back(number_of(value, name));
    return found;
  }
  for (const json::value& one : value.get_array()) {
    found.push_back(number_of(one, name));
  }
  return found;
}

const json::value* optional_in(const json::object& of, std::string_view name) {
  const json::value* const found = of.if_contains(name);
  return found == nullptr || found->is_null() ? nullptr : found;
}

std::vector<std::string> texts_in(const json::object& of, std::string_view name) {
  std::vector<std::string> found;
  if (optional_in(of, name) != nullptr) {
    for (const json::value& one : array_in(of, name)) {
      found.push_back(text_of(one, name));
    }
  }
  return found;
}

std::string optional_text_in(const json::object& of, std::string_view name) {
  const json::value* const found = optional_in(of, name);
  return found == nullptr ? std::string() : text_of(*found, name);
}

bool flag_in(const json::object& of, std::string_view name, bool otherwise) {
  const json::value* const found = optional_in(of, name);
  if (found != nullptr && !found->is_bool()) {
    refuse(name, "is neither true nor false");
  }
  return found == nullptr ? otherwise : found->get_bool();
}

}  // namespace shoal::predict
