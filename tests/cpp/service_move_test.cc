// Arcs that move between services, and orders that are repeated: everything goes on as in a service that had
// the arcs always.

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "arcs.h"
#include "base/crc32c.h"
#include "check.h"
#include "endpoint/service.h"
#include "orders.h"

namespace shoal::service_move_test {
namespace {

using wire::Header;
using wire::Op;
using wire::Status;

constexpr std::uint32_t kJob = 5;
constexpr std::size_t kSlots = 16;
const std::vector<SlotRange> kArcs{{0, 2}, {2, 8}, {8, 9}, {9, 16}};
constexpr std::uint64_t kRead = std::uint64_t{1} << 63U;

constexpr std::uint32_t kTables = 5;

TableSpec spec(std::uint32_t id) {
  const auto with = [](std::size_t dim, Optimizer optimizer, Lifecycle lifecycle,
                       Dtype dtype = Dtype::kFloat32) {
    return TableSpec{.dim = dim,
                     .dtype = dtype,
                     .optimizer = std::move(optimizer),
                     .init = Init("Uniform", 0.1, 3),
                     .seed = 4,
                     .lifecycle = std::move(lifecycle)};
  };
  const Optimizer sgd("SGD", {{"lr", 0.3}, {"weight_decay", 0.01}});
  switch (id) {
    case 0:
      return with(
          2, Optimizer("Adagrad", {{"lr", 0.1}, {"n0", 0.1}, {"eps", 1e-8}, {"weight_decay", 0.0}}),
          Lifecycle(NamedRule{"AfterCount", {{"n", 2}, {"within", 5}}}, {{"TimeToLive", {{"clocks", 6}}}}));
    case 1:
      return with(3, sgd, {}, Dtype::kBfloat16);  // rows with padding
    case 2:
      return with(
          1, Optimizer("FTRL", {{"alpha", 0.1}, {"beta", 1}, {"l1", 0.01}, {"l2", 0.1}, {"n0", 0}}),
          Lifecycle(NamedRule{"AfterBloom", {{"n", 2}, {"capacity", 4000}, {"error", 0.1}, {"within", 7}}},
                    {{"DecayedScore", {{"decay", 0.8}, {"floor", 0.3}}}}));
    case 3:
      return with(16, sgd, Lifecycle({}, {{"MaxRows", {{"rows", 300}, {"frequent", 1}}}}));
    default:
      return with(64, sgd,
                  Lifecycle(NamedRule{"WithProbability", {{"p", 0.5}, {"seed", 3}}},
                            {{"TimeToLive", {{"clocks", 3}}}}));
  }
}

// A reply without what depends on the endpoint.
struct Said {
  Status status;
  std::uint32_t aux;
  std::uint32_t count;
  std::vector<std::byte> bytes;

  bool operator==(const Said&) const = default;
};

// Services between which the arcs of one endpoint are moved; with one of them they stay.
class Fleet {
 public:
  Fleet(std::size_t services, std::uint64_t slot_bytes, bool tiered = false) {
    if (tiered) {
      tier_ = std::make_shared<TierSpace>(1);  // the least memory for each slot
      tier_->open(std::filesystem::temp_directory_path());
    }
    for (std::size_t i = 0; i < services; ++i) {
      services_.push_back(std::make_unique<Service>(Slots(kSlots), i == 0 ? kArcs : std::vector<SlotRange>{},
                                                    ServiceLimits{.tier = tier_}));
    }
    at_.assign(kArcs.size(), 0);
    each([&](Service& service) {
      if (slot_bytes != 0) {
        set_memory(service, slot_bytes);
      }
    });
    serve();
  }

  template <class Order>
  void each(const Order& order) {
    for (const auto& service : services_) {
      order(*service);
    }
  }

  void move(std::size_t arc, std::size_t to) {
    if (at_[arc] == to) {
      return;
    }
    move_arcs(*services_[at_[arc]], *services_[to], {kArcs[arc]});
    at_[arc] = to;
    serve();
  }

  // Replaces an arc by a copy of it.
  void copy(std::size_t arc) {
    Service& service = *services_[at_[arc]];
    const auto pieces = service.save_arc(kArcs[arc]);
    auto made = restored(pieces, tier_);
    CHECK(made->save() == pieces);
    service.discard(take_arcs(service, {kArcs[arc]}));
    std::vector<std::unique_ptr<Arc>> arcs;
    arcs.push_back(std::move(made));
    service.adopt(arcs);
    serve();
  }

