// Maps of slots for tests of the client.

#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "client/slot_map.h"

namespace shoal::client {

// Arcs of random lengths, at most `endpoints` of them owning any.
inline SlotMap random_map(std::mt19937_64& random, std::uint32_t slots, std::uint64_t endpoints) {
  std::vector<Endpoint> all;
  for (std::uint32_t i = 0; i < endpoints; ++i) all.push_back({"tcp://" + std::to_string(i) + ":1", i});
  std::vector<ArcRange> arcs;
  for (std::uint32_t at = 0; at < slots;) {
    const auto end = at + 1 + static_cast<std::uint32_t>(random() % (slots - at));
    arcs.push_back({at, end, static_cast<std::uint32_t>(random() % endpoints)});
    at = end;
  }
  return {1, std::move(all), std::move(arcs)};
}

}  // namespace shoal::client
