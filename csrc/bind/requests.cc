// The requests of a worker without sockets and threads, for simulations and tests of the client.

#include <pybind11/native_enum.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bind/array.h"
#include "bind/bind.h"
#include "bind/buffer_view.h"
#include "bind/calls.h"
#include "cache/row_cache.h"
#include "client/cached_rows.h"
#include "client/requests.h"

namespace shoal::bind {

namespace {

using client::Requests;
using client::Seconds;

py::list frames_of(const client::Outgoing& message) {
  wire::Header header = message.header;
  std::vector<wire::Frame> frames;
  for (std::size_t i = 0; i < message.payload.count; ++i) {
    frames.push_back(message.payload.frames.at(i).bytes);
  }
  std::array<std::byte, sizeof(wire::Header)> encoded;
  wire::encode(header, frames, encoded);
  py::list result;
  const auto add = [&](wire::Frame frame) {
    result.append(py::bytes(reinterpret_cast<const char*>(frame.data()), frame.size()));
  };
  add(encoded);
  for (const wire::Frame frame : frames) {
    add(frame);
  }
  return result;
}

class RequestsBinding final : private client::Submitter {
 public:
  RequestsBinding(const Identity& worker, const py::object& map, const client::Policy& policy,
                  bool atomic_clocks, client::Defect defect)
      : requests_(identity_of(worker), slot_map_of(map), policy, atomic_clocks) {
    requests_.plant(defect);
  }

  py::object submit(std::uint8_t op, std::uint32_t table, std::uint32_t clock, Seconds now, Seconds deadline,
                    const py::object& after, const py::object& follows, const py::object& on_done,
                    bool traced, const py::kwargs& what) {
    now_ = now;
    Described described = describe(wire::Op{op}, what);
    const std::vector<client::CallPtr> before = calls_of(after);
    client::Terms terms{.after = before,
                        .follows = follows.is_none() ? nullptr : follows.cast<CallHandle&>().call,
                        .keep = keep(std::move(described.owners)),
                        .is_traced = traced};
    return handle(requests_.submit(wire::Op{op}, table, clock, now, deadline, std::move(described.operation),
                                   std::move(terms)),
                  described.out, on_done);
  }

  py::object tick(std::uint32_t clock, const std::vector<std::uint32_t>& tables, Seconds now,
                  Seconds deadline, const py::object& on_done, bool traced) {
    now_ = now;
    std::vector<std::uint32_t> sorted = tables;
    sorted.insert(sorted.end(), pushed_.begin(), pushed_.end());
    pushed_.clear();
    clock_ = clock + 1;
    std::ranges::sort(sorted);
    sorted.erase(std::unique(sorted.begin(), sorted.end()), sorted.end());
    return handle(requests_.tick(clock, std::move(sorted), now, deadline, traced), py::none(), on_done);
  }

  bool receive(const std::string& address, const py::iterable& frames, Seconds now) {
    now_ = now;
    std::vector<BufferView> borrowed;
    std::vector<wire::Frame> views;
    for (const py::handle frame : frames) {
      views.push_back(borrowed.emplace_back(frame).bytes());
    }
    const bool good = requests_.receive(address, views, now);
    tell();
    return good;
  }

  template <class Change>
  void change(Seconds now, const Change& work) {
    now_ = now;
    work(requests_);
    tell();
  }

  // A cache of a worker at this clock, which gives every call so many seconds.
  client::CachedRows& add_cache(std::unique_ptr<RowCache> cache, client::CachedRowsOptions options,
                                std::uint32_t clock, Seconds patience) {
    clock_ = clock;
    patience_ = patience;
    client::Submitter& calls = *this;
    return *caches_.emplace_back(
        std::make_unique<client::CachedRows>(calls, std::move(cache), std::move(options)));
  }

  // (address, frames) of all messages that are to be sent.
  py::list take_outgoing() {
    py::list result;
    while (requests_.has_outgoing()) {
      const client::Outgoing message = requests_.take_outgoing();
      result.append(py::make_tuple(message.peer->endpoint.address, frames_of(message)));
    }
    return result;
  }

