#include "bind/client.h"

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <set>
#include <tuple>

#include "batch/key_batch.h"
#include "batch/summed_batch.h"
#include "bind/array.h"
#include "bind/bind.h"
#include "wire/times.h"

namespace shoal::bind {

namespace {

py::object result(ClientCall& self, const py::object& given_timeout) {
  const std::optional<Seconds> timeout = ClientBinding::timeout_of(given_timeout);
  const client::CallPtr& call = self.handle.call;
  self.client->wait(call, timeout);
  if (call->failure.has_value()) {
    if (self.client->client().is_of_this_process()) {
      self.client->client().calls().observed(*call);
    }
    ClientBinding::raise(make_error(*call->failure));
  }
  if (!self.expansion.has_value()) {
    return result_of(self.handle);
  }
  Expansion& expansion = *self.expansion;
  Expansion::Once& once = *expansion.once;
  if (!once.is_done.load(std::memory_order_acquire)) {
    const auto& batch = expansion.batch.cast<const KeyBatch&>();
    auto rows = py::reinterpret_borrow<Array<float>>(expansion.rows);
    const auto to = out(rows);
    auto& pool = expansion.pool.cast<PoolWithScratch&>();
    const WithoutGil nogil;
    const auto expand_once = [&] {  // the first caller may change its rows from then on
      if (!once.is_done.load(std::memory_order_relaxed)) {
        batch.expand(expansion.unique, expansion.dim, to, pool.threads);
        once.is_done.store(true, std::memory_order_release);
      }
    };
    if (self.client->client().is_of_this_process()) {
      const MutexLock lock(once.mutex);
      expand_once();
    } else {  // the mutex may have been locked at the fork
      expand_once();
    }
  }
  return expansion.rows;
}

std::unique_ptr<ClientCall> begin(const BindingPtr& self, std::uint8_t op, std::uint32_t table,
                                  const py::object& after, bool traced, const py::kwargs& what) {
  Described described = describe(wire::Op{op}, what);
  py::object out = described.out;
  auto call = std::make_unique<ClientCall>(ClientCall{.client = self, .handle = {.out = std::move(out)}});
  call->handle.call = self->submit(wire::Op{op}, table, std::move(described), after, nullptr, traced);
  return call;
}

// The keys of a batch, which `owners` keeps.
template <class Batch>
client::Keyed keys_of(const Batch& batch, const py::object& filter, std::vector<py::object>& owners) {
  client::Keyed keyed{.hashes = batch.hashes(), .begins = batch.offsets()};
  if (!filter.is_none()) {
    keyed.filter = filter.cast<client::Filter*>();
    owners.push_back(filter);
  }
  return keyed;
}

// Rows for each unique key, into `rows`.
std::unique_ptr<ClientCall> pull(const BindingPtr& self, std::uint32_t table, const py::object& batch,
                                 Array<float>& rows, std::size_t dim, const py::object& filter,
                                 const py::object& after, std::uint32_t ahead, bool traced) {
  const auto& keys = batch.cast<const KeyBatch&>();
  Described described{.owners = {batch, rows}, .out = rows};
  client::Keyed keyed = keys_of(keys, filter, described.owners);
  keyed.ahead = ahead;
  keyed.out = std::as_writable_bytes(out(rows));
  keyed.width = dim * sizeof(float);
  keyed.dim = static_cast<std::uint16_t>(dim);
  described.operation = keyed;
  auto call = std::make_unique<ClientCall>(ClientCall{.client = self, .handle = {.out = rows}});
  call->handle.call =
      self->submit(wire::Op::kPull, table, std::move(described), after, nullptr, traced, keys.input_size());
  return call;
}

// Rows for each key as given, into `rows` when the result is asked for.
std::unique_ptr<ClientCall> pull_per_key(const BindingPtr& self, std::uint32_t table, const py::object& batch,
                                         const Array<float>& rows, std::size_t dim, const py::object& pool,
                                         const py::object& filter, const py::object& after,
                                         const client::CallPtr& follows, bool traced) {
  const auto& keys = batch.cast<const KeyBatch&>();
  SHOAL_CHECK(static_cast<std::size_t>(rows.size()) == keys.input_size() * dim, "rows are one for each key");
  Described described{.owners = {batch}};
  client::Keyed keyed = keys_of(keys, filter, described.owners);
  const std::shared_ptr<float[]> unique(new float[keys.size() * dim]);
  keyed.out = std::as_writable_bytes(std::span(unique.get(), keys.size() * dim));
  keyed.width = dim * sizeof(float);
  keyed.dim = static_cast<std::uint16_t>(dim);
  described.operation = keyed;
  described.memory = unique;
  auto call = std::make_unique<ClientCall>(
      ClientCall{.client = self,
                 .expansion = Expansion{.batch = batch,
                                        .rows = rows,
                                        .pool = pool,
                                        .unique = {unique.get(), keys.size() * dim},
                                        .owner = unique,
                                        .dim = dim}});
  call->handle.call =
      self->submit(wire::Op::kPull, table, std::move(described), after, follows, traced, keys.input_size());
  return call;
}

std::unique_ptr<ClientCall> push_rows(const BindingPtr& self, std::uint32_t table, Described&& described,
                                      client::Keyed keyed, std::size_t dim,
                                      const std::optional<Array<std::uint32_t>>& counts,
                                      const py::object& after, bool traced) {
  keyed.width = dim * sizeof(float);
  keyed.dim = static_cast<std::uint16_t>(dim);
  if (counts.has_value()) {
    keyed.counts = in(*counts);
    described.owners.push_back(*counts);
  }
  described.operation = keyed;
  auto call = std::make_unique<ClientCall>(ClientCall{.client = self});
  call->handle.call = self->submit(wire::Op::kPush, table, std::move(described), after, nullptr, traced);
  return call;
}

// A gradient for each unique key.
std::unique_ptr<ClientCall> push(const BindingPtr& self, std::uint32_t table, const py::object& batch,
                                 const Array<float>& grads, std::size_t dim,
                                 const std::optional<Array<std::uint32_t>>& counts, const py::object& filter,
                                 const py::object& after, bool traced) {
  Described described{.owners = {batch, grads}};
  client::Keyed keyed = py::isinstance<KeyBatch>(batch)
                            ? keys_of(batch.cast<const KeyBatch&>(), filter, described.owners)
                            : keys_of(batch.cast<const SummedBatch&>(), filter, described.owners);
  keyed.values = std::as_bytes(in(grads));
  return push_rows(self, table, std::move(described), keyed, dim, counts, after, traced);
}

// A gradient for each key as given, summed here.
std::unique_ptr<ClientCall> push_per_key(const BindingPtr& self, std::uint32_t table, const py::object& batch,
                                         const Array<float>& grads, std::size_t dim, PoolWithScratch& pool,
                                         bool integers, const std::optional<Array<std::uint32_t>>& counts,
                                         const py::object& filter, const py::object& after, bool traced) {
  const auto& keys = batch.cast<const KeyBatch&>();
  Described described{.owners = {batch}};
  client::Keyed keyed = keys_of(keys, filter, described.owners);
  const std::shared_ptr<float[]> sums(new float[keys.size() * dim]);
  const std::span<float> room(sums.get(), keys.size() * dim);
  const auto from = in(grads);
  {
    const WithoutGil nogil;
    keys.sum(from, dim, room, pool.threads, integers ? Elements::kInt64Pairs : Elements::kFloat32);
  }
  keyed.values = std::as_bytes(std::span<const float>(room));
  described.memory = sums;
  return push_rows(self, table, std::move(described), keyed, dim, counts, after, traced);
}

std::unique_ptr<ClientCall> tick(const BindingPtr& self, bool traced) {
  auto call = std::make_unique<ClientCall>(ClientCall{.client = self});
  call->handle.call = self->tick(traced);
  return call;
}

// Of a traced call: (serial, settled at, error or None, [(address, server, keys, begun, sent, ended, bytes,
// received bytes, answered, (nanoseconds in the server, in the shard) or None, [(event, time)])]).
py::tuple trace_of(const client::CallPtr& call) {
  py::list parts;
  for (const client::PartTrace& part : *call->trace) {
    const py::object times = part.times.has_value()
                                 ? py::object(py::make_tuple(part.times->server_ns, part.times->shard_ns))
                                 : py::none();
    parts.append(py::make_tuple(part.endpoint.address, part.endpoint.server, part.keys, part.begun, part.sent,
                                part.ended, part.bytes, part.received_bytes, part.is_answered, times,
                                part.events));
  }
  return py::make_tuple(call->serial, call->settled_at,
                        call->failure.has_value() ? make_error(*call->failure) : py::none(), parts);
}

// {op: (seconds in total, {least nanoseconds of a bucket: count})}
py::dict durations(const ClientBinding& self) {
  py::dict result;
  for (const auto& [op, found] : self.client().calls().durations()) {
    py::dict counts;
    for (std::size_t bucket = 0; bucket < found.counts.size(); ++bucket) {
      if (found.counts.at(bucket) != 0) {
        counts[py::int_(std::uint64_t{1} << bucket)] = found.counts.at(bucket);
      }
    }
    result[py::str(std::string(wire::name(op)))] = py::make_tuple(found.seconds, counts);
  }
  return result;
}

py::dict metrics(const ClientBinding& self) {
  py::dict result = dict_of(client::kRequestStatistics, self.client().request_counts());
  add_to(result, client::kClientStatistics, self.client().counts());
  add_to(result, client::kCallStatistics, self.client().calls().counts());
  return result;
}

// [(error, numbers of the call in log events)]
py::list take_failed(const ClientBinding& self) {
  py::list result;
  const client::WorkerIdentity& worker = self.client().worker();
  for (const client::CallPtr& call : self.client().calls().take_failed()) {
    py::dict ids;
    ids["worker"] = worker.rank;
    ids["incarnation"] = worker.incarnation;
    ids["job"] = worker.job;
    ids["call"] = call->serial;
    ids["sequence"] = call->sequence == 0 ? py::object(py::none()) : py::object(py::int_(call->sequence));
    ids["op"] = std::string(wire::name(call->op));
    ids["table"] = call->table;
    ids["clock"] = call->clock;
    result.append(py::make_tuple(make_error(*call->failure), ids));
  }
  return result;
}

py::list take_unobserved(const ClientBinding& self) {
  py::list result;
  for (const client::CallPtr& call : self.client().calls().take_unobserved()) {
    result.append(make_error(*call->failure));
  }
  return result;
}

// [n, 6]: of each part of a pull or a push the serial of its call, its table, whether it is a push, the first
// of its slots, their end, and its position.
Array<std::uint64_t> take_order(const ClientBinding& self) {
  const std::vector<client::Executed> parts = self.client().take_order();
  constexpr std::size_t kFields = 6;
  auto result = fresh<std::uint64_t>(parts.size(), kFields);
  auto to = out(result).begin();
  for (const client::Executed& part : parts) {
    to = std::ranges::copy(std::array<std::uint64_t, kFields>{part.serial, part.table, part.is_push ? 1U : 0U,
                                                              part.first_slot, part.end_slot, part.position},
                           to)
             .out;
  }
  return result;
}

void add_client_call(py::module_& module) {
  py::class_<ClientCall>(module, "Call")
      .def("done", [](const ClientCall& self) { return self.handle.call->is_done(); })
      .def("result", &result, py::arg("timeout") = py::none())
      .def("add_done_callback",
           [](const py::object& self, const py::object& function) {
             const auto& call = self.cast<const ClientCall&>();
             call.client->when_done(call.handle.call, py::cpp_function([self, function] { function(self); }));
           })
      .def("is_of", [](const ClientCall& self, const BindingPtr& client) { return self.client == client; })
      .def_property_readonly("error", [](ClientCall& self) { return error_of(self.handle); })
      .def_property_readonly("clock", [](const ClientCall& self) { return self.handle.call->clock; })
      .def_property_readonly("serial", [](const ClientCall& self) { return self.handle.call->serial; })
      .def_property_readonly("sequence", [](const ClientCall& self) { return self.handle.call->sequence; })
      .def_property_readonly("included", [](const ClientCall& self) { return self.handle.call->included; });
}

// The call behind an argument that may be None.
client::CallPtr call_or_none(const py::object& call) {
  return call.is_none() ? nullptr : call.cast<const ClientCall&>().handle.call;
}

}  // namespace

void add_client(py::module_& module) {
  add_client_call(module);
  add_cached_rows(module);
  constexpr auto kUnlocked = py::call_guard<WithoutGil>();
  py::class_<ClientBinding, BindingPtr>(module, "Client")
      .def(py::init<const std::string&, std::uintptr_t, const Identity&, const py::object&,
                    const client::Policy&, bool, std::uint32_t, Seconds, py::object, std::string, std::string,
                    std::string, int, int, int, Seconds>(),
           py::arg("module"), py::arg("context"), py::arg("worker"), py::arg("map"), py::kw_only(),
           py::arg("policy") = client::Policy{}, py::arg("atomic_clocks") = true, py::arg("clock") = 0,
           py::arg("timeout") = 60.0, py::arg("report") = py::none(), py::arg("curve_server") = "",
           py::arg("curve_public") = "", py::arg("curve_secret") = "",
           py::arg("heartbeat_ms") = client::ClientOptions{}.heartbeat_ms,
           py::arg("silent_ms") = client::ClientOptions{}.silent_ms,
           py::arg("handshake_ms") = client::ClientOptions{}.handshake_ms,
           py::arg("signal_seconds") = kSignalSeconds)
      .def("begin", &begin, py::arg("op"), py::arg("table"), py::kw_only(), py::arg("after") = py::tuple(),
           py::arg("traced") = false)
      .def(
          "pull",
          [](const BindingPtr& self, std::uint32_t table, const py::object& batch, Array<float>& rows,
             std::size_t dim, const py::object& filter, const py::object& after, std::uint32_t ahead,
             bool traced) { return pull(self, table, batch, rows, dim, filter, after, ahead, traced); },
          py::arg("table"), py::arg("batch"), py::arg("rows").noconvert(), py::arg("dim"),
          py::arg("filter") = py::none(), py::arg("after") = py::tuple(), py::arg("ahead") = 0,
          py::arg("traced") = false)
      .def(
          "pull_per_key",
          [](const BindingPtr& self, std::uint32_t table, const py::object& batch, const Array<float>& rows,
             std::size_t dim, const py::object& pool, const py::object& filter, const py::object& after,
             const py::object& follows, bool traced) {
            return pull_per_key(self, table, batch, rows, dim, pool, filter, after, call_or_none(follows),
                                traced);
          },
          py::arg("table"), py::arg("batch"), py::arg("rows").noconvert(), py::arg("dim"), py::arg("pool"),
          py::arg("filter") = py::none(), py::arg("after") = py::tuple(), py::arg("follows") = py::none(),
          py::arg("traced") = false)
      .def("push", &push, py::arg("table"), py::arg("batch"), py::arg("grads").noconvert(), py::arg("dim"),
           py::arg("counts").noconvert() = py::none(), py::arg("filter") = py::none(),
           py::arg("after") = py::tuple(), py::arg("traced") = false)
      .def("push_per_key", &push_per_key, py::arg("table"), py::arg("batch"), py::arg("grads").noconvert(),
           py::arg("dim"), py::arg("pool"), py::arg("integers") = false,
           py::arg("counts").noconvert() = py::none(), py::arg("filter") = py::none(),
           py::arg("after") = py::tuple(), py::arg("traced") = false)
      .def("tick", &tick, py::arg("traced") = false)
      .def(
          "flush_caches",
          [](const ClientBinding& self) {
            self.check_process();
            self.client().flush_caches();
          },
          kUnlocked)
      .def(
          "forget_rows",
          [](const ClientBinding& self) {
            self.check_process();
            self.client().forget_rows();
          },
          kUnlocked)
      .def("drain", &ClientBinding::drain, py::arg("timeout") = py::none())
      .def("check", &ClientBinding::check)
      .def("wait_for_work",
           [](const BindingPtr& self) {
             const WithoutGil nogil;
             return self->client().wait_for_work();
           })
      .def("run_noticed", &ClientBinding::run_noticed)
      .def("take_traced",
           [](const ClientBinding& self) {
             py::list result;
             for (const client::CallPtr& call : self.client().calls().take_traced()) {
               result.append(trace_of(call));
             }
             return result;
           })
      .def(
          "log_order",
          [](const ClientBinding& self, std::set<std::uint32_t> tables) {
            self.client().log_order(std::move(tables));
          },
          py::arg("tables"), kUnlocked)
      .def("take_order", &take_order)
      .def("take_failed", &take_failed)
      .def("take_unobserved", &take_unobserved)
      .def(
          "takes_map_request", [](const ClientBinding& self) { return self.client().takes_map_request(); },
          kUnlocked)
      .def("set_map",
           [](const ClientBinding& self, const py::object& map) {
             client::SlotMap made = slot_map_of(map);
             const WithoutGil nogil;
             self.client().set_map(std::move(made));
           })
      .def(
          "lose",
          [](const ClientBinding& self, std::uint32_t server, const std::string& reason) {
            self.client().lose(server, reason);
          },
          kUnlocked)
      .def("fail",
           [](const ClientBinding& self, const py::object& error) {
             client::Failure failure = failure_of(error);
             const WithoutGil nogil;
             self.client().fail(std::move(failure));
           })
      .def(
          "leave", [](const ClientBinding& self) { self.client().leave(); }, kUnlocked)
      .def(
          "close", [](const ClientBinding& self) { self.client().close(); }, kUnlocked)
      .def("metrics", &metrics)
      .def("durations", &durations)
      .def_property_readonly("has_unobserved",
                             [](const ClientBinding& self) { return self.client().calls().has_unobserved(); })
      .def_property_readonly("has_pending",
                             [](const ClientBinding& self) { return self.client().calls().has_pending(); })
      .def_property_readonly("has_pushed",
                             [](const ClientBinding& self) { return self.client().has_pushed(); })
      .def_property_readonly("is_open", [](const ClientBinding& self) { return self.client().is_open(); })
      .def_property_readonly("is_of_this_process",
                             [](const ClientBinding& self) { return self.client().is_of_this_process(); })
      .def_property_readonly("clock", [](const ClientBinding& self) { return self.client().clock(); })
      .def_property_readonly("timeout", [](const ClientBinding& self) { return self.client().timeout(); })
      .def_property_readonly("connections",
                             [](const ClientBinding& self) { return self.client().connections(); });
}

// Calls of a client, or of requests.
std::vector<client::CallPtr> calls_of(const py::handle& after) {
  std::vector<client::CallPtr> calls;
  for (const py::handle call : after) {
    calls.push_back(py::isinstance<ClientCall>(call) ? call.cast<const ClientCall&>().handle.call
                                                     : call.cast<CallHandle&>().call);
  }
  return calls;
}

}  // namespace shoal::bind
