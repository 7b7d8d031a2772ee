#include <pybind11/native_enum.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/units.h"
#include "bind/array.h"
#include "bind/bind.h"
#include "bind/buffer_view.h"
#include "wire/counts.h"
#include "wire/digest.h"
#include "wire/significance.h"
#include "wire/times.h"
#include "wire/values.h"
#include "wire/wire.h"

namespace shoal::bind {

namespace {

// A field of a header, or a bit of its flags, by its name in Python.
struct HeaderField {
  std::string_view name;
  void (*set)(wire::Header&, const HeaderField&, py::handle);
  std::uint16_t flag = 0;
};

template <class T>
T field_value(const HeaderField& field, py::handle value) {
  py::detail::make_caster<T> caster;
  if (!caster.load(value, true)) {
    throw py::type_error(
        "encode_header: " + std::string(field.name) + " takes a " +
        (std::is_same_v<T, bool> ? "bool" : "number of " + std::to_string(8 * sizeof(T)) + " bits") +
        ", got " + py::repr(value).cast<std::string>());
  }
  return py::detail::cast_op<T>(caster);
}

template <auto Field>
constexpr auto set_field = +[](wire::Header& header, const HeaderField& field, py::handle value) {
  using Type = std::remove_reference_t<decltype(header.*Field)>;
  if constexpr (std::is_enum_v<Type>) {
    header.*Field = Type{field_value<std::underlying_type_t<Type>>(field, value)};
  } else {
    header.*Field = field_value<Type>(field, value);
  }
};

constexpr auto set_flag = +[](wire::Header& header, const HeaderField& field, py::handle value) {
  header.flags =
      static_cast<std::uint16_t>(header.flags | (field_value<bool>(field, value) ? field.flag : 0U));
};

constexpr auto set_part = +[](wire::Header& header, const HeaderField& field, py::handle value) {
  header.flags = static_cast<std::uint16_t>(
      header.flags | (unsigned{field_value<std::uint8_t>(field, value)} << wire::kPartShift));
};

constexpr auto kHeaderFields = std::to_array<HeaderField>({
    {"op", set_field<&wire::Header::op>},
    {"status", set_field<&wire::Header::status>},
    {"dtype", set_field<&wire::Header::dtype>},
    {"dim", set_field<&wire::Header::dim>},
    {"table", set_field<&wire::Header::table>},
    {"worker", set_field<&wire::Header::worker>},
    {"incarnation", set_field<&wire::Header::incarnation>},
    {"sequence", set_field<&wire::Header::sequence>},
    {"epoch", set_field<&wire::Header::epoch>},
    {"clock", set_field<&wire::Header::clock>},
    {"count", set_field<&wire::Header::count>},
    {"aux", set_field<&wire::Header::aux>},
    {"job", set_field<&wire::Header::job>},
    {"part", set_part},
    {"reply", set_flag, wire::kReply},
    {"packed", set_flag, wire::kPacked},
    {"keep", set_flag, wire::kKeep},
    {"digest", set_flag, wire::kDigest},
    {"counted", set_flag, wire::kCounted},
    {"timed", set_flag, wire::kTimed},
    {"dated", set_flag, wire::kDated},
    {"whole", set_flag, wire::kWhole},
});

wire::Header header_of(const py::kwargs& fields) {
  wire::Header header;
  if (!fields.contains("op")) {
    throw py::type_error("encode_header: needs an op");
  }
  for (const auto& [key, value] : fields) {
    const auto name = key.cast<std::string>();
    const auto field = std::ranges::find(kHeaderFields, name, &HeaderField::name);
    if (field == kHeaderFields.end()) {
      throw py::type_error("encode_header: a header has no " + name);
    }
    field->set(header, *field, value);
  }
  return header;
}

py::bytes encode_header(const py::iterable& payload, const py::kwargs& fields) {
  std::vector<BufferView> borrowed;
  std::vector<wire::Frame> frames;
  for (const py::handle buffer : payload) {
    frames.push_back(borrowed.emplace_back(buffer).bytes());
  }
  wire::Header header = header_of(fields);
  std::array<std::byte, sizeof(wire::Header)> out;
  if (total(frames) >= kMinUnlockedBytes) {
    const py::gil_scoped_release nogil;
    wire::encode(header, frames, out);
  } else {
    wire::encode(header, frames, out);
  }
  return {reinterpret_cast<const char*>(out.data()), out.size()};
}

// Frames, as passed by Python: a sequence of buffers.
struct FrameList {
  explicit FrameList(const py::iterable& source) {
    for (const py::handle frame : source) {
      frames.push_back(borrowed.emplace_back(frame).bytes());
    }
  }

  std::vector<wire::Frame> frames;
  std::vector<BufferView> borrowed;
};

// A message with the memory that it views.
struct Message {
  explicit Message(const py::iterable& source) : from(source) {}

