// The manifest of an export (docs/export-format.md): read and checked, before any data file is opened.
//
// Invariants of a Manifest that read_manifest() returns
//   I1  Its checksum is right, and its format and version are those of this library.
//   I2  Sections ascend by slot and lie inside their files; names of files have no folder in them.
//   I3  Its tables take memory in proportion to its files.
//
// Threads: pure functions.

#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "export/section_writer.h"
#include "predict/json.h"

namespace shoal::predict {

// A file that is missing, damaged or of another format: the message names it.
class DamagedExport : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct ManifestFile {
  std::string name;
  std::uint64_t bytes = 0;
};

// A file that only the model reads. Its name there follows the first hyphen.
struct ManifestExtra {
  std::string name;
  std::uint64_t bytes = 0;
  std::uint32_t crc32c = 0;
};

struct ManifestSection {
  Slot slot{};
  std::size_t file = 0;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  SectionShape shape;
  std::uint32_t crc32c = 0;
};

struct ManifestTable {
  std::string name;
  std::uint64_t dim = 0;
  std::string dtype;
  std::string init;
  double init_parameter = 0.0;
  std::uint64_t init_seed = 0;
  std::vector<ManifestFile> files;
  std::vector<ManifestSection> sections;

  bool is_read_like(const ManifestTable& other) const noexcept {
    return name == other.name && dim == other.dim && dtype == other.dtype && init == other.init &&
           init_parameter == other.init_parameter && init_seed == other.init_seed;
  }
};

struct Manifest {
  std::uint64_t number = 0;
  std::uint64_t slots = 0;
  std::vector<ManifestTable> tables;
  std::string base_path;    // of a delta, relative to its directory; else empty
  std::string base_digest;  // SHA-256 of the body of the base's manifest, in hexadecimal digits
  std::optional<json::object> model;
  std::vector<ManifestExtra> extras;
  std::string digest;  // its own
};

inline constexpr std::string_view kManifestName = "manifest.json";

// `path` is the file's, for messages. Throws DamagedExport.
Manifest read_manifest(std::string_view text, const std::string& path);

}  // namespace shoal::predict
