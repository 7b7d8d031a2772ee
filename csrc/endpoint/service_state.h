// ServiceState: what the handlers of a Service share (reads.h, writes.h, saves.h): the arcs, what there is of
// the requests of each job, caches, limits and metrics. Private to endpoint/.
//
// Threads: that of the Service.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "endpoint/deferred_reads.h"
#include "endpoint/hot_keys.h"
#include "endpoint/key_list_cache.h"
#include "endpoint/postponed_calls.h"
#include "endpoint/reply_queue.h"
#include "endpoint/request_context.h"
#include "endpoint/saves.h"
#include "endpoint/scans.h"
#include "endpoint/service_metrics.h"
#include "replica/arc_group.h"
#include "wire/wire.h"

namespace shoal {

// Of a steady clock.
using NanosecondClock = std::uint64_t (*)() noexcept;

// A table, in addition to the arcs' shards.
struct ServedTable {
  explicit ServedTable(const TableSpec& of)
      : spec(of), rows(of.dim, of.dtype, of.optimizer, of.lifecycle.metadata()) {}

  TableSpec spec;
  Rows rows;
  bool is_everywhere = true;  // in all arcs
  std::uint64_t pushes = 0;   // applied at once
};

// A worker's use of a table, for the metrics of staleness under SSP and ASP.
struct TableView {
  std::uint64_t pushes = 0;  // pushes of the table at the worker's last pull
  std::uint64_t own = 0;     // the worker's own pushes since then
};

// The answer to a function of all rows.
struct FunctionAnswer {
  wire::Header request{};  // without a sequence: none
  std::vector<double> numbers{};
  std::vector<std::uint64_t> words{};
};

// What there is of the requests of a job.
struct JobRequests {
  explicit JobRequests(std::uint32_t of) : number(of) {}

  std::uint32_t number;                                      // 0: the default job before it has begun
  bool arcs_agree = true;                                    // all have this job, with the same workers
  std::vector<std::unique_ptr<PostponedCalls>> postponed{};  // by rank
  std::vector<std::unique_ptr<FunctionAnswer>> functions{};  // by rank: the last one that was answered
  DeferredReads deferred{};
  std::map<std::uint32_t, std::vector<TableView>> views{};  // by table, then by rank
};

// What a change of arcs, jobs or tables needs, allocated before it: nothing fails afterwards.
struct StateRoom {
  std::map<std::uint32_t, std::unique_ptr<ServedTable>> tables{};
  std::vector<std::unique_ptr<JobRequests>> jobs{};
};

struct ServiceState {
  ServiceState(Slots of, const ServiceLimits& given);

  // --- questions ------------------------------------------------------------------------------------------

  // Null: there is none, or some arc does not have it.
  ServedTable* find_table(std::uint32_t id) noexcept;
  // Null: there is none.
  JobRequests* find_job(std::uint32_t number) noexcept;
  // Of a request of an admitted worker.
  JobRequests& job_of(const RequestContext& request) noexcept;
  PostponedCalls& postponed(const RequestContext& request);
  TableView& view(const RequestContext& request);
  // The numbers of a row of a request.
  static std::size_t width_of(const RequestContext& request, const ServedTable& table) noexcept {
    return request.is_whole() ? table.rows.floats() : table.rows.dim();
  }
  // For requests that mean all slots of their map.
  bool has_newest_map(const RequestContext& request) const noexcept { return request.header.epoch >= epoch; }

  // --- what changes with the arcs, the jobs and the tables ------------------------------------------------

  // For so many arcs, and for these tables and jobs in addition.
  StateRoom make_room(std::size_t num_arcs, const std::map<std::uint32_t, TableSpec>& more_tables = {},
                      std::span<const std::uint32_t> more_jobs = {});
  // To be called after each such change: what follows from it.
  void follow_arcs(StateRoom room = {}) noexcept;
  void limit_waiting() noexcept;

  // Calls work(), which uses rows; adds its time to the request if that asks for it.
  template <class Work>
  void in_rows(RequestContext& request, const Work& work) const {
    if (request.received_ns == 0 || now_ns == nullptr) {
      return work();
    }
    const std::uint64_t begin = now_ns();
    work();
    request.shard_ns += now_ns() - begin;
  }

  const Slots slots;
  const ServiceLimits given_limits;
  ServiceLimits limits;
  NanosecondClock now_ns = nullptr;
  std::uint32_t epoch = 0;
  ArcWorkspace workspace;
  Disposal disposal;  // of replaced tables
  ArcGroup arcs;
  std::map<std::uint32_t, std::unique_ptr<ServedTable>> tables{};
  std::vector<std::unique_ptr<JobRequests>> jobs{};  // the default job comes first
  KeyListCache key_lists;
  HotKeys hot_keys{};
  Saves saves{};
  Scans* scans = nullptr;  // null: no function is computed beside the requests
  ServiceMetrics metrics{};
  Cut cut{};  // of the current request
};

// --- outcomes ---------------------------------------------------------------------------------------------

// OK, or WRONG_EPOCH with the slots that are elsewhere.
Answer done(PooledBuffer refused, std::uint32_t aux = 0);
// The slots that are elsewhere, allocated before anything is changed.
PooledBuffer refused_slots(const Cut& cut, ReplyQueue& out);
// The map of the request is old.
Answer wrong_epoch();
Answer words_answer(std::span<const std::uint64_t> words, ReplyQueue& out);
Answer numbers_answer(std::span<const double> numbers, std::uint32_t aux, ReplyQueue& out);
Refusal bad_request(std::string text);
// Whether the table and the job can have whole rows, if the request has such.
std::optional<Refusal> check_whole(const ServiceState& state, const RequestContext& request,
                                   const ServedTable& table);
// Integers are carried as the bits of float32: 16 bits would change them.
std::optional<Refusal> check_dtype(const RequestContext& request, const ServedTable& table);

}  // namespace shoal
