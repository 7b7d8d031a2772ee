// One input of the service's fuzzer: a sequence of events of a server, made of arbitrary bytes.
//
// The bytes choose the events: well-formed requests with arbitrary numbers, some of them damaged, between
// orders of the scheduler. For any sequence the service answers each request, with messages that decode, and
// its tables stay consistent. tests/fuzz/service/fuzz_service.cc feeds it from libFuzzer, wire_corpus_test.cc
// from the committed corpus.

#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "endpoint/key_list_cache.h"
#include "endpoint/service.h"
#include "orders.h"
#include "wire/counts.h"
#include "wire/values.h"

namespace shoal::service_input {

using wire::Decoded;
using wire::Dtype;
using wire::Fault;
using wire::Frame;
using wire::Header;
using wire::Op;
using wire::Record;

inline constexpr std::size_t kSlots = 8;
inline constexpr std::uint32_t kJob = 1;
inline constexpr std::uint32_t kNamedJob = 2;

// A violated invariant.
struct Broken : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Numbers from the input; zeros after its end.
class Source {
 public:
  explicit Source(std::span<const std::uint8_t> bytes) : bytes_(bytes) {}
  bool empty() const { return bytes_.empty(); }
  std::uint8_t byte() {
    if (bytes_.empty()) {
      return 0;
    }
    const std::uint8_t first = bytes_.front();
    bytes_ = bytes_.subspan(1);
    return first;
  }
  std::uint32_t below(std::uint32_t n) { return byte() % n; }