  static std::unique_ptr<Arc> restored(const std::vector<std::vector<std::byte>>& pieces,
                                       std::shared_ptr<TierSpace> tier = {}) {
    ArcRestorer restorer(std::move(tier));
    for (const auto& piece : pieces) {
      restorer.add(piece);
    }
    return restorer.finish();
  }

  std::vector<std::vector<std::byte>> bytes(std::size_t arc) const {
    return services_[at_[arc]]->save_arc(kArcs[arc]);
  }

  std::size_t services() const { return services_.size(); }

  // Sends a request to every service that may concern it, and joins the answers to it by slot; reads that
  // wait are collected.
  std::vector<Said> send(Header header, const std::vector<std::vector<std::byte>>& payload) {
    std::vector<Said> all;
    for (std::size_t i = 0; i < services_.size(); ++i) {
      if (std::ranges::find(at_, i) == at_.end()) {
        continue;
      }
      std::vector<wire::Frame> frames;
      std::vector<std::vector<std::byte>> mine = payload;
      const bool keyed = header.op == Op::kPush || header.op == Op::kPull || header.op == Op::kErase;
      Header its = header;
      if (keyed) {
        cut(its, mine, i);
        if (its.count == 0) {
          continue;
        }
      }
      for (const auto& bytes : mine) {
        frames.emplace_back(bytes);
      }
      its.epoch = epoch_;
      std::array<std::byte, sizeof(Header)> head;
      wire::encode(its, frames, head);
      frames.insert(frames.begin(), head);
      ReplyQueue out(pool_);
      services_[i]->handle("peer", frames, out);
      for (Reply& reply : out.replies()) {
        add(all, reply);
      }
    }
    return all;
  }

  // Everything that is stored, and the clocks.
  std::vector<std::uint64_t> digest() {
    std::vector<std::uint64_t> sums;
    for (std::size_t arc = 0; arc < kArcs.size(); ++arc) {
      for (const std::uint32_t id : services_[at_[arc]]->tables()) {
        const auto copy = services_[at_[arc]]->snapshot(id);
        for (std::size_t s = kArcs[arc].first; s < kArcs[arc].end; ++s) {
          const Slot slot{static_cast<std::uint32_t>(s)};
          const auto sum = copy->digest(slot);
          sums.insert(sums.end(), sum.begin(), sum.end());
          std::vector<std::byte> filter;
          copy->filter(slot, filter);
          sums.push_back(filter.size());
        }
        CHECK_EQ(copy->verify(), "");
      }
    }
    return sums;
  }

  std::uint32_t applied() {
    std::uint32_t least = ~std::uint32_t{0};
    for (std::size_t i = 0; i < services_.size(); ++i) {
      if (std::ranges::find(at_, i) != at_.end()) {
        least = std::min(least, services_[i]->metrics().applied);
      }
    }
    return least;
  }

  Service& one(std::size_t i) { return *services_[i]; }

 private:
  void serve() {
    ++epoch_;
    for (std::size_t i = 0; i < services_.size(); ++i) {
      std::vector<SlotRange> ranges;
      for (std::size_t arc = 0; arc < kArcs.size(); ++arc) {
        if (at_[arc] == i) {
          ranges.push_back(kArcs[arc]);
        }
      }
      services_[i]->set_map(epoch_, ranges);
    }
  }

  // Leaves in the payload what the service has.
  void cut(Header& header, std::vector<std::vector<std::byte>>& payload, std::size_t service) {
    const Slots slots(kSlots);
    std::vector<std::vector<std::byte>> mine(payload.size());
    std::uint32_t count = 0;
    for (std::size_t k = 0; k < header.count; ++k) {
      std::uint64_t hash = 0;
      std::memcpy(&hash, payload[0].data() + k * sizeof hash, sizeof hash);
      const std::size_t slot = index_of(slots.of(hash));
      const auto arc = static_cast<std::size_t>(
          std::ranges::find_if(kArcs, [&](const SlotRange& one) { return slot < one.end; }) - kArcs.begin());
      if (at_[arc] != service) {
        continue;
      }
      ++count;
      for (std::size_t f = 0; f < payload.size(); ++f) {
        const std::size_t each = payload[f].size() / header.count;
        mine[f].insert(mine[f].end(), payload[f].begin() + static_cast<std::ptrdiff_t>(k * each),
                       payload[f].begin() + static_cast<std::ptrdiff_t>((k + 1) * each));
      }
    }
    header.count = count;
    payload = std::move(mine);
  }

