// Bindings of a worker's caches: their calls are those of its client.

#include "client/cached_rows.h"

#include <pybind11/stl.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "batch/key_batch.h"
#include "batch/summed_batch.h"
#include "bind/array.h"
#include "bind/bind.h"
#include "bind/client.h"

namespace shoal::bind {

namespace {

constexpr std::size_t kMinKeys = 16;  // a call with fewer goes to the servers

struct RowsBinding {
  BindingPtr client;
  client::CachedRows* rows;

  template <class Work>
  auto use(std::uint64_t bytes, const Work& work) const {
    return ClientBinding::unlocked(bytes, [&] { return client->client().use(work); });
  }
};

std::unique_ptr<RowsBinding> make(const BindingPtr& self, std::uint32_t table, const TableSpec& spec,
                                  std::size_t rows, std::size_t slots, std::uint32_t staleness,
                                  const std::optional<std::uint32_t>& waits, bool local_steps,
                                  const py::object& filter) {
  client::CachedRowsOptions options{.table = table, .slots = slots, .staleness = staleness, .waits = waits};
  if (!filter.is_none()) {
    options.filter = filter.cast<client::Filter*>();
    options.keep = keep({filter});
  }
  return std::make_unique<RowsBinding>(RowsBinding{
      .client = self,
      .rows = &self->client().add_cache(make_cache(spec, rows, local_steps), std::move(options))});
}

// `is_fresh`: from the servers, with all pushes of this worker.
client::CallPtr submit_pull(const RowsBinding& self, const KeyBatch& batch, std::span<float> rows,
                            std::shared_ptr<const void> owner, const py::object& after, bool is_fresh,
                            bool traced) {
  self.client->prepare();
  const std::vector<client::CallPtr> before = calls_of(after);
  const bool asks_servers = is_fresh || !before.empty() || batch.size() < kMinKeys;
  return self.use(rows.size_bytes(), [&] {
    return asks_servers ? self.rows->pull_from_servers(batch.hashes(), batch.offsets(), rows, before,
                                                       std::move(owner), traced)
                        : self.rows->pull(batch.hashes(), rows, std::move(owner), traced);
  });
}

std::unique_ptr<ClientCall> pull_cached(const RowsBinding& self, const py::object& batch, Array<float>& rows,
                                        const py::object& after, bool fresh, bool traced) {
  auto call = std::make_unique<ClientCall>(ClientCall{.client = self.client, .handle = {.out = rows}});
  call->handle.call =
      submit_pull(self, batch.cast<const KeyBatch&>(), out(rows), keep({batch, rows}), after, fresh, traced);
  return call;
}

// Rows for each key as given, into `rows` when the result is asked for.
std::unique_ptr<ClientCall> pull_cached_per_key(const RowsBinding& self, const py::object& batch,
                                                const Array<float>& rows, const py::object& pool,
                                                const py::object& after, bool fresh, bool traced) {
  const auto& keys = batch.cast<const KeyBatch&>();
  const std::size_t dim = self.rows->dim();
  SHOAL_CHECK(static_cast<std::size_t>(rows.size()) == keys.input_size() * dim, "rows are one for each key");
  const std::shared_ptr<float[]> unique(new float[keys.size() * dim]);
  const std::span<float> room(unique.get(), keys.size() * dim);
  auto call = std::make_unique<ClientCall>(ClientCall{
      .client = self.client,
      .expansion = Expansion{
          .batch = batch, .rows = rows, .pool = pool, .unique = room, .owner = unique, .dim = dim}});
  call->handle.call = submit_pull(self, keys, room, keep({batch}, unique), after, fresh, traced);
  return call;
}

client::CallPtr submit_push(const RowsBinding& self, std::span<const std::uint64_t> hashes,
                            std::span<const float> grads, const std::optional<Array<std::uint32_t>>& counts,
                            const py::object& after, bool traced) {
  self.client->prepare();
  const std::vector<client::CallPtr> before = calls_of(after);
  const auto times = counts.has_value() ? in(*counts) : std::span<const std::uint32_t>{};
  return self.use(grads.size_bytes(), [&] {
    return !before.empty() || hashes.size() < kMinKeys
               ? self.rows->push_to_servers(hashes, grads, times, before, traced)
               : self.rows->push(hashes, grads, times, traced);
  });
}

std::unique_ptr<ClientCall> push_cached(const RowsBinding& self, const py::object& batch,
                                        const Array<float>& grads,
                                        const std::optional<Array<std::uint32_t>>& counts,
                                        const py::object& after, bool traced) {
  const auto hashes = py::isinstance<KeyBatch>(batch) ? batch.cast<const KeyBatch&>().hashes()
                                                      : batch.cast<const SummedBatch&>().hashes();
  auto call = std::make_unique<ClientCall>(ClientCall{.client = self.client});
  call->handle.call = submit_push(self, hashes, in(grads), counts, after, traced);
  return call;
}

// A gradient for each key as given, summed here.
std::unique_ptr<ClientCall> push_cached_per_key(const RowsBinding& self, const KeyBatch& batch,
                                                const Array<float>& grads, PoolWithScratch& pool,
                                                const std::optional<Array<std::uint32_t>>& counts,
                                                const py::object& after, bool traced) {
  const std::size_t dim = self.rows->dim();
  const std::unique_ptr<float[]> sums(new float[batch.size() * dim]);
  const std::span<float> room(sums.get(), batch.size() * dim);
  const auto from = in(grads);
  {
    const WithoutGil nogil;
    batch.sum(from, dim, room, pool.threads);
  }
  auto call = std::make_unique<ClientCall>(ClientCall{.client = self.client});
  call->handle.call = submit_push(self, batch.hashes(), room, counts, after, traced);
  return call;
}

py::list flush(const RowsBinding& self) {
  self.client->check_process();
  std::vector<client::CallPtr> calls;
  {
    const WithoutGil nogil;
    calls = self.client->client().use([&] { return self.rows->flush(); });
  }
  py::list calls_made;
  for (client::CallPtr& call : calls) {
    calls_made.append(
        std::make_unique<ClientCall>(ClientCall{.client = self.client, .handle = {.call = std::move(call)}}));
  }
  return calls_made;
}

void forget(const RowsBinding& self) {
  self.client->check_process();
  const WithoutGil nogil;
  self.client->client().use([&] { self.rows->forget(); });
}

void forget_after(const RowsBinding& self, const ClientCall& call) {
  const WithoutGil nogil;
  self.client->client().use([&] { self.rows->forget_after(call.handle.call); });
}

}  // namespace

void add_cached_rows(py::module_& module) {
  const auto array = [](const char* name) { return py::arg(name).noconvert(); };
  py::class_<RowsBinding>(module, "CachedRows")
      .def(py::init(&make), py::arg("client"), py::arg("table"), py::arg("spec"), py::kw_only(),
           py::arg("rows"), py::arg("slots"), py::arg("staleness"), py::arg("waits") = std::nullopt,
           py::arg("local_steps") = false, py::arg("filter") = py::none())
      .def("pull", &pull_cached, py::arg("batch"), array("rows"), py::arg("after") = py::tuple(),
           py::arg("fresh") = false, py::arg("traced") = false)
      .def("pull_per_key", &pull_cached_per_key, py::arg("batch"), array("rows"), py::arg("pool"),
           py::arg("after") = py::tuple(), py::arg("fresh") = false, py::arg("traced") = false)
      .def("push", &push_cached, py::arg("batch"), array("grads"), array("counts") = py::none(),
           py::arg("after") = py::tuple(), py::arg("traced") = false)
      .def("push_per_key", &push_cached_per_key, py::arg("batch"), array("grads"), py::arg("pool"),
           array("counts") = py::none(), py::arg("after") = py::tuple(), py::arg("traced") = false)
      .def("flush", &flush)
      .def("forget", &forget)
      .def("forget_after", &forget_after, py::arg("call"))
      .def("metrics", [](const RowsBinding& self) {
        return self.client->client().use([&] { return dict_of(kRowCacheStatistics, self.rows->cache()); });
      });
}

}  // namespace shoal::bind
