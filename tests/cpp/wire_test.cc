// The wire format: round trips of every op, and every fault.

#include "wire/wire.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/crc32c.h"
#include "check.h"
#include "wire/record_header.h"
#include "wire/times.h"
#include "wire/values.h"

namespace shoal::wire::wire_test {
namespace {

using Bytes = std::vector<std::byte>;

template <class T>
Bytes bytes_of_all(const std::vector<T>& values) {
  const auto bytes = std::as_bytes(std::span(values));
  return {bytes.begin(), bytes.end()};
}

// A message as it lies in memory.
struct Sent {
  Header header;
  std::vector<Bytes> payload;

  std::vector<Bytes> frames() {
    const std::vector<Frame> views(payload.begin(), payload.end());
    Bytes head(sizeof(Header));
    encode(header, views, std::span<std::byte, sizeof(Header)>(head.data(), sizeof(Header)));
    std::vector<Bytes> all = {head};
    all.insert(all.end(), payload.begin(), payload.end());
    return all;
  }
};

Fault decode_bytes(const std::vector<Bytes>& frames, Decoded& out, const Limits& limits) {
  const std::vector<Frame> views(frames.begin(), frames.end());
  return decode(views, limits, out);
}

// One good message of every shape there is.
std::vector<Sent> samples() {
  const Bytes hashes = bytes_of_all<std::uint64_t>({3, 5, ~std::uint64_t{0}});
  const Bytes floats = bytes_of_all<float>({1, 0, -2, 0, 0, 3});
  const Bytes halves = bytes_of_all<std::uint16_t>({0x3c00, 0, 0xc000, 0, 0, 0x4200});
  const Bytes map = bytes_of_all<std::uint8_t>({0b100101});
  const Bytes kept = bytes_of_all<float>({1, -2, 3});
  const Bytes kept_halves = bytes_of_all<std::uint16_t>({0x3c00, 0xc000, 0x4200});
  const Bytes digest(16, std::byte{7});
  const Bytes numbers = bytes_of_all<std::uint64_t>({9, 4, 4});
  const Bytes text = bytes_of_all<char>({'n', 'o', '!'});
  std::vector<Sent> all;
  const auto add = [&](Op op, std::uint16_t flags, Dtype dtype, std::vector<Bytes> payload,
                       std::uint32_t aux = 0, Status status = Status::kOk, std::uint32_t count = 3) {
    Header header{.op = op,
                  .status = status,
                  .dtype = dtype,
                  .flags = flags,
                  .dim = 2,
                  .table = 8,
                  .worker = 1,
                  .incarnation = 2,
                  .sequence = 77,
                  .epoch = 4,
                  .clock = 5,
                  .count = count,
                  .aux = aux,
                  .job = 6};
    all.push_back({header, std::move(payload)});
  };
  const Dtype f32 = Dtype::kFloat32;
  add(Op::kPull, 0, f32, {hashes});
  add(Op::kPull, kPacked | kKeep | 0x4200, Dtype::kBfloat16, {hashes});
  add(Op::kPull, kDigest, f32, {digest});
  add(Op::kPull, kReply, f32, {floats});
  add(Op::kPull, kReply, Dtype::kFloat16, {halves});
  add(Op::kPull, kReply | kPacked, f32, {map, kept});
  add(Op::kPull, kReply | kPacked, Dtype::kFloat16, {map, kept_halves});
  for (const Op op : {Op::kPush, Op::kAssign}) {
    add(op, 0, f32, {hashes, floats});
    add(op, 0, Dtype::kFloat16, {hashes, halves});
    add(op, kPacked, f32, {hashes, map, kept});
    add(op, kReply, Dtype::kNone, {});
    add(op, kTimed, f32, {hashes, floats});
    add(op, kReply | kTimed, Dtype::kNone, {}, 0x40021001);
  }
  add(Op::kPull, kTimed | kPacked, f32, {hashes});
  add(Op::kPull, kReply | kTimed, f32, {floats}, 0x40021001);
  add(Op::kPull, kDated | kTimed, f32, {hashes});
  add(Op::kPull, kReply | kDated | kTimed, f32, {floats}, 0x40021001);
  add(Op::kPush, kDigest, Dtype::kFloat16, {digest, halves});
  add(Op::kPush, kDigest | kPacked, f32, {digest, map, kept});
  add(Op::kPush, kKeep, f32, {hashes, floats});
  const Bytes counts = bytes_of_all<std::uint8_t>({0b110, 3, 0, 0xbc, 2, 0, 0});
  add(Op::kPush, kCounted, f32, {hashes, floats, counts});
  add(Op::kPush, kCounted | kDigest | kPacked, f32, {digest, map, kept, counts});
  add(Op::kPush, kCounted | kPacked, Dtype::kBfloat16,
      {hashes, map, bytes_of_all<std::uint16_t>({0x3f80, 0xc000, 0x4040}), counts});
  add(Op::kTick, 0, Dtype::kNone, {numbers, bytes_of_all<std::uint32_t>({1, 9})}, 2);
  add(Op::kTick, kReply, Dtype::kNone, {});
  add(Op::kTick, kTimed, Dtype::kNone, {numbers, bytes_of_all<std::uint32_t>({1, 9})}, 2);
  add(Op::kTick, kReply | kTimed, Dtype::kNone, {}, 1);
  add(Op::kErase, 0, Dtype::kNone, {hashes});
  add(Op::kErase, kReply, Dtype::kNone, {}, 3);
  add(Op::kContains, 0, Dtype::kNone, {hashes});
  add(Op::kContains, kReply, Dtype::kUint8, {text});
  add(Op::kContains, kTimed, Dtype::kNone, {hashes});
  add(Op::kContains, kReply | kTimed, Dtype::kUint8, {text}, 1);
  add(Op::kState, 0, Dtype::kNone, {hashes}, 1);
  add(Op::kState, kReply, f32, {floats});
  add(Op::kSlot, 0, Dtype::kNone, {}, 1023);
  add(Op::kSlot, kReply, f32, {hashes, floats});
  add(Op::kSection, 0, Dtype::kNone, {}, 1023);
  add(Op::kSection, kReply, Dtype::kUint8, {Bytes(192, std::byte{1})});
  add(Op::kLoadBegin, 0, Dtype::kNone, {numbers});
  add(Op::kLoadRows, 0, Dtype::kUint8, {Bytes(64)});
  add(Op::kLoadEnd, 0, Dtype::kNone, {bytes_of_all<std::uint64_t>({12})}, 0, Status::kOk, 1);
  add(Op::kStats, 0, Dtype::kNone, {});
  add(Op::kStats, kReply, Dtype::kNone, {numbers});
  add(Op::kReduce, 0, Dtype::kFloat64, {bytes_of_all<double>({1, 2, 3})}, 2);
  add(Op::kReduce, kReply, Dtype::kFloat64, {bytes_of_all<double>({1, 2, 3})});
  add(Op::kLoadFilter, 0, Dtype::kUint8, {Bytes(12)}, 5);
  add(Op::kSweep, 0, Dtype::kFloat64, {bytes_of_all<double>({1, 2, 0})}, 1);
  add(Op::kSweep, kReply, Dtype::kNone, {numbers});
  add(Op::kSaveBegin, 0, Dtype::kNone, {numbers});
  add(Op::kSaveBegin, kReply, Dtype::kNone, {numbers});
  add(Op::kSavePoll, 0, Dtype::kUint8, {numbers, text});
  add(Op::kSavePoll, kReply, Dtype::kUint8, {text});
  add(Op::kSaveEnd, 0, Dtype::kNone, {numbers});
  add(Op::kSaveEnd, kReply, Dtype::kNone, {});
  const auto record = [](Record kind) { return static_cast<std::uint32_t>(kind); };
  add(Op::kReplicate, 0, Dtype::kNone, {}, record(Record::kAlive));
  for (const Record kind : {Record::kOrder, Record::kCopyBegin, Record::kCopyChunk, Record::kCopyEnd}) {
    add(Op::kReplicate, 0, Dtype::kUint8, {text}, record(kind));
  }
  add(Op::kReplicate, kReply, Dtype::kNone, {}, 6);
  add(Op::kReplicate, kReply, Dtype::kNone, {text}, 0, Status::kInternal);
  add(Op::kPing, 0, Dtype::kNone, {});
  add(Op::kPing, kReply, Dtype::kNone, {});
  add(Op::kPrefetch, 0, Dtype::kNone, {hashes});
  add(Op::kPrefetch, kReply, Dtype::kNone, {});
  add(Op::kPush, kReply, Dtype::kNone, {text}, 0, Status::kBadRequest);
  add(Op::kPush, kReply, Dtype::kNone, {text}, 0, Status::kResourceExhausted);
  add(Op::kNone, kReply, Dtype::kNone, {text}, 0, Status::kInternal);
  add(Op::kErase, kReply, Dtype::kNone, {bytes_of_all<std::uint16_t>({1, 2, 900})}, 1, Status::kWrongEpoch);
  for (const Status status :
       {Status::kDeferred, Status::kFenced, Status::kNotAdmitted, Status::kNoTable, Status::kRetry,
        Status::kOverloaded, Status::kWrongVersion, Status::kWrongJob, Status::kUnknownKeyList}) {
    add(Op::kPull, kReply, Dtype::kNone, {}, 0, status, 0);
  }
  // Nothing at all of each.
  add(Op::kPull, 0, f32, {Bytes()}, 0, Status::kOk, 0);
  add(Op::kPush, 0, f32, {Bytes(), Bytes()}, 0, Status::kOk, 0);
  add(Op::kPush, kPacked, f32, {Bytes(), Bytes(), Bytes()}, 0, Status::kOk, 0);
  add(Op::kTick, 0, Dtype::kNone, {Bytes(), Bytes()}, 0, Status::kOk, 0);
  return all;
}

Limits limits_for(const Sent& sent) { return {.replies = (sent.header.flags & kReply) != 0}; }

TEST(a_message_of_every_shape_comes_back_as_it_was) {
  for (Sent& sent : samples()) {
    Decoded got;
    const Fault fault = decode_bytes(sent.frames(), got, limits_for(sent));
    CHECK_EQ(std::string(fault.message()), "");
    CHECK(!fault);
    CHECK(std::memcmp(&got.header, &sent.header, sizeof(Header)) == 0);
  }
}

TEST(values_are_float32_however_they_travelled) {
  const std::vector<float> values = {1, 0, -2, 0, 0, 3};
  int seen = 0;
  for (Sent& sent : samples()) {
    const bool weights = sent.header.dtype >= Dtype::kFloat32 && sent.header.dtype <= Dtype::kBfloat16;
    if (!weights || sent.header.count == 0 || (sent.header.op == Op::kPull && !sent.header.is_reply())) {
      continue;
    }
    Decoded got;
    const std::vector<Bytes> frames = sent.frames();
    CHECK(!decode_bytes(frames, got, limits_for(sent)));
    CHECK(std::equal(values.begin(), values.end(), got.floats().begin(), got.floats().end()));
    CHECK_EQ(got.values.size(), values.size() * sizeof(float));
    ++seen;
  }
  CHECK_EQ(seen, 22);
}

TEST(plain_values_of_an_answer_are_put_where_they_are_wanted_and_nothing_else_is) {
  int put = 0;
  for (Sent& sent : samples()) {
    const std::vector<Bytes> frames = sent.frames();
    const std::vector<Frame> views(frames.begin(), frames.end());
    const std::size_t last = sent.payload.empty() ? 0 : sent.payload.back().size();
    for (const std::size_t size : {last, last + 4, std::size_t{24}}) {
      Bytes room(size + 1, std::byte{0x5a});
      Decoded straight;
      Decoded got;
      CHECK(!decode(views, limits_for(sent), straight));
      CHECK(!decode(views, limits_for(sent), got, std::span(room).first(size)));
      CHECK(std::ranges::equal(got.values, straight.values));
      CHECK(room[size] == std::byte{0x5a});
      const bool there = !got.values.empty() && got.values.data() == room.data();
      const Header& header = sent.header;
      const bool plain = header.is_reply() && header.status == Status::kOk && size == last && size > 0 &&
                         ((header.dtype == Dtype::kFloat32 && (header.flags & kPacked) == 0) ||
                          header.op == Op::kContains || header.op == Op::kReduce);
      CHECK_EQ(there, plain);
      CHECK(there || std::ranges::count(room, std::byte{0x5a}) == static_cast<std::ptrdiff_t>(size) + 1);
      put += there ? 1 : 0;
    }
    // Damage is detected as before.
    if (last > 0) {
      std::vector<Bytes> damaged = frames;
      damaged.back().back() ^= std::byte{1};
      const std::vector<Frame> wrong(damaged.begin(), damaged.end());
      Bytes room(last);
      Decoded got;
      CHECK(static_cast<bool>(decode(wrong, limits_for(sent), got, room)));
      CHECK(got.values.empty());
    }
  }
  CHECK(put > 4);
}

TEST(whom_a_message_is_for_is_known_from_a_header_that_holds) {
  for (Sent& sent : samples()) {
    std::vector<Bytes> frames = sent.frames();
    const auto look = [&] {
      const std::vector<Frame> views(frames.begin(), frames.end());
      return peek(views);
    };
    CHECK(look().has_value());
    CHECK_EQ(look()->sequence, sent.header.sequence);
    CHECK_EQ(look()->part(), sent.header.part());
    for (const std::size_t byte : {0UL, 3UL, 24UL, 56UL, 63UL}) {
      frames[0][byte] ^= std::byte{4};
      CHECK(!look().has_value());
      frames[0][byte] ^= std::byte{4};
    }
    frames[0].pop_back();
    CHECK(!look().has_value());
  }
  CHECK(!peek({}).has_value());
}

TEST(one_decoded_serves_message_after_message_and_keeps_nothing_of_the_last) {
  Decoded got;
  for (Sent& sent : samples()) {
    const bool good = !decode_bytes(sent.frames(), got, limits_for(sent));
    CHECK(good);
  }
  Sent stats = {{.op = Op::kStats}, {}};
  CHECK(!decode_bytes(stats.frames(), got, {}));
  CHECK(got.counts.empty());
  CHECK(got.hashes.empty() && got.digest.empty() && got.values.empty() && got.numbers.empty());
  CHECK(got.tables.empty() && got.slots.empty() && got.text.empty() && got.floats().empty() &&
        got.doubles().empty());
  CHECK(decode_bytes({}, got, {}).status == Status::kBadRequest);
  CHECK_EQ(got.header.magic, 0);
}

TEST(times_are_exact_to_a_thousandth_and_never_too_large) {
  std::uint64_t last = 0;
  for (unsigned shift = 0; shift < 42; ++shift) {
    for (const std::uint64_t offset : {0U, 1U, 2U}) {
      const std::uint64_t ns = (std::uint64_t{1} << shift) + (offset << shift) / 3;
      const std::uint64_t back = unpack_time(pack_time(ns));
      CHECK(back <= ns && ns - back <= ns / 1024);
      CHECK(ns > 2047 || back == ns);
      CHECK(back >= last);
      last = back;
    }
  }
  CHECK_EQ(unpack_time(pack_time(0)), 0);
  const std::uint64_t longest = std::uint64_t{2047} << 31U;
  for (const std::uint64_t ns : {longest, longest + (1U << 31U), ~std::uint64_t{0}}) {
    CHECK_EQ(unpack_time(pack_time(ns)), longest);
  }
  const ServerTimes times = unpack_times(pack_times({.server_ns = 5000, .shard_ns = 3}));
  CHECK_EQ(times.server_ns, 5000);
  CHECK_EQ(times.shard_ns, 3);
}

TEST(a_header_that_gets_times_is_whole_and_has_nothing_else_changed) {
  Sent sent = {{.op = Op::kPush, .flags = kReply | 0x4200, .sequence = 77, .job = 6}, {}};
  std::vector<Bytes> frames = sent.frames();
  set_times(std::span<std::byte, sizeof(Header)>(frames[0].data(), sizeof(Header)),
            {.server_ns = 5000, .shard_ns = 3});
  Decoded got;
  CHECK(!decode_bytes(frames, got, {.replies = true}));
  Header expected = sent.header;
  expected.flags |= kTimed;
  expected.aux = pack_times({.server_ns = 5000, .shard_ns = 3});
  expected.header_crc = got.header.header_crc;
  CHECK(std::memcmp(&got.header, &expected, sizeof(Header)) == 0);
}

TEST(frames_may_begin_at_any_byte) {
  for (Sent& sent : samples()) {
    const std::vector<Bytes> frames = sent.frames();
    Decoded straight;
    CHECK(!decode_bytes(frames, straight, limits_for(sent)));
    for (std::size_t shift = 1; shift < 8; ++shift) {
      std::vector<Bytes> kept;
      std::vector<Frame> views;
      for (const Bytes& frame : frames) {
        Bytes moved(shift);
        moved.insert(moved.end(), frame.begin(), frame.end());
        kept.push_back(std::move(moved));
        views.push_back(std::span(kept.back()).subspan(shift));
      }
      Decoded got;
      CHECK(!decode(views, limits_for(sent), got));
      const auto same = [](auto a, auto b) { return std::equal(a.begin(), a.end(), b.begin(), b.end()); };
      CHECK(same(got.hashes, straight.hashes) && same(got.values, straight.values));
      CHECK(same(got.numbers, straight.numbers) && same(got.tables, straight.tables));
      CHECK(same(got.slots, straight.slots) && same(got.text, straight.text));
      CHECK_EQ(reinterpret_cast<std::uintptr_t>(got.hashes.data()) % 8, 0);
      CHECK_EQ(reinterpret_cast<std::uintptr_t>(got.numbers.data()) % 8, 0);
      CHECK_EQ(reinterpret_cast<std::uintptr_t>(got.floats().data()) % 4, 0);
      CHECK_EQ(reinterpret_cast<std::uintptr_t>(got.doubles().data()) % 8, 0);
    }
  }
}

TEST(a_changed_bit_anywhere_is_noticed) {
  for (Sent& sent : samples()) {
    std::vector<Bytes> frames = sent.frames();
    for (Bytes& frame : frames) {
      for (std::size_t bit = 0; bit < frame.size() * 8; ++bit) {
        frame[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
        Decoded got;
        CHECK(static_cast<bool>(decode_bytes(frames, got, limits_for(sent))));
        frame[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
      }
    }
  }
}

TEST(a_frame_too_many_too_few_too_long_or_too_short_is_noticed) {
  for (Sent& sent : samples()) {
    const std::vector<Bytes> frames = sent.frames();
    const auto bad = [&](std::vector<Bytes> changed) {
      Decoded got;
      return decode_bytes(changed, got, limits_for(sent)).status == Status::kBadRequest;
    };
    for (std::size_t i = 0; i < frames.size(); ++i) {
      auto changed = frames;
      changed[i].push_back(std::byte{0});
      CHECK(bad(changed));
      changed = frames;
      if (!changed[i].empty()) {
        changed[i].pop_back();
        CHECK(bad(changed));
      }
      changed = frames;
      changed.erase(changed.begin() + static_cast<std::ptrdiff_t>(i));
      CHECK(bad(changed));
    }
    auto changed = frames;
    changed.emplace_back();
    CHECK(bad(changed));
  }
}

// A REPLICATE of a push, and the push.
std::vector<Bytes> replicated(Header header = {}) {
  Sent push = {{.op = Op::kPush, .dtype = Dtype::kFloat32, .dim = 1, .sequence = 77, .count = 2},
               {bytes_of_all<std::uint64_t>({3, 5}), bytes_of_all<float>({1, 2})}};
  header.op = Op::kReplicate;
  header.sequence = 12;
  header.aux = static_cast<std::uint32_t>(Record::kRequest);
  header.table = 0x89abcdefU;
  header.job = 0x12345U;
  std::vector<Bytes> frames = Sent{header, {}}.frames();
  const std::vector<Bytes> nested = push.frames();
  frames.insert(frames.end(), nested.begin(), nested.end());
  return frames;
}

TEST(a_nested_request_comes_back_as_it_was_and_is_decoded_on_its_own) {
  const std::vector<Bytes> frames = replicated();
  const std::vector<Frame> views(frames.begin(), frames.end());
  Decoded got;
  CHECK(!decode(views, {}, got));
  CHECK_EQ(RecordHeader::of(got.header).stream, 0x1234589abcdefU);
  CHECK_EQ(got.nested.size(), 3);
  Decoded push;
  CHECK(!decode(got.nested, {}, push));
  CHECK_EQ(push.header.sequence, 77);
  CHECK_EQ(push.floats()[1], 2.0F);
  // The header of the record covers no byte of it.
  std::vector<Bytes> damaged = frames;
  damaged[2][0] ^= std::byte{1};
  const std::vector<Frame> wrong(damaged.begin(), damaged.end());
  CHECK(!decode(wrong, {}, got));
  CHECK(decode(got.nested, {}, push).message().find("damaged") != std::string_view::npos);
}

TEST(a_nested_request_of_a_wrong_form_is_refused) {
  const auto fault_of = [](std::vector<Bytes> frames, const Limits& limits = {}) {
    Decoded got;
    const std::string text(decode_bytes(frames, got, limits).message());
    CHECK(got.nested.empty() == !text.empty());
    return text;
  };
  const std::vector<Bytes> good = replicated();
  CHECK_EQ(fault_of(good), "");
  CHECK_EQ(fault_of({good[0]}), "a nested message has 1 to 5 frames, got 0");
  std::vector<Bytes> frames = good;
  frames[1].pop_back();
  CHECK_EQ(fault_of(frames), "a nested header has 64 to 256 bytes, got 63");
  frames[1].resize(256);
  CHECK_EQ(fault_of(frames), "");
  frames[1].resize(257);
  CHECK_EQ(fault_of(frames), "a nested header has 64 to 256 bytes, got 257");
  frames = good;
  frames.resize(6);
  CHECK_EQ(fault_of(frames), "");
  frames.resize(7);
  CHECK_EQ(fault_of(frames), "a message has 1 to 6 frames, got 7");
  CHECK_EQ(fault_of(good, {.payload_bytes = 24}), "");
  CHECK_EQ(fault_of(good, {.payload_bytes = 23}), "24 bytes in one message, at most 23 are taken");
  frames = good;
  const std::vector<Bytes> covered = Sent{{.op = Op::kReplicate, .aux = 1}, {Bytes(3)}}.frames();
  frames[0] = covered[0];
  CHECK(fault_of(frames).starts_with("the header states 3 payload bytes, crc32c "));
  CHECK_EQ(fault_of(Sent{{.op = Op::kReplicate, .aux = 6}, {}}.frames()), "there is no record of kind 6");
}

// A message whose checksums hold, whatever is said in it.
Fault decode_sent(Sent sent, Decoded& got, const Limits& limits = {}) {
  return decode_bytes(sent.frames(), got, limits);
}

void check_refused(const Sent& sent, const std::string& part, const Limits& limits = {},
                   Status status = Status::kBadRequest) {
  Decoded got;
  const Fault fault = decode_sent(sent, got, limits);
  CHECK(fault.status == status);
  CHECK_EQ(std::string(fault.message()) +
               (fault.message().find(part) == std::string_view::npos ? " lacks " + part : ""),
           std::string(fault.message()));
  CHECK_EQ(got.header.sequence, sent.header.sequence);  // an error can be sent to it
}

TEST(what_is_wrong_is_told_with_its_numbers) {
  const Bytes hashes = bytes_of_all<std::uint64_t>({3, 5, 9});
  const Bytes floats = bytes_of_all<float>({1, 0, 3});
  const Sent push = {{.op = Op::kPush, .dtype = Dtype::kFloat32, .dim = 1, .sequence = 77, .count = 3},
                     {hashes, floats}};
  Decoded got;
  CHECK(!decode_sent(push, got));

  Sent sent = push;
  for (const unsigned version : {1U, 3U}) {
    sent.header.version = static_cast<std::uint8_t>(version);
    check_refused(sent, "version " + std::to_string(version) + " of the wire format, this side speaks 2", {},
                  Status::kWrongVersion);
  }
  sent = push;
  sent.header.op = Op::kNone;
  check_refused(sent, "there is no op 0");
  sent.header.op = Op{23};
  check_refused(sent, "there is no op 23");
  sent = push;
  sent = {{.op = Op::kErase, .flags = kWhole, .sequence = 77, .count = 3}, {hashes}};
  check_refused(sent, "a erase cannot have the flags 0080");
  sent = push;
  sent.header.flags = kReply;
  check_refused(sent, "a reply where requests are taken");
  sent.header.flags = kKeep | kDigest;
  check_refused(sent, "flags 000c");
  sent = {{.op = Op::kErase, .flags = kTimed, .sequence = 77, .count = 3}, {hashes}};
  check_refused(sent, "a erase cannot have the flags 0020");
  sent = {{.op = Op::kErase, .flags = kReply | kTimed, .sequence = 77}, {}};
  check_refused(sent, "cannot have the flags 0021", {.replies = true});
  sent = {{.op = Op::kPull, .status = Status::kDeferred, .flags = kReply | kTimed, .sequence = 77}, {}};
  check_refused(sent, "cannot have the flags 0021", {.replies = true});
  sent = push;
  sent.header.flags = kDated;
  check_refused(sent, "a push cannot have the flags 0040");
  sent = push;
  sent.header.flags = 0;
  check_refused(sent, "a request where replies are taken", {.replies = true});
  sent = push;
  sent.header.status = Status::kDeferred;
  check_refused(sent, "status 1 in a request");
  sent = push;
  sent.header.flags = kReply;
  sent.header.status = Status{2};
  check_refused(sent, "status 2 in a reply", {.replies = true});
  sent.header.status = Status::kOk;
  sent.header.op = Op::kNone;
  check_refused(sent, "status 0 in a reply to no op", {.replies = true});
  sent = push;
  sent.header.dtype = Dtype{7};
  check_refused(sent, "there is no dtype 7");
  sent.header.dtype = Dtype::kUint64;
  check_refused(sent, "a push has no values of dtype uint64");
  for (const unsigned dim : {0U, 4097U, 65535U}) {
    sent = push;
    sent.header.dim = static_cast<std::uint16_t>(dim);
    check_refused(sent, "dim must be 1 to 4096, got " + std::to_string(dim));
  }
  sent = push;
  sent.header.count = 4;
  check_refused(sent, "the hashes of a push of 4 need 32 bytes, got 24");
  sent.header.count = 0xffffffffU;
  check_refused(sent, "need 34359738360 bytes, got 24");
  sent = push;
  sent.header.dim = 4096;
  check_refused(sent, "the values of a push of 3 need 49152 bytes, got 12");
  check_refused(push, "36 bytes in one message, at most 35 are taken", {.payload_bytes = 35});
  CHECK(!decode_sent(push, got, {.payload_bytes = 36}));
  for (const std::vector<std::uint64_t>& wrong :
       {std::vector<std::uint64_t>{3, 3, 9}, {3, 9, 5}, {3, 5, 0}}) {
    sent = push;
    sent.payload[0] = bytes_of_all(wrong);
    check_refused(sent, "hashes must ascend strictly: number");
  }
  sent = {{.op = Op::kTick, .sequence = 77, .count = 0, .aux = 2},
          {Bytes(), bytes_of_all<std::uint32_t>({2, 2})}};
  check_refused(sent, "tables must ascend strictly: number 0 is 2, after it 2");
}

TEST(a_header_that_tells_of_another_length_or_checksum_is_refused_though_its_own_holds) {
  Sent push = {{.op = Op::kPush, .dtype = Dtype::kFloat32, .dim = 1, .sequence = 77, .count = 1},
               {bytes_of_all<std::uint64_t>({3}), bytes_of_all<float>({1})}};
  const auto check_message = [&](std::size_t at, const std::string& part) {
    std::vector<Bytes> frames = push.frames();
    frames[0][at] ^= std::byte{1};
    const std::uint32_t crc = crc32c(std::span(frames[0]).first(offsetof(Header, header_crc)));
    std::memcpy(frames[0].data() + offsetof(Header, header_crc), &crc, sizeof crc);
    Decoded got;
    const Fault fault = decode_bytes(frames, got, {});
    CHECK(fault.status == Status::kBadRequest);
    CHECK(fault.message().find(part) != std::string_view::npos);
  };
  check_message(offsetof(Header, payload_bytes), "the header states 13 payload bytes, got 12");
  check_message(offsetof(Header, payload_crc), "the payload's crc32c is");
  // A row too many, though all else is consistent.
  push.header.count = 2;
  check_refused(push, "the hashes of a push of 2 need 16 bytes, got 8");
  push.header.count = 0;
  check_refused(push, "the hashes of a push of 0 need 0 bytes, got 8");
}

TEST(a_map_cannot_make_values_out_of_nothing) {
  Sent sent = {
      {.op = Op::kPush, .dtype = Dtype::kFloat32, .flags = kPacked, .dim = 3, .sequence = 77, .count = 1},
      {bytes_of_all<std::uint64_t>({3}), bytes_of_all<std::uint8_t>({0b101}), bytes_of_all<float>({1, 2})}};
  Decoded got;
  CHECK(!decode_sent(sent, got));
  CHECK_EQ(got.floats()[2], 2.0F);
  sent.payload[1][0] = std::byte{0b111};
  check_refused(sent, "the values of a push of 1 need 12 bytes, got 8");
  sent.payload[1][0] = std::byte{0b1001};
  check_refused(sent, "the map of 3 values has bits after the last one");
  // 4096 x 16 zeros in 8 KiB: as float32 they have 256 KiB.
  std::vector<std::uint64_t> hashes(16);
  for (std::size_t i = 0; i < hashes.size(); ++i) {
    hashes[i] = i;
  }
  sent = {
      {.op = Op::kPush, .dtype = Dtype::kFloat32, .flags = kPacked, .dim = 4096, .sequence = 77, .count = 16},
      {bytes_of_all(hashes), Bytes(8192), Bytes()}};
  check_refused(sent, "262144 bytes in one message, at most 262143 are taken", {.payload_bytes = 262143});
  CHECK(!decode_sent(sent, got, {.payload_bytes = 262144}));
  CHECK_EQ(got.floats().size(), 65536);
}

TEST(counts_are_read_and_checked_to_the_last_byte) {
  Sent sent = {
      {.op = Op::kPush, .dtype = Dtype::kFloat32, .flags = kCounted, .dim = 1, .sequence = 77, .count = 3},
      {bytes_of_all<std::uint64_t>({3, 5, 9}), bytes_of_all<float>({1, 0, 3}),
       bytes_of_all<std::uint8_t>({0b101, 2, 0, 0, 1, 0, 0})}};
  Decoded got;
  CHECK(!decode_sent(sent, got));
  CHECK(std::ranges::equal(got.counts, std::vector<std::uint32_t>{2, 1, 256}));
  const auto refused = [&](const std::vector<std::uint8_t>& counts, const std::string& part) {
    Sent bad = sent;
    bad.payload[2] = bytes_of_all(counts);
    check_refused(bad, part);
  };
  const std::string form = "the counts of 3 rows are not packed as they must be";
  refused({0b1101, 2, 3, 4}, form);            // of a row that is not there
  refused({0b101, 2, 1}, form);                // 1 is not a bit
  refused({0b101, 2, 0, 255, 0, 0, 0}, form);  // 255 is a byte
  refused({0b101, 2, 0, 0, 0, 0, 0}, form);    // a count of 0 is invalid
  refused({0b101, 2}, "the counts of a push of 3 need 3 bytes, got 2");
  refused({0b101, 2, 3, 0}, "need 3 bytes, got 4");
  refused({0b101, 2, 0, 0, 1, 0}, "need 7 bytes, got 6");
  refused({}, "need 1 bytes, got 0");
  sent.header.flags = 0;
  check_refused(sent, "a push has 2 frames behind its header, got 3");
  sent = {{.op = Op::kAssign, .dtype = Dtype::kFloat32, .flags = kCounted, .dim = 1, .sequence = 77}, {}};
  check_refused(sent, "a assign cannot have the flags 0010");
}

TEST(what_is_no_header_of_ours_leaves_none) {
  Sent sent = {{.op = Op::kStats, .sequence = 77}, {}};
  const std::vector<Bytes> good = sent.frames();
  for (std::size_t byte : {std::size_t{0}, std::size_t{30}, std::size_t{63}}) {
    auto frames = good;
    frames[0][byte] ^= std::byte{1};
    Decoded got;
    const Fault fault = decode_bytes(frames, got, {});
    CHECK(fault.status == Status::kBadRequest);
    CHECK(fault.message().find(byte == 0 ? "no header of shoal begins with" : "crc32c is") !=
          std::string_view::npos);
    CHECK_EQ(got.header.magic, 0);
    CHECK_EQ(got.header.sequence, 0);
  }
}

TEST(random_bytes_with_good_checksums_never_harm) {
  std::mt19937 random(5);
  std::vector<Sent> all = samples();
  Decoded got;
  int good = 0;
  for (int round = 0; round < 200'000; ++round) {
    Sent sent = all[random() % all.size()];
    // A few fields become other numbers, often near ones.
    for (auto changes = random() % 3; changes-- > 0;) {
      const std::size_t at = 4 + random() % 48;
      auto* const bytes = reinterpret_cast<unsigned char*>(&sent.header);
      bytes[at] = static_cast<unsigned char>(random() % 2 == 0 ? random() : bytes[at] + random() % 3 - 1);
    }
    for (Bytes& frame : sent.payload) {
      if (random() % 8 == 0) {
        frame.resize(random() % 40, static_cast<std::byte>(random()));
      }
      if (random() % 8 == 0 && !frame.empty()) {
        frame[random() % frame.size()] = static_cast<std::byte>(random());
      }
    }
    const Fault fault = decode_sent(sent, got, {.payload_bytes = 4096, .replies = random() % 2 == 0});
    good += fault ? 0 : 1;
    CHECK(fault || got.values.size() <= 4096);
    CHECK(static_cast<bool>(fault) != fault.message().empty());
  }
  CHECK(good > 10'000);
}

TEST(the_header_of_the_document_is_read) {
  // The worked example of docs/wire-format.md.
  constexpr std::array<unsigned char, 64> kHeader = {
      0x53, 0x48, 0x4f, 0x4c, 0x02, 0x02, 0x00, 0x01, 0x00, 0x00, 0x01, 0x00, 0x05, 0x00, 0x00, 0x00,
      0x02, 0x00, 0x00, 0x00, 0x01, 0x00, 0x00, 0x00, 0x07, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
      0x03, 0x00, 0x00, 0x00, 0x0b, 0x00, 0x00, 0x00, 0x01, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
      0xef, 0xbe, 0xad, 0xde, 0x0c, 0x00, 0x00, 0x00, 0x3b, 0x7b, 0x42, 0x18, 0x7e, 0x91, 0xaf, 0xef};
  Sent sent = {{.op = Op::kPush,
                .dtype = Dtype::kFloat32,
                .dim = 1,
                .table = 5,
                .worker = 2,
                .incarnation = 1,
                .sequence = 7,
                .epoch = 3,
                .clock = 11,
                .count = 1,
                .job = 0xdeadbeef},
               {bytes_of_all<std::uint64_t>({0x63cbe1e459320dd7}), bytes_of_all<float>({0.5})}};
  const std::vector<Bytes> frames = sent.frames();
  CHECK(std::memcmp(frames[0].data(), kHeader.data(), kHeader.size()) == 0);
  Decoded got;
  CHECK(!decode_bytes(frames, got, {}));
  CHECK_EQ(got.hashes[0], 0x63cbe1e459320dd7);
  CHECK_EQ(got.floats()[0], 0.5F);
}

TEST(every_op_status_and_dtype_has_a_name) {
  for (unsigned i = 0; i < 256; ++i) {
    CHECK_EQ(name(Op{static_cast<std::uint8_t>(i)}) == "?", i > 22);
    CHECK_EQ(name(Dtype{static_cast<std::uint8_t>(i)}) == "?", i > 6);
    CHECK_EQ(name(Status{static_cast<std::uint8_t>(i)}) == "?", i > 27 || (i > 1 && i < 16));
  }
}

}  // namespace
}  // namespace shoal::wire::wire_test
