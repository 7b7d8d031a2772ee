// Pushes that wait under BSP: their large frames stay where they were received, everything else is copied.

#include <array>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <vector>

#include "check.h"
#include "endpoint/data_loop.h"
#include "endpoint/service.h"
#include "fake_zmq.h"
#include "orders.h"

namespace shoal::kept_messages_test {
using wire::Op;
using wire::Status;

namespace {

constexpr std::uint32_t kJob = 9;
constexpr std::size_t kDim = 4;
constexpr std::size_t kOverhead = PendingPushes::kOverhead;
// The least numbers of rows whose gradients, or gradients and hashes, are kept as they were received.
constexpr std::size_t kLargeGrads = MultipartMessage::kMinTakenBytes / (kDim * sizeof(float));
constexpr std::size_t kLargeBoth = MultipartMessage::kMinTakenBytes / sizeof(std::uint64_t);

template <class T>
Bytes bytes_of(const std::vector<T>& values) {
  const auto bytes = std::as_bytes(std::span(values));
  return {bytes.begin(), bytes.end()};
}

std::vector<std::uint64_t> hashes_of(std::uint64_t seed, std::size_t rows) {
  const std::uint64_t stride = std::numeric_limits<std::uint64_t>::max() / (rows + 1);
  std::vector<std::uint64_t> hashes(rows);
  for (std::size_t i = 0; i < rows; ++i) {
    hashes[i] = (i + 1) * stride - seed % 2;  // even and odd seeds: different rows
  }
  return hashes;
}

std::vector<float> grads_of(std::uint64_t seed, std::size_t rows) {
  std::vector<float> grads(rows * kDim);
  for (std::size_t i = 0; i < grads.size(); ++i) {
    grads[i] = 1.0F / static_cast<float>(seed + i + 1);
  }
  return grads;
}

Frames message(wire::Header header, const Frames& payload, std::uint32_t rank = 0) {
  header.worker = rank;
  header.incarnation = 1;
  header.job = kJob;
  header.epoch = 2;
  const std::vector<wire::Frame> views(payload.begin(), payload.end());
  Bytes encoded(sizeof(header));
  wire::encode(header, views, std::span<std::byte, sizeof(header)>(encoded));
  const auto peer = std::as_bytes(std::span(&"a"[0], 1));
  Frames all{Bytes(peer.begin(), peer.end()), encoded};
  all.insert(all.end(), payload.begin(), payload.end());
  return all;
}

Frames push(std::uint64_t sequence, std::size_t rows, std::uint32_t rank = 0, std::uint32_t clock = 0,
            std::uint16_t flags = 0) {
  const auto hashes = hashes_of(sequence, rows);
  const Digest name = digest(hashes, kJob);
  const Bytes keys =
      (flags & wire::kDigest) != 0 ? bytes_of(std::vector{name.first, name.second}) : bytes_of(hashes);
  return message({.op = Op::kPush,
                  .dtype = wire::Dtype::kFloat32,
                  .flags = flags,
                  .dim = kDim,
                  .sequence = sequence,
                  .clock = clock,
                  .count = static_cast<std::uint32_t>(rows)},
                 {keys, bytes_of(grads_of(sequence, rows))}, rank);
}

Frames tick(std::uint32_t rank = 0, std::uint32_t clock = 0) {
  return message({.op = Op::kTick, .sequence = std::uint64_t{1} << 63U, .clock = clock, .aux = 1},
                 {{}, bytes_of(std::vector<std::uint32_t>{0})}, rank);
}

// A service of two workers under BSP, the slots [0, end) of 16 and one table.
template <class AnyService>
void set_up(AnyService& service, std::size_t end) {
  service.set_map(1, {{0, end}});
  start_job(service, kJob, Mode::kBsp, 0, true);
  admit(service, 0, 1, 0);
  admit(service, 1, 1, 0);
  TableSpec spec{
      .dim = kDim,
      .dtype = Dtype::kFloat32,
      .optimizer = Optimizer("Adagrad", {{"lr", 0.1}, {"eps", 1e-8}, {"n0", 0.0}, {"weight_decay", 0.0}}),
      .init = Init("Constant", 0.5, 0),
      .seed = 0};
  add_table(service, 0, spec);
}

// A service that receives its messages from a fake libzmq, in the calling thread.
struct Host {
  explicit Host(const ServiceLimits& limits = {}, std::size_t end = 16,
                const std::vector<SlotRange>& arcs = {{0, 16}})
      : service(Slots(16), arcs, limits) {
    set_up(service, end);
  }

