#include "predict/tensors.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <optional>
#include <span>
#include <vector>

#include "base/half.h"
#include "base/unaligned.h"
#include "predict/json_instances.h"

namespace shoal::predict {

namespace {

constexpr std::size_t kMostDimensions = 8;
constexpr std::string_view kTextType = "BYTES";

using Digits = std::array<char, 24>;

template <class Whole>
Cell whole_cell(Whole number, Digits& room) noexcept {
  Cell cell;
  cell.kind = Cell::Kind::kWhole;
  cell.text = {room.data(), std::to_chars(room.data(), room.data() + room.size(), number).ptr};
  cell.number = static_cast<double>(number);
  cell.whole = static_cast<std::uint64_t>(number);
  cell.fits = number >= Whole{};
  return cell;
}

Cell cell_of(const json::value& value, Digits& room) noexcept {
  Cell cell;
  switch (value.kind()) {
    case json::kind::null:
      return cell;
    case json::kind::bool_:
      cell.kind = value.get_bool() ? Cell::Kind::kTrue : Cell::Kind::kFalse;
      return cell;
    case json::kind::int64:
      return whole_cell(value.get_int64(), room);
    case json::kind::uint64:
      return whole_cell(value.get_uint64(), room);
    case json::kind::double_:
      return Cell::of_number(value.get_double());
    case json::kind::string:
      return Cell::of_text(value.get_string());
    case json::kind::array:
    case json::kind::object:
      cell.kind = Cell::Kind::kObject;
  }
  return cell;
}

// ---- one tensor ----

enum class Type : std::uint8_t {
  kBytes,
  kBool,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kUint8,
  kUint16,
  kUint32,
  kUint64,
  kFp16,
  kFp32,
  kFp64
};

struct TypeName {
  std::string_view name;
  Type type;
  std::size_t bytes;
};

constexpr std::array<TypeName, 13> kTypes = {{{kTextType, Type::kBytes, 0},
                                              {"BOOL", Type::kBool, 1},
                                              {"INT8", Type::kInt8, 1},
                                              {"INT16", Type::kInt16, 2},
                                              {"INT32", Type::kInt32, 4},
                                              {"INT64", Type::kInt64, 8},
                                              {"UINT8", Type::kUint8, 1},
                                              {"UINT16", Type::kUint16, 2},
                                              {"UINT32", Type::kUint32, 4},
                                              {"UINT64", Type::kUint64, 8},
                                              {"FP16", Type::kFp16, 2},
                                              {"FP32", Type::kFp32, 4},
                                              {"FP64", Type::kFp64, 8}}};

// A tensor, as its elements in row-major order.
class Tensor {
 public:
  Tensor(const json::object& given, std::string_view& raw);

  const std::string& name() const noexcept { return name_; }
  std::size_t size() const noexcept { return size_; }
  std::size_t rows() const noexcept { return rows_; }
  // Elements of a row.
  std::size_t width() const noexcept { return width_; }

  Cell at(std::size_t i, Digits& room) const noexcept {
    if (type_ == nullptr) {
      return cell_of(*values_[i], room);
    }
    if (type_->type == Type::kBytes) {
      return Cell::of_text(texts_[i]);
    }
    return raw_cell(i, room);
  }

 private:
  void flatten(const json::array& data);
  void unpack(std::string_view raw);
  Cell raw_cell(std::size_t i, Digits& room) const noexcept;
  [[noreturn]] void refuse(const std::string& what) const {
    throw BadBody("input " + in_quotes(name_) + " " + what);
  }

