#include "predict/manifest.h"

#include <array>
#include <boost/hash2/sha2.hpp>
#include <charconv>
#include <set>

#include "base/check.h"
#include "base/crc32c.h"
#include "base/units.h"
#include "export/row_format.h"
#include "optim/init.h"

namespace shoal::predict {

namespace {

constexpr std::string_view kFormat = "shoal export";
constexpr std::uint64_t kVersion = 1;
constexpr std::size_t kMaxTables = 1024;
constexpr std::uint64_t kIndexBytes = 64;             // of memory, for each slot of a table with rows
constexpr std::uint64_t kFreeIndexBytes = 256 * MiB;  // for any export
constexpr std::string_view kDataSuffix = ".frozen";
constexpr std::uint64_t kAlignment = 64;

// {"crc32c":"xxxxxxxx","body":...}
constexpr std::string_view kBeforeSum = R"({"crc32c":")";
constexpr std::string_view kBeforeBody = R"(","body":)";
constexpr std::size_t kSumDigits = 8;

std::string_view body_of(std::string_view text, const std::string& path) {
  const std::size_t begin = kBeforeSum.size() + kSumDigits + kBeforeBody.size();
  const auto damaged = [&](const char* what) { return DamagedExport(path + " is damaged: " + what); };
  if (text.size() <= begin || !text.starts_with(kBeforeSum) ||
      text.substr(kBeforeSum.size() + kSumDigits, kBeforeBody.size()) != kBeforeBody || text.back() != '}') {
    throw damaged("it is not a checksum and a body");
  }
  std::uint32_t sum = 0;
  const char* const digits = text.data() + kBeforeSum.size();
  const auto [end, fault] = std::from_chars(digits, digits + kSumDigits, sum, 16);
  const std::string_view body = text.substr(begin, text.size() - begin - 1);
  if (fault != std::errc{} || end != digits + kSumDigits ||
      crc32c(std::as_bytes(std::span(body.data(), body.size()))) != sum) {
    throw damaged("its checksum does not match");
  }
  return body;
}

std::string sha256(std::string_view bytes) {
  boost::hash2::sha2_256 hash;
  hash.update(bytes.data(), bytes.size());
  std::string hexadecimal;
  for (const unsigned char byte : hash.result()) {
    constexpr std::string_view kDigits = "0123456789abcdef";
    hexadecimal += kDigits[byte >> 4U];
    hexadecimal += kDigits[byte & 15U];
  }
  return hexadecimal;
}

bool is_file_name(const std::string& name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == std::string::npos &&
         name.find('\0') == std::string::npos;
}

ManifestSection read_section(const json::value& given, const ManifestTable& table, std::uint64_t slots,
                             std::int64_t last_slot) {
  const std::string in = "table '" + table.name + "'";
  constexpr std::size_t kNumbers = 10;
  SHOAL_CHECK(given.is_array() && given.get_array().size() == kNumbers,
              in + " has a section that is no list of 10");
  std::array<std::uint64_t, kNumbers> n{};
  for (std::size_t i = 0; i < kNumbers; ++i) {
    n[i] = count_of(given.get_array()[i], "sections");
  }
  const std::string where = in + ", slot " + std::to_string(n[0]);
  SHOAL_CHECK(n[0]<slots&& static_cast<std::int64_t>(n[0])> last_slot, where + " is out of order");
  SHOAL_CHECK(n[1] < table.files.size(), where + ": there is no file " + std::to_string(n[1]));
  const std::uint64_t size = table.files[n[1]].bytes;
  SHOAL_CHECK(n[2] % kAlignment == 0 && n[2] <= size && n[3] <= size - n[2],
              where + ": its rows lie outside of their file");
  return {.slot = Slot{static_cast<std::uint32_t>(n[0])},
          .file = n[1],
          .offset = n[2],
          .bytes = n[3],
          .shape = {.rows = n[4], .homes = n[5], .lines = n[6], .reach = n[7], .width = n[8]},
          .crc32c = static_cast<std::uint32_t>(n[9])};
}

