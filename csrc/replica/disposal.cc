#include "replica/disposal.h"

#include <exception>
#include <utility>

namespace shoal {

void Disposal::add(std::shared_ptr<Shard> shard) noexcept {
  if (shard == nullptr) {
    return;
  }
  if (shard.use_count() == 1) {  // otherwise a save is still reading it
    shard->leave_budget();
  }
  try {
    queue_.add(std::move(shard));
  } catch (const std::exception&) {
    // It is freed at the end of this call.
  }
}

}  // namespace shoal