 private:
  std::span<const std::uint8_t> bytes_;
};

using Bytes = std::vector<std::byte>;

template <class T>
inline Bytes raw(const std::vector<T>& values) {
  const auto bytes = std::as_bytes(std::span(values));
  return {bytes.begin(), bytes.end()};
}

struct Made {
  Header header;
  std::vector<Bytes> payload;
};

// The frames that the checksum of the header covers.
inline std::vector<Frame> covered(const Made& made) {
  const Header& header = made.header;
  const bool nests = header.op == Op::kReplicate && Record{header.aux} == Record::kRequest;
  return nests ? std::vector<Frame>() : std::vector<Frame>(made.payload.begin(), made.payload.end());
}

inline std::vector<std::uint64_t> some_hashes(Source& from, std::size_t count) {
  std::vector<std::uint64_t> hashes;
  for (std::size_t i = 0; i < count; ++i) {
    hashes.push_back((std::uint64_t{from.byte()} << 56U) | from.below(4));
  }
  std::sort(hashes.begin(), hashes.end());
  hashes.erase(std::unique(hashes.begin(), hashes.end()), hashes.end());
  return hashes;
}

inline Made make(Source& from) {
  Made made;
  Header& h = made.header;
  const std::uint8_t op = from.byte();
  h.op = Op{static_cast<std::uint8_t>(op < 240 ? 1 + op % 16 : op < 252 ? 17 + op % 3 : 20 + op % 2)};
  const std::uint8_t bits = from.byte();
  h.table = from.below(3);
  h.worker = (bits & 1U) != 0 ? from.below(3) : 0;
  h.worker = (bits & 0x7eU) == 0x7eU ? wire::kAnonymous : h.worker;
  h.incarnation = (bits & 2U) != 0 ? from.below(4) : 1;
  h.sequence = from.byte();
  h.epoch = (bits & 4U) != 0 ? from.below(4) : 3;
  h.clock = from.below(4);
  h.dim = static_cast<std::uint16_t>(1 + from.below(2));
  h.job = (bits & 8U) != 0 ? from.below(3) : kJob;
  h.aux = from.below(12);
  const auto hashes = some_hashes(from, from.below(6));
  h.count = static_cast<std::uint32_t>(hashes.size());
  std::vector<std::uint64_t> numbers;
  switch (h.op) {
    case Op::kPull:
    case Op::kPush:
    case Op::kAssign:
      h.dtype = Dtype{static_cast<std::uint8_t>(1 + from.below(3))};
      if ((bits & 16U) != 0 && h.op != Op::kAssign) {
        h.flags |= (bits & 32U) != 0 ? wire::kDigest : wire::kKeep;
      }
      if ((h.flags & wire::kDigest) != 0) {
        const Digest name = digest(hashes, kJob);
        made.payload.push_back(raw(std::vector<std::uint64_t>{name.first, name.second}));
      } else {
        made.payload.push_back(raw(hashes));
      }
      if (h.op == Op::kPull) {
        h.flags |= (bits & 64U) != 0 ? wire::kPacked : std::uint16_t{0};
        break;
      }
      if (h.dtype == Dtype::kFloat32) {
        std::vector<float> values(hashes.size() * h.dim);
        for (float& value : values) {
          const std::uint8_t byte = from.byte();
          value = byte == 255 ? HUGE_VALF : static_cast<float>(byte) - 100.0F;
        }
        if ((bits & 64U) != 0) {
          h.flags |= wire::kPacked;
          Bytes map(map_bytes(values.size()));
          std::vector<float> kept(count_nonzero(std::span<const float>(values)));
          pack(values, map, kept);
          made.payload.push_back(map);
          made.payload.push_back(raw(kept));
        } else {
          made.payload.push_back(raw(values));
        }
      } else {
        made.payload.emplace_back(hashes.size() * h.dim * 2, std::byte{from.byte()});
      }
      if (h.op == Op::kPush && (bits & 128U) != 0) {
        std::vector<std::uint32_t> counts(hashes.size());
        for (std::uint32_t& count : counts) {
          const std::uint32_t byte = from.byte();
          count = byte < 200 ? 1 + byte / 50 : byte << (byte % 25);
        }
        Bytes packed(packed_counts_bytes(std::span<const std::uint32_t>(counts)));
        if (!packed.empty()) {
          pack_counts(counts, packed);
          h.flags |= wire::kCounted;
          made.payload.push_back(packed);
        }
      }
      break;
    case Op::kErase:
    case Op::kContains:
    case Op::kState:
    case Op::kPrefetch:
      made.payload.push_back(raw(hashes));
      break;
    case Op::kTick: {
      for (std::uint32_t n = from.below(3); n > 0; --n) {
        numbers.push_back((std::uint64_t{from.below(kSlots + 2)} << 48U) | from.byte());
      }
      std::vector<std::uint32_t> tables;
      for (std::uint32_t table = 0; table < 3; ++table) {
        if (from.below(2) != 0) {
          tables.push_back(table);
        }
      }
      h.count = static_cast<std::uint32_t>(numbers.size());
      h.aux = static_cast<std::uint32_t>(tables.size());
      made.payload = {raw(numbers), raw(tables)};
      break;
    }
    case Op::kLoadBegin:
      numbers.assign((bits & 16U) != 0 ? from.below(20) : kSlots, from.byte());
      h.count = static_cast<std::uint32_t>(numbers.size());
      made.payload.push_back(raw(numbers));
      break;
    case Op::kLoadRows: {
      h.dtype = Dtype::kUint8;
      Bytes section(64 * from.below(5));
      for (std::byte& byte : section) {
        byte = std::byte{from.byte()};
      }
      h.count = from.below(4);
      made.payload.push_back(section);
      break;
    }
    case Op::kLoadEnd:
      numbers.assign((bits & 16U) != 0 ? from.below(3) : 1, from.byte());
      h.count = static_cast<std::uint32_t>(numbers.size());
      made.payload.push_back(raw(numbers));
      break;
    case Op::kReduce: {
      h.dtype = Dtype::kFloat64;
      std::vector<double> parameters(from.below(3));
      for (double& one : parameters) {
        one = static_cast<double>(from.byte()) / 64.0 - 1.0;
      }
      h.count = static_cast<std::uint32_t>(parameters.size());
      made.payload.push_back(raw(parameters));
      break;
    }
    case Op::kLoadFilter: {
      h.dtype = Dtype::kUint8;
      Bytes filter(16 * from.below(4));
      for (std::byte& byte : filter) {
        byte = std::byte{from.byte()};
      }
      h.count = (bits & 16U) != 0 ? from.byte() : kSlots;
      made.payload.push_back(filter);
      break;
    }
    case Op::kSweep: {
      h.dtype = Dtype::kFloat64;
      h.aux %= 2;
      std::vector<double> rules;
      for (std::uint32_t n = 3 * from.below(3); n > 0; --n) {
        rules.push_back(static_cast<double>(from.byte()) / 4.0);
      }
      h.count = static_cast<std::uint32_t>(rules.size());
      made.payload.push_back(raw(rules));
      break;
    }
    case Op::kSaveBegin: {
      // An unknown base, or none, and up to three tables, of any kind.
      numbers.assign(4, (bits & 16U) != 0 ? from.byte() : 0);
      for (std::uint32_t n = from.below(4); n > 0; --n) {
        numbers.push_back(from.below(4) | std::uint64_t{from.below(5)} << 32U);
      }
      h.count = static_cast<std::uint32_t>(numbers.size());
      made.payload.push_back(raw(numbers));
      break;
    }
    case Op::kSavePoll: {
      numbers.assign(1 + from.below(16) / 15, from.byte());
      h.count = static_cast<std::uint32_t>(numbers.size());
      h.dtype = Dtype::kUint8;
      made.payload = {raw(numbers), Bytes(from.below(9), std::byte{'w'})};
      break;
    }
    case Op::kSaveEnd:
      numbers.assign((bits & 16U) != 0 ? 5 : 1 + from.below(16) / 15, from.byte());
      numbers[0] = from.byte();
      h.count = static_cast<std::uint32_t>(numbers.size());
      made.payload.push_back(raw(numbers));
      break;
    case Op::kReplicate: {
      h.dtype = Dtype::kUint8;
      h.aux = from.below(7);
      h.job = 0;
      h.table = 1 + from.below(3);
      made.payload.assign(h.aux == static_cast<std::uint32_t>(Record::kAlive) ? 0 : 1, Bytes(from.below(9)));
      if (h.aux == static_cast<std::uint32_t>(Record::kRequest)) {
        h.dtype = Dtype::kNone;
        Made nested = make(from);
        Bytes head(sizeof(Header));
        encode(nested.header, covered(nested), std::span<std::byte, sizeof(Header)>(head));
        made.payload = {head};
        made.payload.insert(made.payload.end(), nested.payload.begin(), nested.payload.end());
      }
      break;
    }
    default:
      h.count = 0;
  }
  return made;
}

// Every reply must be a message that a client accepts.
inline void check_replies(ReplyQueue& out) {
  Decoded decoded;
  for (const Reply& reply : out.replies()) {
    std::vector<Frame> frames = {reply.header};
    for (std::size_t i = 0; i < reply.frames; ++i) {
      frames.push_back(reply.payload[i].bytes());
    }
    const Fault fault = decode(frames, {.payload_bytes = std::uint64_t{1} << 30U, .replies = true}, decoded);
    if (fault) {
      throw Broken("a reply that decodes: " + std::string(fault.message()));
    }
  }
  out.replies().clear();
}

inline void order(Service& service, Source& from) {
  const std::uint8_t what = from.byte();
  const std::uint32_t job = what < 128 ? kDefaultJob : kNamedJob;
  switch (what % 7) {
    case 0:
      admit(service, from.below(3), 1 + from.below(3), from.below(4), job);
      break;
    case 1:
      dismiss(service, from.below(3), 1 + from.below(3),
              from.below(2) == 0 ? LastTick() : fence(service, from.below(3), 1 + from.below(3), job), job);
      break;
    case 2:
      hold(service, job);
      break;
    case 3:
      resume(service, job);
      break;
    case 4: {
      const std::size_t first = from.below(kSlots);
      service.set_map(from.below(6),
                      {{first, first + from.below(static_cast<std::uint32_t>(kSlots - first + 1))}});
      break;
    }
    case 5:
      if (job == kNamedJob) {
        if (from.below(2) == 0) {
          end_job(service, job);
        }
        start_job(service, job, Mode{static_cast<std::uint8_t>(from.below(3))}, from.below(3), false, 0,
                  true);
        admit(service, 0, 1, 0, job);
        break;
      }
      start_job(service, 1 + from.below(2), Mode{static_cast<std::uint8_t>(from.below(3))}, from.below(3),
                from.below(2) != 0, from.below(4));
      admit(service, 0, 1, 0);
      break;
    default:
      drop_table(service, 2);
  }
}

// Adds tables with rules of all kinds, and begins a job of two workers, and a named one of one.
inline void set_up(Service& service, Source& from) {
  const auto spec = [](std::size_t dim, const std::string& rule, std::map<std::string, double> params) {
    return TableSpec{.dim = dim,
                     .dtype = shoal::Dtype::kFloat32,
                     .optimizer = Optimizer(rule, std::move(params)),
                     .init = Init("Zeros", 0.0, 0),
                     .seed = 0};
  };
  const std::map<std::string, double> sgd = {{"lr", 1.0}, {"weight_decay", 0.0}};
  add_table(service, 0,
            spec(1, "FTRL", {{"alpha", 0.1}, {"beta", 1.0}, {"l1", 1.0}, {"l2", 0.0}, {"n0", 0.0}}));
  TableSpec counting = spec(2, "SGD", sgd);
  counting.lifecycle =
      Lifecycle(NamedRule{"AfterCount", {{"n", 2.0}, {"capacity", 16.0}}},
                {{"TimeToLive", {{"clocks", 2.0}}}, {"MaxRows", {{"rows", 16.0}, {"frequent", 1.0}}}});
  add_table(service, 1, counting);
  add_table(service, 2, spec(1, "SGD", sgd));
  start_job(service, kJob, Mode{static_cast<std::uint8_t>(from.below(3))}, 1, from.below(2) != 0);
  admit(service, 0, 1, 0);
  admit(service, 1, 1, 0);
  start_job(service, kNamedJob, Mode::kBsp, 0, false, 0, true);
  admit(service, 0, 1, 0, kNamedJob);
}

// Throws Broken if an invariant is violated.
inline void check(std::span<const std::uint8_t> bytes) {
  Source from(bytes);
  const ServiceLimits limits{.deferred_reads = 4,
                             .deferred_bytes = 4000,
                             .pending_bytes = 4000,
                             .reply_bytes = 4000,
                             .request_bytes = 4000,
                             .key_list_bytes = 500};
  Service service(Slots(kSlots), {{0, 3}, {3, kSlots}}, limits);
  service.set_map(3, {{0, 6}});
  set_up(service, from);

  BufferPool pool;
  ReplyQueue out(pool);
  std::size_t asked = 0;
  for (int turn = 0; turn < 40 && !from.empty(); ++turn) {
    if (from.below(8) == 0) {
      try {
        order(service, from);
      } catch (const std::invalid_argument&) {
        // An error of the scheduler: it gets an exception, and nothing has changed.
      }
      service.released(out);
      check_replies(out);
      continue;
    }
    Made made = make(from);
    const std::uint8_t damage = from.byte();
    if (damage > 200 && !made.payload.empty() && !made.payload[0].empty()) {
      made.payload[0][from.byte() % made.payload[0].size()] ^= std::byte{damage};
    }
    if (damage == 199) {
      made.header.count = from.byte();
    }
    std::array<std::byte, sizeof(Header)> head;
    encode(made.header, covered(made), head);
    std::vector<Frame> frames = {head};
    frames.insert(frames.end(), made.payload.begin(), made.payload.end());
    service.handle("peer", frames, out);
    if (out.replies().empty()) {
      throw Broken("a reply to every request");
    }
    check_replies(out);
    ++asked;
  }
  if (service.metrics().messages != asked) {
    throw Broken("a count of every message");
  }
  service.close_saves();
  for (const std::uint32_t id : service.tables()) {
    if (const std::string broken = service.snapshot(id)->verify(); !broken.empty()) {
      throw Broken("table " + std::to_string(id) + ": " + broken);
    }
  }
}

}  // namespace shoal::service_input
