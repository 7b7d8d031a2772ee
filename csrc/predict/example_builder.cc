#include "predict/example_builder.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>

#include "text/cell.h"

namespace shoal::predict {

namespace {

constexpr std::size_t kExcerpt = 80;
constexpr std::size_t kExampleBytes = 64;  // of an example in a request and in its answer
constexpr std::size_t kFeatureBytes = sizeof(std::uint64_t) + sizeof(float);

// [+-] digits whose number has less than 64 bits.
bool is_integer(std::string_view text) noexcept {
  if (text.starts_with('+') || text.starts_with('-')) {
    text.remove_prefix(1);
  }
  std::int64_t number = 0;
  const auto [end, fault] = std::from_chars(text.data(), text.data() + text.size(), number);
  return !text.empty() && text.front() != '-' && fault == std::errc{} && end == text.data() + text.size();
}

}  // namespace

void ExampleBuilder::refuse(const std::string& what) const {
  throw BadExample(static_cast<std::int64_t>(examples()),
                   "instance " + std::to_string(examples()) + ": " + what);
}

void ExampleBuilder::refuse_size() const {
  throw TooLarge("the body takes more than " + std::to_string(limit_) +
                 " bytes once it is decoded, and at most so many are used: send fewer examples in a request");
}

void ExampleBuilder::refuse_cell(const std::string& what) const {
  throw BadExample(static_cast<std::int64_t>(examples()),
                   "instance " + std::to_string(examples()) + ", column " + in_quotes(name_) + ": " + what);
}

std::string ExampleBuilder::excerpt_of(const Cell& cell) const {
  switch (cell.kind) {
    case Cell::Kind::kNull:
      return "null";
    case Cell::Kind::kFalse:
      return "false";
    case Cell::Kind::kTrue:
      return "true";
    case Cell::Kind::kObject:
      return "an object";
    case Cell::Kind::kWhole:
      return std::string(cell.text.substr(0, kExcerpt));
    case Cell::Kind::kText:
      return in_quotes(cell.text);
    case Cell::Kind::kReal:
      break;
  }
  std::array<char, 64> digits;
  return {digits.data(), std::to_chars(digits.data(), digits.data() + digits.size(), cell.number).ptr};
}

void ExampleBuilder::reset(const InputSchema& schema, std::size_t limit) {
  schema_ = &schema;
  takes_fields_ = schema.needs_fields() || !schema.pairs.empty();
  limit_ = limit;
  most_keys_ = limit / (kFeatureBytes + (takes_fields_ ? sizeof(std::uint64_t) : 0));
  most_examples_ = limit / kExampleBytes;
  offsets_.assign(1, 0);
  keys_.clear();
  is_valued_ = schema.has_values;
  values_.clear();
  fields_.clear();
  unknown_.clear();
  seen_.assign(schema.columns.size() + 1, 0);
  in_list_ = false;
}

void ExampleBuilder::put(std::uint64_t key, float value, std::uint64_t field) {
  if (keys_.size() >= most_keys_) {
    refuse_size();
  }
  if (value != 1.0F && !is_valued_) {
    is_valued_ = true;
    values_.assign(keys_.size(), 1.0F);
  }
  if (is_valued_) {
    values_.push_back(value);
  }
  keys_.push_back(key);
  if (takes_fields_) {
    fields_.push_back(field);
  }
}

void ExampleBuilder::begin() {
  has_keys_ = has_values_ = has_fields_ = false;
  lists_ = columns_ = 0;
  sparse_values_.clear();
  sparse_fields_.clear();
  seen_others_.clear();
  cells_seen_ = 0;
  text_.clear();
}

void ExampleBuilder::column(std::string_view name) {
  name_.assign(name);
  member_ = Member::kColumn;
  if (name == "keys") {
    member_ = Member::kKeys;
  } else if (name == "values") {
    member_ = Member::kValues;
  } else if (name == "fields") {
    member_ = Member::kFields;
  }
  if (member_ != Member::kColumn && schema_->has_columns && schema_->columns.contains(name)) {
    member_ = Member::kColumn;  // a model with such a column takes no keys
  }
}

// Sets column_ to that of the current member.
void ExampleBuilder::find_column() {
  ++columns_;
  a_column_ = name_;
  const auto found = schema_->columns.find(name_);
  if (found != schema_->columns.end()) {
    column_ = found->second;
    if (seen_[column_.index] == examples() + 1) {
      refuse_cell("it is there twice");
    }
    seen_[column_.index] = examples() + 1;
    return;
  }
  column_ = {.role = schema_->others};
  if (column_.role == Role::kPassedOver) {
    const bool is_known = schema_->header && std::find(schema_->header->begin(), schema_->header->end(),
                                                       name_) != schema_->header->end();
    if (!is_known) {
      unknown_.insert(name_);
    }
    return;
  }
  if (!seen_others_.insert(name_).second) {
    refuse_cell("it is there twice");
  }
  column_.field = field_number("csv", name_);
  column_.seed = text::field_seed(column_.field);
}

void ExampleBuilder::begin_list() {
  if (in_list_) {
    if (member_ != Member::kColumn) {
      refuse("a list within " + name_ + ": send numbers");
    }
    if (column_.role != Role::kPassedOver && column_.role != Role::kLabel) {
      refuse_cell("a list within a list");
    }
    return;
  }
  in_list_ = true;
  if (member_ == Member::kColumn) {
    if (schema_->is_criteo()) {
      refuse_cell("a list is not a cell: send text, a whole number or null");
    }
    if (!schema_->has_columns) {
      refuse("an instance has keys, values and fields, got " + in_quotes(name_) + ": " + schema_->takes());
    }
    find_column();
    if (column_.role == Role::kNumeric) {
      refuse_cell("a list is not a number");
    }
    if (column_.role == Role::kCategorical) {
      refuse_cell("a list is not a cell: send text, a number, true, false or null");
    }
    return;
  }
  bool& has = member_ == Member::kKeys ? has_keys_ : (member_ == Member::kValues ? has_values_ : has_fields_);
  if (has) {
    refuse(name_ + " are there twice");
  }
  has = true;
  ++lists_;
}

void ExampleBuilder::end_list() { in_list_ = false; }

void ExampleBuilder::cell(const Cell& cell) {
  if (in_list_) {
    member_ == Member::kColumn ? put_item(cell) : put_sparse(cell);
    return;
  }
  if (schema_->is_criteo()) {
    put_criteo(cell);
  } else if (schema_->has_columns) {
    member_ = Member::kColumn;
    find_column();
    put_column(cell);
  } else if (member_ == Member::kColumn) {
    refuse("an instance has keys, values and fields, got " + in_quotes(name_) + ": " + schema_->takes());
  } else if (cell.kind != Cell::Kind::kNull || member_ == Member::kKeys) {
    refuse(name_ + " are a list, got " + excerpt_of(cell) + ": " + schema_->takes());
  }
}

// ---- columns ----

float ExampleBuilder::number_of(const Cell& cell) const {
  double number = cell.number;
  if (cell.kind == Cell::Kind::kText) {
    float read = 0.0F;
    const text::Fault fault = text::read_number_of(text::bytes_of(cell.text), read);
    if (fault == text::Fault::kValueRange) {
      refuse_cell(excerpt_of(cell) + " is not finite as float32");
    }
    if (fault != text::Fault::kGood) {
      refuse_cell(excerpt_of(cell) + " is not a number");
    }
    return read;
  }
  if (cell.kind == Cell::Kind::kTrue || cell.kind == Cell::Kind::kFalse) {
    number = cell.kind == Cell::Kind::kTrue ? 1.0 : 0.0;
  } else if (cell.kind != Cell::Kind::kWhole && cell.kind != Cell::Kind::kReal) {
    refuse_cell(excerpt_of(cell) + " is not a number");
  }
  const auto found = static_cast<float>(number);
  if (!std::isfinite(found)) {
    refuse_cell(excerpt_of(cell) + " is not finite as float32");
  }
  return found;
}

void ExampleBuilder::put_text(std::string_view text) {
  const auto* const p = reinterpret_cast<const std::uint8_t*>(text.data());
  put(text::cell_key(column_.seed, p, text.size(), p + text.size()), 1.0F, column_.field);
}

// Whether a cell is missing, apart from null.
static bool is_missing(const InputSchema& schema, const Cell& cell) noexcept {
  if (cell.kind == Cell::Kind::kText) {
    return schema.is_missing(cell.text);
  }
  return (cell.kind == Cell::Kind::kWhole || cell.kind == Cell::Kind::kReal) &&
         schema.is_missing(cell.number);
}

void ExampleBuilder::put_column(const Cell& cell) {
  if (column_.role == Role::kPassedOver || column_.role == Role::kLabel || cell.kind == Cell::Kind::kNull ||
      is_missing(*schema_, cell)) {
    return;
  }
  if (column_.role == Role::kNumeric) {
    const float number = number_of(cell);
    put(text::cell_key(column_.seed, nullptr, 0, nullptr), number, column_.field);
    return;
  }
  if (column_.role == Role::kList || column_.role == Role::kVector) {
    refuse_cell(excerpt_of(cell) + " is not a list, and this column holds lists");
  }
  put_item(cell);
}

// A category, or an item of a list.
void ExampleBuilder::put_item(const Cell& cell) {
  if (column_.role == Role::kPassedOver || column_.role == Role::kLabel) {
    return;
  }
  if (column_.role != Role::kCategorical) {
    const bool empty_is_missing = schema_->format == DataFormat::kCsv || column_.role == Role::kVector;
    const bool missing = cell.kind == Cell::Kind::kNull || is_missing(*schema_, cell) ||
                         (empty_is_missing && cell.kind == Cell::Kind::kText && cell.text.empty());
    if (column_.role == Role::kVector) {
      put(text::cell_key(column_.seed, nullptr, 0, nullptr), missing ? 0.0F : number_of(cell), column_.field);
      return;
    }
    if (missing) {
      put_text(kMissingItem);
      return;
    }
  }
  text::NumberRoom room;
  switch (cell.kind) {
    case Cell::Kind::kText:
    case Cell::Kind::kWhole:
      return put_text(cell.text);
    case Cell::Kind::kFalse:
      return put_text("false");
    case Cell::Kind::kTrue:
      return put_text("true");
    case Cell::Kind::kReal:
      if (!std::isfinite(cell.number)) {
        refuse_cell(excerpt_of(cell) + " is not finite");
      }
      return put_text({reinterpret_cast<const char*>(room.data()), text::number_text(cell.number, room)});
    case Cell::Kind::kNull:
    case Cell::Kind::kObject:
      refuse_cell(excerpt_of(cell) + " is not a cell: send text, a number, true, false or null");
  }
}

// ---- keys ----

void ExampleBuilder::keys(std::span<const std::uint64_t> keys) {
  if (keys.size() > most_keys_ - keys_.size()) {
    refuse_size();
  }
  keys_.insert(keys_.end(), keys.begin(), keys.end());
  if (is_valued_) {
    values_.resize(keys_.size(), 1.0F);
  }
  if (takes_fields_) {
    fields_.resize(keys_.size(), 0);
  }
}

void ExampleBuilder::put_sparse(const Cell& cell) {
  const bool is_number = cell.kind == Cell::Kind::kWhole || cell.kind == Cell::Kind::kReal;
  if (member_ == Member::kKeys) {
    if (cell.kind != Cell::Kind::kWhole || !cell.fits) {
      refuse(excerpt_of(cell) + " is not a key: keys are whole numbers from 0 to 2^64 - 1");
    }
    put(cell.whole, 1.0F, 0);
  } else if (member_ == Member::kValues) {
    const auto value = static_cast<float>(cell.number);
    if (!is_number || !std::isfinite(value)) {
      refuse("values must be finite as float32, got " + excerpt_of(cell));
    }
    sparse_values_.push_back(value);
  } else {
    if (!schema_->needs_fields()) {
      refuse("this model takes no fields: send keys and values alone");
    }
    if (cell.kind != Cell::Kind::kText && cell.kind != Cell::Kind::kWhole) {
      refuse(excerpt_of(cell) + " is not a field: send a name or a whole number");
    }
    try {
      sparse_fields_.push_back(field_number(schema_->fields_of, cell.text));
    } catch (const std::invalid_argument& error) {
      refuse(excerpt_of(cell) + " is not a field: " + error.what());
    }
  }
}

void ExampleBuilder::end_sparse() {
  if (columns_ > 0) {
    refuse(in_quotes(a_column_) + " stands beside keys: an instance has keys, values and fields, or columns");
  }
  const auto first = static_cast<std::size_t>(offsets_.back());
  const std::size_t count = keys_.size() - first;
  const auto check = [&](bool has, std::size_t size, const char* what) {
    if (has && size != count) {
      refuse(std::to_string(count) + " keys and " + std::to_string(size) + " " + what +
             ": send one for each key");
    }
  };
  check(has_values_, sparse_values_.size(), "values");
  check(has_fields_, sparse_fields_.size(), "fields");
  is_valued_ = is_valued_ || std::any_of(sparse_values_.begin(), sparse_values_.end(),
                                         [](float value) { return value != 1.0F; });
  if (is_valued_) {
    values_.resize(keys_.size(), 1.0F);
    std::copy(sparse_values_.begin(), sparse_values_.end(),
              values_.begin() + static_cast<std::ptrdiff_t>(first));
  }
  if (schema_->needs_fields()) {
    if (!has_fields_) {
      refuse("no fields, and this model needs the field of each key: " + schema_->takes());
    }
    std::copy(sparse_fields_.begin(), sparse_fields_.end(),
              fields_.begin() + static_cast<std::ptrdiff_t>(first));
  } else if (takes_fields_) {
    // Keys are complete: none of them interacts.
    std::uint64_t none = 0;
    while (std::find(schema_->pairs.begin(), schema_->pairs.end(), none) != schema_->pairs.end()) {
      ++none;
    }
    std::fill(fields_.begin() + static_cast<std::ptrdiff_t>(first), fields_.end(), none);
  }
}

void ExampleBuilder::end() {
  if (has_keys_) {
    end_sparse();
  } else if (schema_->is_criteo()) {
    if (lists_ > 0) {
      refuse("values or fields without keys: " + schema_->takes());
    }
    return end_criteo();
  } else if (!schema_->has_columns) {
    refuse("no keys: " + schema_->takes());
  } else if (lists_ > 0) {
    name_ = has_values_ ? "values" : "fields";
    if (schema_->others == Role::kCategorical) {
      refuse_cell("a list is not a cell: send text, a number, true, false or null");
    }
    unknown_.insert(name_);
  }
  if (examples() >= most_examples_) {
    refuse_size();
  }
  offsets_.push_back(static_cast<std::int64_t>(keys_.size()));
}

// ---- lines ----

void ExampleBuilder::put_criteo(const Cell& cell) {
  const unsigned column = name_ == "label" || name_ == "0" ? 0 : criteo_column(name_);
  if (column == 0 && name_ != "label" && name_ != "0") {
    refuse_cell("no column of Criteo's logs: they are 1 to 39, or I1 to I13 and C1 to C26");
  }
  if (column == 0) {
    return;
  }
  if ((cells_seen_ >> column & 1U) != 0) {
    refuse_cell("it is there twice");
  }
  cells_seen_ |= std::uint64_t{1} << column;
  a_column_ = name_;
  ++columns_;
  text::NumberRoom room;
  std::string_view text = cell.text;
  if (cell.kind == Cell::Kind::kReal && std::isfinite(cell.number) &&
      cell.number == std::floor(cell.number)) {
    text = {reinterpret_cast<const char*>(room.data()), text::number_text(cell.number, room)};
  } else if (cell.kind != Cell::Kind::kText && cell.kind != Cell::Kind::kWhole &&
             cell.kind != Cell::Kind::kNull) {
    refuse_cell(excerpt_of(cell) + " is not a cell: send text, a whole number or null");
  }
  if (column <= kIntegerColumns && !text.empty() && !is_integer(text)) {
    refuse_cell(excerpt_of(cell) + " is not a whole number below 2^63");
  }
  if (text.find_first_of("\t\r\n") != std::string_view::npos) {
    refuse_cell(excerpt_of(cell) + " has a tab or an end of line, which a cell of Criteo's cannot have");
  }
  cells_[column] = {text_.size(), text.size()};
  text_ += text;
}

void ExampleBuilder::end_criteo() {
  line_.assign(1, '0');
  for (unsigned column = 1; column < kCriteoCells; ++column) {
    line_ += '\t';
    if ((cells_seen_ >> column & 1U) != 0) {
      line_.append(text_, cells_[column].first, cells_[column].second);
    }
  }
  line_ += '\n';
  parse_text(line_, nullptr);
}

Features ExampleBuilder::finish() {
  if (schema_->pairs.empty()) {
    return {.offsets = offsets_, .keys = keys_, .values = values_, .fields = fields_};
  }
  const FieldedRows rows{offsets_, keys_, values_, fields_};
  Interactions interactions(schema_->pairs);
  crossed_offsets_.resize(offsets_.size());
  interactions.count(rows, crossed_offsets_);
  const auto made = static_cast<std::size_t>(crossed_offsets_.back());
  if (made > most_keys_) {
    refuse_size();
  }
  crossed_keys_.resize(made);
  crossed_values_.resize(values_.empty() ? 0 : made);
  interactions.write(rows, crossed_keys_, crossed_values_);
  return {.offsets = crossed_offsets_, .keys = crossed_keys_, .values = crossed_values_};
}

}  // namespace shoal::predict
