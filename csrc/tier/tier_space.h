// TierSpace: where the tables of a server have their tiers: a directory and memory, which they share.
//
// Threads: open() once, before any table; then any number.

#pragma once

#include <cstddef>
#include <string>
#include <utility>

#include "base/check.h"
#include "tier/page_file.h"
#include "tier/tier_memory.h"

namespace shoal {

class TierSpace {
 public:
  explicit TierSpace(std::size_t bytes) noexcept : memory_(bytes) {}

  // Throws TierStorageError if no file can be made there.
  void open(std::string directory) {
    PageFile(directory, PageFile::kPage);
    directory_ = std::move(directory);
  }
  const std::string& directory() const {
    SHOAL_CHECK(!directory_.empty(), "the directory of the tiers is not open yet");
    return directory_;
  }
  TierMemory& memory() noexcept { return memory_; }

 private:
  TierMemory memory_;
  std::string directory_;
};

}  // namespace shoal
