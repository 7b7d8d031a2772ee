// Orders of the scheduler as calls, for a Service, an Endpoint or a FollowerFace.

#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "endpoint/endpoint.h"
#include "endpoint/service.h"
#include "replica/orders.h"

namespace shoal {

// The copies of arcs that an endpoint has of the stream of a primary.
struct FollowerFace {
  Endpoint& endpoint;
  StreamId stream;
  std::vector<SlotRange> arcs{};

  ArcResult apply(const Order& order) const { return endpoint.apply_to_follower(stream, arcs, order); }
};

template <class Face>
ArcResult order(Face& face, const Order& given) {
  if constexpr (requires { face.resolved(given); }) {
    return face.apply(face.resolved(given));
  } else {
    return face.apply(given);
  }
}

template <class Face>
void start_job(Face& face, std::uint32_t job, Mode mode, std::uint32_t staleness, bool mean,
               std::uint32_t before = 0, bool is_named = false) {
  order(face, StartJob{.job = job,
                       .mode = mode,
                       .staleness = staleness,
                       .mean = mean,
                       .before = before,
                       .is_named = is_named});
}
template <class Face>
void end_job(Face& face, std::uint32_t job) {
  order(face, EndJob{.job = job});
}
template <class Face>
void admit(Face& face, std::uint32_t rank, std::uint32_t incarnation, std::uint32_t clock,
           std::uint32_t job = kDefaultJob) {
  order(face, Admit{.rank = rank, .incarnation = incarnation, .clock = clock, .job = job});
}
template <class Face>
LastTick fence(Face& face, std::uint32_t rank, std::uint32_t incarnation, std::uint32_t job = kDefaultJob) {
  return order(face, Fence{.rank = rank, .incarnation = incarnation, .job = job}).last;
}
template <class Face>
std::uint32_t dismiss(Face& face, std::uint32_t rank, std::uint32_t incarnation, const LastTick& last = {},
                      std::uint32_t job = kDefaultJob) {
  return order(face, Dismiss{.rank = rank,
                             .incarnation = incarnation,
                             .clock = last.clock,
                             .tables = last.tables,
                             .job = job})
      .clock;
}
template <class Face>
std::uint32_t hold(Face& face, std::uint32_t job = kDefaultJob) {
  return order(face, Hold{.job = job}).clock;
}
template <class Face>
void resume(Face& face, std::uint32_t job = kDefaultJob) {
  order(face, Resume{.job = job});
}
template <class Face>
void set_memory(Face& face, std::uint64_t slot_bytes) {
  order(face, SetMemory{.slot_bytes = slot_bytes});
}
template <class Face>
void add_table(Face& face, std::uint32_t id, const TableSpec& spec) {
  order(face, AddTable{.id = id, .spec = spec});
}
template <class Face>
void drop_table(Face& face, std::uint32_t id) {
  order(face, DropTable{.id = id});
}

}  // namespace shoal