  const Requests& requests() const noexcept { return requests_; }

 private:
  py::object handle(const client::CallPtr& call, const py::object& out, const py::object& on_done) {
    py::object made = py::cast(std::make_unique<CallHandle>(CallHandle{.call = call, .out = out}));
    if (!on_done.is_none()) {
      waiting_.emplace(call.get(), std::pair(made, on_done));
    }
    tell();
    return made;
  }

  // Calls the functions of calls that were settled.
  void tell() {
    while (requests_.has_settled()) {
      for (const client::CallPtr& call : requests_.take_settled()) {
        if (call->observer != nullptr) {
          call->observer->settled(call);
        }
        const auto found = waiting_.find(call.get());
        if (found != waiting_.end()) {
          const auto [handle, on_done] = std::move(found->second);
          waiting_.erase(found);
          on_done(handle);
        }
      }
    }
    release_kept();
  }

  std::uint32_t clock() const noexcept override { return clock_; }
  std::uint64_t repetitions() const noexcept override { return requests_.repetitions(); }
  client::CallPtr submit_rows(wire::Op op, std::uint32_t table, client::Keyed what,
                              client::Terms terms) override {
    if (op == wire::Op::kPush) {
      pushed_.insert(table);
    }
    return requests_.submit(op, table, clock_, now_, now_ + patience_, what, std::move(terms));
  }
  client::CallPtr compose(wire::Op op, std::uint32_t table, bool is_traced) override {
    return requests_.compose(op, table, clock_, now_, is_traced);
  }
  void complete(const client::CallPtr& composed, std::optional<client::Failure> failure) override {
    requests_.complete(composed, now_, std::move(failure));
  }

  Requests requests_;
  std::unordered_map<const client::Call*, std::pair<py::object, py::object>> waiting_;
  std::vector<std::unique_ptr<client::CachedRows>> caches_;
  Seconds now_ = 0;
  // Of caches:
  std::uint32_t clock_ = 0;
  Seconds patience_ = 0;
  std::set<std::uint32_t> pushed_;  // tables pushed to in this clock
};

// A cache of simulated requests.
struct SimulatedRows {
  std::shared_ptr<RequestsBinding> requests;
  client::CachedRows* rows;