  FrameList from;
  std::optional<BufferView> into;
  wire::Decoded decoded;
};

std::unique_ptr<Message> decode(const py::iterable& source, bool replies, std::uint64_t payload_bytes,
                                const py::object& into) {
  auto message = std::make_unique<Message>(source);
  const auto& frames = message->from.frames;
  std::span<std::byte> room;
  if (!into.is_none()) {
    room = message->into.emplace(into, PyBUF_WRITABLE).writable_bytes();
  }
  const wire::Limits limits{.payload_bytes = payload_bytes, .replies = replies};
  wire::Fault fault;
  if (total(frames) >= kMinUnlockedBytes) {
    const py::gil_scoped_release nogil;
    fault = wire::decode(frames, limits, message->decoded, room);
  } else {
    fault = wire::decode(frames, limits, message->decoded, room);
  }
  SHOAL_CHECK(!fault, std::string(fault.message()));
  return message;
}

// (sequence, part), or None if the header is invalid.
py::object peek(const py::iterable& source) {
  const FrameList message(source);
  const auto header = wire::peek(message.frames);
  return header ? py::make_tuple(header->sequence, header->part()) : py::object(py::none());
}

// Whether decode() has put the values into the given buffer.
bool is_in_place(const Message& message) {
  const auto values = message.decoded.values;
  return message.into && !values.empty() && values.data() == message.into->writable_bytes().data();
}

py::object values(const py::object& self) {
  const wire::Decoded& decoded = self.cast<const Message&>().decoded;
  const auto as = [&]<class T>(T /*type*/) -> py::object {
    return view(
        std::span(reinterpret_cast<const T*>(decoded.values.data()), decoded.values.size() / sizeof(T)),
        self);
  };
  switch (decoded.header.dtype) {
    case wire::Dtype::kFloat32:
    case wire::Dtype::kFloat16:
    case wire::Dtype::kBfloat16:
      return as(float{});
    case wire::Dtype::kUint64:
      return as(std::uint64_t{});
    case wire::Dtype::kFloat64:
      return as(double{});
    case wire::Dtype::kNone:
    case wire::Dtype::kUint8:
      break;
  }
  return as(std::uint8_t{});
}

// (nanoseconds in the server, of those in the shard), or None if the message has none.
py::object times(const Message& message) {
  const wire::Header& header = message.decoded.header;
  if (!header.is_reply() || (header.flags & wire::kTimed) == 0) {
    return py::none();
  }
  const wire::ServerTimes found = wire::unpack_times(header.aux);
  return py::make_tuple(found.server_ns, found.shard_ns);
}

template <auto Field>
auto header_field() {
  return [](const Message& message) { return message.decoded.header.*Field; };
}

template <auto Field>
auto number_of() {
  return [](const Message& message) { return static_cast<int>(message.decoded.header.*Field); };
}

template <std::uint16_t Flag>
auto has_flag() {
  return [](const Message& message) { return (message.decoded.header.flags & Flag) != 0; };
}

template <auto Field>
auto span_field() {
  return [](const py::object& self) { return view(self.cast<const Message&>().decoded.*Field, self); };
}

// --- filters -----------------------------------------------------------------------------------------------

// Runs work(), without the GIL if it is long enough.
template <class Work>
auto unlocked(std::size_t bytes, const Work& work) {
  if (bytes < kMinUnlockedBytes) {
    return work();
  }
  const py::gil_scoped_release nogil;
  return work();
}

py::bytes digest_of(const Array<std::uint64_t>& hashes, std::uint32_t seed) {
  const auto from = in(hashes);
  const Digest found = unlocked(from.size_bytes(), [&] { return digest(from, seed); });
  const std::array<std::uint64_t, 2> halves = {found.first, found.second};
  return {reinterpret_cast<const char*>(halves.data()), sizeof halves};
}

std::size_t dim_of(const Array<float>& rows) {
  SHOAL_CHECK(rows.ndim() == 2, "rows are float32[n, dim]");
  return static_cast<std::size_t>(rows.shape(1));
}

// (uint16[n, dim], sum of squared errors, the largest error)
py::tuple narrow_rows(const Array<float>& rows, const Array<std::uint64_t>& hashes, std::uint8_t dtype,
                      std::uint64_t seed, std::uint64_t message) {
  const wire::Dtype to{dtype};
  SHOAL_CHECK(to == wire::Dtype::kFloat16 || to == wire::Dtype::kBfloat16, "narrow to float16 or bfloat16");
  const std::size_t dim = dim_of(rows);
  const auto from = in(rows);
  const auto names = in(hashes);
  Array<std::uint16_t> result = fresh<std::uint16_t>(static_cast<std::size_t>(rows.shape(0)), dim);
  const auto halves = out(result);
  NarrowingErrors loss;
  unlocked(from.size_bytes(), [&] {
    narrow(from, names, dim, to == wire::Dtype::kFloat16 ? Dtype::kFloat16 : Dtype::kBfloat16, seed, message,
           halves, loss);
  });
  return py::make_tuple(result, loss.squared, loss.largest);
}

// (map, kept), or None if that is not smaller.
template <class Word>
py::object pack_values(const Array<Word>& values) {
  const auto from = in(values);
  const std::size_t kept = unlocked(from.size_bytes(), [&] { return count_nonzero(from); });
  const std::size_t bytes = map_bytes(from.size());
  if (bytes + kept * sizeof(Word) >= from.size_bytes()) {
    return py::none();
  }
  Array<std::uint8_t> map = fresh<std::uint8_t>(bytes);
  Array<Word> words = fresh<Word>(kept);
  const auto map_out = std::as_writable_bytes(out(map));
  const auto words_out = out(words);
  unlocked(from.size_bytes(), [&] { pack(from, map_out, words_out); });
  return py::make_tuple(map, words);
}

// None if all are 1.
py::object pack_counts_of(const Array<std::uint32_t>& counts) {
  const auto from = in(counts);
  const auto zero = std::find(from.begin(), from.end(), 0U);
  SHOAL_CHECK(zero == from.end(),
              "counts are at least 1: number " + std::to_string(zero - from.begin()) + " is 0");
  const std::size_t bytes = packed_counts_bytes(from);
  if (bytes == 0) {
    return py::none();
  }
  Array<std::uint8_t> packed = fresh<std::uint8_t>(bytes);
  const auto to = std::as_writable_bytes(out(packed));
  unlocked(from.size_bytes(), [&] { pack_counts(from, to); });
  return packed;
}

// (the rows to send, the number of rows zeroed, the number scaled up, the sum of squared errors)
py::tuple significant(const Array<float>& rows, const Array<std::uint64_t>& hashes, double threshold,
                      std::uint64_t seed, std::uint64_t call) {
  const std::size_t dim = dim_of(rows);
  const auto from = in(rows);
  const auto names = in(hashes);
  Array<float> result = fresh<float>(static_cast<std::size_t>(rows.shape(0)), dim);
  const auto to = out(result);
  Significance counts;
  unlocked(from.size_bytes(),
           [&] { filter_significant(from, names, dim, threshold, seed, call, to, counts); });
  return py::make_tuple(result, counts.dropped, counts.raised, counts.squared);
}

void add_filters(py::module_& module) {
  module.def("digest", &digest_of, py::arg("hashes").noconvert(), py::arg("seed"));
  module.def("narrow", &narrow_rows, py::arg("rows").noconvert(), py::arg("hashes").noconvert(),
             py::arg("dtype"), py::arg("seed"), py::arg("message"));
  module.def("pack", &pack_values<float>, py::arg("values").noconvert());
  module.def("pack", &pack_values<std::uint16_t>, py::arg("values").noconvert());
  module.def("pack_counts", &pack_counts_of, py::arg("counts").noconvert());
  module.def("filter_significant", &significant, py::arg("rows").noconvert(), py::arg("hashes").noconvert(),
             py::arg("threshold"), py::arg("seed"), py::arg("call"));
}

void add_messages(py::module_& module) {
  py::native_enum<wire::Op>(module, "Op", "enum.IntEnum")
      .value("PULL", wire::Op::kPull)
      .value("PUSH", wire::Op::kPush)
      .value("TICK", wire::Op::kTick)
      .value("ASSIGN", wire::Op::kAssign)
      .value("ERASE", wire::Op::kErase)
      .value("CONTAINS", wire::Op::kContains)
      .value("STATE", wire::Op::kState)
      .value("SLOT", wire::Op::kSlot)
      .value("SECTION", wire::Op::kSection)
      .value("LOAD_BEGIN", wire::Op::kLoadBegin)
      .value("LOAD_ROWS", wire::Op::kLoadRows)
      .value("LOAD_END", wire::Op::kLoadEnd)
      .value("STATS", wire::Op::kStats)
      .value("REDUCE", wire::Op::kReduce)
      .value("LOAD_FILTER", wire::Op::kLoadFilter)
      .value("SWEEP", wire::Op::kSweep)
      .value("SAVE_BEGIN", wire::Op::kSaveBegin)
      .value("SAVE_POLL", wire::Op::kSavePoll)
      .value("SAVE_END", wire::Op::kSaveEnd)
      .value("REPLICATE", wire::Op::kReplicate)
      .value("PING", wire::Op::kPing)
      .value("PREFETCH", wire::Op::kPrefetch)
      .finalize();
  py::native_enum<wire::Status>(module, "Status", "enum.IntEnum")
      .value("OK", wire::Status::kOk)
      .value("DEFERRED", wire::Status::kDeferred)
      .value("BAD_REQUEST", wire::Status::kBadRequest)
      .value("WRONG_EPOCH", wire::Status::kWrongEpoch)
      .value("FENCED", wire::Status::kFenced)
      .value("NOT_ADMITTED", wire::Status::kNotAdmitted)
      .value("NO_TABLE", wire::Status::kNoTable)
      .value("RETRY", wire::Status::kRetry)
      .value("OVERLOADED", wire::Status::kOverloaded)
      .value("INTERNAL", wire::Status::kInternal)
      .value("VERSION", wire::Status::kWrongVersion)
      .value("WRONG_JOB", wire::Status::kWrongJob)
      .value("UNKNOWN_KEY_LIST", wire::Status::kUnknownKeyList)
      .value("RESOURCE_EXHAUSTED", wire::Status::kResourceExhausted)
      .finalize();
  py::native_enum<wire::Dtype>(module, "WireDtype", "enum.IntEnum")
      .value("NONE", wire::Dtype::kNone)
      .value("FLOAT32", wire::Dtype::kFloat32)
      .value("FLOAT16", wire::Dtype::kFloat16)
      .value("BFLOAT16", wire::Dtype::kBfloat16)
      .value("UINT8", wire::Dtype::kUint8)
      .value("UINT64", wire::Dtype::kUint64)
      .value("FLOAT64", wire::Dtype::kFloat64)
      .finalize();
  using wire::Header;
  py::class_<Message>(module, "Message")
      .def_property_readonly("op", number_of<&Header::op>())
      .def_property_readonly("status", number_of<&Header::status>())
      .def_property_readonly("reply",
                             [](const Message& message) { return message.decoded.header.is_reply(); })
      .def_property_readonly("part", [](const Message& message) { return message.decoded.header.part(); })
      .def_property_readonly("packed", has_flag<wire::kPacked>())
      .def_property_readonly("keep", has_flag<wire::kKeep>())
      .def_property_readonly("timed", has_flag<wire::kTimed>())
      .def_property_readonly("times", &times)
      .def_property_readonly("dated", has_flag<wire::kDated>())
      .def_property_readonly("whole", has_flag<wire::kWhole>())
      .def_property_readonly("dtype", number_of<&Header::dtype>())
      .def_property_readonly("dim", header_field<&Header::dim>())
      .def_property_readonly("table", header_field<&Header::table>())
      .def_property_readonly("worker", header_field<&Header::worker>())
      .def_property_readonly("incarnation", header_field<&Header::incarnation>())
      .def_property_readonly("sequence", header_field<&Header::sequence>())
      .def_property_readonly("epoch", header_field<&Header::epoch>())
      .def_property_readonly("clock", header_field<&Header::clock>())
      .def_property_readonly("count", header_field<&Header::count>())
      .def_property_readonly("aux", header_field<&Header::aux>())
      .def_property_readonly("job", header_field<&Header::job>())
      .def_property_readonly("payload_bytes", header_field<&Header::payload_bytes>())
      .def_property_readonly("hashes", span_field<&wire::Decoded::hashes>())
      .def_property_readonly("digest",
                             [](const Message& message) {
                               const wire::Frame digest = message.decoded.digest;
                               return py::bytes(reinterpret_cast<const char*>(digest.data()), digest.size());
                             })
      .def_property_readonly("values", &values)
      .def_property_readonly("counts", span_field<&wire::Decoded::counts>())
      .def_property_readonly("in_place", &is_in_place)
      .def_property_readonly("numbers", span_field<&wire::Decoded::numbers>())
      .def_property_readonly("tables", span_field<&wire::Decoded::tables>())
      .def_property_readonly("slots", span_field<&wire::Decoded::slots>())
      .def_property_readonly(
          "nested",
          [](const Message& message) {
            py::list frames;
            for (const wire::Frame frame : message.decoded.nested) {
              frames.append(py::bytes(reinterpret_cast<const char*>(frame.data()), frame.size()));
            }
            return frames;
          })
      .def_property_readonly("text", [](const Message& message) {
        const std::string_view text = message.decoded.text;
        return py::reinterpret_steal<py::str>(
            PyUnicode_DecodeUTF8(text.data(), static_cast<py::ssize_t>(text.size()), "replace"));
      });
  module.def("encode_header", &encode_header, py::kw_only(), py::arg("payload") = py::tuple());
  module.def("decode", &decode, py::arg("frames"), py::kw_only(), py::arg("replies") = true,
             py::arg("payload_bytes") = GiB, py::arg("into") = py::none());
  module.def("peek", &peek, py::arg("frames"));
}

}  // namespace

void add_wire(py::module_& module) {
  add_messages(module);
  add_filters(module);
}

}  // namespace shoal::bind
