#include "predict/mapped_export.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "base/check.h"
#include "base/crc32c.h"
#include "base/units.h"

namespace shoal::predict {

namespace fs = std::filesystem;

namespace {

constexpr std::size_t kMaxManifest = 256 * MiB;
constexpr std::size_t kHeaderBytes = 64;
constexpr int kTries = 3;  // of opening an export that is replaced meanwhile

// An open file, for reading.
class File {
 public:
  explicit File(const fs::path& path) : path_(path), descriptor_(::open(path.c_str(), kHow)) {
    if (descriptor_ < 0) {
      if (errno == ENOENT || errno == ENOTDIR) {
        throw DamagedExport(path.string() + " is missing");
      }
      throw std::system_error(errno, std::generic_category(), path.string());
    }
    struct stat status{};
    if (::fstat(descriptor_, &status) != 0 || !S_ISREG(status.st_mode)) {
      ::close(descriptor_);
      throw DamagedExport(path.string() + " is not a regular file");
    }
    bytes_ = static_cast<std::uint64_t>(status.st_size);
  }
  ~File() { ::close(descriptor_); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  int descriptor() const noexcept { return descriptor_; }
  std::uint64_t bytes() const noexcept { return bytes_; }

  std::string read_all() const {
    std::string found(bytes_, '\0');
    std::size_t at = 0;
    while (at < found.size()) {
      const ssize_t got = ::read(descriptor_, found.data() + at, found.size() - at);
      if (got < 0 && errno == EINTR) {
        continue;
      }
      if (got < 0) {
        throw std::system_error(errno, std::generic_category(), path_.string());
      }
      if (got == 0) {
        break;
      }
      at += static_cast<std::size_t>(got);
    }
    found.resize(at);
    return found;
  }

 private:
  static constexpr int kHow = O_RDONLY | O_NONBLOCK | O_CLOEXEC;  // a pipe does not wait for its writer

  fs::path path_;
  int descriptor_;
  std::uint64_t bytes_ = 0;
};

bool has_header(std::span<const std::byte> file) noexcept {
  std::array<std::uint8_t, kHeaderBytes> header{'S', 'H', 'O', 'A', 'L', 'F', 'R', 'Z', 1};
  return std::memcmp(file.data(), header.data(), kHeaderBytes) == 0;
}

FileMapping map_file(const fs::path& path, std::uint64_t bytes) {
  const File file(path);
  if (file.bytes() != bytes || bytes < kHeaderBytes) {
    throw DamagedExport(path.string() + " has " + std::to_string(file.bytes()) + " bytes instead of " +
                        std::to_string(bytes));
  }
  FileMapping mapping(file.descriptor(), 0, bytes, FileMapping::Access::kRead);
  mapping.prefer_huge_pages();
  if (!has_header({mapping.data(), mapping.bytes()})) {
    throw DamagedExport(path.string() + " is damaged: it does not begin with the header of a data file");
  }
  return mapping;
}

}  // namespace

Manifest manifest_in(const fs::path& directory) {
  const fs::path path = directory / kManifestName;
  const File file(path);
  if (file.bytes() > kMaxManifest) {
    throw DamagedExport(path.string() + " has " + std::to_string(file.bytes()) +
                        " bytes, more than a manifest");
  }
  return read_manifest(file.read_all(), path.string());
}

MappedExport::MappedExport(fs::path directory, Manifest manifest, bool verify)
    : directory_(std::move(directory)), manifest_(std::move(manifest)) {
  for (const ManifestTable& table : manifest_.tables) {
    auto& mapped = files_.emplace_back();
    for (const ManifestFile& file : table.files) {
      mapped.push_back(map_file(directory_ / file.name, file.bytes));
    }
    for (const ManifestSection& section : table.sections) {
      const FileMapping& from = mapped[section.file];
      if (verify && crc32c({from.data() + section.offset, section.bytes}) != section.crc32c) {
        throw DamagedExport((directory_ / table.files[section.file].name).string() +
                            " is damaged: the checksum of slot " +
                            std::to_string(static_cast<std::uint32_t>(section.slot)) + " does not match");
      }
    }
  }
}

void ExportChain::add(const MappedExport& one, std::size_t t,
                      std::map<std::string_view, const ManifestTable*>& known) {
  const ManifestTable& table = one.manifest().tables[t];
  const auto [seen, is_new] = known.try_emplace(table.name, &table);
  if (!is_new && !seen->second->is_read_like(table)) {
    throw DamagedExport("table '" + table.name + "' of " + one.directory().string() +
                        " has another description than that of its base");
  }
  ExportReader& reader =
      tables_
          .try_emplace(table.name, RowFormat(table.dtype, table.dim),
                       Init(table.init, table.init_parameter, table.init_seed), Slots(one.manifest().slots))
          .first->second;
  if (!table.sections.empty()) {
    reader.add_layer();
  }
  for (const ManifestSection& section : table.sections) {
    try {
      reader.add(section.slot, section.shape,
                 one.file(t, section.file).subspan(section.offset, section.bytes));
    } catch (const std::invalid_argument& error) {
      throw DamagedExport((one.directory() / table.files[section.file].name).string() + ": " + error.what());
    }
  }
}

ExportChain::ExportChain(std::vector<std::shared_ptr<const MappedExport>> exports)
    : exports_(std::move(exports)) {
  std::map<std::string_view, const ManifestTable*> known;
  for (const auto& one : exports_) {
    if (one->manifest().slots != newest().slots) {
      throw DamagedExport(one->directory().string() + " has " + std::to_string(one->manifest().slots) +
                          " slots, and its delta " + std::to_string(newest().slots));
    }
    for (std::size_t t = 0; t < one->manifest().tables.size(); ++t) {
      add(*one, t, known);
    }
  }
}

std::shared_ptr<const ExportChain> ExportChain::open(const fs::path& directory, bool verify,
                                                     const ExportChain* known) {
  const auto mapped = [&](const fs::path& where, Manifest&& manifest) -> std::shared_ptr<const MappedExport> {
    if (known != nullptr) {
      for (const auto& one : known->exports_) {
        if (one->directory() == where && one->manifest().digest == manifest.digest) {
          return one;
        }
      }
    }
    return std::make_shared<const MappedExport>(where, std::move(manifest), verify);
  };
  for (int attempt = 1;; ++attempt) {
    fs::path where = fs::weakly_canonical(directory);
    Manifest manifest = manifest_in(where);
    const std::string digest = manifest.digest;
    try {
      std::vector<std::shared_ptr<const MappedExport>> chain;
      for (;;) {
        chain.push_back(mapped(where, std::move(manifest)));
        const Manifest& last = chain.back()->manifest();
        if (last.base_path.empty()) {
          break;
        }
        if (chain.size() == kMaxChain) {
          throw DamagedExport(directory.string() + " is based on a chain of more than " +
                              std::to_string(kMaxChain) + " exports");
        }
        where = fs::weakly_canonical(where / last.base_path);
        manifest = manifest_in(where);
        if (manifest.digest != last.base_digest) {
          throw DamagedExport(where.string() + " is not the export that the delta " +
                              chain.back()->directory().string() + " was made upon: it was replaced");
        }
      }
      std::reverse(chain.begin(), chain.end());
      return std::shared_ptr<const ExportChain>(new ExportChain(std::move(chain)));
    } catch (const DamagedExport&) {  // it may have been replaced since its manifest was read
      if (attempt == kTries || manifest_in(fs::weakly_canonical(directory)).digest == digest) {
        throw;
      }
    }
  }
}

std::optional<std::string> ExportChain::extra(std::string_view name) const {
  for (const ManifestExtra& extra : newest().extras) {
    const std::size_t hyphen = extra.name.find('-');
    if (hyphen == std::string::npos || std::string_view(extra.name).substr(hyphen + 1) != name) {
      continue;
    }
    const fs::path path = exports_.back()->directory() / extra.name;
    const File file(path);
    if (file.bytes() != extra.bytes) {
      throw DamagedExport(path.string() + " has " + std::to_string(file.bytes()) + " bytes instead of " +
                          std::to_string(extra.bytes));
    }
    std::string found = file.read_all();
    if (crc32c(std::as_bytes(std::span(found))) != extra.crc32c) {
      throw DamagedExport(path.string() + " is damaged: its checksum does not match");
    }
    return found;
  }
  return std::nullopt;
}

const ExportReader* ExportChain::table(std::string_view name) const noexcept {
  const auto found = tables_.find(name);
  return found == tables_.end() ? nullptr : &found->second;
}

}  // namespace shoal::predict
