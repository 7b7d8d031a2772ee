#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <limits>
#include <memory>
#include <random>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "check.h"
#include "text/cell.h"
#include "text/cells.h"
#include "text/criteo.h"
#include "text/csv.h"
#include "text/fault.h"
#include "text/libsvm.h"
#include "text/target.h"
#include "text/token_key.h"
#include "text/vw.h"

namespace shoal::text::text_test {

namespace {

using Bytes = std::span<const std::uint8_t>;
using Parse = std::function<Stop(Bytes block, std::size_t start, Target& out, bool skip)>;

Bytes bytes(std::string_view text) {
  return {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()};
}

// Memory of exactly the size of the text: a read beyond it is found by the sanitizer.
struct Exact {
  explicit Exact(std::string_view text)
      : memory(std::make_unique<std::uint8_t[]>(text.size())), size(text.size()) {
    std::copy(text.begin(), text.end(), memory.get());
  }
  Bytes view() const { return {memory.get(), size}; }

  std::unique_ptr<std::uint8_t[]> memory;
  std::size_t size;
};

struct Arrays {
  Arrays(std::size_t rows, std::size_t features)
      : labels(rows),
        weights(rows, 1.0F),
        values(features, 1.0F),
        keys(features),
        fields(features),
        indptr(rows + 1),
        spans(2 * features),
        ends(2 * rows) {
    target = {.labels = labels,
              .weights = weights,
              .indptr = indptr,
              .keys = keys,
              .values = values,
              .fields = fields,
              .spans = spans,
              .ends = ends};
  }
  Arrays(const Arrays&) = delete;
  Arrays& operator=(const Arrays&) = delete;

  std::vector<float> labels, weights, values;
  std::vector<std::uint64_t> keys, fields;
  std::vector<std::int64_t> indptr, spans, ends;
  Target target;
};

struct Feature {
  std::uint64_t key;
  float value;
  std::uint64_t field;
  std::string text;

  friend bool operator==(const Feature&, const Feature&) = default;
};
struct Row {
  float label;
  float weight;
  std::vector<Feature> features;

