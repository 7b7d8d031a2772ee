// What a tier throws when its disk fails. Rows in memory are consistent afterwards, and the call has changed
// nothing else.

#pragma once

#include <stdexcept>
#include <string>

namespace shoal {

struct TierError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The disk is full, or refuses: the message names the file and the reason.
struct TierStorageError : TierError {
  using TierError::TierError;
};

// The disk returned other bytes than were written: the message names the file, the slot and the page.
struct TierCorruptionError : TierError {
  using TierError::TierError;
};

}  // namespace shoal
