#include "server/replica.h"

#include <algorithm>
#include <array>
#include <exception>
#include <utility>
#include <vector>

#include "server/orders.h"
#include "server/replication_log.h"

namespace shoal {

using wire::Header;
using wire::Record;
using wire::Status;

namespace {

// OK and WRONG_EPOCH differ in which slots are elsewhere, and that is not the same for both.
Status comparable(Status status) noexcept { return status == Status::kWrongEpoch ? Status::kOk : status; }

}  // namespace

void Replica::handle(std::string_view peer, const wire::Decoded& message) noexcept {
  const Header& header = message.header;
  try {
    peer_ = peer;
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
      return replay(message);
    case Record::kOrder:
      shoal::execute(decode_order(message.values), service_);
      return true;
    default:
      throw std::invalid_argument("it is not executed here");
  }
}

bool Replica::replay(const wire::Decoded& message) {
  const Header& header = message.header;
  const Status expected{static_cast<std::uint8_t>(header.count)};
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
  if (!owes_reply()) {
    return;
  }
  const Status status = !fault_.empty() ? Status::kInternal : (gap_ ? Status::kRetry : Status::kOk);
  queue_replicate_reply(out, peer_, stream_, status, position_, fault_);
  peer_.clear();
  gap_ = false;
}

void queue_replicate_reply(ReplyQueue& out, std::string_view peer, std::uint64_t stream, Status status,
                           std::uint64_t sequence, std::string_view text) {
  Reply reply;
  reply.peer = peer;
  Header header{.op = wire::Op::kReplicate, .status = status, .flags = wire::kReply, .sequence = sequence};
  header.set_stream(stream);
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
