// RequestContext: a request on its way through the handlers, on the stack of the call. Outcome: what a
// handler returns: the reply, or a refusal. Out of memory and other exceptions become refusals in one place
// (service.cc).

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <variant>

#include "endpoint/reply_queue.h"
#include "replica/arc_group.h"
#include "transport/buffer_pool.h"
#include "transport/multipart_message.h"
#include "wire/wire.h"

namespace shoal {

// A received message, or a deferred one, whose parameters are bytes.
struct RequestContext {
  std::string_view peer;
  const wire::Header& header;
  std::span<const std::uint64_t> hashes{};
  std::span<const float> floats{};          // gradients, weights
  std::span<const std::uint32_t> counts{};  // of a push's rows; empty: all are 1
  std::span<const std::byte> bytes{};       // a section, parameters of a function, numbers of a SAVE_BEGIN
  std::span<const std::uint64_t> numbers{};
  std::span<const std::uint32_t> tables{};  // of a TICK
  wire::Frame digest{};
  ReplyQueue& out;
  MultipartMessage* received = nullptr;  // has the frames of the arrays; null: none may be taken
  std::uint64_t received_ns = 0;         // of a request that asks for times; otherwise 0

  // What it has done.
  std::uint64_t shard_ns = 0;  // the time of its work in rows, if it asks for times
  ChangedArcs changed{};
  wire::Status status = wire::Status::kInternal;  // of its reply
  std::span<const std::uint64_t> key_list{};      // that its digest named; valid until the next request

  WorkerId worker() const noexcept { return {.job = header.job, .rank = header.worker}; }
  WriteId write() const noexcept {
    return {.worker = worker(),
            .sequence = header.sequence,
            .table = header.table,
            .clock = header.clock,
            .step = header.op == wire::Op::kPush ? header.aux : 0};
  }
  WriteRows rows() const noexcept {
    return {.hashes = hashes, .values = floats, .counts = counts, .is_whole = is_whole()};
  }
  // Whether its values are whole rows.
  bool is_whole() const noexcept { return (header.flags & wire::kWhole) != 0; }
  bool is_anonymous() const noexcept { return header.worker == wire::kAnonymous; }
  std::span<const double> doubles() const noexcept {
    return {reinterpret_cast<const double*>(bytes.data()), bytes.size() / sizeof(double)};
  }
};

// The reply: status, dtype, dim, count, aux, flags, and the clock of a kDated one.
struct Answer {
  wire::Header header{};
  std::size_t frames = 0;
  PooledBuffer first{};
  PooledBuffer second{};
};

// Why nothing was done, or not all; the text goes with BAD_REQUEST, INTERNAL and RESOURCE_EXHAUSTED.
struct Refusal {
  wire::Status status;
  std::string text{};
};

using Outcome = std::variant<Answer, Refusal>;

}  // namespace shoal