  static void add(std::vector<Said>& all, Reply& reply) {
    Header header;
    std::memcpy(&header, reply.header.data(), sizeof header);
    Said said{header.status, header.aux, header.count, {}};
    for (std::size_t f = 0; f < reply.frames; ++f) {
      const auto bytes = reply.payload.at(f).bytes();
      said.bytes.insert(said.bytes.end(), bytes.begin(), bytes.end());
    }
    all.push_back(std::move(said));
  }

  std::shared_ptr<TierSpace> tier_;
  std::vector<std::unique_ptr<Service>> services_;
  std::vector<std::size_t> at_;  // by arc: its service
  std::uint32_t epoch_ = 0;
  BufferPool pool_;
};

std::vector<std::byte> bytes_of(const auto& values) {
  const auto raw = std::as_bytes(std::span(values));
  return {raw.begin(), raw.end()};
}

// Sums of what the answers to one request have, whoever gave them.
std::array<std::uint64_t, 3> summary(const std::vector<Said>& all, bool is_erase) {
  std::array<std::uint64_t, 3> sums{};
  for (const Said& said : all) {
    CHECK(said.status == Status::kOk);
    sums[0] += is_erase ? said.aux : 0;
    sums[1] += said.bytes.size();
    for (std::size_t i = 0; i + 3 < said.bytes.size(); i += 4) {
      std::uint32_t word = 0;
      std::memcpy(&word, said.bytes.data() + i, sizeof word);
      sums[2] += mix(word);
    }
  }
  return sums;
}

// Compares arcs that stay with arcs that move between three services, or with arcs that are copied in one,
// and that may have tiers.
void run(Mode mode, std::uint32_t staleness, std::uint64_t slot_bytes, std::uint64_t seed, bool copies,
         bool tiered = false) {
  Fleet still(1, slot_bytes);
  Fleet moved(copies ? 1 : 3, slot_bytes, tiered);
  std::mt19937_64 random(seed);
  constexpr std::uint32_t kWorkers = 2;
  std::array<std::uint32_t, kWorkers> clocks{};
  std::array<std::uint64_t, kWorkers> sequences{};
  std::array<std::uint32_t, kWorkers> incarnations{1, 1};
  std::array<std::vector<std::uint64_t>, kWorkers> named;
  const auto order = [&](const auto& what) {
    still.each(what);
    moved.each(what);
    if (random() % 2 == 0) {
      moved.each(what);  // repeated orders change nothing
    }
  };
  for (std::uint32_t id = 0; id < kTables; ++id) {
    order([&](Service& service) { add_table(service, id, spec(id)); });
  }
  order([&](Service& service) { start_job(service, kJob, mode, staleness, false); });
  for (std::uint32_t rank = 0; rank < kWorkers; ++rank) {
    order([&](Service& service) { admit(service, rank, 1, 0); });
  }
  const auto both = [&](const Header& header, const std::vector<std::vector<std::byte>>& payload) {
    const auto here = still.send(header, payload);
    const auto there = moved.send(header, payload);
    if (copies) {
      CHECK(here == there);
      return;
    }
    CHECK(summary(here, header.op == Op::kErase) == summary(there, header.op == Op::kErase));
  };
  for (int i = 0; i < 600; ++i) {
    for (std::uint64_t n = random() % 3; n != 0; --n) {
      const std::size_t arc = random() % kArcs.size();
      if (!copies) {
        moved.move(arc, random() % moved.services());
      } else if (random() % 4 == 0) {
        moved.copy(arc);
      }
    }
    const auto rank = static_cast<std::uint32_t>(random() % kWorkers);
    const auto id = static_cast<std::uint32_t>(random() % kTables);
    const std::size_t dim = spec(id).dim;
    std::set<std::uint64_t> keys;
    for (std::uint64_t n = random() % 8 == 0 ? 300 : 1 + random() % 12; n != 0; --n) {
      keys.insert(mix(random() % 900));
    }
    const std::vector<std::uint64_t> hashes(keys.begin(), keys.end());
    Header header{.table = id,
                  .worker = rank,
                  .incarnation = incarnations[rank],
                  .clock = clocks[rank],
                  .count = static_cast<std::uint32_t>(hashes.size()),
                  .job = kJob};
    const std::uint64_t kind = random() % 20;
    if (kind < 9) {
      header.op = Op::kPush;
      header.dtype = wire::Dtype::kFloat32;
      header.dim = static_cast<std::uint16_t>(dim);
      header.sequence = ++sequences[rank];
      std::vector<float> grads(hashes.size() * dim);
      std::ranges::generate(grads, [&] { return static_cast<float>(random() % 100) / 50 - 1; });
      named[rank].push_back(header.sequence);
      both(header, {bytes_of(hashes), bytes_of(grads)});
      if (random() % 3 == 0) {
        both(header, {bytes_of(hashes), bytes_of(grads)});  // sent again
      }
    } else if (kind < 12 && clocks[rank] <= still.applied()) {
      header.op = Op::kPull;
      header.dtype = wire::Dtype::kFloat32;
      header.dim = static_cast<std::uint16_t>(dim);
      header.sequence = kRead;
      both(header, {bytes_of(hashes)});
    } else if (kind < 13 && mode != Mode::kBsp) {
      header.op = Op::kErase;
      header.sequence = ++sequences[rank];
      both(header, {bytes_of(hashes)});
    } else if (kind < 14 && clocks[rank] <= still.applied() && id != 1) {
      header.op = Op::kSweep;
      header.dtype = wire::Dtype::kFloat64;
      header.count = 0;
      header.sequence = ++sequences[rank];
      const auto here = still.send(header, {{}});
      const auto there = moved.send(header, {{}});
      CHECK(!copies || tiered || here == there);  // with the bytes of memory
    } else if (kind < 18) {
      if (clocks[rank] > clocks[1 - rank] + (mode == Mode::kBsp ? 0 : staleness)) {
        continue;
      }
      header.op = Op::kTick;
      header.sequence = kRead;
      const std::vector<std::uint32_t> tables{0, 1, 2, 3, 4};
      header.count = 0;
      header.aux = kTables;
      both(header, {{}, bytes_of(tables)});
      if (random() % 3 == 0) {
        both(header, {{}, bytes_of(tables)});
      }
      ++clocks[rank];
      named[rank].clear();
    } else if (kind == 18 && clocks[0] == clocks[1] && random() % 4 == 0) {
      // The worker is taken over: fenced, dismissed, admitted again.
      order([&](Service& service) { fence(service, rank, incarnations[rank]); });
      order([&](Service& service) {
        dismiss(service, rank, incarnations[rank], {.clock = clocks[rank], .tables = {0, 1}});
      });
      order([&](Service& service) { hold(service); });
      ++incarnations[rank];
      sequences[rank] = 0;
      order([&](Service& service) { admit(service, rank, incarnations[rank], clocks[rank]); });
    }
    if (i % 20 == 0) {
      CHECK_EQ(still.applied(), moved.applied());
      CHECK(still.digest() == moved.digest());
    }
  }
  CHECK(still.digest() == moved.digest());
  for (std::size_t arc = 0; arc < kArcs.size(); ++arc) {
    CHECK(tiered || still.bytes(arc) == moved.bytes(arc));  // with the capacities of tables in memory
  }
  CHECK(still.applied() > 10 || mode != Mode::kBsp);
}

TEST(arcs_that_move_at_any_point_go_on_as_if_they_had_stayed) {
  for (std::uint64_t seed = 0; seed < check::rounds(3U); ++seed) {
    run(Mode::kBsp, 0, 0, seed, false);
    run(Mode::kBsp, 0, 1 << 20, 10 + seed, false);
    run(Mode::kSsp, 2, 0, 20 + seed, false);
    run(Mode::kAsp, 0, 1 << 20, 30 + seed, false);
  }
}

TEST(arcs_with_tiers_go_on_as_those_in_memory_also_if_they_move_or_are_copied) {
  for (std::uint64_t seed = 0; seed < check::rounds(2U); ++seed) {
    for (const bool copies : {false, true}) {
      run(Mode::kBsp, 0, 0, 100 + seed, copies, true);
      run(Mode::kSsp, 2, 0, 110 + seed, copies, true);
      run(Mode::kAsp, 0, 0, 120 + seed, copies, true);
    }
  }
}

TEST(copies_of_arcs_at_any_point_go_on_like_them_and_have_equal_bytes) {
  for (std::uint64_t seed = 0; seed < check::rounds(3U); ++seed) {
    run(Mode::kBsp, 0, 0, 40 + seed, true);
    run(Mode::kSsp, 2, 0, 50 + seed, true);
    run(Mode::kAsp, 0, 1 << 20, 60 + seed, true);
    run(Mode::kAsp, 0, 1 << 14, 70 + seed, true);  // evicts rows, and refuses some
    run(Mode::kBsp, 0, 1 << 14, 80 + seed, true);
  }
}

std::vector<std::vector<std::byte>> some_pieces() {
  Fleet fleet(1, 1 << 20);
  for (const std::uint32_t id : {0U, 1U, 2U}) {
    add_table(fleet.one(0), id, spec(id));
  }
  start_job(fleet.one(0), kJob, Mode::kBsp, 0, true);
  admit(fleet.one(0), 0, 1, 0);
  admit(fleet.one(0), 1, 1, 0);
  for (std::uint64_t sequence = 1; sequence < 9; ++sequence) {
    const auto id = static_cast<std::uint32_t>(sequence % 3);
    std::vector<std::uint64_t> hashes;
    for (std::uint64_t k = 0; k < 20; ++k) {
      hashes.push_back((std::uint64_t{3} << 60U) + (k << 40U));
    }
    const std::vector<float> grads(hashes.size() * spec(id).dim, 0.5F);
    const auto said = fleet.send({.op = Op::kPush,
                                  .dtype = wire::Dtype::kFloat32,
                                  .dim = static_cast<std::uint16_t>(spec(id).dim),
                                  .table = id,
                                  .worker = 0,
                                  .incarnation = 1,
                                  .sequence = sequence,
                                  .clock = static_cast<std::uint32_t>((sequence - 1) / 4),
                                  .count = static_cast<std::uint32_t>(hashes.size()),
                                  .job = kJob},
                                 {bytes_of(hashes), bytes_of(grads)});
    CHECK(said[0].status == Status::kOk);
    if (sequence == 4) {
      for (const std::uint32_t rank : {0U, 1U}) {
        fleet.send({.op = Op::kTick, .worker = rank, .incarnation = 1, .sequence = kRead, .job = kJob},
                   {{}, {}});
      }
    }
  }
  CHECK_EQ(fleet.applied(), 1);
  return fleet.bytes(1);
}

TEST(a_damaged_copy_is_refused_by_name) {
  const auto pieces = some_pieces();
  CHECK(Fleet::restored(pieces)->save() == pieces);
  CHECK_THROWS(Fleet::restored({}), "ends after 0 pieces");
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    auto fewer = pieces;
    fewer.erase(fewer.begin() + static_cast<std::ptrdiff_t>(i));
    CHECK_THROWS(Fleet::restored(fewer), "arc");
    for (const std::size_t at : {std::size_t{0}, std::size_t{4}, std::size_t{5}, std::size_t{9},
                                 std::size_t{16}, std::size_t{24}, pieces[i].size() - 1}) {
      auto damaged = pieces;
      damaged[i][at] ^= std::byte{0x40};
      CHECK_THROWS(Fleet::restored(damaged), "arc");
    }
  }
  auto more = pieces;
  more.push_back(pieces.back());
  CHECK_THROWS(Fleet::restored(more), "continues after its last piece");
}

TEST(damage_with_a_right_checksum_does_no_more_than_throw) {
  const auto pieces = some_pieces();
  std::mt19937_64 random(17);
  std::size_t refused = 0;
  for (int i = 0; i < check::rounds(3000); ++i) {
    auto damaged = pieces;
    auto& piece = damaged[random() % 3 == 0 ? damaged.size() - 1 : random() % damaged.size()];
    for (std::uint64_t n = 1 + random() % 3; n != 0; --n) {
      piece[24 + random() % (piece.size() - 24)] = static_cast<std::byte>(random());
    }
    if (random() % 4 == 0) {
      piece.resize(24 + random() % (piece.size() - 24));
    }
    const std::uint32_t crc = crc32c(std::span(piece).subspan(24));
    const std::uint64_t size = piece.size() - 24;
    std::memcpy(piece.data() + 12, &crc, sizeof crc);
    std::memcpy(piece.data() + 16, &size, sizeof size);
    try {
      CHECK(Fleet::restored(damaged)->save().size() == pieces.size());
    } catch (const std::invalid_argument&) {
      ++refused;
    } catch (const std::bad_alloc&) {
      ++refused;
    } catch (const MemoryBudgetExceededError&) {
      ++refused;
    }
  }
  CHECK(refused > check::rounds(500U));
}

class Two {
 public:
  Service from{Slots(kSlots), kArcs};
  Service to{Slots(kSlots), {}};
  BufferPool pool;

