// ReplicaOrders: the scheduler's orders for the replica of a stream whose primary died before it logged them.
//
// The orders take effect in the given arcs only, and are kept as the last records of these arcs, so that their other
// copies execute them too (server/replica.h). Without arcs they take effect in all arcs of the replica, and are not
// kept.
//
// Threads: as ReplicatedService, which must outlive it.

#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "server/orders.h"
#include "server/replicated_service.h"

namespace shoal {

class ReplicaOrders {
 public:
  ReplicaOrders(ReplicatedService& service, StreamId stream, std::vector<SlotRange> arcs)
      : service_(service), stream_(stream), arcs_(std::move(arcs)) {}

  // Before its uses, since it deduces what it returns.
  template <class Act>
  auto act(const Order& order, const Act& function) {
    return service_.act_on_replica(stream_, arcs_, order, function);
  }

  void start_job(std::uint32_t job, Mode mode, std::uint32_t staleness, bool mean, std::uint32_t before = 0,
                 bool is_named = false) {
    act(StartJob{job, mode, staleness, mean, before, is_named},
        [&](Service& service) { service.start_job(job, mode, staleness, mean, before, is_named); });
  }
  void end_job(std::uint32_t job) {
    act(EndJob{job}, [&](Service& service) { service.end_job(job); });
  }
  void admit(std::uint32_t rank, std::uint32_t incarnation, std::uint32_t clock,
             std::uint32_t job = kDefaultJob) {
    act(Admit{rank, incarnation, clock, job},
        [&](Service& service) { service.admit(rank, incarnation, clock, job); });
  }
  LastTick fence(std::uint32_t rank, std::uint32_t incarnation, std::uint32_t job = kDefaultJob) {
    return act(Fence{rank, incarnation, job},
               [&](Service& service) { return service.fence(rank, incarnation, job); });
  }
  std::uint32_t dismiss(std::uint32_t rank, std::uint32_t incarnation, const LastTick& last,
                        std::uint32_t job = kDefaultJob) {
    return act(Dismiss{rank, incarnation, last, job},
               [&](Service& service) { return service.dismiss(rank, incarnation, last, job); });
  }
  std::uint32_t hold(std::uint32_t job = kDefaultJob) {
    return act(Hold{job}, [&](Service& service) { return service.hold(job); });
  }
  void resume(std::uint32_t job = kDefaultJob) {
    act(Resume{job}, [&](Service& service) { service.resume(job); });
  }
  void set_memory(std::uint64_t slot_bytes) {
    act(SetMemory{slot_bytes}, [&](Service& service) { service.set_memory(slot_bytes); });
  }
  void add_table(std::uint32_t id, const TableSpec& spec) {
    act(AddTable{id, spec}, [&](Service& service) { service.add_table(id, spec); });
  }
  void drop_table(std::uint32_t id) {
    act(DropTable{id}, [&](Service& service) { service.drop_table(id); });
  }

  std::vector<std::uint32_t> tables() const {
    return service_.with_replica(stream_, [](Service& service) { return service.tables(); });
  }
  std::unique_ptr<Shard> snapshot(std::uint32_t id) const {
    return service_.with_replica(stream_, [&](Service& service) { return service.snapshot(id); });
  }
  std::vector<std::vector<std::byte>> save_arc(const SlotRange& range) const {
    return service_.with_replica(stream_, [&](Service& service) { return service.save_arc(range); });
  }

 private:
  ReplicatedService& service_;
  StreamId stream_;
  std::vector<SlotRange> arcs_;
};

}  // namespace shoal
