// MappedExport: the files of one export, mapped and checked. ExportChain: an export and its bases, read together.
//
// Algorithm. A delta's layers come after those of its bases; the newest layer that has a key answers. Pages of a
// file are read when they are first used, and all processes of the machine share them. Exports that an
// earlier chain has mapped are used again: a newer version maps its own delta only.
//
// Invariants
//   I1  A chain has at most kMaxChain exports, of one number of slots; each base has the digest that its delta
//       names.
//   I2  With `verify` every section's checksum was right when it was mapped.
//
// Threads: immutable once made; any number of readers.

#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/memory.h"
#include "export/export_reader.h"
#include "predict/manifest.h"

namespace shoal::predict {

class MappedExport {
 public:
  // Throws DamagedExport; std::system_error if a file cannot be read.
  MappedExport(std::filesystem::path directory, Manifest manifest, bool verify);

  const std::filesystem::path& directory() const noexcept { return directory_; }
  const Manifest& manifest() const noexcept { return manifest_; }
  // The bytes of file `file` of table `table`, by their positions in the manifest.
  std::span<const std::byte> file(std::size_t table, std::size_t file) const noexcept {
    const FileMapping& mapping = files_[table][file];
    return {mapping.data(), mapping.bytes()};
  }

 private:
  std::filesystem::path directory_;
  Manifest manifest_;
  std::vector<std::vector<FileMapping>> files_;  // by table
};

class ExportChain {
 public:
  static constexpr std::size_t kMaxChain = 64;

  // Opens the export in a directory. `known`: an earlier chain, or null.
  static std::shared_ptr<const ExportChain> open(const std::filesystem::path& directory, bool verify,
                                                 const ExportChain* known);

  std::uint64_t number() const noexcept { return newest().number; }
  const std::string& digest() const noexcept { return newest().digest; }
  const Manifest& newest() const noexcept { return exports_.back()->manifest(); }
  // A file that only the model reads, by its name there; none if there is no such file. DamagedExport.
  std::optional<std::string> extra(std::string_view name) const;
  // Null if there is none of that name.
  const ExportReader* table(std::string_view name) const noexcept;

 private:
  explicit ExportChain(std::vector<std::shared_ptr<const MappedExport>> exports);
  void add(const MappedExport& one, std::size_t table,
           std::map<std::string_view, const ManifestTable*>& known);

  std::vector<std::shared_ptr<const MappedExport>> exports_;  // the oldest first
  std::map<std::string, ExportReader, std::less<>> tables_;
};

// Reads the manifest in a directory. DamagedExport if there is none.
Manifest manifest_in(const std::filesystem::path& directory);

}  // namespace shoal::predict