ManifestTable read_table(const json::object& given, std::uint64_t slots, std::set<std::string>& files) {
  ManifestTable table;
  table.name = text_in(given, "name");
  table.dim = count_in(given, "dim");
  table.dtype = text_in(given, "dtype");
  table.init = text_in(given, "init");
  table.init_parameter = number_in(given, "init_parameter");
  table.init_seed = count_in(given, "init_seed");
  static_cast<void>(RowFormat(table.dtype, table.dim));  // throws if there is none
  static_cast<void>(Init(table.init, table.init_parameter, table.init_seed));
  for (const json::value& one : array_in(given, "files")) {
    SHOAL_CHECK(one.is_object(), "a file of table '" + table.name + "' is not an object");
    ManifestFile file{text_in(one.get_object(), "name"), count_in(one.get_object(), "bytes")};
    SHOAL_CHECK(
        is_file_name(file.name) && file.name.ends_with(kDataSuffix),
        "table '" + table.name + "' has a file '" + file.name + "', which is not the name of a data file");
    SHOAL_CHECK(files.insert(file.name).second, "two tables have the file '" + file.name + "'");
    table.files.push_back(std::move(file));
  }
  std::int64_t last_slot = -1;
  std::uint64_t rows = 0;
  for (const json::value& one : array_in(given, "sections")) {
    table.sections.push_back(read_section(one, table, slots, last_slot));
    last_slot = static_cast<std::int64_t>(table.sections.back().slot);
    rows += table.sections.back().shape.rows;
  }
  SHOAL_CHECK(count_in(given, "rows") == rows,
              "table '" + table.name + "': its rows are not the sum of its sections");
  return table;
}

void check_memory(const Manifest& manifest) {
  std::uint64_t index = 0;
  std::uint64_t data = 0;
  for (const ManifestTable& table : manifest.tables) {
    index += table.sections.empty() ? 0 : kIndexBytes * manifest.slots;
    for (const ManifestFile& file : table.files) {
      data += file.bytes;
    }
  }
  SHOAL_CHECK(index <= kFreeIndexBytes || (index - kFreeIndexBytes) / 16 <= data,
              "its tables have few rows, and their " + std::to_string(manifest.slots) + " slots take " +
                  std::to_string(index) + " bytes of memory: export them from a store of fewer slots");
}

Manifest read_body(const json::object& body) {
  Manifest found;
  found.number = count_in(body, "number");
  found.slots = count_in(body, "slots");
  SHOAL_CHECK(found.slots >= 2 && found.slots <= 16384 && std::has_single_bit(found.slots),
              std::to_string(found.slots) + " slots: the number is not a power of two from 2 to 16384");
  if (const json::value* const tables = optional_in(body, "tables"); tables != nullptr) {
    SHOAL_CHECK(tables->is_array() && tables->get_array().size() <= kMaxTables,
                "its tables are not up to 1024");
    std::set<std::string> files;
    std::set<std::string> names;
    for (const json::value& one : tables->get_array()) {
      SHOAL_CHECK(one.is_object(), "a table is not an object");
      found.tables.push_back(read_table(one.get_object(), found.slots, files));
      SHOAL_CHECK(names.insert(found.tables.back().name).second, "two tables have the same name");
    }
  }
  check_memory(found);
  if (const json::value* const base = optional_in(body, "base"); base != nullptr) {
    SHOAL_CHECK(base->is_object(), "'base' is not an object");
    found.base_path = text_in(base->get_object(), "path");
    found.base_digest = text_in(base->get_object(), "digest");
    SHOAL_CHECK(!found.base_path.empty(), "the path of its base is empty");
  }
  if (const json::value* const model = optional_in(body, "model"); model != nullptr) {
    SHOAL_CHECK(model->is_object(), "'model' is not an object");
    found.model = model->get_object();
  }
  if (optional_in(body, "extras") != nullptr) {
    for (const json::value& one : array_in(body, "extras")) {
      SHOAL_CHECK(one.is_object(), "an extra file is not an object");
      const json::object& given = one.get_object();
      found.extras.push_back({text_in(given, "name"), count_in(given, "bytes"),
                              static_cast<std::uint32_t>(count_in(given, "crc32c"))});
      SHOAL_CHECK(is_file_name(found.extras.back().name), "an extra file has no name of a file");
    }
  }
  return found;
}

}  // namespace

Manifest read_manifest(std::string_view text, const std::string& path) {
  const std::string_view body = body_of(text, path);
  try {
    const json::value parsed = parse_json(body);
    SHOAL_CHECK(parsed.is_object(), "it is not an object");
    const json::object& members = parsed.get_object();
    const json::value* const format = optional_in(members, "format");
    if (format == nullptr || !format->is_string() || std::string_view(format->get_string()) != kFormat) {
      throw DamagedExport(path + " is not the manifest of an export");
    }
    if (const std::uint64_t version = count_in(members, "version"); version != kVersion) {
      throw DamagedExport(path + " is of version " + std::to_string(version) +
                          ": read it with a newer shoal");
    }
    Manifest found = read_body(members);
    found.digest = sha256(body);
    return found;
  } catch (const std::invalid_argument& error) {
    throw DamagedExport(path + " cannot be read: " + error.what());
  }
}

}  // namespace shoal::predict