  std::string name_;
  const TypeName* type_ = nullptr;  // of raw data
  std::size_t size_ = 0;
  std::size_t rows_ = 0;
  std::size_t width_ = 1;
  std::vector<const json::value*> values_;
  std::vector<std::string_view> texts_;
  std::string_view raw_;
};

void Tensor::flatten(const json::array& data) {
  for (const json::value& one : data) {
    values_.push_back(&one);
  }
  for (std::size_t depth = 0; depth < kMostDimensions; ++depth) {
    const auto lists =
        std::count_if(values_.begin(), values_.end(), [](const json::value* one) { return one->is_array(); });
    if (lists == 0) {
      return;
    }
    if (static_cast<std::size_t>(lists) != values_.size()) {
      break;
    }
    std::vector<const json::value*> inner;
    for (const json::value* const list : values_) {
      for (const json::value& one : list->get_array()) {
        inner.push_back(&one);
      }
    }
    values_ = std::move(inner);
  }
  refuse("is not an array: its lists are nested unequally, or too deeply");
}

void Tensor::unpack(std::string_view raw) {
  raw_ = raw;
  if (type_->bytes > 0) {
    if (raw.size() % type_->bytes != 0) {
      refuse("has " + std::to_string(raw.size()) + " bytes, which are no whole number of elements");
    }
    size_ = raw.size() / type_->bytes;
    return;
  }
  while (!raw.empty()) {
    std::uint32_t bytes = 0;
    if (raw.size() < sizeof bytes) {
      refuse("ends within the length of a text");
    }
    std::memcpy(&bytes, raw.data(), sizeof bytes);
    raw.remove_prefix(sizeof bytes);
    if (bytes > raw.size()) {
      refuse("has a text of " + std::to_string(bytes) + " bytes, and " + std::to_string(raw.size()) +
             " are left");
    }
    texts_.push_back(raw.substr(0, bytes));
    raw.remove_prefix(bytes);
  }
  size_ = texts_.size();
}

Cell Tensor::raw_cell(std::size_t i, Digits& room) const noexcept {
  const auto* const at = reinterpret_cast<const std::byte*>(raw_.data()) + i * type_->bytes;
  Cell cell;
  switch (type_->type) {
    case Type::kBool:
      cell.kind = load<std::uint8_t>(at) != 0 ? Cell::Kind::kTrue : Cell::Kind::kFalse;
      return cell;
    case Type::kInt8:
      return whole_cell(std::int64_t{load<std::int8_t>(at)}, room);
    case Type::kInt16:
      return whole_cell(std::int64_t{load<std::int16_t>(at)}, room);
    case Type::kInt32:
      return whole_cell(std::int64_t{load<std::int32_t>(at)}, room);
    case Type::kInt64:
      return whole_cell(load<std::int64_t>(at), room);
    case Type::kUint8:
      return whole_cell(std::uint64_t{load<std::uint8_t>(at)}, room);
    case Type::kUint16:
      return whole_cell(std::uint64_t{load<std::uint16_t>(at)}, room);
    case Type::kUint32:
      return whole_cell(std::uint64_t{load<std::uint32_t>(at)}, room);
    case Type::kUint64:
      return whole_cell(load<std::uint64_t>(at), room);
    case Type::kFp16:
      return Cell::of_number(static_cast<double>(from_float16(load<std::uint16_t>(at))));
    case Type::kFp32:
      return Cell::of_number(static_cast<double>(load<float>(at)));
    case Type::kFp64:
      return Cell::of_number(load<double>(at));
    case Type::kBytes:
      break;
  }
  return cell;
}

Tensor::Tensor(const json::object& given, std::string_view& raw) : name_(text_in(given, "name")) {
  const std::string datatype = text_in(given, "datatype");
  const auto type =
      std::find_if(kTypes.begin(), kTypes.end(), [&](const TypeName& one) { return one.name == datatype; });
  if (type == kTypes.end()) {
    std::string all;
    for (const TypeName& one : kTypes) {
      all += (all.empty() ? "" : ", ") + std::string(one.name);
    }
    refuse("is of " + in_quotes(datatype) + ": send " + all);
  }
  const json::array& shape = array_in(given, "shape");
  if (shape.empty() || shape.size() > kMostDimensions) {
    refuse("has " + std::to_string(shape.size()) + " dimensions: the first dimension is that of instances");
  }
  const json::value* const parameters = optional_in(given, "parameters");
  const json::value* size = nullptr;
  if (parameters != nullptr && parameters->is_object()) {
    size = optional_in(parameters->get_object(), "binary_data_size");
  }
  if (size != nullptr) {
    const std::uint64_t bytes = count_of(*size, "binary_data_size");
    if (bytes > raw.size()) {
      refuse("has " + std::to_string(bytes) + " bytes of data, and " + std::to_string(raw.size()) +
             " are left");
    }
    type_ = &*type;
    unpack(raw.substr(0, bytes));
    raw.remove_prefix(bytes);
  } else {
    flatten(array_in(given, "data"));
    size_ = values_.size();
  }
  std::uint64_t product = 1;
  for (std::size_t i = 0; i < shape.size(); ++i) {
    const std::uint64_t extent = count_of(shape[i], "shape");
    if (extent > 0 && product > (std::uint64_t{1} << 40U) / extent) {
      refuse("has a shape of too many elements");
    }
    product *= extent;
    if (i > 0) {
      width_ *= extent;
    }
  }
  if (product != size_) {
    refuse("has a shape of " + std::to_string(product) + " elements, and " + std::to_string(size_) +
           " are there");
  }
  rows_ = count_of(shape[0], "shape");
}

// ---- instances of tensors ----

bool is_sparse_name(std::string_view name) noexcept {
  return name == "keys" || name == "values" || name == "fields";
}

// Keys of all instances one after the other, and where each begins.
void read_offsets(const std::vector<Tensor>& inputs, const Tensor& offsets, ExampleBuilder& into) {
  const Tensor* keys = nullptr;
  for (const Tensor& one : inputs) {
    keys = one.name() == "keys" ? &one : keys;
  }
  for (const Tensor& one : inputs) {
    if (&one != &offsets && (!is_sparse_name(one.name()) || one.size() != keys->size())) {
      throw BadBody("with offsets: send keys, values and fields of one length, and nothing else");
    }
  }
  Digits room;
  std::vector<std::size_t> ends;
  for (std::size_t i = 0; i < offsets.size(); ++i) {
    const Cell cell = offsets.at(i, room);
    if (cell.kind != Cell::Kind::kWhole || !cell.fits || cell.whole > keys->size() ||
        cell.whole < (ends.empty() ? 0 : ends.back())) {
      throw BadBody("offsets are whole numbers from 0 to the number of keys, " +
                    std::to_string(keys->size()) + ", that do not fall");
    }
    ends.push_back(cell.whole);
  }
  if (ends.empty() || ends.front() != 0 || ends.back() != keys->size()) {
    throw BadBody("offsets run from 0 to the number of keys, " + std::to_string(keys->size()));
  }
  for (std::size_t i = 0; i + 1 < ends.size(); ++i) {
    into.begin();
    for (const Tensor& one : inputs) {
      if (&one == &offsets) {
        continue;
      }
      into.column(one.name());
      into.begin_list();
      for (std::size_t k = ends[i]; k < ends[i + 1]; ++k) {
        into.cell(one.at(k, room));
      }
      into.end_list();
    }
    into.end();
  }
}

}  // namespace

void read_tensors(const json::array& inputs, std::string_view raw, const InputSchema& schema,
                  ExampleBuilder& into) {
  std::vector<Tensor> found;
  const Tensor* offsets = nullptr;
  bool has_keys = false;
  found.reserve(inputs.size());
  for (const json::value& one : inputs) {
    if (!one.is_object()) {
      throw BadBody("an input is not an object");
    }
    const Tensor& tensor = found.emplace_back(one.get_object(), raw);
    const bool is_new = std::none_of(found.begin(), found.end() - 1,
                                     [&](const Tensor& other) { return other.name() == tensor.name(); });
    if (!is_new) {
      throw BadBody("input " + in_quotes(tensor.name()) + " is there twice");
    }
    offsets = tensor.name() == "offsets" ? &tensor : offsets;
    has_keys = has_keys || tensor.name() == "keys";
  }
  if (!raw.empty()) {
    throw BadBody(std::to_string(raw.size()) + " bytes of data belong to no input");
  }
  if (found.empty()) {
    throw BadBody("no inputs: send a tensor for each column");
  }
  if (has_keys && offsets != nullptr) {
    return read_offsets(found, *offsets, into);
  }
  const Tensor& first = found.front();
  for (const Tensor& one : found) {
    if (one.rows() != first.rows()) {
      throw BadBody("the inputs are of different numbers of instances: " + in_quotes(first.name()) + " of " +
                    std::to_string(first.rows()) + ", " + in_quotes(one.name()) + " of " +
                    std::to_string(one.rows()));
    }
  }
  Digits room;
  const bool is_line =
      found.size() == 1 && first.name() == "line" && schema.takes_lines() && !schema.has_columns;
  for (std::size_t i = 0; i < first.rows(); ++i) {
    if (is_line) {
      const Cell cell = first.at(i, room);
      if (cell.kind != Cell::Kind::kText || first.width() != 1) {
        into.refuse("a line is a text");
      }
      into.line(cell.text);
      continue;
    }
    into.begin();
    for (const Tensor& one : found) {
      into.column(one.name());
      const bool is_list =
          one.width() != 1 || schema.is_listed(one.name()) || (has_keys && is_sparse_name(one.name()));
      if (is_list) {
        into.begin_list();
      }
      for (std::size_t k = i * one.width(); k < (i + 1) * one.width(); ++k) {
        into.cell(one.at(k, room));
      }
      if (is_list) {
        into.end_list();
      }
    }
    into.end();
  }
}

namespace {

void read_value(const json::value& value, ExampleBuilder& into, Digits& room) {
  if (!value.is_array()) {
    return into.cell(cell_of(value, room));
  }
  into.begin_list();
  for (const json::value& one : value.get_array()) {
    if (one.is_array()) {
      into.begin_list();  // refused, unless the column is passed over
    } else {
      into.cell(cell_of(one, room));
    }
  }
  into.end_list();
}

void read_instance(const json::value& value, ExampleBuilder& into, Digits& room) {
  if (value.is_string()) {
    return into.line(value.get_string());
  }
  if (!value.is_object()) {
    into.refuse("an instance is an object or a line of text");
  }
  into.begin();
  for (const auto& [name, cell] : value.get_object()) {
    into.column(name);
    read_value(cell, into, room);
  }
  into.end();
}

}  // namespace

void read_columns(const json::value& columns, ExampleBuilder& into) {
  Digits room;
  if (columns.is_array()) {
    for (const json::value& one : columns.get_array()) {
      read_instance(one, into, room);
    }
    return;
  }
  if (!columns.is_object() || columns.get_object().empty()) {
    throw BadBody(R"("inputs" are a list of instances, or an object with a list for each column)");
  }
  std::optional<std::size_t> rows;
  for (const auto& [name, cells] : columns.get_object()) {
    if (!cells.is_array()) {
      throw BadBody("input " + in_quotes(name) + " is no list: send a cell for each row");
    }
    if (rows.value_or(cells.get_array().size()) != cells.get_array().size()) {
      throw BadBody("the inputs have different lengths: " + std::to_string(*rows) + ", and " +
                    in_quotes(name) + " " + std::to_string(cells.get_array().size()));
    }
    rows = cells.get_array().size();
  }
  for (std::size_t i = 0; i < *rows; ++i) {
    into.begin();
    for (const auto& [name, cells] : columns.get_object()) {
      into.column(name);
      read_value(cells.get_array()[i], into, room);
    }
    into.end();
  }
}

}  // namespace shoal::predict
