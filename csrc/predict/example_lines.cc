// The lines of text of an ExampleBuilder, parsed as in a file.

#include <algorithm>

#include "predict/criteo_tables.h"
#include "predict/csv_rows.h"
#include "predict/example_builder.h"
#include "text/libsvm.h"
#include "text/vw.h"

namespace shoal::predict {

namespace {

constexpr std::size_t kShownBefore = 40;  // bytes of a line before the one at fault, in a message
constexpr std::string_view kCriteoNames[] = {
    "label", "I1",  "I2",  "I3",  "I4",  "I5",  "I6",  "I7",  "I8",  "I9",  "I10", "I11", "I12", "I13",
    "C1",    "C2",  "C3",  "C4",  "C5",  "C6",  "C7",  "C8",  "C9",  "C10", "C11", "C12", "C13", "C14",
    "C15",   "C16", "C17", "C18", "C19", "C20", "C21", "C22", "C23", "C24", "C25", "C26"};

}  // namespace

void ExampleBuilder::line(std::string_view text) {
  if (schema_->has_columns || schema_->format == DataFormat::kNone) {
    refuse("a line of text, " + in_quotes(text) + ": " + schema_->takes());
  }
  if (text.ends_with('\n')) {
    text.remove_suffix(1);
  }
  if (text.ends_with('\r')) {
    text.remove_suffix(1);
  }
  if (text.find('\n') != std::string_view::npos) {
    refuse("a line break within a line: send an instance for each line");
  }
  line_.assign(text);
  line_ += '\n';
  const std::size_t before = examples();
  parse_text(line_, nullptr);
  if (examples() == before) {
    refuse("a line without an example: leave out blank lines");
  }
}

void ExampleBuilder::text(std::string_view text) {
  if (schema_->format == DataFormat::kNone) {
    throw BadExample(-1, "lines of text: " + schema_->takes());
  }
  const std::size_t newline = std::min(text.find('\n'), text.size());
  const std::string_view first = text.substr(0, newline);
  const std::size_t last = first.find_last_not_of('\r');
  if (newline + 1 >= text.size() && last != std::string_view::npos && first.find('\r') < last) {
    throw BadExample(0, std::string(kCrAlone));
  }
  line_.assign(text);
  if (!line_.ends_with('\n')) {
    line_ += '\n';
  }
  if (!schema_->has_columns) {
    return parse_text(line_, nullptr);
  }
  std::size_t start = 0;
  std::vector<std::string> names;
  if (!schema_->header) {
    start = line_.find('\n') + 1;
    names = split_header(std::string_view(line_).substr(0, start - 1), schema_->separator);
    for (const std::string& name : names) {
      if (schema_->others == Role::kPassedOver && !schema_->columns.contains(name)) {
        unknown_.insert(name);
      }
    }
  }
  const std::vector<std::string>& all = schema_->header ? *schema_->header : names;
  const text::CsvColumns columns = bind_columns(*schema_, all);
  const std::string rows = line_.substr(start);
  try {
    parse_text(rows, &columns);
  } catch (const BadLine& error) {
    const std::string name = column_at(*schema_, all, error.line(), error.at());
    if (name.empty()) {
      refuse(error.what());
    }
    name_ = name;
    refuse_cell(error.what());
  }
}

// `text` is whole lines; `columns`: of csv.
void ExampleBuilder::parse_text(std::string_view text, const text::CsvColumns* columns) {
  const bool has_values = columns != nullptr ? schema_->has_values : schema_->format != DataFormat::kCriteo;
  if (has_values && !is_valued_) {
    is_valued_ = true;
    values_.assign(keys_.size(), 1.0F);
  }
  const auto bytes = text::bytes_of(text);
  unquoted_.resize(columns == nullptr ? 0 : text.size());
  std::size_t start = 0;
  std::size_t row = examples();
  std::size_t nnz = keys_.size();
  const auto lines = static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n'));
  std::size_t room =
      std::max<std::size_t>(64, text.size() / 3) + (columns == nullptr ? 0 : columns->all.size());
  for (;;) {
    if (nnz + room > most_keys_ || row + lines > most_examples_) {
      refuse_size();
    }
    offsets_.resize(row + lines + 1);
    labels_.resize(row + lines);
    weights_.resize(row + lines);
    ends_.resize(2 * (row + lines));
    keys_.resize(nnz + room);
    values_.resize(is_valued_ ? nnz + room : 0, 1.0F);
    fields_.resize(takes_fields_ ? nnz + room : 0);
    text::Target target{.labels = labels_,
                        .weights = weights_,
                        .indptr = offsets_,
                        .keys = keys_,
                        .values = has_values ? std::span(values_) : std::span<float>(),
                        .fields = fields_,
                        .spans = {},
                        .ends = ends_,
                        .labelled = false,
                        .classes = 0,
                        .row = row,
                        .nnz = nnz};
    text::Stop stop;
    if (columns != nullptr) {
      stop = text::parse_csv(bytes, start, target, false, *columns, unquoted_);
    } else if (schema_->format == DataFormat::kLibsvm) {
      stop = text::parse_libsvm(bytes, start, target, false);
    } else if (schema_->format == DataFormat::kLibffm) {
      stop = text::parse_libffm(bytes, start, target, false);
    } else if (schema_->format == DataFormat::kVw) {
      stop = text::parse_vw(bytes, start, target, false);
    } else {
      stop = text::parse_criteo(bytes, start, target, false, criteo_tables());
    }
    row = target.row;
    nnz = target.nnz;
    start = stop.end;
    if (stop.fault != text::Fault::kGood) {
      offsets_.resize(row + 1);
      refuse_line(text.substr(start, text.find('\n', start) - start), stop.at - start, stop.fault);
    }
    if (start == text.size()) {
      break;
    }
    room *= 2;
  }
  offsets_.resize(row + 1);
  keys_.resize(nnz);
  values_.resize(is_valued_ ? nnz : 0, 1.0F);
  fields_.resize(takes_fields_ ? nnz : 0);
}

void ExampleBuilder::refuse_line(std::string_view line, std::size_t at, text::Fault fault) {
  at = std::min(at, line.size());
  const std::string_view shown = line.substr(at - std::min(at, kShownBefore));
  const std::string form = schema_->has_columns ? "csv" : schema_->format_name;
  const std::string what = std::string(text::fault_text(fault)) + " at byte " + std::to_string(at) +
                           " of the " + form + " line: " + in_quotes(shown);
  if (schema_->has_columns) {
    throw BadLine(std::string(line), at, what);
  }
  const std::string_view before = line.substr(0, at);
  const auto tabs = static_cast<std::size_t>(std::count(before.begin(), before.end(), '\t'));
  if (schema_->is_criteo() && tabs > 0 && tabs < kCriteoCells) {
    name_ = kCriteoNames[tabs];
    refuse_cell(what);
  }
  refuse(what);
}

}  // namespace shoal::predict
