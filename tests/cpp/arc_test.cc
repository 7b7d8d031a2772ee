// Operations of an arc for which there is no memory: each allocation of each operation fails in turn, the
// operation is repeated, and the arc equals one that has never failed.

#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "failing_memory.h"
#include "replica/arc.h"
#include "replica/arc_group.h"
#include "shard/reductions.h"

namespace shoal::arc_test {
namespace {

constexpr std::uint32_t kAsp = 4;
constexpr std::uint32_t kBsp = 5;  // named
constexpr std::uint32_t kTable = 3;
constexpr std::uint32_t kOther = 7;
constexpr std::size_t kEnd = 8;  // of the arc's slots, of 16
const Slots kSlots(16);

TableSpec spec() {
  return {.dim = 2,
          .dtype = Dtype::kFloat32,
          .optimizer = Optimizer("SGD", {{"lr", 0.5}, {"weight_decay", 0.0}}),
          .init = Init("Constant", 0.0, 0),
          .seed = 0,
          .lifecycle = Lifecycle({}, {{"TimeToLive", {{"clocks", 3}}}})};
}

struct OwnedArc {
  ArcWorkspace workspace;
  Disposal disposal;
  Arc arc{kSlots, 0, kEnd, workspace, disposal};
};

std::vector<std::uint64_t> hashes_of(std::size_t count) {
  std::vector<std::uint64_t> hashes;
  for (std::uint64_t i = 0; i < count; ++i) {
    hashes.push_back(i * ((std::uint64_t{1} << 63U) / count) + 11);
  }
  return hashes;
}

const std::vector<std::uint64_t> kHashes = hashes_of(300);
const std::vector<float> kRows(2 * kHashes.size(), 1.5F);

WriteId write_of(std::uint32_t job, std::uint64_t sequence, std::uint32_t clock = 0,
                 std::uint32_t table = kTable) {
  return {.worker = {.job = job, .rank = 0}, .sequence = sequence, .table = table, .clock = clock};
}

using Operation = std::function<void(Arc&)>;

Operation push(std::uint32_t job, std::uint64_t sequence) {
  return [=](Arc& arc) {
    const WriteId write = write_of(job, sequence);
    const Remainder left = arc.remainder(write, kHashes);
    if (left.any) {
      arc.apply(
          PushOp{.write = write, .rows = {.hashes = kHashes, .values = kRows, .counts = {}}, .left = left});
    }
  };
}

Operation apply(ArcOp op) {
  return [op = std::move(op)](Arc& arc) { arc.apply(op); };
}

// A clock that a worker has not ended is ended; an operation that names the clock is not repeated once it has
// acted.
Operation tick(std::uint32_t job, std::uint32_t rank, std::uint32_t clock) {
  return [=](Arc& arc) {
    const std::vector<std::uint32_t> tables{kTable};
    if (arc.jobs().find(job)->clocks.clock(rank) == clock) {
      arc.apply(TickOp{.worker = {.job = job, .rank = rank}, .tables = tables});
    }
  };
}

std::vector<Operation> operations() {
  static const std::vector<double> decay{0.5};
  static const std::vector<std::byte> empty;
  return {
      apply(AddTable{.id = kTable, .spec = spec()}),
      apply(StartJob{.job = kAsp, .mode = Mode::kAsp}),
      apply(StartJob{.job = kBsp, .mode = Mode::kBsp, .is_named = true}),
      apply(Admit{.rank = 0, .incarnation = 1, .clock = 0, .job = kAsp}),
      apply(Admit{.rank = 0, .incarnation = 1, .clock = 0, .job = kBsp}),
      apply(Admit{.rank = 1, .incarnation = 1, .clock = 0, .job = kBsp}),
      push(kAsp, 1),
      push(kBsp, 1),
      [](Arc& arc) {
        const WriteId write = write_of(kAsp, 2);
        const std::span<const std::uint64_t> some = std::span(kHashes).first(50);
        const Remainder left = arc.remainder(write, some);
        arc.apply(AssignOp{.write = write,
                           .rows = {.hashes = some, .values = std::span(kRows).first(100), .counts = {}},
                           .left = left});
      },
      [](Arc& arc) {
        const WriteId write = write_of(kAsp, 3);
        const Remainder left = arc.remainder(write, std::span(kHashes).subspan(40, 30));
        if (left.any) {
          arc.apply(EraseOp{.write = write, .left = left});
        }
      },
      apply(ChangeOp{.write = write_of(kAsp, 4),
                     .function = Function::kDecay,
                     .parameters = decay,
                     .first = 0,
                     .end = kEnd}),
      apply(SweepOp{.write = write_of(kAsp, 5), .rules = {}}),
      apply(SweepOp{.write = write_of(kBsp, 2), .rules = {}}),
      tick(kBsp, 0, 0),
      tick(kBsp, 1, 0),
      [](Arc& arc) {
        while (arc.jobs().all()[1]->has_step()) {
          arc.apply(StepOp{.job = 1});
        }
      },
      apply(BeginSaveOp{.write = write_of(kAsp, 6)}),
      apply(MarkOp{.write = write_of(kAsp, 6)}),
      apply(EndSavesOp{.job = kAsp, .name = "a name"}),
      apply(Hold{.job = kBsp}),
      apply(Fence{.rank = 1, .incarnation = 1, .job = kBsp}),
      apply(Dismiss{.rank = 1, .incarnation = 1, .clock = 1, .tables = {kTable}, .job = kBsp}),
      apply(Resume{.job = kBsp}),
      apply(AddTable{.id = kOther, .spec = spec()}),
      [](Arc& arc) {
        const WriteId write = write_of(kAsp, 7, 0, kOther);
        if (!arc.jobs().has_done(write.worker, write.sequence)) {
          arc.apply(LoadBeginOp{.write = write, .shard = arc.shard_maker()(spec())});
        }
      },
      apply(LoadRowsOp{.write = write_of(kAsp, 8, 0, kOther), .rows = 0, .section = empty}),
      apply(LoadEndOp{.write = write_of(kAsp, 9, 0, kOther), .step = 5, .table_clock = 2, .base = "base"}),
      apply(DropTable{.id = kOther}),
      apply(EndJob{.job = kBsp}),
      apply(StartJob{.job = kAsp + 5, .mode = Mode::kSsp, .staleness = 2, .before = 1}),
  };
}

// What must be equal in words, so that a difference is legible.
std::string state_of(const Arc& arc) {
  std::string text;
  const auto add = [&](const std::string& what, auto number) {
    text += what + " " + std::to_string(number) + "\n";
  };
  for (const auto& [id, table] : arc.tables()) {
    add("table", id);
    for (const double number : reduce(*table.shard, Function::kDigest, {}, 0, kEnd)) {
      add("digest", number);
    }
    add("rows", table.shard->size());
    add("step", table.shard->step());
    add("loads", table.loading != nullptr ? 1 : 0);
    add("saves", table.save ? 1 : 0);
    add("reached", table.reached);
  }
  for (const auto& job : arc.jobs().all()) {
    add("job", job->number);
    add("applied", job->applied);
    add("floor", job->clocks.floor());
    add("greatest", job->clocks.greatest());
    add("workers", job->clocks.admitted());
    add("pending", job->pending.bytes());
    for (std::uint64_t sequence = 1; sequence < 12; ++sequence) {
      add("done", arc.jobs().has_done({.job = job->number, .rank = 0}, sequence) ? 1 : 0);
    }
  }
  return text;
}

// Whether an allocation failed.
bool runs_out(long allocations, const std::function<void()>& call) {
  check::allocations_left = allocations;
  try {
    call();
  } catch (const std::bad_alloc&) {
    CHECK(check::allocations_left < 0);
  }
  return std::exchange(check::allocations_left, -1) < 0;
}

}  // namespace

TEST(an_operation_for_which_memory_runs_out_at_any_allocation_acts_once_when_it_is_repeated) {
  const std::vector<Operation> all = operations();
  std::size_t failures = 0;
  for (std::size_t n = 0; n < all.size(); ++n) {
    OwnedArc plain;
    for (std::size_t before = 0; before <= n; ++before) {
      all[before](plain.arc);
    }
    const std::string expected = state_of(plain.arc);
    for (long allocations = 0;; ++allocations) {
      OwnedArc tried;
      for (std::size_t before = 0; before < n; ++before) {
        all[before](tried.arc);
      }
      const bool has_failed = runs_out(allocations, [&] { all[n](tried.arc); });
      failures += has_failed ? 1 : 0;
      all[n](tried.arc);
      if (state_of(tried.arc) != expected) {
        CHECK_EQ("operation " + std::to_string(n) + ", allocation " + std::to_string(allocations) + "\n" +
                     state_of(tried.arc),
                 expected);
      }
      if (!has_failed) {
        break;
      }
    }
  }
  CHECK(failures > all.size());
}

}  // namespace shoal::arc_test