  template <class Work>
  void change(Seconds now, const Work& work) const {
    requests->change(now, [&](Requests&) { work(*rows); });
  }
};

std::unique_ptr<SimulatedRows> make_rows(const std::shared_ptr<RequestsBinding>& self, std::uint32_t table,
                                         const TableSpec& spec, std::size_t rows, std::size_t slots,
                                         std::uint32_t staleness, const std::optional<std::uint32_t>& waits,
                                         bool local_steps, const py::object& filter, std::uint32_t clock,
                                         Seconds patience, RowCacheDefect row_defect,
                                         client::CachedRowsDefect defect) {
  auto cache = make_cache(spec, rows, local_steps);
  cache->plant(row_defect);
  client::CachedRowsOptions options{.table = table, .slots = slots, .staleness = staleness, .waits = waits};
  if (!filter.is_none()) {
    options.filter = filter.cast<client::Filter*>();
    options.keep = keep({filter});
  }
  client::CachedRows& made = self->add_cache(std::move(cache), std::move(options), clock, patience);
  made.plant(defect);
  return std::make_unique<SimulatedRows>(SimulatedRows{.requests = self, .rows = &made});
}

void add_simulated_rows(py::module_& module) {
  const auto array = [](const char* name) { return py::arg(name).noconvert(); };
  py::class_<SimulatedRows>(module, "SimulatedRows")
      .def(py::init(&make_rows), py::arg("requests"), py::arg("table"), py::arg("spec"), py::kw_only(),
           py::arg("rows"), py::arg("slots"), py::arg("staleness"), py::arg("waits") = std::nullopt,
           py::arg("local_steps") = false, py::arg("filter") = py::none(), py::arg("clock") = 0,
           py::arg("patience") = 60.0, py::arg("row_defect") = RowCacheDefect::kNone,
           py::arg("defect") = client::CachedRowsDefect::kNone)
      .def(
          "pull",
          [](const SimulatedRows& self, const Array<std::uint64_t>& hashes, Array<float>& rows, Seconds now) {
            CallHandle handle{.out = rows};
            self.change(now, [&](client::CachedRows& cache) {
              handle.call = cache.pull(in(hashes), out(rows), keep({hashes, rows}));
            });
            return handle;
          },
          array("hashes"), array("rows"), py::arg("now"))
      .def(
          "push",
          [](const SimulatedRows& self, const Array<std::uint64_t>& hashes, const Array<float>& grads,
             Seconds now) {
            CallHandle handle;
            self.change(
                now, [&](client::CachedRows& cache) { handle.call = cache.push(in(hashes), in(grads), {}); });
            return handle;
          },
          array("hashes"), array("grads"), py::arg("now"))
      .def("end_clock",
           [](const SimulatedRows& self, Seconds now) {
             self.change(now, [](client::CachedRows& cache) { cache.end_clock(); });
           })
      .def("flush", [](const SimulatedRows& self,
                       Seconds now) { self.change(now, [](client::CachedRows& cache) { cache.flush(); }); })
      .def_property_readonly("unacknowledged",
                             [](const SimulatedRows& self) {
                               std::vector<CallHandle> result;
                               for (const client::CallPtr& call : self.rows->unacknowledged()) {
                                 result.push_back({.call = call});
                               }
                               return result;
                             })
      .def("metrics",
           [](const SimulatedRows& self) { return dict_of(kRowCacheStatistics, self.rows->cache()); });
}

client::Policy make_policy(Seconds resend_after, double backoff, Seconds longest, double bytes_per_second,
                           Seconds deferred_after, Seconds pause, Seconds longest_pause, std::uint64_t credit,
                           std::uint64_t message_bytes, std::uint64_t largest_message) {
  return {resend_after, backoff,       longest, bytes_per_second, deferred_after,
          pause,        longest_pause, credit,  message_bytes,    largest_message};
}

void add_policy(py::module_& module) {
  const client::Policy usual;
  py::class_<client::Policy>(module, "Policy")
      .def(py::init(&make_policy), py::kw_only(), py::arg("resend_after") = usual.resend_after,
           py::arg("backoff") = usual.backoff, py::arg("longest") = usual.longest,
           py::arg("bytes_per_second") = usual.bytes_per_second,
           py::arg("deferred_after") = usual.deferred_after, py::arg("pause") = usual.pause,
           py::arg("longest_pause") = usual.longest_pause, py::arg("credit") = usual.credit,
           py::arg("message_bytes") = usual.message_bytes,
           py::arg("largest_message") = usual.largest_message);
}

py::dict filter_metrics(const client::Filter& filter) {
  const client::FilterCounts& counts = filter.counts();
  py::dict result;
  const auto add = [&](const char* name, auto value) {
    if (value != 0) {
      result[name] = value;
    }
  };
  add("pushes", counts.pushes);
  add("pulls", counts.pulls);
  add("key_bytes_saved", counts.key_bytes_saved);
  add("gradient_bytes_saved", counts.gradient_bytes_saved);
  add("weight_bytes_saved", counts.weight_bytes_saved);
  add("lists_sent", counts.lists_sent);
  add("lists_named", counts.lists_named);
  add("lists_lost", counts.lists_lost);
  add("rows_dropped", counts.rows_dropped);
  add("rows_raised", counts.rows_raised);
  result["gradient_error"] = counts.gradient_error;
  result["largest_error"] = counts.largest_error;
  return result;
}

void add_filter(py::module_& module) {
  py::class_<client::Filter>(module, "Filter")
      .def(py::init([](bool key_caching, bool zeros, std::uint8_t gradients, std::uint8_t weights,
                       double threshold, std::uint64_t seed, std::uint32_t job) {
             return client::Filter({.key_caching = key_caching,
                                    .zeros = zeros,
                                    .gradients = wire::Dtype{gradients},
                                    .weights = wire::Dtype{weights},
                                    .threshold = threshold,
                                    .seed = seed,
                                    .job = job});
           }),
           py::kw_only(), py::arg("key_caching"), py::arg("zeros"), py::arg("gradients"), py::arg("weights"),
           py::arg("threshold"), py::arg("seed"), py::arg("job"))
      .def("metrics", &filter_metrics);
}

void add_call(py::module_& module) {
  py::class_<CallHandle>(module, "SubmittedCall")
      .def_property_readonly("op", [](const CallHandle& handle) { return static_cast<int>(handle.call->op); })
      .def_property_readonly("table", [](const CallHandle& handle) { return handle.call->table; })
      .def_property_readonly("clock", [](const CallHandle& handle) { return handle.call->clock; })
      .def_property_readonly("sequence", [](const CallHandle& handle) { return handle.call->sequence; })
      .def_property_readonly("serial", [](const CallHandle& handle) { return handle.call->serial; })
      .def_property_readonly("name", [](const CallHandle& handle) { return handle.call->name(); })
      .def_property_readonly("included", [](const CallHandle& handle) { return handle.call->included; })
      .def("done", [](const CallHandle& handle) { return handle.call->is_done(); })
      .def_property_readonly("error", &error_of)
      .def("get", [](CallHandle& handle) {
        const py::object error = error_of(handle);
        if (!error.is_none()) {
          PyErr_SetObject(py::type::handle_of(error).ptr(), error.ptr());
          throw py::error_already_set();
        }
        return result_of(handle);
      });
}

void add_defects(py::module_& module) {
  using client::Defect;
  py::native_enum<Defect>(module, "ClientDefect", "enum.IntEnum")
      .value("NONE", Defect::kNone)
      .value("FORGETS_REFUSED_SLOTS", Defect::kForgetsRefusedSlots)
      .value("RESENDS_WITH_A_NEW_SEQUENCE", Defect::kResendsWithANewSequence)
      .value("TAKES_EARLY_FOR_DONE", Defect::kTakesEarlyForDone)
      .value("TICKS_BEFORE_ITS_READS", Defect::kTicksBeforeItsReads)
      .value("TICKS_BEFORE_ITS_PUSHES_ARE_EVERYWHERE", Defect::kTicksBeforeItsPushesAreEverywhere)
      .value("SENDS_ONCE", Defect::kSendsOnce)
      .value("DONE_BY_THE_FIRST_PART", Defect::kDoneByTheFirstPart)
      .value("TAKES_ANY_ANSWER", Defect::kTakesAnyAnswer)
      .value("KEEPS_ITS_OLD_MAP", Defect::kKeepsItsOldMap)
      .value("RENUMBERS_PUSHES", Defect::kRenumbersPushes)
      .value("RENUMBERS_OTHER_WRITES", Defect::kRenumbersOtherWrites)
      .value("LOSES_COUNTS", Defect::kLosesCounts)
      .value("TAKES_ROWS_BEHIND_A_REPEATED_PUSH", Defect::kTakesRowsBehindARepeatedPush)
      .value("LEAVES_BEFORE_A_FILTERED_PUSH", Defect::kLeavesBeforeAFilteredPush)
      .finalize();
  py::native_enum<RowCacheDefect>(module, "RowCacheDefect", "enum.IntEnum")
      .value("NONE", RowCacheDefect::kNone)
      .value("KEEPS_ROWS_FOR_A_LONG_TIME", RowCacheDefect::kKeepsRowsForALongTime)
      .value("ADDS_TO_WHAT_IT_HAS_SENT", RowCacheDefect::kAddsToWhatItHasSent)
      .value("KEEPS_COPIES_OF_WHAT_IT_SENDS", RowCacheDefect::kKeepsCopiesOfWhatItSends)
      .value("TAKES_THE_LAST_ANSWER", RowCacheDefect::kTakesTheLastAnswer)
      .value("SENDS_CHANGES_AGAIN", RowCacheDefect::kSendsChangesAgain)
      .value("FORGETS_WHAT_CHANGED_MEANWHILE", RowCacheDefect::kForgetsWhatChangedMeanwhile)
      .value("KEEPS_ANSWERS_THAT_LACK_PUSHES", RowCacheDefect::kKeepsAnswersThatLackPushes)
      .value("READS_PASSED_GRADIENTS_LATER", RowCacheDefect::kReadsPassedGradientsLater)
      .finalize();
  using client::CachedRowsDefect;
  py::native_enum<CachedRowsDefect>(module, "CachedRowsDefect", "enum.IntEnum")
      .value("NONE", CachedRowsDefect::kNone)
      .value("HOLDS_FOR_ANOTHER_CLOCK", CachedRowsDefect::kHoldsForAnotherClock)
      .value("FORGETS_THAT_PUSHES_ARE_HELD", CachedRowsDefect::kForgetsThatPushesAreHeld)
      .value("TRUSTS_THE_ORDER", CachedRowsDefect::kTrustsTheOrder)
      .value("TAKES_ITS_OWN_CLOCK", CachedRowsDefect::kTakesItsOwnClock)
      .value("PULLS_BEFORE_IT_PUSHES", CachedRowsDefect::kPullsBeforeItPushes)
      .finalize();
}

}  // namespace

void add_requests(py::module_& module) {
  add_policy(module);
  add_filter(module);
  add_call(module);
  add_defects(module);
  py::class_<RequestsBinding, std::shared_ptr<RequestsBinding>>(module, "Requests")
      .def(py::init<const Identity&, const py::object&, const client::Policy&, bool, client::Defect>(),
           py::arg("worker"), py::arg("map"), py::arg("policy") = client::Policy{}, py::kw_only(),
           py::arg("atomic_clocks") = true, py::arg("defect") = client::Defect::kNone)
      .def("submit", &RequestsBinding::submit, py::arg("op"), py::arg("table"), py::arg("clock"),
           py::arg("now"), py::arg("deadline"), py::kw_only(), py::arg("after") = py::tuple(),
           py::arg("follows") = py::none(), py::arg("on_done") = py::none(), py::arg("traced") = false)
      .def("tick", &RequestsBinding::tick, py::arg("clock"), py::arg("tables"), py::arg("now"),
           py::arg("deadline"), py::kw_only(), py::arg("on_done") = py::none(), py::arg("traced") = false)
      .def("receive", &RequestsBinding::receive, py::arg("address"), py::arg("frames"), py::arg("now"))
      .def("on_time",
           [](RequestsBinding& self, Seconds now) {
             self.change(now, [&](Requests& requests) { requests.on_time(now); });
           })
      .def("reconnected",
           [](RequestsBinding& self, const std::string& address, const std::string& reason, Seconds now) {
             self.change(now, [&](Requests& requests) { requests.reconnected(address, reason, now); });
           })
      .def("set_map",
           [](RequestsBinding& self, const py::object& map, Seconds now) {
             self.change(now, [&](Requests& requests) { requests.set_map(slot_map_of(map), now); });
           })
      .def("lose",
           [](RequestsBinding& self, std::uint32_t server, const std::string& reason, Seconds now) {
             self.change(now, [&](Requests& requests) { requests.lose(server, reason, now); });
           })
      .def("close",
           [](RequestsBinding& self, const py::object& error, Seconds now) {
             self.change(now, [&](Requests& requests) { requests.close(failure_of(error), now); });
           })
      .def("take_outgoing", &RequestsBinding::take_outgoing)
      .def("next_time",
           [](const RequestsBinding& self) {
             const Seconds next = self.requests().next_time();
             return next == client::kNever ? std::nullopt : std::optional(next);
           })
      .def("verify", [](const RequestsBinding& self) { return self.requests().verify(); })
      .def_property_readonly("wants_map",
                             [](const RequestsBinding& self) { return self.requests().wants_map(); })
      .def_property_readonly("repetitions",
                             [](const RequestsBinding& self) { return self.requests().repetitions(); })
      .def_property_readonly("timers", [](const RequestsBinding& self) { return self.requests().timers(); })
      .def_property_readonly("epoch",
                             [](const RequestsBinding& self) { return self.requests().map().epoch(); })
      .def_property_readonly("counts", [](const RequestsBinding& self) {
        return dict_of(client::kRequestStatistics, self.requests().counts());
      });
  add_simulated_rows(module);
}

}  // namespace shoal::bind
