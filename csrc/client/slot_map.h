// SlotMap: which endpoint serves which slots, as the scheduler's map says
// (python/shoal/cluster/protocol/slot_map.py).
//
//   arcs        0 | 1 | 2 | 3 | 4 | 5 | 6 | 7     fixed ranges of slots, in slot order
//   endpoint    A   A   A   B   B   A   B   B
//   runs        A         | B     | A | B         adjacent arcs of one endpoint: what a request is cut by
//
// Threads: immutable.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace shoal::client {

// One data loop of a server.
struct Endpoint {
  std::string address{};
  std::uint32_t server = 0;

  // In messages to users.
  std::string label() const { return "server " + std::to_string(server) + " at " + address; }
};

struct ArcRange {
  std::uint32_t first_slot = 0;
  std::uint32_t end_slot = 0;
  std::uint32_t endpoint = 0;  // index
};

struct Run {
  std::uint32_t first_slot = 0;
  std::uint32_t end_slot = 0;
  std::uint32_t endpoint = 0;  // index
  std::uint32_t siblings = 0;  // runs of that endpoint, this one included
};

class SlotMap {
 public:
  // `backups`: indices of endpoints that hold copies. Throws std::invalid_argument if the arcs do not follow
  // one another from slot 0 on, or an index is out of range.
  SlotMap(std::uint32_t epoch, std::vector<Endpoint> endpoints, std::vector<ArcRange> arcs,
          std::vector<std::uint32_t> backups = {});

  std::uint32_t epoch() const noexcept { return epoch_; }
  std::uint32_t slots() const noexcept { return arcs_.back().end_slot; }
  const std::vector<Endpoint>& endpoints() const noexcept { return endpoints_; }
  const Endpoint& endpoint(std::uint32_t index) const noexcept { return endpoints_[index]; }
  const std::vector<Run>& runs() const noexcept { return runs_; }
  // The endpoints that serve slots, in the order of the first slot of each.
  const std::vector<std::uint32_t>& owners() const noexcept { return owners_; }
  const std::vector<std::uint32_t>& backups() const noexcept { return backups_; }

  // Index of the run that has a slot.
  std::size_t run_of(std::uint32_t slot) const noexcept;
  // The arcs that have some of the slots [first, end), in slot order.
  std::span<const ArcRange> arcs_of(std::uint32_t first, std::uint32_t end) const noexcept;
  bool has(const std::string& address) const noexcept;

 private:
  std::uint32_t epoch_;
  std::vector<Endpoint> endpoints_;
  std::vector<ArcRange> arcs_;
  std::vector<Run> runs_;
  std::vector<std::uint32_t> owners_;
  std::vector<std::uint32_t> backups_;
};

}  // namespace shoal::client
