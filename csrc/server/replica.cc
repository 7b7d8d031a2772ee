#include "server/replica.h"

#include <algorithm>
#include <array>
#include <exception>
#include <iterator>
#include <stdexcept>
#include <utility>
#include <variant>
#include <vector>

#include "base/byte_stream.h"
#include "base/check.h"
#include "server/replication_log.h"

namespace shoal {

using wire::Header;
using wire::Record;
using wire::Status;

namespace {

// OK and WRONG_EPOCH differ in which slots are elsewhere, and that is not the same for both.
Status comparable(Status status) noexcept { return status == Status::kWrongEpoch ? Status::kOk : status; }

bool is_of_stream(const Order& order) noexcept {
  return std::holds_alternative<ReleaseArcs>(order) || std::holds_alternative<AbortCopy>(order) ||
         std::holds_alternative<JoinArcs>(order);
}

}  // namespace

void Replica::handle(std::string_view peer, const wire::Decoded& message) noexcept {
  const Header& header = message.header;
  try {
    peer_ = peer;
    is_due_ = true;
    if (!fault_.empty()) {
      return;
    }
    if (Record{header.aux} == Record::kAlive) {
      gap_ |= header.sequence > position_;
    } else if (header.sequence == position_ + 1) {
      gap_ = !execute(message);
      position_ += gap_ ? 0 : 1;
    } else {
      gap_ |= header.sequence > position_;
    }
  } catch (const std::exception& error) {
    try {
      fault_ = "record " + std::to_string(header.sequence) + " failed: " + error.what();
    } catch (const std::bad_alloc&) {
      fault_ = "no memory";  // short enough to need none
    }
  }
}

bool Replica::execute(const wire::Decoded& message) {
  switch (Record{message.header.aux}) {
    case Record::kRequest:
      if (!replay(message)) {
        return false;
      }
      keep(message);
      return true;
    case Record::kOrder: {
      const Order order = decode_order(message.values);
      if (!is_of_stream(order)) {
        keep(message);
      }
      execute_order(order);
      return true;
    }
    case Record::kCopyBegin:
      begin_copy(message.values);
      return true;
    case Record::kCopyChunk:
      add_chunk(message.values);
      return true;
    case Record::kCopyEnd:
      restore_copy();
      return true;
    case Record::kAlive:
      break;
  }
  return true;
}

void Replica::execute_order(const Order& order) {
  if (const auto* const release = std::get_if<ReleaseArcs>(&order); release != nullptr) {
    auto arcs = service_.take_arcs(release->arcs);
    std::ranges::move(arcs, std::back_inserter(aside_));
  } else if (const auto* const joined = std::get_if<JoinArcs>(&order); joined != nullptr) {
    join(joined->arcs);
  } else if (std::holds_alternative<AbortCopy>(order)) {
    arriving_.reset();
  } else {
    shoal::execute(order, service_);
  }
}

bool Replica::replay(const wire::Decoded& message) {
  const Header& header = message.header;
  const Status expected{static_cast<std::uint8_t>(header.count)};
  if (service_.arcs().empty()) {  // the first arc is arriving
    const wire::Limits limits{.payload_bytes = limits_.request_bytes, .replies = false};
    return !wire::decode(message.nested, limits, checked_);
  }
  const Status status = service_.replay(message.nested, header.clock);
  if (status == Status::kBadRequest && expected != Status::kBadRequest) {
    return false;  // damaged on its way: nothing was executed
  }
  if (header.count != LogRecord::kNotCompared && comparable(status) != comparable(expected)) {
    throw std::runtime_error("its status is \"" + std::string(wire::name(status)) +
                             "\", the primary's is \"" + std::string(wire::name(expected)) + "\"");
  }
  if (header.epoch != 0) {
    const std::vector<SlotRange> arcs = service_.arcs();
    const std::uint32_t applied = service_.applied_sum(arcs) + 1;
    if (applied != header.epoch) {
      throw std::runtime_error("the clocks applied add up to " + std::to_string(applied - 1) +
                               ", the primary's to " + std::to_string(header.epoch - 1));
    }
  }
  return true;
}

void Replica::acknowledge(ReplyQueue& out) {
  if (!is_due_) {
    return;
  }
  const Status status = !fault_.empty() ? Status::kInternal : (gap_ ? Status::kRetry : Status::kOk);
  queue_replicate_reply(out, peer_, stream_, status, position_, arrived_, fault_);
  is_due_ = false;
  gap_ = false;
}

bool Replica::has(const SlotRange& range) const {
  return std::ranges::any_of(service_.arcs(), [&](const SlotRange& one) { return one.first == range.first; });
}

void Replica::adopt(std::vector<std::unique_ptr<Arc>> arcs) {
  service_.adopt(std::move(arcs));
  service_.set_map(0, service_.arcs());
}

void Replica::expect(std::vector<std::unique_ptr<Arc>> arcs, std::span<const SlotRange> in_sync) {
  std::vector<SlotRange> all = service_.arcs();
  for (const SlotRange& range : in_sync) {
    if (!has(range) &&
        std::ranges::none_of(arcs, [&](const auto& arc) { return arc->first_slot() == range.first; })) {
      all.push_back(range);
    }
  }
  std::ranges::sort(all, {}, &SlotRange::first);
  service_.set_map(0, all);
  std::ranges::move(arcs, std::back_inserter(aside_));
  expected_.assign(in_sync.begin(), in_sync.end());
}

void Replica::join(std::span<const SlotRange> ranges) {
  std::vector<std::unique_ptr<Arc>> arcs;
  for (const SlotRange& range : ranges) {
    if (has(range)) {
      continue;
    }
    auto found = take_aside([&](const SlotRange& one) { return one.first == range.first; });
    SHOAL_CHECK(!found.empty(), "it has no arc of the slots from " + std::to_string(range.first) + " on");
    arcs.push_back(std::move(found.front()));
  }
  adopt(std::move(arcs));
}

void Replica::join_expected() {
  std::vector<SlotRange> here;
  for (const SlotRange& range : expected_) {
    if (std::ranges::any_of(aside_, [&](const auto& arc) { return arc->first_slot() == range.first; })) {
      here.push_back(range);
    }
  }
  join(here);
}

std::vector<std::unique_ptr<Arc>> Replica::take_aside(const std::function<bool(const SlotRange&)>& wanted) {
  std::vector<std::unique_ptr<Arc>> arcs;
  for (std::unique_ptr<Arc>& arc : aside_) {
    if (wanted({arc->first_slot(), arc->end_slot()})) {
      arcs.push_back(std::move(arc));
    }
  }
  std::erase(aside_, nullptr);
  return arcs;
}

// --- copies -----------------------------------------------------------------------------------------------------

void Replica::begin_copy(std::span<const std::byte> head) {
  ByteReader from(head, "the head of a copy");
  Copy copy;
  copy.range.first = from.take_between<std::uint64_t>("the first slot", 0, slots_.count() - 1);
  copy.range.end = from.take_between<std::uint64_t>("the end", copy.range.first + 1, slots_.count());
  copy.total = from.take<std::uint64_t>("the bytes");
  from.done();
  arrived_ = 0;
  std::erase_if(aside_, [&](const auto& arc) { return arc->first_slot() == copy.range.first; });
  arriving_ = std::move(copy);
}

// A chunk belongs to one piece.
void Replica::add_chunk(std::span<const std::byte> chunk) {
  SHOAL_CHECK(arriving_ && arriving_->service == nullptr, "no copy has begun");
  Copy& copy = *arriving_;
  copy.bytes += chunk.size();
  std::span<const std::byte> piece = chunk;
  if (!copy.piece.empty()) {
    copy.piece.insert(copy.piece.end(), chunk.begin(), chunk.end());
    piece = copy.piece;
  }
  const std::uint64_t whole = ArcRestorer::piece_bytes(piece);
  SHOAL_CHECK(piece.size() <= whole, "a chunk of the copy goes on after its piece");
  if (piece.size() == whole) {
    copy.restorer.add(piece);
    copy.piece.clear();
  } else if (copy.piece.empty()) {
    copy.piece.assign(chunk.begin(), chunk.end());
  }
}

void Replica::restore_copy() {
  SHOAL_CHECK(arriving_ && arriving_->service == nullptr, "no copy has begun");
  Copy& copy = *arriving_;
  std::vector<std::unique_ptr<Arc>> arcs;
  arcs.push_back(copy.restorer.finish());
  SHOAL_CHECK(arcs.front()->first_slot() == copy.range.first && arcs.front()->end_slot() == copy.range.end,
              "the copy is of another arc");
  copy.service = std::make_unique<Service>(slots_, std::vector<SlotRange>(), limits_);
  copy.service->adopt(std::move(arcs));
  copy.service->set_map(0, {copy.range});
}

void Replica::keep(const wire::Decoded& message) {
  if (!arriving_) {
    return;
  }
  KeptRecord kept{.header = message.header, .frames = {}};
  if (Record{message.header.aux} == Record::kRequest) {
    for (const wire::Frame frame : message.nested) {
      kept.frames.emplace_back(frame.begin(), frame.end());
    }
  } else {
    kept.frames.emplace_back(message.values.begin(), message.values.end());
  }
  arriving_->kept.push_back(std::move(kept));
  ++arriving_->fresh;
}

void Replica::execute_kept() {
  constexpr std::size_t kBytes = std::size_t{1} << 20U;
  Copy& copy = *arriving_;
  const std::size_t least = 2 * std::exchange(copy.fresh, 0) + 1;  // more than are added
  std::size_t bytes = 0;
  for (std::size_t i = 0; (i < least || bytes < kBytes) && !copy.kept.empty(); ++i) {
    const KeptRecord record = std::move(copy.kept.front());
    copy.kept.pop_front();
    for (const auto& frame : record.frames) {
      bytes += frame.size();
    }
    if (Record{record.header.aux} == Record::kRequest) {
      const std::vector<wire::Frame> frames(record.frames.begin(), record.frames.end());
      copy.service->replay(frames, record.header.clock);
    } else {
      shoal::execute(decode_order(record.frames.front()), *copy.service);
    }
  }
  if (copy.kept.empty()) {
    adopt(copy.service->take_arcs({copy.range}));
    arrived_ = static_cast<std::uint32_t>(copy.range.first + 1);
    is_due_ = true;
    arriving_.reset();
  }
}

void Replica::catch_up() noexcept {
  if (!is_behind() || !fault_.empty()) {
    return;
  }
  try {
    execute_kept();
  } catch (const std::exception& error) {
    try {
      fault_ = std::string("the copy of an arc failed: ") + error.what();
    } catch (const std::bad_alloc&) {
      fault_ = "no memory";  // short enough to need none
    }
    is_due_ = true;
  }
}

std::optional<Replica::Arriving> Replica::arriving() const {
  if (!arriving_) {
    return std::nullopt;
  }
  return Arriving{.range = arriving_->range,
                  .bytes = arriving_->bytes,
                  .total = std::max(arriving_->bytes, arriving_->total)};
}

void queue_replicate_reply(ReplyQueue& out, std::string_view peer, std::uint64_t stream, Status status,
                           std::uint64_t sequence, std::uint32_t aux, std::string_view text) {
  Reply reply;
  reply.peer = peer;
  Header header{.op = wire::Op::kReplicate, .status = status, .flags = wire::kReply, .sequence = sequence};
  header.set_stream(stream);
  header.aux = status == Status::kOk ? aux : 0;
  if (status == Status::kInternal) {
    header.count = static_cast<std::uint32_t>(text.size());
    reply.payload[0] = out.acquire(text.size());
    std::ranges::copy(std::as_bytes(std::span(text)), reply.payload[0].bytes().begin());
    reply.frames = 1;
  }
  const std::array<wire::Frame, 1> payload{reply.payload[0].bytes()};
  wire::encode(header, std::span(payload).first(reply.frames), reply.header);
  out.add(std::move(reply));
}

}  // namespace shoal
