#include "client/encoding.h"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "wire/counts.h"

namespace shoal::client {

namespace {

constexpr std::size_t kSlotShift = 48;  // of a mark of a tick: the slot, plus one, above the sequence

bool can_be_timed(wire::Op op) noexcept {
  return op == wire::Op::kPull || op == wire::Op::kPush || op == wire::Op::kTick || op == wire::Op::kAssign ||
         op == wire::Op::kContains;
}

bool has_dim(wire::Op op) noexcept {
  return op == wire::Op::kPull || op == wire::Op::kPush || op == wire::Op::kAssign;
}

// The hashes of a part, or its rows.
SharedFrame piece(const Part& part, const void* array, std::size_t width) noexcept {
  return {.bytes = {static_cast<const std::byte*>(array) + part.begin * width, part.rows() * width},
          .owner = part.call->keep};
}

// How often each row occurred, unless all occurred once.
bool add_counts(const Part& part, const Keyed& keyed, Payload& payload) {
  if (keyed.counts.empty()) {
    return false;
  }
  const auto counts = keyed.counts.subspan(part.begin, part.rows());
  const std::size_t bytes = packed_counts_bytes(counts);
  if (bytes == 0) {
    return false;
  }
  std::span<std::byte> room;
  payload.add(own_frame(bytes, room));
  pack_counts(counts, room);
  return true;
}

// The names of a push's part in a tick: for each arc the slot of its last row there, and the sequence. A
// server executes an arc's rows together, but it may have had only some of the arcs when the part arrived.
void add_marks(const Part& push, const SlotMap& map, std::vector<std::uint64_t>& marks) {
  const auto begins = push.call->keyed()->begins;
  std::size_t done = push.begin;
  for (const ArcRange& arc : map.arcs_of(push.first_slot, push.end_slot)) {
    const std::uint64_t end = begins[std::min(arc.end_slot, push.end_slot)];
    if (end > done) {
      const auto slot = std::ranges::lower_bound(begins, end) - begins.begin() - 1;
      marks.push_back((static_cast<std::uint64_t>(slot) + 1) << kSlotShift | push.sequence);
      done = end;
    }
  }
}

template <class T>
SharedFrame copied(std::span<const T> numbers) {
  std::span<std::byte> room;
  SharedFrame frame = own_frame(numbers.size_bytes(), room);
  if (!numbers.empty()) {
    std::memcpy(room.data(), numbers.data(), numbers.size_bytes());
  }
  return frame;
}

void encode_keyed(Part& part, const Keyed& keyed, wire::Header& header) {
  if (!part.is_filtered) {
    const SharedFrame hashes = piece(part, keyed.hashes.data(), sizeof(std::uint64_t));
    if (keyed.filter == nullptr) {
      part.encoded = {};
      part.encoded.payload.add(hashes);
      part.encoded.dtype = has_dim(part.call->op) ? wire::Dtype::kFloat32 : wire::Dtype::kNone;
      if (!keyed.values.empty()) {
        part.encoded.payload.add(piece(part, keyed.values.data(), keyed.width));
      }
    } else if (part.call->op == wire::Op::kPrefetch) {
      part.encoded = keyed.filter->prefetch(hashes, part.peer->lists);
    } else if (part.call->op == wire::Op::kPull) {
      part.encoded = keyed.filter->pull(hashes, part.peer->lists);
    } else {
      part.encoded = keyed.filter->push(hashes, piece(part, keyed.values.data(), keyed.width), keyed.dim,
                                        part.sequence, part.peer->lists, keyed.is_whole);
    }
    part.encoded.is_counted = add_counts(part, keyed, part.encoded.payload);
    part.is_filtered = keyed.filter != nullptr;
  }
  const EncodedPayload& sent = part.encoded;
  header.dtype = sent.dtype;
  header.count = static_cast<std::uint32_t>(part.rows());
  header.aux = keyed.aux;
  header.dim = has_dim(part.call->op) ? keyed.dim : std::uint16_t{0};
  header.clock += keyed.ahead;
  const auto flag = [&](bool is_set, std::uint16_t bit) { header.flags |= is_set ? bit : std::uint16_t{0}; };
  flag(sent.is_packed, wire::kPacked);
  flag(sent.keep, wire::kKeep);
  flag(sent.digest.has_value() && !sent.keep, wire::kDigest);
  flag(sent.is_counted, wire::kCounted);
  flag(keyed.is_dated, wire::kDated);
  flag(keyed.is_whole, wire::kWhole);
}

template <class Described>
void encode_described(Part& part, const Described& what, wire::Header& header) {
  part.encoded.payload = what.payload;
  header.dtype = what.dtype;
  header.count = what.count;
  header.aux = what.aux;
}

}  // namespace

void encode(Part& part, const WorkerIdentity& worker, const SlotMap& map,
            std::span<const Part* const> pushes) {
  const Call& call = *part.call;
  wire::Header header{.op = call.op,
                      .flags = static_cast<std::uint16_t>(unsigned{part.number} << wire::kPartShift),
                      .table = call.table,
                      .worker = worker.rank,
                      .incarnation = worker.incarnation,
                      .sequence = part.sequence,
                      .epoch = map.epoch(),
                      .clock = call.clock,
                      .job = worker.job};
  if (call.trace != nullptr && can_be_timed(call.op)) {
    header.flags |= wire::kTimed;
  }
  if (const auto* const keyed = std::get_if<Keyed>(&call.what)) {
    encode_keyed(part, *keyed, header);
  } else if (const auto* const of_slot = std::get_if<OfSlot>(&call.what)) {
    encode_described(part, *of_slot, header);
  } else if (const auto* const of_all = std::get_if<OfAll>(&call.what)) {
    encode_described(part, *of_all, header);
  } else {
    const auto& tables = std::get<Ending>(call.what).tables;
    std::vector<std::uint64_t> marks;
    for (const Part* const push : pushes) {
      add_marks(*push, map, marks);
    }
    part.encoded.payload = {};
    part.encoded.payload.add(copied(std::span<const std::uint64_t>(marks)));
    part.encoded.payload.add(copied(std::span<const std::uint32_t>(tables)));
    header.count = static_cast<std::uint32_t>(marks.size());
    header.aux = static_cast<std::uint32_t>(tables.size());
  }
  part.header = header;
}

std::span<std::byte> answer_room(const Part& part) noexcept {
  const Keyed* const keyed = part.call->keyed();
  return keyed == nullptr || keyed->out.empty()
             ? std::span<std::byte>()
             : keyed->out.subspan(part.begin * keyed->width, part.rows() * keyed->width);
}

std::string store_answer(Part& part, const wire::Decoded& reply, std::size_t payload_bytes) {
  Call& call = *part.call;
  const wire::Header& header = reply.header;
  const Keyed* const keyed = call.keyed();
  if (keyed != nullptr && keyed->is_dated) {
    const std::uint32_t clocks = (header.flags & wire::kDated) != 0 ? header.clock : 0;
    call.included = std::min(call.included.value_or(clocks), clocks);
  }
  if (keyed != nullptr && keyed->width != 0 && keyed->values.empty()) {
    const std::span<std::byte> room = answer_room(part);
    const bool are_bytes = call.op == wire::Op::kContains;
    if (reply.values.size() != room.size() || (header.dtype == wire::Dtype::kUint8) != are_bytes) {
      const std::size_t width = are_bytes ? 1 : sizeof(float);
      const std::string_view type = header.dtype == wire::Dtype::kUint8 ? "uint8" : "float32";
      return std::string(type) + "[" +
             std::to_string(reply.values.size() / (type == "uint8" ? 1 : sizeof(float))) + "] where " +
             (are_bytes ? "uint8" : "float32") + "[" + std::to_string(room.size() / width) +
             "] was asked for";
    }
    if (!room.empty() && reply.values.data() != room.data()) {
      std::memcpy(room.data(), reply.values.data(), room.size());
    }
    if (keyed->filter != nullptr) {
      keyed->filter->pulled(room.size(), payload_bytes);
    }
    return {};
  }
  if (call.op == wire::Op::kErase || call.op == wire::Op::kPrefetch) {
    call.total += header.aux;
    return {};
  }
  if (keyed != nullptr) {
    return {};
  }
  if (std::holds_alternative<Ending>(call.what)) {
    call.answers.push_back(
        {.address = part.peer->endpoint.address});  // it is not asked again under the same map
    return {};
  }
  Answer answer{.address = part.peer->endpoint.address,
                .count = header.count,
                .dim = header.dim,
                .aux = header.aux,
                .dtype = header.dtype};
  answer.hashes.assign(reply.hashes.begin(), reply.hashes.end());
  if (!reply.numbers.empty()) {
    answer.dtype = wire::Dtype::kUint64;
    const auto bytes = std::as_bytes(reply.numbers);
    answer.values.assign(bytes.begin(), bytes.end());
  } else {
    answer.values.assign(reply.values.begin(), reply.values.end());
  }
  call.answers.push_back(std::move(answer));
  return {};
}

std::string put_in_slot_order(Call& call, const SlotMap& map) {
  const auto of = [&](std::uint32_t endpoint) {
    return std::ranges::find(call.answers, map.endpoint(endpoint).address, &Answer::address);
  };
  const auto* const of_all = std::get_if<OfAll>(&call.what);
  std::vector<Answer> ordered;
  if (of_all == nullptr || !of_all->is_per_slot || map.runs().size() == map.owners().size()) {
    for (const std::uint32_t owner : map.owners()) {
      const auto found = of(owner);
      if (found != call.answers.end()) {
        ordered.push_back(std::move(*found));
      }
    }
    call.answers = std::move(ordered);
    return {};
  }
  std::vector<std::size_t> taken(map.endpoints().size());  // bytes of each endpoint's answer
  for (const Run& run : map.runs()) {
    std::size_t slots = 0;
    for (const Run& other : map.runs()) {
      slots += other.endpoint == run.endpoint ? other.end_slot - other.first_slot : 0;
    }
    const auto found = of(run.endpoint);
    const std::size_t numbers = found->values.size() / sizeof(double);
    if (numbers % slots != 0) {
      return std::to_string(numbers) + " numbers for " + std::to_string(slots) + " slots";
    }
    const std::size_t bytes = numbers / slots * sizeof(double) * (run.end_slot - run.first_slot);
    const auto begin = found->values.begin() + static_cast<std::ptrdiff_t>(taken[run.endpoint]);
    Answer answer = {.address = found->address,
                     .count = static_cast<std::uint32_t>(bytes / sizeof(double)),
                     .dtype = found->dtype};
    answer.values.assign(begin, begin + static_cast<std::ptrdiff_t>(bytes));
    taken[run.endpoint] += bytes;
    ordered.push_back(std::move(answer));
  }
  call.answers = std::move(ordered);
  return {};
}

std::optional<Failure> user_failure(const std::vector<Answer>& answers) {
  std::optional<Failure> failure;
  double first = 0;
  for (const Answer& answer : answers) {
    // For each slot: its number, how many words follow, and these. A failure: kUserFailed, bytes of the text,
    // the text.
    const std::size_t size = answer.values.size() / sizeof(double);
    const auto word = [&](std::size_t i) {
      double value = 0;
      std::memcpy(&value, answer.values.data() + i * sizeof value, sizeof value);
      return value;
    };
    for (std::size_t at = 0; at + 2 < size; at += 2 + static_cast<std::size_t>(word(at + 1))) {
      if (word(at + 2) != kUserFailed || at + 4 > size || (failure.has_value() && word(at) >= first)) {
        continue;
      }
      const auto begin = reinterpret_cast<const char*>(answer.values.data() + (at + 4) * sizeof(double));
      std::string_view text(
          begin, std::min(static_cast<std::size_t>(word(at + 3)), (size - at - 4) * sizeof(double)));
      constexpr std::string_view kSpace = " \t\n\r\v\f";
      text.remove_prefix(std::min(text.find_first_not_of(kSpace), text.size()));
      text = text.substr(0, text.find_last_not_of(kSpace) + 1);
      first = word(at);
      failure = Failure{ErrorKind::kUserCode, "a function of rows failed: " + std::string(text)};
    }
  }
  return failure;
}

}  // namespace shoal::client
