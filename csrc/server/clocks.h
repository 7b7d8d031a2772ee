// Clocks: the workers that a data loop serves, and how many ticks each has completed.
//
// Idea. A worker is a rank and an incarnation: a number that rises whenever somebody takes that rank anew, so that what
// the one before still has under way can be told apart and is refused. A worker that is fenced is refused, too, but the
// others still wait for it; one that is dismissed no longer holds anybody back.
//
//   slowest()    the least clock of all who are admitted; with nobody admitted, the greatest that anybody reached
//   floor()      the clocks below it are complete: slowest(), but not past a hold
//   hold()       nothing is completed past the greatest clock that a worker has reached here: that clock. Somebody who
//                joins at it, or later, misses nothing. Ends with an admission, or resume()
//
// Invariants
//   I1  floor() <= slowest(); without admissions, floor() never falls.
//   I2  a rank's incarnation never falls until clear().
//
// Threads: none of its own; one owner.

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace shoal {

class Clocks {
 public:
  static constexpr std::uint32_t kMaxWorkers = 65536;

  enum class WorkerState : std::uint8_t {
    kAdmitted,
    kFenced,   // fenced, dismissed, or somebody else has taken the rank since
    kUnknown,  // not admitted yet
  };

  struct Worker {
    std::uint32_t incarnation = 0;  // 0: never admitted
    std::uint32_t clock = 0;
    bool admitted = false;
    bool fenced = false;
  };

  // A new job: nobody is known.
  void clear();

  WorkerState state(std::uint32_t rank, std::uint32_t incarnation) const noexcept;
  // The worker must be admitted.
  std::uint32_t clock(std::uint32_t rank) const noexcept { return workers_[rank].clock; }

  // False where it is in already, or is an old one; a hold ends in any case. Ranks from kMaxWorkers on, and incarnation
  // 0, are refused: std::invalid_argument.
  bool admit(std::uint32_t rank, std::uint32_t incarnation, std::uint32_t clock);
  // Its clock stands still from now on. False where it is not in.
  bool fence(std::uint32_t rank, std::uint32_t incarnation);
  // The incarnation, and all before it, are fenced off from now on. False where nobody leaves.
  bool dismiss(std::uint32_t rank, std::uint32_t incarnation);

  // The worker must be admitted.
  void tick(std::uint32_t rank) noexcept;

  std::uint32_t hold() noexcept;
  void resume() noexcept;
  bool held() const noexcept { return hold_.has_value(); }

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