  // Without `owned`, the service does not learn who owns the frames, and copies what it keeps.
  Status handle(const Frames& frames, bool owned = true) {
    fake.arrive(frames);
    MultipartMessage parts(Fake::functions());
    CHECK(parts.receive(this) == MultipartMessage::Result::kMessage);
    std::vector<wire::Frame> views;
    for (std::size_t i = 1; i < parts.count(); ++i) {
      views.push_back(parts.frame(i));
    }
    service.handle("a", views, out, owned ? &parts : nullptr);
    wire::Header header;
    CHECK_EQ(out.replies().size(), 1);
    std::memcpy(&header, out.replies().front().header.data(), sizeof header);
    out.replies().clear();
    return header.status;
  }
  // Frames that are kept; requires that no message is being handled.
  int kept() const { return fake.live; }

  Fake fake;
  Service service;
  BufferPool pool;
  ReplyQueue out{pool};
};

std::vector<std::array<std::uint64_t, 2>> digests(const Service& service) {
  const auto table = service.snapshot(0);
  std::vector<std::array<std::uint64_t, 2>> all;
  for (std::uint32_t slot = 0; slot < 16; ++slot) {
    all.push_back(table->digest(Slot{slot}));
  }
  return all;
}

}  // namespace

TEST(large_frames_of_a_push_are_kept_until_its_clock_ends) {
  Host endpoint;
  int kept = 0;
  std::size_t bytes = kOverhead;
  std::uint64_t sequence = 0;
  const auto push_rows = [&](std::size_t rows, int frames) {
    CHECK(endpoint.handle(push(++sequence, rows)) == Status::kOk);
    kept += frames;
    bytes += kOverhead + rows * (sizeof(std::uint64_t) + kDim * sizeof(float));
    CHECK_EQ(endpoint.kept(), kept);
    CHECK_EQ(endpoint.service.metrics().pending_bytes, bytes);
  };
  push_rows(0, 0);
  push_rows(1, 0);
  push_rows(kLargeGrads - 1, 0);
  push_rows(kLargeGrads, 1);
  push_rows(kLargeBoth - 1, 1);
  push_rows(kLargeBoth, 2);
  push_rows(100'000, 2);
  // A repeated message is a duplicate, of which nothing is kept.
  CHECK(endpoint.handle(push(sequence, 100'000)) == Status::kOk);
  CHECK_EQ(endpoint.kept(), kept);
  CHECK(endpoint.handle(tick()) == Status::kOk);
  CHECK_EQ(endpoint.kept(), kept);
  CHECK(endpoint.handle(tick(1)) == Status::kOk);
  CHECK_EQ(endpoint.kept(), 0);
  CHECK_EQ(endpoint.service.metrics().pending_bytes, 0);
  CHECK_EQ(endpoint.service.metrics().failed_steps, 0);
}

TEST(pushes_that_were_kept_or_copied_or_misaligned_give_the_same_rows) {
  std::vector<std::vector<std::array<std::uint64_t, 2>>> all;
  for (const bool owned : {true, false}) {
    for (const std::size_t misalignment : {0U, 4U, 1U}) {
      Host endpoint;
      endpoint.fake.misalignment = misalignment;
      int kept = 0;
      for (std::uint32_t clock = 0; clock < 3; ++clock) {
        for (std::uint32_t rank = 0; rank < 2; ++rank) {
          std::uint64_t sequence = 100 * clock;
          for (const std::size_t rows : {0UL, 7UL, kLargeGrads, 5 * kLargeBoth, 3UL, kLargeBoth + 1}) {
            CHECK(endpoint.handle(push(++sequence, rows, rank, clock), owned) == Status::kOk);
          }
          kept += endpoint.kept();
        }
        CHECK(endpoint.handle(tick(1, clock)) == Status::kOk);
        CHECK(endpoint.handle(tick(0, clock)) == Status::kOk);
      }
      CHECK_EQ(endpoint.kept(), 0);
      CHECK_EQ(kept, owned && misalignment == 0 ? 3 * (5 + 10) : 0);
      CHECK_EQ(endpoint.service.snapshot(0)->step(), 3);
      all.push_back(digests(endpoint.service));
    }
  }
  for (const auto& one : all) {
    CHECK(one == all.front());
  }
}

TEST(one_worker_s_push_whose_frames_are_kept_is_applied_from_them) {
  // A single list is not merged: the step reads the frames themselves.
  std::vector<std::vector<std::array<std::uint64_t, 2>>> all;
  for (const bool owned : {true, false}) {
    Host endpoint;
    dismiss(endpoint.service, 1, 1);
    CHECK(endpoint.handle(push(1, 3 * kLargeBoth), owned) == Status::kOk);
    CHECK_EQ(endpoint.kept(), owned ? 2 : 0);
    CHECK(endpoint.handle(tick()) == Status::kOk);
    CHECK_EQ(endpoint.kept(), 0);
    all.push_back(digests(endpoint.service));
  }
  CHECK(all[0] == all[1]);
}

TEST(what_is_a_part_of_a_frame_or_was_decoded_is_copied) {
  constexpr std::size_t kRows = 4 * kLargeBoth;
  {
    Host endpoint({}, 8);  // half of the slots are elsewhere
    CHECK(endpoint.handle(push(1, kRows)) == Status::kWrongEpoch);
    CHECK_EQ(endpoint.kept(), 0);
    CHECK_EQ(endpoint.service.metrics().pending_bytes,
             2 * kOverhead + kRows / 2 * (sizeof(std::uint64_t) + kDim * sizeof(float)));
    // The other half arrives after the slots: the first half is not taken twice.
    endpoint.service.set_map(2, {{0, 16}});
    CHECK(endpoint.handle(push(1, kRows)) == Status::kOk);
    CHECK_EQ(endpoint.kept(), 0);
    CHECK(endpoint.handle(tick()) == Status::kOk);
    CHECK(endpoint.handle(tick(1)) == Status::kOk);
    CHECK_EQ(endpoint.service.snapshot(0)->size(), kRows);
  }
  {
    Host endpoint;  // a cached key list
    CHECK(endpoint.handle(push(1, kRows, 0, 0, wire::kKeep)) == Status::kOk);
    CHECK_EQ(endpoint.kept(), 2);
    CHECK(endpoint.handle(push(3, kRows, 0, 0, wire::kDigest)) == Status::kOk);
    CHECK_EQ(endpoint.kept(), 3);
    CHECK(endpoint.handle(tick()) == Status::kOk);
    CHECK(endpoint.handle(tick(1)) == Status::kOk);
    CHECK_EQ(endpoint.kept(), 0);
    CHECK_EQ(endpoint.service.snapshot(0)->size(), kRows);
  }
  {
    Host endpoint;  // 16-bit values
    const auto hashes = hashes_of(1, kRows);
    const std::vector<std::uint16_t> halves(kRows * kDim, 0x3f80);
    CHECK(endpoint.handle(message(
              {.op = Op::kPush, .dtype = wire::Dtype::kBfloat16, .dim = kDim, .sequence = 1, .count = kRows},
              {bytes_of(hashes), bytes_of(halves)})) == Status::kOk);
    CHECK_EQ(endpoint.kept(), 1);  // the hashes
    CHECK(endpoint.handle(tick()) == Status::kOk);
    CHECK(endpoint.handle(tick(1)) == Status::kOk);
    CHECK_EQ(endpoint.kept(), 0);
  }
}

TEST(a_push_beyond_the_limit_of_pending_bytes_keeps_no_frame) {
  constexpr std::size_t kRows = 2 * kLargeBoth;
  constexpr std::size_t kBytes = kRows * (sizeof(std::uint64_t) + kDim * sizeof(float));
  Host endpoint({.pending_bytes = 2 * (kBytes + kOverhead) + kOverhead});
  CHECK(endpoint.handle(push(1, kRows)) == Status::kOk);
  CHECK(endpoint.handle(push(2, kRows)) == Status::kOk);
  CHECK_EQ(endpoint.kept(), 4);
  CHECK(endpoint.handle(push(3, kRows)) == Status::kBadRequest);
  CHECK_EQ(endpoint.kept(), 4);
  // A later clock may take half of the limit.
  CHECK(endpoint.handle(tick()) == Status::kOk);
  CHECK(endpoint.handle(push(4, kRows, 0, 1)) == Status::kOk);
  CHECK(endpoint.handle(push(5, kRows, 0, 1)) == Status::kOverloaded);
  CHECK_EQ(endpoint.kept(), 6);
  CHECK_EQ(endpoint.service.metrics().pending_bytes, 3 * (kBytes + kOverhead) + 3 * kOverhead);
}

TEST(frames_of_dropped_pushes_are_released) {
  Host endpoint;
  const auto push_both = [&](std::uint64_t sequence) {
    CHECK(endpoint.handle(push(sequence, kLargeBoth, 0)) == Status::kOk);
    CHECK(endpoint.handle(push(sequence, kLargeBoth, 1)) == Status::kOk);
    CHECK_EQ(endpoint.kept(), 4);
  };
  push_both(1);
  dismiss(endpoint.service, 1, 1);
  CHECK_EQ(endpoint.kept(), 2);
  drop_table(endpoint.service, 0);
  CHECK_EQ(endpoint.kept(), 0);
  set_up(endpoint.service, 16);
  admit(endpoint.service, 1, 2, 0);
  CHECK(endpoint.handle(push(2, kLargeBoth)) == Status::kOk);
  CHECK_EQ(endpoint.kept(), 2);
  start_job(endpoint.service, kJob + 1, Mode::kBsp, 0, false);
  CHECK_EQ(endpoint.kept(), 0);
}

TEST(the_arcs_that_a_message_reaches_share_its_frames) {
  constexpr std::size_t kRows = 4 * kLargeBoth;
  std::vector<std::vector<std::array<std::uint64_t, 2>>> all;
  for (const std::vector<SlotRange>& arcs :
       {std::vector<SlotRange>{{0, 16}}, std::vector<SlotRange>{{0, 1}, {1, 6}, {6, 9}, {9, 16}}}) {
    Host endpoint({}, 16, arcs);
    CHECK(endpoint.handle(push(1, kRows)) == Status::kOk);
    CHECK_EQ(endpoint.kept(), 2);
    CHECK(endpoint.handle(push(2, kRows), false) == Status::kOk);
    CHECK_EQ(endpoint.kept(), 2);
    CHECK(endpoint.handle(tick()) == Status::kOk);
    CHECK(endpoint.handle(tick(1)) == Status::kOk);
    CHECK_EQ(endpoint.kept(), 0);
    CHECK_EQ(endpoint.service.metrics().pending_bytes, 0);
    all.push_back(digests(endpoint.service));
  }
  CHECK(all[0] == all[1]);
}

TEST(a_service_may_be_destroyed_by_another_thread_with_pushes_that_came_through_its_loop) {
  Fake fake;  // its destructor checks that no frame is left
  {
    Endpoint service(Slots(16), {{0, 5}, {5, 16}});
    set_up(service, 16);
    DataLoop loop(Fake::functions(), &fake, service, {.address = "fake://any"});
    for (std::uint64_t sequence = 1; sequence <= 20; ++sequence) {
      fake.arrive(push(sequence, sequence * 1000));
    }
    const auto replies = fake.wait(20);
    fake.take();
    loop.stop();
    CHECK(service.metrics().pending_bytes > 20 * 1000 * 24);
    CHECK(fake.live > 30);
  }
  CHECK_EQ(fake.live, 0);
}

}  // namespace shoal::kept_messages_test
