#include "bind/calls.h"

#include <pybind11/stl.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <utility>

#include "base/check.h"
#include "batch/key_batch.h"
#include "batch/summed_batch.h"
#include "bind/bind.h"
#include "bind/buffer_view.h"
#include "client/encoding.h"
#include "shard/user_function.h"
#include "transport/dealer.h"

namespace shoal::bind {

namespace {

static_assert(client::kUserFailed == kUserFailed);

struct Objects {
  std::vector<py::object> owners;
  Objects* next = nullptr;
};

// Objects whose last owner has let them go. Without a lock, which a fork could copy while it is held; never
// destroyed: threads may end after the interpreter.
constinit std::atomic<Objects*> put_aside{nullptr};

struct Kept {
  Kept(std::vector<py::object>&& owned, std::shared_ptr<const void> buffer)
      : objects(std::make_unique<Objects>(Objects{.owners = std::move(owned)})), memory(std::move(buffer)) {}
  ~Kept() {
    Objects* const released = objects.release();
    released->next = put_aside.load(std::memory_order_relaxed);
    while (!put_aside.compare_exchange_weak(released->next, released, std::memory_order_release,
                                            std::memory_order_relaxed)) {
    }
  }
  Kept(const Kept&) = delete;
  Kept& operator=(const Kept&) = delete;

  std::unique_ptr<Objects> objects;
  std::shared_ptr<const void> memory;
};

constexpr const char* kErrorNames[] = {
    "ShoalError",        "DeadlineExceededError", "DependencyError", "MemoryBudgetExceededError",
    "NotConnectedError", "ProtocolError",         "ServerLostError", "FencedError",
    "ClosedError",       "UserCodeError",
};

template <class T>
std::span<const T> typed(const py::object& array, const char* what) {
  SHOAL_CHECK(py::isinstance<Array<T>>(array), std::string(what) + " has another type, or is not contiguous");
  return in(py::reinterpret_borrow<Array<T>>(array));
}

wire::Dtype dtype_of_call(wire::Op op) {
  switch (op) {
    case wire::Op::kLoadRows:
    case wire::Op::kLoadFilter:
    case wire::Op::kSavePoll:
      return wire::Dtype::kUint8;
    case wire::Op::kReduce:
    case wire::Op::kSweep:
      return wire::Dtype::kFloat64;
    default:
      return wire::Dtype::kNone;
  }
}

bool is_keyed(wire::Op op) {
  switch (op) {
    case wire::Op::kPull:
    case wire::Op::kPush:
    case wire::Op::kAssign:
    case wire::Op::kErase:
    case wire::Op::kContains:
    case wire::Op::kState:
    case wire::Op::kPrefetch:
      return true;
    default:
      return false;
  }
}

// The named arguments of a call; what is not given is None, 0 or false.
class Given {
 public:
  explicit Given(const py::kwargs& kwargs) : kwargs_(kwargs) {}

  py::object object(const char* name) const {
    return kwargs_.contains(name) ? py::object(kwargs_[name]) : py::object(py::none());
  }
  template <class T>
  T number(const char* name, T otherwise = {}) const {
    const py::object found = object(name);
    return found.is_none() ? otherwise : found.cast<T>();
  }