  friend bool operator==(const Row&, const Row&) = default;
};
using Rows = std::vector<Row>;

Rows rows_of(const Arrays& arrays, Bytes block) {
  Rows rows;
  for (std::size_t r = 0; r < arrays.target.row; ++r) {
    Row& row = rows.emplace_back(Row{arrays.labels[r], arrays.weights[r], {}});
    for (auto i = static_cast<std::size_t>(arrays.indptr[r]);
         i < static_cast<std::size_t>(arrays.indptr[r + 1]); ++i) {
      const auto begin = block.begin() + arrays.spans[2 * i];
      const std::string text(begin, block.begin() + arrays.spans[2 * i + 1]);
      row.features.push_back({arrays.keys[i], arrays.values[i], arrays.fields[i], text});
    }
  }
  CHECK_EQ(arrays.target.nnz, static_cast<std::size_t>(arrays.indptr[arrays.target.row]));
  return rows;
}

Rows parsed(const Parse& parse, std::string_view text, bool labelled = true) {
  const Exact block(text);
  Arrays arrays(20, 200);
  arrays.target.labelled = labelled;
  const Stop stop = parse(block.view(), 0, arrays.target, false);
  CHECK_EQ(static_cast<int>(stop.fault), 0);
  CHECK_EQ(stop.end, text.size());
  CHECK_EQ(stop.lines, static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n')));
  CHECK_EQ(stop.skipped, 0);
  return rows_of(arrays, block.view());
}

// The key by its definition, a byte at a time.
std::uint64_t slow_key(std::uint64_t field, std::string_view text) {
  const auto word_at = [&](std::size_t i, std::size_t n) {
    std::uint64_t word = 0;
    for (std::size_t j = 0; j < n; ++j) {
      word |= std::uint64_t{static_cast<std::uint8_t>(text[i + j])} << (8 * j);
    }
    return word;
  };
  std::uint64_t h = mix(field) + text.size() * 0x9e3779b97f4a7c15U;
  if (text.size() <= 8) {
    return scramble(h ^ word_at(0, text.size()));
  }
  for (std::size_t i = 0; i + 8 < text.size(); i += 8) {
    h = scramble(h ^ word_at(i, 8));
  }
  return scramble(h ^ word_at(text.size() - 8, 8));
}

Feature number(std::uint64_t key, float value, std::uint64_t field, std::string text) {
  return {key, value, field, std::move(text)};
}
Feature name(std::uint64_t field, std::string text, float value = 1.0F) {
  return {slow_key(field, text), value, field, text};
}

// Tables in which bucket b holds b alone, up to 299, and the rest.
struct FlatTables {
  FlatTables() {
    for (std::uint64_t b = 0; b < kBuckets; ++b) {
      floors.push_back(b);
    }
    floors.push_back(std::numeric_limits<std::uint64_t>::max());
    cells.assign(CriteoTables::kCells, kBuckets - 1);
    for (std::uint64_t v = 0; v < kBuckets; ++v) {
      cells[criteo_cell(kBuckets - 1 - v)] = static_cast<std::uint16_t>(kBuckets - 1 - v);
    }
    for (std::size_t v = 0; v < CriteoTables::kSmallIntegers; ++v) {
      small.push_back(static_cast<std::uint8_t>(std::min<std::size_t>(v, 255)));
    }
    for (std::uint64_t i = 0; i < CriteoTables::kIntegers * kBuckets; ++i) {
      numbers.push_back(i);
    }
  }
  CriteoTables view() const { return {floors, cells, small, numbers}; }
  Feature integer(std::uint64_t column, std::uint64_t bucket, std::string text) const {
    return {(column - 1) * kBuckets + bucket, 1.0F, column, std::move(text)};
  }

  static constexpr std::uint64_t kBuckets = 300;
  std::vector<std::uint64_t> floors, numbers;
  std::vector<std::uint16_t> cells;
  std::vector<std::uint8_t> small;
};

const Parse kCriteo = [](Bytes block, std::size_t start, Target& out, bool skip) {
  static const FlatTables tables;
  return parse_criteo(block, start, out, skip, tables.view());
};

CsvColumn column(CellKind kind, std::uint64_t field) { return {kind, field, field_seed(field)}; }

CsvColumns csv_columns(std::vector<CellKind> kinds) {
  CsvColumns columns;
  for (const CellKind kind : kinds) {
    columns.all.push_back(column(kind, columns.all.size()));
  }
  columns.missing = MissingTexts({"", "NA"});
  return columns;
}

Parse csv(CsvColumns columns) {
  return [columns](Bytes block, std::size_t start, Target& out, bool skip) {
    std::vector<std::uint8_t> scratch(block.size());
    return parse_csv(block, start, out, skip, columns, scratch);
  };
}

using enum CellKind;
const CsvColumns kColumns = csv_columns({kLabel, kNumeric, kCategorical, kPassedOver, kWeight});
const CsvColumns kListed = csv_columns({kLabel, kList, kVector});

// A line of Criteo's: a label, integers from `first` on, and 26 categories.
std::string criteo_line(std::string_view label, int first, std::string_view category) {
  std::string line(label);
  for (int i = 0; i < 13; ++i) {
    line.append("\t").append(std::to_string(first + i));
  }
  for (int i = 0; i < 26; ++i) {
    line.append("\t").append(category);
  }
  return line.append("\n");
}

struct Example {
  const char* format;
  Parse parse;
  std::string text;
};

// Lines of every format, malformed and unusual ones among them.
std::vector<Example> examples() {
  const std::string criteo = criteo_line("1", 7, "68fd1e64") + criteo_line("0", -3, "") + "1\t5\n" +
                             criteo_line("-1", 9998, "a long category");
  return {
      {"libsvm", parse_libsvm,
       "1 3:1 18446744073709551615:0.25 # c\n\n-1 qid:7 2:1e-3\n0 x\n+1 5:12345678.9\n"},
      {"libffm", parse_libffm, "1 2:3:1 4:5:0.5\n0\n1 2:3\n0 18446744073709551615:1:1\n"},
      {"vw", parse_vw, "1 2 tag|a b:2 longer_than_eight\n0 |:3 x |y z:1e2\n1 a\n-1 'q |n:2 m\n"},
      {"criteo", kCriteo, criteo},
      {"csv", csv(kColumns),
       "1,0.5,blue,x,2\n0,NA,\"a\"\"b\",,1\n1,x,b,c,1\n1,12345,17.0,c,0.5\r\n0,7,,c,1\n"},
      {"csv lists", csv(kListed), "1,a|b,1|2.5\n0,\"x|\"\"|\",\"1|\"\n1,|,x\n"},
  };
}

// What random lines are made of: for each column some texts, malformed ones among them.
struct Shape {
  Parse parse;
  char separator;
  std::vector<std::vector<std::string>> columns;
};

std::vector<Shape> shapes() {
  const std::vector<std::string> labels = {"1", "0", "-1", "1.0", "x"};
  const std::vector<std::string> numbers = {"", "NA", "7", "12345", "0.5", "-3", "1e-05", " 8 ", "x"};
  const std::vector<std::string> texts = {
      "",         "NA",    "a",      "68fd1e64",    "longer than eight",
      "17.0",     "1e-05", "-2e-07", "3e+12",       "-0",
      "100",      "TRUE",  "False",  "12:00:00.50", "12:00:00.00",
      "\"q,\"\"", "\"x",   "7e-1",   "a-05",        "2024-05-01T12:00:00Z"};
  const std::vector<std::string> integers = {"",   "0", "7", "42", "255", "10000", "-5", "1234567890123",
                                             "1.5"};
  const std::vector<std::string> features = {"3:1", "7:0.5", "18446744073709551615:1e-3",
                                             "",    "x",     "5:12345678.9"};
  const std::vector<std::string> fielded = {"1:2:3", "4:5:0.5", "", "2:3", "18446744073709551615:1:1"};
  const std::vector<std::string> words = {"|a",    "b", "b:2", "longer_than_eight", "|:3", "'q",
                                          "z:1e2", "1", ""};
  std::vector<std::vector<std::string>> criteo(40, texts);
  criteo[0] = labels;
  std::fill_n(criteo.begin() + 1, 13, integers);
  return {{csv(kColumns), ',', {labels, numbers, texts, texts, {"1", "0.5", "2", "-1"}}},
          {csv(csv_columns({kCategorical, kCategorical, kLabel})), ',', {texts, texts, labels}},
          {csv(kListed), ',', {labels, {"a|b", "", "17.0|1e-05", "\"x|\""}, {"1|2.5", "1", "", "1|x"}}},
          {parse_libsvm, ' ', {labels, features, features, features}},
          {parse_libffm, ' ', {labels, fielded, fielded, fielded}},
          {parse_vw, ' ', {labels, words, words, words, words}},
          {kCriteo, '\t', criteo}};
}

}  // namespace

TEST(every_fault_has_its_own_text) {
  std::set<std::string_view> texts;
  for (std::size_t code = 0; code < kFaults; ++code) {
    CHECK(texts.insert(fault_text(static_cast<Fault>(code))).second);
  }
  CHECK_EQ(fault_text(Fault::kGood), "");
  CHECK_EQ(fault_text(Fault::kLabelClass).substr(0, 40), "the label is not the number of a class, ");
}

TEST(keys_of_tokens_are_those_of_every_version_and_equal_the_slow_definition) {
  const auto key = [](std::uint64_t field, std::string_view text) {
    const Exact token(text);  // no byte behind it may be read
    const auto view = token.view();
    return token_key(field_seed(field), view.data(), view.size(), view.data() + view.size());
  };
  CHECK_EQ(key(0, ""), 0x48218226ff3cd4bfU);
  CHECK_EQ(key(0, "a"), 0xdce7424d02840130U);
  CHECK_EQ(key(3, "blue"), 0x6eb336c3a479d90fU);
  CHECK_EQ(key(7, "68fd1e64"), 0x93b15231e21761d7U);
  CHECK_EQ(key(7, "123456789"), 0xf52e08f9de82be40U);
  CHECK_EQ(key(7, "a text of more than sixteen bytes"), 0x3bfbb9941887853eU);
  std::string text;
  for (int n = 0; n < 70; ++n) {
    CHECK_EQ(key(5, text), slow_key(5, text));
    const std::string behind = text + ",12345678";  // as in a line
    const Bytes cell = bytes(behind);
    CHECK_EQ(scramble(unscrambled_separated(field_seed(5), cell.data(), text.size() + 1,
                                            cell.data() + cell.size())),
             slow_key(5, text));
    text += static_cast<char>(200 + n);
  }
}

TEST(lines_of_libsvm_and_libffm_become_rows) {
  CHECK(parsed(parse_libsvm, "1 3:1 18446744073709551615:0.25 # c\n\n# c\n-1 qid:7 2:1e-3\n0\n") ==
        (Rows{{1,
               1,
               {number(3, 1, 0, "3"),
                number(std::numeric_limits<std::uint64_t>::max(), 0.25F, 0, "18446744073709551615")}},
              {0, 1, {number(2, 1e-3F, 0, "2")}},
              {0, 1, {}}}));
  CHECK(parsed(parse_libffm, "1 2:3:1 4:5:-0.5\n") ==
        (Rows{{1, 1, {number(3, 1, 2, "2:3"), number(5, -0.5F, 4, "4:5")}}}));
  const Rows unlabelled = parsed(parse_libsvm, "7 3:1\n3:1\n", false);
  CHECK_EQ(unlabelled.size(), 2);
  CHECK(std::isnan(unlabelled[0].label));
  CHECK(unlabelled[0].features == unlabelled[1].features);
}

TEST(lines_of_vowpal_wabbit_become_rows) {
  const std::uint64_t a = slow_key(0, "a");
  const std::uint64_t empty = slow_key(0, "");
  CHECK(parsed(parse_vw, "1 2 tag|a b:2 longer_than_eight\n\n-1 'q |:3 x |a b\n") ==
        (Rows{{1, 2, {name(a, "b", 2), name(a, "longer_than_eight")}},
              {0, 1, {name(empty, "x", 3), name(a, "b")}}}));
}

TEST(lines_of_criteo_become_rows_whether_their_cells_are_scanned_or_not) {
  const FlatTables tables;
  for (const int lines : {1, 3}) {  // the last line of a block is read byte by byte
    std::string text;
    for (int i = 0; i < lines; ++i) {
      text += criteo_line("1", 7, "68fd1e64");
    }
    for (const Row& row : parsed(kCriteo, text)) {
      CHECK_EQ(row.label, 1.0F);
      CHECK_EQ(row.features.size(), 39);
      for (std::uint64_t c = 1; c <= 13; ++c) {
        CHECK(row.features[c - 1] == tables.integer(c, 6 + c, std::to_string(6 + c)));
      }
      for (std::uint64_t c = 14; c <= 39; ++c) {
        CHECK(row.features[c - 1] == name(c, "68fd1e64"));
      }
    }
  }
  const Rows rows = parsed(kCriteo, criteo_line("0", -3, "") + criteo_line("1", 100'000, "") + "\n");
  CHECK_EQ(rows.size(), 2);
  CHECK_EQ(rows[0].features.size(), 13);
  CHECK_EQ(rows[0].features[0].key, slow_key(1, "SP-3"));
  CHECK_EQ(rows[0].features[3].key, tables.integer(4, 0, "").key);
  CHECK_EQ(rows[1].features[2].key, tables.integer(3, FlatTables::kBuckets - 1, "").key);
  // The tabs tell whether there is a label.
  const std::string line = criteo_line("1", 7, "a");
  const Rows unlabelled = parsed(kCriteo, line + line.substr(2) + line + line.substr(2), false);
  CHECK_EQ(unlabelled.size(), 4);
  for (const Row& row : unlabelled) {
    CHECK(row.features == unlabelled[0].features);
  }
}

TEST(lines_of_csv_become_rows_whether_their_cells_are_scanned_or_not) {
  const Row blue{1, 2, {{slow_key(1, ""), 0.5F, 1, "0.5"}, name(2, "blue")}};
  const std::string line = "1,0.5,blue,x,2\n";
  CHECK(parsed(csv(kColumns), line) == Rows{blue});
  CHECK(parsed(csv(kColumns), line + line + line + line) == (Rows{blue, blue, blue, blue}));
  CHECK(parsed(csv(kColumns), "0,NA,\"a\"\"b\",,1\r\n\n0,,17.0,,1\n") ==
        (Rows{{0, 1, {{slow_key(2, "a\"b"), 1, 2, "\"a\"\"b\""}}},
              {0, 1, {{slow_key(2, "17"), 1, 2, "17.0"}}}}));
  CHECK(parsed(csv(kListed), "1,a||17.0,1|NA|2.5\n") ==
        (Rows{{1,
               1,
               {name(1, "a"),
                {slow_key(1, std::string_view("\0missing", 8)), 1, 1, ""},
                {slow_key(1, "17"), 1, 1, "17.0"},
                {slow_key(2, ""), 1, 2, "1"},
                {slow_key(2, ""), 0, 2, ""},
                {slow_key(2, ""), 2.5F, 2, "2.5"}}}}));
  // The last number of a copied cell ends with the copy.
  CsvColumns quoted = kListed;
  quoted.missing = MissingTexts({"x\"y"});
  CHECK(parsed(csv(quoted), "1,a,\"x\"\"y|2\"\n") == (Rows{{1,
                                                            1,
                                                            {name(1, "a"),
                                                             {slow_key(2, ""), 0, 2, "\"x\"\"y|2\""},
                                                             {slow_key(2, ""), 2, 2, "\"x\"\"y|2\""}}}}));
  CsvColumns named = csv_columns({kLabel, kCategorical});
  named.positive = "true";
  named.unlabelled = {column(kCategorical, 1)};
  CHECK(parsed(csv(named), "True,a\n0,a\n") == (Rows{{1, 1, {name(1, "a")}}, {0, 1, {name(1, "a")}}}));
  const Rows unlabelled = parsed(csv(named), "1,a\na\n1,a\na\n1,a\na\n", false);
  CHECK_EQ(unlabelled.size(), 6);
  for (const Row& row : unlabelled) {
    CHECK(row.features == std::vector{name(1, "a")});
  }
}

TEST(a_malformed_line_stops_a_parse_at_its_fault_or_is_skipped) {
  struct Case {
    Parse parse;
    std::string good, bad;
    Fault fault;
    std::size_t at;  // in the bad line
  };
  const std::vector<Case> cases = {
      {parse_libsvm, "1 2:3\n", "2 2:3\n", Fault::kLabelRange, 0},
      {parse_libsvm, "1 2:3\n", "1 2:3 4:x\n", Fault::kValueText, 8},
      {parse_libsvm, "1 2:3\n", "1 18446744073709551616:1\n", Fault::kKeyRange, 2},
      {parse_libffm, "1 1:2:3\n", "1 2\n", Fault::kFieldText, 3},
      {parse_vw, "1 |a b\n", "1 1 3 |a b\n", Fault::kInitial, 4},
      {parse_vw, "1 |a b\n", "1 a\n", Fault::kImportance, 2},
      {parse_vw, "1 |a b\n", "1\n", Fault::kBarMissing, 1},
      {kCriteo, criteo_line("1", 7, "a"), "1\t5\n", Fault::kColumns, 3},
      {kCriteo, criteo_line("1", 7, "a"), "1\tx" + criteo_line("", 7, "a"), Fault::kIntegerText, 2},
      {csv(kColumns), "1,0.5,blue,x,2\n", "1,x,blue,x,2\n", Fault::kValueText, 2},
      {csv(kColumns), "1,0.5,blue,x,2\n", "1,0.5,\"blue,x,2\n", Fault::kQuoteOpen, 6},
      {csv(kColumns), "1,0.5,blue,x,2\n", "1,0.5,blue,x\n", Fault::kCells, 12},
      {csv(kColumns), "1,0.5,blue,x,2\n", ",0.5,blue,x,2\n", Fault::kCellMissing, 0},
  };
  for (const Case& one : cases) {
    const Exact block(one.good + one.bad + one.good + one.good);
    Arrays stopped(9, 200);
    const Stop stop = one.parse(block.view(), 0, stopped.target, false);
    CHECK_EQ(fault_text(stop.fault), fault_text(one.fault));
    CHECK_EQ(stop.at, one.good.size() + one.at);
    CHECK_EQ(stop.end, one.good.size());
    CHECK_EQ(stop.lines, 1);
    CHECK_EQ(stopped.target.row, 1);
    Arrays skipped(9, 200);
    const Stop all = one.parse(block.view(), 0, skipped.target, true);
    CHECK_EQ(static_cast<int>(all.fault), 0);
    CHECK_EQ(all.end, block.size);
    CHECK_EQ(all.lines, 4);
    CHECK_EQ(all.skipped, 1);
    CHECK_EQ(skipped.target.row, 3);
    CHECK_EQ(skipped.ends[2], static_cast<std::int64_t>(2 * one.good.size() + one.bad.size()));
    CHECK_EQ(skipped.ends[3], 1);
  }
}

TEST(a_parse_into_arrays_that_are_full_goes_on_from_the_line_that_did_not_fit) {
  for (const Example& example : examples()) {
    const Exact block(example.text);
    Arrays whole(20, 200);
    example.parse(block.view(), 0, whole.target, true);
    const Rows want = rows_of(whole, block.view());
    for (std::size_t room = 39; room <= 80; ++room) {
      Rows got;
      Stop stop;
      while (stop.end < block.size) {
        Arrays few(1 + room % 3, room);
        const std::size_t before = stop.end;
        stop = example.parse(block.view(), stop.end, few.target, true);
        CHECK(stop.end > before);
        for (const Row& row : rows_of(few, block.view())) {
          got.push_back(row);
        }
      }
      CHECK(got == want);
    }
    Arrays none(20, 0);
    const Stop stop = example.parse(block.view(), 0, none.target, true);
    CHECK_EQ(none.target.nnz, 0);
    CHECK(stop.end < block.size);
  }
}

TEST(a_block_that_ends_anywhere_is_read_to_its_end_and_no_further) {
  for (const Example& example : examples()) {
    const Exact whole(example.text);
    Arrays all(20, 200);
    example.parse(whole.view(), 0, all.target, true);
    const Rows want = rows_of(all, whole.view());
    for (std::size_t size = 0; size <= example.text.size(); ++size) {
      const Exact block(example.text.substr(0, size) + "\n");
      for (const bool labelled : {true, false}) {
        Arrays arrays(20, 200);
        arrays.target.labelled = labelled;
        const Stop stop = example.parse(block.view(), 0, arrays.target, true);
        CHECK_EQ(stop.end, block.size);
        if (!labelled) {
          continue;
        }
        const Rows got = rows_of(arrays, block.view());
        const auto lines = static_cast<std::size_t>(std::count_if(
            all.ends.begin(), all.ends.begin() + static_cast<std::ptrdiff_t>(2 * all.target.row),
            [&, i = 0](std::int64_t end) mutable {
              return i++ % 2 == 0 && end <= static_cast<std::int64_t>(size);
            }));
        CHECK(got.size() >= lines);
        CHECK(std::equal(want.begin(), want.begin() + static_cast<std::ptrdiff_t>(lines), got.begin()));
      }
    }
  }
}

TEST(a_line_has_the_same_row_wherever_it_is_in_a_block) {
  std::mt19937_64 random(5);
  const auto rows = [](const Parse& parse, std::string_view text) {
    const Exact block(text);
    Arrays arrays(20, text.size() + 20 * 40);
    CHECK_EQ(parse(block.view(), 0, arrays.target, true).end, text.size());
    return rows_of(arrays, block.view());
  };
  std::size_t found = 0;
  for (const Shape& shape : shapes()) {
    for (int round = 0; round < check::rounds(600); ++round) {
      // Few texts in a block: what is done for it as a whole depends on what it does not hold.
      std::vector<std::vector<std::string>> columns = shape.columns;
      for (std::vector<std::string>& texts : columns) {
        std::shuffle(texts.begin(), texts.end(), random);
        texts.resize(1 + random() % std::min<std::size_t>(texts.size(), 3));
      }
      std::string text;
      Rows alone;
      for (int i = 0; i < 20; ++i) {
        std::string line;
        for (const std::vector<std::string>& texts : columns) {
          line.append(line.empty() ? "" : std::string(1, shape.separator))
              .append(texts[random() % texts.size()]);
        }
        line.append(random() % 8 == 0 ? "\r\n" : "\n");
        text += line;
        std::ranges::move(rows(shape.parse, line), std::back_inserter(alone));
      }
      found += alone.size();
      CHECK(rows(shape.parse, text) == alone);
    }
  }
  CHECK(found > 0);
}

TEST(equal_values_have_equal_texts_and_keys) {
  const std::vector<std::pair<const char*, const char*>> texts = {
      {"", ""},
      {"blue", "blue"},
      {"True", "true"},
      {"FALSE", "false"},
      {"17.0", "17"},
      {"-0", "0"},
      {"-0.00", "0"},
      {"0.50", "0.50"},
      {"007.0", "007.0"},
      {"2.02405e+13", "20240500000000"},
      {"1.5e-07", "0.00000015"},
      {"12:00:00.500", "12:00:00.5"},
      {"12:00:00.000", "12:00:00"},
      {"2024-05-01T12:00:00.500000Z", "2024-05-01 12:00:00.5"},
      {"2024-05-01 00:00:00", "2024-05-01"},
      {"2024-12-31 23:30:00-01:00", "2025-01-01 00:30:00"},
      {"2024-02-30 12:00:00", "2024-02-30 12:00:00"},
  };
  for (const auto& [given, want] : texts) {
    const Exact cell(given);
    const Bytes view = cell.view();
    const Cursor end = view.data() + view.size();
    CellRoom room;
    const CellText text = cell_text(view.data(), view.size(), end, room);
    CHECK_EQ(std::string(text.begin, text.begin + text.size), want);
    CHECK_EQ(cell_key(field_seed(3), view.data(), view.size(), end), slow_key(3, want));
  }
}

TEST(numbers_are_written_without_exponents_and_read_as_csv_reads_them) {
  NumberRoom room;
  const std::vector<std::pair<double, const char*>> numbers = {
      {17.0, "17"},
      {-0.0, "0"},
      {0.1, "0.1"},
      {-1e-7, "-0.0000001"},
      {1e21, "1000000000000000000000"},
      {18446744073709549568.0, "18446744073709549568"},
      {std::nan(""), "nan"},
      {-HUGE_VAL, "-inf"}};
  for (const auto& [given, want] : numbers) {
    CHECK_EQ(std::string(room.begin(), room.begin() + static_cast<std::ptrdiff_t>(number_text(given, room))),
             want);
  }
  const auto read = [](const std::string& text, float& out) {
    return read_number_of(Exact(text).view(), out);
  };
  float number = 0.0F;
  CHECK_EQ(static_cast<int>(read(" 2.5\t", number)), 0);
  CHECK_EQ(number, 2.5F);
  CHECK_EQ(static_cast<int>(read("1" + std::string(2000, '0') + "e-2000", number)), 0);
  CHECK_EQ(number, 1.0F);
  CHECK_EQ(static_cast<int>(read("1e39", number)), static_cast<int>(Fault::kValueRange));
  for (const char* text : {"", " ", "x", "1 2", "1e", "1\n"}) {
    CHECK_EQ(static_cast<int>(read(text, number)), static_cast<int>(Fault::kValueText));
  }
}

TEST(cells_one_after_the_other_have_the_texts_keys_and_numbers_of_each) {
  const Exact data("17.0x1e3");
  const std::vector<std::int64_t> offsets = {0, 4, 5, 5, 8};
  std::vector<std::uint64_t> keys(4);
  hash_cells(data.view(), offsets, 3, keys);
  CHECK(keys == (std::vector{slow_key(3, "17"), slow_key(3, "x"), slow_key(3, ""), slow_key(3, "1e3")}));
  std::vector<std::int64_t> ends(5);
  const auto plain = plain_texts(data.view(), offsets, ends);
  CHECK_EQ(std::string(plain.begin(), plain.end()), "17x1000");
  CHECK(ends == (std::vector<std::int64_t>{0, 2, 3, 3, 7}));
  const auto texts = number_texts(std::vector{1.5, 2.0}, std::span(ends).first(3));
  CHECK_EQ(std::string(texts.begin(), texts.end()), "1.52");
  std::vector<float> numbers(4);
  const NumbersRead all =
      read_numbers(data.view(), offsets, std::array<std::uint8_t, 4>{1, 0, 0, 1}, numbers);
  CHECK_EQ(static_cast<int>(all.fault), 0);
  CHECK_EQ(numbers[0], 17.0F);
  CHECK(std::isnan(numbers[1]));
  CHECK_EQ(numbers[3], 1000.0F);
  const NumbersRead some =
      read_numbers(data.view(), offsets, std::array<std::uint8_t, 4>{1, 1, 1, 1}, numbers);
  CHECK_EQ(static_cast<int>(some.fault), static_cast<int>(Fault::kValueText));
  CHECK_EQ(some.count, 1);
}

TEST(a_missing_cell_has_one_of_the_texts_given) {
  const MissingTexts missing({"NA", "longer_than_eight"});
  const auto is = [&](std::string_view text) {
    const Exact cell(text);
    return missing.contains(cell.view().data(), cell.size);
  };
  CHECK(is("NA") && is("longer_than_eight"));
  CHECK(!is("") && !is("N") && !is("NAN") && !is("na"));
  CHECK(!missing.has_empty() && MissingTexts({""}).has_empty());
}

}  // namespace shoal::text::text_test
