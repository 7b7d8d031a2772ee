// The requests of a worker without sockets and threads, for simulations and tests of the client.

#include <pybind11/native_enum.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bind/array.h"
#include "bind/bind.h"
#include "bind/buffer_view.h"
#include "bind/calls.h"
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
  py::list all;
  const auto add = [&](wire::Frame frame) {
    all.append(py::bytes(reinterpret_cast<const char*>(frame.data()), frame.size()));
  };
  add(encoded);
  for (const wire::Frame frame : frames) {
    add(frame);
  }
  return all;
}

class RequestsBinding {
 public:
  RequestsBinding(const Identity& worker, const py::object& map, const client::Policy& policy,
                  bool atomic_clocks, client::Defect defect)
      : requests_(identity_of(worker), slot_map_of(map), policy, atomic_clocks) {
    requests_.plant(defect);
  }

  py::object submit(std::uint8_t op, std::uint32_t table, std::uint32_t clock, Seconds now, Seconds deadline,
                    const py::object& after, const py::object& follows, const py::object& on_done,
                    bool traced, const py::kwargs& what) {
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
    std::vector<std::uint32_t> sorted = tables;
    std::ranges::sort(sorted);
    sorted.erase(std::ranges::unique(sorted).begin(), sorted.end());
    return handle(requests_.tick(clock, std::move(sorted), now, deadline, traced), py::none(), on_done);
  }

  bool receive(const std::string& address, const py::iterable& frames, Seconds now) {
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
  void change(const Change& work) {
    work(requests_);
    tell();
  }

  // (address, frames) of all messages that are to be sent.
  py::list take_outgoing() {
    py::list all;
    while (requests_.has_outgoing()) {
      const client::Outgoing message = requests_.take_outgoing();
      all.append(py::make_tuple(message.peer->endpoint.address, frames_of(message)));
    }
    return all;
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

  Requests requests_;
  std::unordered_map<const client::Call*, std::pair<py::object, py::object>> waiting_;
};

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
  py::dict all;
  const auto add = [&](const char* name, auto value) {
    if (value != 0) {
      all[name] = value;
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
  all["gradient_error"] = counts.gradient_error;
  all["largest_error"] = counts.largest_error;
  return all;
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
      .def_property_readonly("op", [](const CallHandle& one) { return static_cast<int>(one.call->op); })
      .def_property_readonly("table", [](const CallHandle& one) { return one.call->table; })
      .def_property_readonly("clock", [](const CallHandle& one) { return one.call->clock; })
      .def_property_readonly("sequence", [](const CallHandle& one) { return one.call->sequence; })
      .def_property_readonly("serial", [](const CallHandle& one) { return one.call->serial; })
      .def_property_readonly("name", [](const CallHandle& one) { return one.call->name(); })
      .def_property_readonly("included", [](const CallHandle& one) { return one.call->included; })
      .def("done", [](const CallHandle& one) { return one.call->is_done(); })
      .def_property_readonly("error", &error_of)
      .def("get", [](CallHandle& one) {
        const py::object error = error_of(one);
        if (!error.is_none()) {
          PyErr_SetObject(py::type::handle_of(error).ptr(), error.ptr());
          throw py::error_already_set();
        }
        return result_of(one);
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
}

}  // namespace

void add_requests(py::module_& module) {
  add_policy(module);
  add_filter(module);
  add_call(module);
  add_defects(module);
  py::class_<RequestsBinding>(module, "Requests")
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
           [](RequestsBinding& self, Seconds now) { self.change([&](Requests& all) { all.on_time(now); }); })
      .def("reconnected",
           [](RequestsBinding& self, const std::string& address, const std::string& reason, Seconds now) {
             self.change([&](Requests& all) { all.reconnected(address, reason, now); });
           })
      .def("set_map",
           [](RequestsBinding& self, const py::object& map, Seconds now) {
             self.change([&](Requests& all) { all.set_map(slot_map_of(map), now); });
           })
      .def("lose", [](RequestsBinding& self, std::uint32_t server, const std::string& reason,
                      Seconds now) { self.change([&](Requests& all) { all.lose(server, reason, now); }); })
      .def("close",
           [](RequestsBinding& self, const py::object& error, Seconds now) {
             self.change([&](Requests& all) { all.close(failure_of(error), now); });
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
}

}  // namespace shoal::bind