 private:
  const py::kwargs& kwargs_;
};

client::Filter* filter_of(const py::object& filter, std::vector<py::object>& owners) {
  if (filter.is_none()) {
    return nullptr;
  }
  owners.push_back(filter);
  return filter.cast<client::Filter*>();
}

std::span<std::byte> room_of(const py::array& out) {
  SHOAL_CHECK((out.flags() & py::array::c_style) != 0, "out must be contiguous");
  auto writable = out;
  return {static_cast<std::byte*>(writable.mutable_data()), static_cast<std::size_t>(out.nbytes())};
}

Described describe_keyed(wire::Op op, const Given& given) {
  Described described;
  client::Keyed keyed;
  const std::string name(wire::name(op));
  const py::object hashes = given.object("hashes");
  const py::object begins = given.object("begins");
  SHOAL_CHECK(!hashes.is_none() && !begins.is_none(), "a " + name + " needs hashes, and begins of slots");
  keyed.hashes = typed<std::uint64_t>(hashes, "hashes");
  keyed.begins = typed<std::uint64_t>(begins, "begins");
  described.owners = {hashes, begins};
  const auto dim = given.number<std::size_t>("dim");
  const py::object out = given.object("out");
  const bool reads = op == wire::Op::kPull || op == wire::Op::kContains || op == wire::Op::kState;
  SHOAL_CHECK(out.is_none() != reads, "a " + name + (reads ? " needs out" : " has no out"));
  if (reads) {
    keyed.width = op == wire::Op::kContains ? 1 : dim * sizeof(float);
    keyed.out = room_of(py::reinterpret_borrow<py::array>(out));
    described.owners.push_back(out);
    described.out = out;
  }
  const py::object values = given.object("values");
  if (!values.is_none()) {
    keyed.width = dim * sizeof(float);
    keyed.values = std::as_bytes(typed<float>(values, "values"));
    described.owners.push_back(values);
  }
  const py::object counts = given.object("counts");
  if (!counts.is_none()) {
    keyed.counts = typed<std::uint32_t>(counts, "counts");
    described.owners.push_back(counts);
  }
  keyed.dim = static_cast<std::uint16_t>(dim);
  keyed.aux = given.number<std::uint32_t>("aux");
  if (op == wire::Op::kPull || op == wire::Op::kPush || op == wire::Op::kPrefetch) {
    keyed.filter = filter_of(given.object("filter"), described.owners);
  }
  keyed.ahead = given.number<std::uint32_t>("ahead");
  keyed.is_dated = given.number<bool>("dated");
  keyed.is_whole = given.number<bool>("whole");
  described.operation = keyed;
  return described;
}

client::Payload payload_of(const Given& given) {
  client::Payload payload;
  const py::object frames = given.object("payload");
  if (frames.is_none()) {
    return payload;
  }
  for (const py::handle frame : frames) {
    const BufferView view(frame);
    SHOAL_CHECK(payload.count < payload.frames.size(), "a message has at most 5 frames behind its header");
    if (view.bytes().size() >= Dealer::kMinSharedBytes) {
      payload.add({.bytes = view.bytes(), .owner = keep({py::reinterpret_borrow<py::object>(frame)})});
      continue;
    }
    std::span<std::byte> room;
    SharedFrame copy = client::own_frame(view.bytes().size(), room);
    if (!room.empty()) {
      std::memcpy(room.data(), view.bytes().data(), room.size());
    }
    payload.add(std::move(copy));
  }
  return payload;
}

template <class T>
py::object array_of(const client::Answer& answer) {
  Array<T> array = fresh<T>(answer.values.size() / sizeof(T));
  if (!answer.values.empty()) {
    std::memcpy(array.mutable_data(), answer.values.data(), answer.values.size());
  }
  return array;
}

py::object answer_of(const client::Answer& answer) {
  return answer.dtype == wire::Dtype::kFloat64 ? array_of<double>(answer) : array_of<std::uint64_t>(answer);
}

}  // namespace

client::WorkerIdentity identity_of(const Identity& worker) {
  return {std::get<0>(worker), std::get<1>(worker), std::get<2>(worker)};
}

std::shared_ptr<const void> keep(std::vector<py::object>&& objects, std::shared_ptr<const void> memory) {
  return std::make_shared<const Kept>(std::move(objects), std::move(memory));
}

void release_kept() {
  Objects* next = put_aside.exchange(nullptr, std::memory_order_acquire);
  while (next != nullptr) {
    const std::unique_ptr<Objects> first(next);
    next = first->next;
  }
}

py::object make_error(const client::Failure& failure) {
  if (failure.kind == client::ErrorKind::kGiven) {
    // A copy: an exception that is raised twice collects both tracebacks.
    const py::object& error = static_cast<const Kept*>(failure.given.get())->objects->owners.front();
    return py::type::of(error)(*error.attr("args"));
  }
  const py::object type =
      py::module_::import("shoal.errors").attr(kErrorNames[static_cast<std::size_t>(failure.kind)]);
  return type(py::reinterpret_steal<py::str>(
      PyUnicode_DecodeUTF8(failure.text.data(), static_cast<py::ssize_t>(failure.text.size()), "replace")));
}

client::Failure failure_of(const py::object& error) {
  return {.kind = client::ErrorKind::kGiven, .text = py::str(error), .given = keep({error})};
}

py::object error_of(CallHandle& handle) {
  if (handle.error.is_none() && handle.call->is_done() && handle.call->failure.has_value()) {
    handle.error = make_error(*handle.call->failure);
  }
  return handle.error;
}

py::object result_of(const CallHandle& handle) {
  const client::Call& call = *handle.call;
  switch (call.op) {
    case wire::Op::kPull:
    case wire::Op::kContains:
    case wire::Op::kState:
      return handle.out;
    case wire::Op::kErase:
    case wire::Op::kPrefetch:
      return py::int_(call.total);
    case wire::Op::kSlot: {
      const client::Answer& answer = call.answers.front();
      Array<float> rows = fresh<float>(answer.count, answer.dim);
      if (!answer.values.empty()) {
        std::memcpy(rows.mutable_data(), answer.values.data(), answer.values.size());
      }
      return py::make_tuple(copied(answer.hashes), rows);
    }
    case wire::Op::kSection: {
      const client::Answer& answer = call.answers.front();
      return py::make_tuple(answer.count, array_of<std::uint8_t>(answer), answer.aux);
    }
    case wire::Op::kSavePoll: {
      const client::Answer& answer = call.answers.front();
      return py::make_tuple(answer.count != 0, py::bytes(reinterpret_cast<const char*>(answer.values.data()),
                                                         answer.values.size()));
    }
    case wire::Op::kStats:
    case wire::Op::kReduce:
    case wire::Op::kSweep:
    case wire::Op::kSaveBegin: {
      py::list answers;
      for (const client::Answer& answer : call.answers) {
        answers.append(answer_of(answer));
      }
      return answers;
    }
    default:
      return py::none();
  }
}

client::SlotMap slot_map_of(const py::object& map) {
  std::vector<client::Endpoint> endpoints;
  std::vector<std::uint64_t> ids;
  for (const py::handle entry : map.attr("endpoints")) {
    ids.push_back(entry.attr("id").cast<std::uint64_t>());
    endpoints.push_back(
        {entry.attr("address").cast<std::string>(), entry.attr("server").cast<std::uint32_t>()});
  }
  const auto index_of_id = [&](std::uint64_t id) {
    return static_cast<std::uint32_t>(std::ranges::find(ids, id) - ids.begin());
  };
  std::vector<client::ArcRange> arcs;
  for (const py::handle entry : map.attr("arcs")) {
    arcs.push_back({entry.attr("first_slot").cast<std::uint32_t>(),
                    entry.attr("end_slot").cast<std::uint32_t>(),
                    index_of_id(entry.attr("primary").cast<std::uint64_t>())});
  }
  std::vector<std::uint32_t> backups;
  for (const py::handle entry : map.attr("streams")) {
    backups.push_back(index_of_id(entry.attr("backup").cast<std::uint64_t>()));
  }
  return {map.attr("epoch").cast<std::uint32_t>(), std::move(endpoints), std::move(arcs), std::move(backups)};
}

Described describe(wire::Op op, const py::kwargs& kwargs) {
  const Given given(kwargs);
  if (is_keyed(op)) {
    return describe_keyed(op, given);
  }
  Described described;
  const auto dtype =
      static_cast<wire::Dtype>(given.number("dtype", static_cast<std::uint8_t>(dtype_of_call(op))));
  const auto count = given.number<std::uint32_t>("count");
  const py::object slot = given.object("slot");
  const bool is_of_slot = op == wire::Op::kSlot || op == wire::Op::kSection || op == wire::Op::kLoadRows ||
                          op == wire::Op::kLoadFilter;
  SHOAL_CHECK(!is_of_slot || !slot.is_none(), "a " + std::string(wire::name(op)) + " needs a slot");
  if (!slot.is_none()) {
    const auto number = slot.cast<std::uint32_t>();
    const bool is_named = op == wire::Op::kSlot || op == wire::Op::kSection;
    described.operation = client::OfSlot{.slot = number,
                                         .payload = payload_of(given),
                                         .count = count,
                                         .aux = is_named ? number : given.number<std::uint32_t>("aux"),
                                         .dtype = dtype};
    return described;
  }
  described.operation = client::OfAll{.payload = payload_of(given),
                                      .count = count,
                                      .aux = given.number<std::uint32_t>("aux"),
                                      .dtype = dtype,
                                      .is_write = given.number<bool>("write"),
                                      .is_per_slot = given.number<bool>("per_slot"),
                                      .is_user_function = given.number<bool>("user_function")};
  return described;
}

}  // namespace shoal::bind