  std::vector<Header> send(Service& service, Header header,
                           const std::vector<std::vector<std::byte>>& payload) {
    header.job = header.job == 0 ? kJob : header.job;
    std::vector<wire::Frame> frames;
    for (const auto& bytes : payload) {
      frames.emplace_back(bytes);
    }
    std::array<std::byte, sizeof(Header)> head;
    wire::encode(header, frames, head);
    frames.insert(frames.begin(), head);
    ReplyQueue out(pool);
    service.handle("peer", frames, out);
    return read(out);
  }
  static std::vector<Header> read(ReplyQueue& out) {
    std::vector<Header> all;
    for (const Reply& reply : out.replies()) {
      std::memcpy(&all.emplace_back(), reply.header.data(), sizeof(Header));
    }
    return all;
  }
  std::vector<Header> released(Service& service) {
    ReplyQueue out(pool);
    service.released(out);
    return read(out);
  }
  Status pull(Service& service, std::uint32_t table, std::uint64_t hash, std::uint32_t rank = 0,
              std::uint32_t clock = 0) {
    const auto all = send(service,
                          {.op = Op::kPull,
                           .dtype = wire::Dtype::kFloat32,
                           .dim = static_cast<std::uint16_t>(spec(table).dim),
                           .table = table,
                           .worker = rank,
                           .incarnation = 1,
                           .sequence = kRead,
                           .epoch = 9,
                           .clock = clock,
                           .count = 1},
                          {bytes_of(std::array{hash})});
    CHECK_EQ(all.size(), 1);
    return all[0].status;
  }
  Status tick(Service& service, std::uint32_t rank, std::uint32_t clock) {
    const auto all = send(
        service,
        {.op = Op::kTick, .worker = rank, .incarnation = 1, .sequence = kRead, .epoch = 9, .clock = clock},
        {{}, {}});
    CHECK(!all.empty());
    return all.back().status;
  }
};

TEST(a_deferred_read_of_slots_that_leave_is_refused_at_once) {
  Two two;
  add_table(two.from, 0, spec(0));
  start_job(two.from, kJob, Mode::kBsp, 0, false);
  admit(two.from, 0, 1, 0);
  admit(two.from, 1, 1, 0);
  CHECK(two.tick(two.from, 0, 0) == Status::kOk);
  CHECK(two.pull(two.from, 0, 5, 0, 1) == Status::kDeferred);  // slot 0
  CHECK(two.pull(two.from, 0, std::uint64_t{15} << 60U, 0, 1) ==
        Status::kDeferred);  // replaces it: the same number
  auto arcs = take_arcs(two.from, {{9, 16}});
  const auto replies = two.released(two.from);
  CHECK_EQ(replies.size(), 1);
  CHECK(replies[0].status == Status::kWrongEpoch);
  CHECK(two.pull(two.from, 0, std::uint64_t{15} << 60U, 0, 1) == Status::kWrongEpoch);
  CHECK_EQ(two.from.metrics().deferred_reads, 0);
}

TEST(a_repeated_order_completes_the_arcs_that_lack_it) {
  Two two;
  add_table(two.from, 0, spec(0));
  start_job(two.from, kJob, Mode::kAsp, 0, false);
  admit(two.from, 0, 1, 0);
  add_table(two.to, 0, spec(0));
  start_job(two.to, kJob, Mode::kAsp, 0, false);
  admit(two.to, 0, 1, 0);
  move_arcs(two.from, two.to, {{0, 2}});
  // The first service alone has executed these.
  admit(two.from, 1, 1, 0);
  add_table(two.from, 1, spec(1));
  move_arcs(two.from, two.to, {{2, 8}});
  two.to.set_map(9, {{0, 2}, {2, 8}});
  const std::uint64_t in_first = 5;
  const std::uint64_t in_second = std::uint64_t{3} << 60U;
  CHECK(two.pull(two.to, 0, in_first) == Status::kOk);
  CHECK(two.pull(two.to, 0, in_second, 1) == Status::kNotAdmitted);  // one arc does not know the worker
  CHECK(two.pull(two.to, 1, in_second) == Status::kNoTable);         // one arc does not have the table
  admit(two.to, 1, 1, 0);
  add_table(two.to, 1, spec(1));
  for (const std::uint32_t rank : {0U, 1U}) {
    for (const std::uint32_t table : {0U, 1U}) {
      CHECK(two.pull(two.to, table, in_first, rank) == Status::kOk);
      CHECK(two.pull(two.to, table, in_second, rank) == Status::kOk);
    }
  }
  CHECK_THROWS(add_table(two.to, 1, spec(0)), "there is a table 1 already");
  fence(two.from, 1, 1);
  move_arcs(two.from, two.to, {{8, 9}});
  CHECK(two.pull(two.to, 0, in_first, 1) == Status::kFenced);
  dismiss(two.from, 1, 1);
  drop_table(two.from, 1);
  move_arcs(two.from, two.to, {{9, 16}});
  CHECK(two.pull(two.to, 0, in_first, 1) == Status::kFenced);
  CHECK(two.pull(two.to, 1, in_first) == Status::kNoTable);
  dismiss(two.to, 1, 1);
  drop_table(two.to, 1);
  drop_table(two.to, 1);
  CHECK(two.to.tables() == std::vector<std::uint32_t>{0});
  CHECK(two.pull(two.to, 0, in_first) == Status::kOk);
  CHECK_EQ(two.to.metrics().clocks.size(), 1);
}

TEST(a_job_that_some_arcs_have_not_started_serves_nobody_until_the_order_is_repeated) {
  Two two;
  add_table(two.from, 0, spec(0));
  start_job(two.from, kJob, Mode::kAsp, 0, false);
  admit(two.from, 0, 1, 0);
  move_arcs(two.from, two.to, {{0, 2}});
  two.to.set_map(9, {{0, 2}});
  CHECK(two.pull(two.to, 0, 5) == Status::kOk);
  const auto start = [](Service& service) {
    start_job(service, kJob + 1, Mode::kAsp, 0, false);
    admit(service, 0, 1, 0);
  };
  start(two.from);
  const Header push{.op = Op::kPush,
                    .dtype = wire::Dtype::kFloat32,
                    .dim = 2,
                    .worker = 0,
                    .incarnation = 1,
                    .sequence = 1,
                    .epoch = 9,
                    .count = 1,
                    .job = kJob + 1};
  const std::vector<std::vector<std::byte>> rows{bytes_of(std::array{std::uint64_t{3} << 60U}),
                                                 bytes_of(std::array{1.0F, 2.0F})};
  CHECK(two.send(two.from, push, rows)[0].status == Status::kOk);
  move_arcs(two.from, two.to, {{2, 8}});
  two.to.set_map(9, {{0, 2}, {2, 8}});
  CHECK(two.pull(two.to, 0, 5) == Status::kNotAdmitted);
  start(two.to);
  CHECK(two.pull(two.to, 0, 5) == Status::kWrongJob);
  const auto all = two.send(two.to,
                            {.op = Op::kPull,
                             .dtype = wire::Dtype::kFloat32,
                             .dim = 2,
                             .worker = 0,
                             .incarnation = 1,
                             .sequence = kRead,
                             .epoch = 9,
                             .count = 1,
                             .job = kJob + 1},
                            {bytes_of(std::array{std::uint64_t{5}})});
  CHECK(all[0].status == Status::kOk);
  // The arc that had started it has not started it again.
  CHECK(two.send(two.to, push, rows)[0].status == Status::kOk);
  CHECK_EQ(two.to.metrics().duplicates, 1);
}

TEST(a_repeated_tick_reaches_the_arcs_that_lack_it_and_no_other) {
  Two two;
  add_table(two.from, 0, spec(0));
  start_job(two.from, kJob, Mode::kBsp, 0, false);
  admit(two.from, 0, 1, 0);
  admit(two.from, 1, 1, 0);
  move_arcs(two.from, two.to, {{0, 2}});
  two.to.set_map(9, {{0, 2}});
  CHECK(two.tick(two.from, 0, 0) == Status::kOk);
  move_arcs(two.from, two.to, {{2, 8}});
  two.to.set_map(9, {{0, 2}, {2, 8}});
  CHECK(two.tick(two.to, 0, 0) == Status::kOk);
  CHECK(two.tick(two.to, 0, 0) == Status::kOk);
  CHECK(two.tick(two.to, 1, 0) == Status::kOk);
  CHECK_EQ(two.to.metrics().applied, 1);
  CHECK_EQ(two.to.metrics().floor, 1);
}

TEST(arcs_that_do_not_fit_are_refused_and_stay) {
  Two two;
  add_table(two.from, 0, spec(0));
  CHECK_THROWS(take_arcs(two.from, {{0, 1}}), "no arc here has the slots [0, 1)");
  CHECK_THROWS(take_arcs(two.from, {{0, 2}, {0, 2}}), "named twice");
  auto arcs = take_arcs(two.from, {{0, 2}});
  Service overlapping(Slots(kSlots), {{1, 3}});
  CHECK_THROWS(overlapping.adopt(arcs), "slot 1 has an arc already");
  Service other(Slots(32), {});
  CHECK_THROWS(other.adopt(arcs), "16 slots does not fit a service of 32");
  Service another(Slots(kSlots), {});
  add_table(another, 0, spec(1));
  CHECK_THROWS(another.adopt(arcs), "table 0 has another description");
  Service budgeted(Slots(kSlots), {});
  CHECK_THROWS(set_memory(budgeted, (std::uint64_t{1} << 48U) + 1), "beyond any machine");  // no copy has it
  CHECK_EQ(arcs.size(), 1);
  CHECK(arcs.front() != nullptr);
  two.from.adopt(arcs);
  CHECK(arcs.front() == nullptr);
  two.from.set_map(1, kArcs);
  two.from.discard(take_arcs(two.from, {{9, 16}}));
}

TEST(arcs_keep_their_shares_of_memory_wherever_they_go) {
  constexpr std::uint64_t kLess = 1U << 20U;
  constexpr std::uint64_t kMore = 3 * kLess;
  Two one;
  set_memory(one.from, kLess);
  add_table(one.from, 0, spec(0));
  Two other;
  set_memory(other.from, kMore);
  add_table(other.from, 0, spec(0));
  Service unlimited(Slots(kSlots), {{9, 16}});
  add_table(unlimited, 0, spec(0));
  Service all(Slots(kSlots), {});
  move_arcs(one.from, all, {{0, 2}});
  move_arcs(other.from, all, {{2, 8}, {8, 9}});
  all.set_map(9, {{0, 2}, {2, 8}, {8, 9}});
  CHECK_EQ(all.metrics().budget_bytes, 2 * kLess + 7 * kMore);
  move_arcs(unlimited, all, {{9, 16}});
  all.set_map(10, kArcs);
  CHECK_EQ(all.metrics().budget_bytes, 0);
  const auto arcs = take_arcs(all, kArcs);
  CHECK(arcs[0]->slot_bytes() == kLess);
  CHECK(arcs[1]->slot_bytes() == kMore);
  CHECK(arcs[2]->slot_bytes() == kMore);
  CHECK(!arcs[3]->slot_bytes());
}

TEST(a_save_of_arcs_that_leave_is_cancelled_and_can_begin_where_they_went) {
  Two two;
  add_table(two.from, 0, spec(0));
  start_job(two.from, kJob, Mode::kAsp, 0, false);
  admit(two.from, 0, 1, 0);
  std::vector<std::uint64_t> numbers(wire::kBaseWords + 1);  // no base; table 0, all rows
  const Header begin{.op = Op::kSaveBegin,
                     .worker = 0,
                     .incarnation = 1,
                     .sequence = 1,
                     .epoch = 9,
                     .count = static_cast<std::uint32_t>(numbers.size())};
  CHECK(two.send(two.from, begin, {bytes_of(numbers)})[0].status == Status::kOk);
  const auto session = two.from.take_session();
  CHECK(!session->ended());
  move_arcs(two.from, two.to, kArcs);
  CHECK(session->ended());
  CHECK(session->closed());
  two.to.set_map(9, kArcs);
  Header again = begin;
  again.sequence = 2;
  const auto reply = two.send(two.to, again, {bytes_of(numbers)})[0];
  CHECK(reply.status == Status::kOk);
  CHECK_EQ(reply.count, CheckpointSession::kSummaryWords);
}

TEST(arcs_go_on_when_the_service_that_they_came_from_is_gone) {
  Service to(Slots(kSlots), {});
  BufferPool pool;
  {
    Two two;
    add_table(two.from, 0, spec(1));
    start_job(two.from, kJob, Mode::kBsp, 0, false);
    admit(two.from, 0, 1, 0);
    const auto push =
        two.send(two.from,
                 {.op = Op::kPush,
                  .dtype = wire::Dtype::kFloat32,
                  .dim = 3,
                  .worker = 0,
                  .incarnation = 1,
                  .sequence = 1,
                  .epoch = 9,
                  .count = 1},
                 {bytes_of(std::array{std::uint64_t{5}}), bytes_of(std::array{1.0F, 2.0F, 3.0F})});
    CHECK(push[0].status == Status::kOk);
    move_arcs(two.from, to, kArcs);
  }
  to.set_map(9, kArcs);
  Two two;
  CHECK(two.tick(to, 0, 0) == Status::kOk);
  CHECK_EQ(to.metrics().applied, 1);
  CHECK_EQ(to.snapshot(0)->size(), 1);
  drop_table(to, 0);
  start_job(to, kJob + 1, Mode::kBsp, 0, false);
}

}  // namespace
}  // namespace shoal::service_move_test
