// Saves: the saves and loads of checkpoints in progress, by the server's own threads
// (endpoint/checkpoint_session.h), and the copies of arcs, which a save cancels. save() handles SAVE_BEGIN,
// SAVE_POLL and SAVE_END.
//
// Threads: that of the Service; sessions have a mutex of their own.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "endpoint/checkpoint_session.h"
#include "endpoint/request_context.h"
#include "replica/arc_copy.h"

namespace shoal {

struct ServiceState;

class Saves {
 public:
  // Of all workers of a job or of one; loads, saves, or both.
  struct Which {
    std::uint32_t job = 0;
    std::optional<std::uint32_t> rank{};
    std::optional<bool> loads{};
  };

  // In progress, or ended but still in use by a thread.
  const std::vector<std::shared_ptr<CheckpointSession>>& sessions() const noexcept { return sessions_; }
  // Null: there is none, or it has ended.
  CheckpointSession* find(const CheckpointSession::Name& name) const noexcept;
  void cancel(const Which& which) noexcept;
  // Those that include tables of this arc, which leaves.
  void cancel_holding(const Arc& arc);
  void forget_closed();
  bool have_ended() const noexcept;
  void add(std::shared_ptr<CheckpointSession> session);
  // The next session that begins, once for each; null: there is none.
  std::shared_ptr<CheckpointSession> take() noexcept;
  bool has_unclaimed() const noexcept { return !unclaimed_.empty(); }
  // Cancels all sessions, and refuses new ones.
  void close() noexcept;
  bool is_closed() const noexcept { return is_closed_; }

  void add_copy(std::shared_ptr<ArcCopy> copy);
  // Of one arc, or of all.
  void cancel_copies(const Arc* arc = nullptr) noexcept;

  // Asked before a save begins while there is no other: if it returns false, the save is answered OVERLOADED.
  void set_filter(std::function<bool()> filter) { filter_ = std::move(filter); }
  bool may_begin() const { return !filter_ || filter_(); }

 private:
  std::vector<std::shared_ptr<CheckpointSession>> sessions_;
  std::vector<std::shared_ptr<CheckpointSession>> unclaimed_;  // not yet taken
  std::vector<std::weak_ptr<ArcCopy>> copies_;
  std::function<bool()> filter_;
  bool is_closed_ = false;
};

Outcome save(ServiceState& state, RequestContext& request);
// Of a request whose parameters are bytes, as a deferred one has them.
Outcome begin_save(ServiceState& state, RequestContext& request);

}  // namespace shoal
