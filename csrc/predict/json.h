// JSON for the prediction library: Boost.JSON, with the checks of a reader of files.
//
// A value of another type than is asked for, or a missing member, is an error that names the member.
//
// Threads: pure functions.

#pragma once

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/value.hpp>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace shoal::predict {

namespace json = boost::json;

// std::invalid_argument: it is not one JSON value.
json::value parse_json(std::string_view text);

// The members of an object. std::invalid_argument: there is none of that name, or it is of another type.
const json::value& member(const json::object& of, std::string_view name);
std::uint64_t count_in(const json::object& of, std::string_view name);
double number_in(const json::object& of, std::string_view name);
std::string text_in(const json::object& of, std::string_view name);
const json::array& array_in(const json::object& of, std::string_view name);
const json::object& object_in(const json::object& of, std::string_view name);
std::vector<double> numbers_in(const json::object& of, std::string_view name);

// A list of texts, and a text; empty if it is missing or null.
std::vector<std::string> texts_in(const json::object& of, std::string_view name);
std::string optional_text_in(const json::object& of, std::string_view name);

// The member, unless it is missing or null.
const json::value* optional_in(const json::object& of, std::string_view name);
bool flag_in(const json::object& of, std::string_view name, bool otherwise);

// A whole number of 64 bits without a sign.
std::uint64_t count_of(const json::value& value, std::string_view name);
double number_of(const json::value& value, std::string_view name);
std::string text_of(const json::value& value, std::string_view name);

// A text in quotes, shortened, for a message.
std::string in_quotes(std::string_view text);

}  // namespace shoal::predict
