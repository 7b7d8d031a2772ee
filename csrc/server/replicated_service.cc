#include "server/replicated_service.h"

#include <limits>
#include <utility>

namespace shoal {

ReplicatedService::ReplicatedService(Slots slots, const std::vector<SlotRange>& arcs,
                                     const ServiceLimits& limits)
    : service_(slots, arcs, limits) {}

// --- control ----------------------------------------------------------------------------------------------------

void ReplicatedService::set_waker(std::function<void()> waker) { service_.set_waker(std::move(waker)); }

void ReplicatedService::set_map(std::uint32_t epoch, const std::vector<SlotRange>& ranges) {
  const std::lock_guard lock(mutex_);
  service_.set_map(epoch, ranges);
}

void ReplicatedService::start_job(std::uint32_t job, Mode mode, std::uint32_t staleness, bool mean,
                                  std::uint32_t before) {
  const std::lock_guard lock(mutex_);
  service_.start_job(job, mode, staleness, mean, before);
}

void ReplicatedService::admit(std::uint32_t rank, std::uint32_t incarnation, std::uint32_t clock) {
  const std::lock_guard lock(mutex_);
  service_.admit(rank, incarnation, clock);
}

LastTick ReplicatedService::fence(std::uint32_t rank, std::uint32_t incarnation) {
  const std::lock_guard lock(mutex_);
  return service_.fence(rank, incarnation);
}

std::uint32_t ReplicatedService::dismiss(std::uint32_t rank, std::uint32_t incarnation,
                                         const LastTick& last) {
  const std::lock_guard lock(mutex_);
  return service_.dismiss(rank, incarnation, last);
}

std::uint32_t ReplicatedService::hold() {
  const std::lock_guard lock(mutex_);
  return service_.hold();
}

void ReplicatedService::resume() {
  const std::lock_guard lock(mutex_);
  service_.resume();
}

void ReplicatedService::set_memory(std::uint64_t slot_bytes) {
  const std::lock_guard lock(mutex_);
  service_.set_memory(slot_bytes);
}

void ReplicatedService::add_table(std::uint32_t id, const TableSpec& spec) { service_.add_table(id, spec); }

void ReplicatedService::drop_table(std::uint32_t id) {
  const std::lock_guard lock(mutex_);
  service_.drop_table(id);
}

// --- data -------------------------------------------------------------------------------------------------------

void ReplicatedService::handle(std::string_view peer, std::span<const wire::Frame> frames, ReplyQueue& out,
                               MultipartMessage* received) noexcept {
  service_.handle(peer, frames, out, received);
}

void ReplicatedService::released(ReplyQueue& out) noexcept { service_.released(out); }

void ReplicatedService::acknowledge(ReplyQueue& /*out*/) noexcept {}

std::vector<StreamTarget> ReplicatedService::targets() const { return {}; }

bool ReplicatedService::next_message(StreamId /*stream*/, StreamMessage& /*message*/) noexcept {
  return false;
}

void ReplicatedService::handle_backup(StreamId /*stream*/, std::span<const wire::Frame> /*frames*/,
                                      ReplyQueue& /*out*/) noexcept {}

void ReplicatedService::reconnected(StreamId /*stream*/) noexcept {}

void ReplicatedService::on_time(Milliseconds /*now*/, ReplyQueue& /*out*/) noexcept {}

Milliseconds ReplicatedService::next_time() const noexcept {
  return std::numeric_limits<Milliseconds>::max();
}

}  // namespace shoal
