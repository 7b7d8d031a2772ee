// Clocks: the workers that a data loop serves, and how many ticks each has completed. A worker is a rank and
// an incarnation.
//
//   slowest()    the least clock of the admitted workers; without any, the greatest clock reached so far
//   floor()      all clocks below it are complete: slowest(), but not beyond a hold
//   hold()       completes no clock beyond the greatest that a worker has reached here, and returns it. A
//                worker that joins at it, or later, misses nothing. Ends with an admission or resume()
//
// Invariants
//   I1  floor() <= slowest(); without admissions, floor() never decreases.
//   I2  A rank's incarnation never decreases until clear().
//
// Threads: none of its own; one owner.

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/byte_stream.h"

namespace shoal {

class Clocks {
 public:
  static constexpr std::uint32_t kMaxWorkers = 65536;

  enum class WorkerState : std::uint8_t {
    kAdmitted,
    kFenced,   // fenced, dismissed, or replaced by a later incarnation
    kUnknown,  // not admitted yet
  };

  struct Worker {
    std::uint32_t incarnation = 0;  // 0: never admitted
    std::uint32_t clock = 0;
    bool admitted = false;
    bool fenced = false;
  };

  // A new job: no worker is known.
  void clear();

  WorkerState state(std::uint32_t rank, std::uint32_t incarnation) const noexcept;
  // The worker must be admitted.
  std::uint32_t clock(std::uint32_t rank) const noexcept { return workers_[rank].clock; }

  // False if the worker is already admitted, or the incarnation is an old one; a hold ends in any case.
  // std::invalid_argument: a rank of kMaxWorkers or more, or incarnation 0.
  bool admit(std::uint32_t rank, std::uint32_t incarnation, std::uint32_t clock);
  // Its clock does not advance any more. False if it is not admitted.
  bool fence(std::uint32_t rank, std::uint32_t incarnation);
  // Refuses this incarnation and all before it from now on. False if no admitted worker leaves.
  bool dismiss(std::uint32_t rank, std::uint32_t incarnation);

  // The worker must be admitted.
  void tick(std::uint32_t rank) noexcept;

  std::uint32_t hold() noexcept;
  void resume() noexcept;
  bool held() const noexcept { return hold_.has_value(); }

  // Whether both know the same workers, in the same states; their clocks may differ.
  bool agrees_with(const Clocks& other) const noexcept;

  void save(ByteWriter& out) const;
  static Clocks restore(ByteReader& in);

  std::uint32_t slowest() const noexcept { return slowest_; }
  std::uint32_t greatest() const noexcept { return greatest_; }
  std::uint32_t floor() const noexcept { return floor_; }
  std::size_t admitted() const noexcept { return admitted_; }
  const std::vector<Worker>& workers() const noexcept { return workers_; }  // by rank

 private:
  static void check(std::uint32_t rank, std::uint32_t incarnation);
  void update() noexcept;

  std::vector<Worker> workers_;
  std::size_t admitted_ = 0;
  std::uint32_t slowest_ = 0;
  std::uint32_t greatest_ = 0;
  std::uint32_t floor_ = 0;
  std::optional<std::uint32_t> hold_;
};

}  // namespace shoal
