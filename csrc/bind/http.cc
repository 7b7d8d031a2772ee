#include "http/server.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "bind/bind.h"
#include "bind/without_gil.h"

namespace shoal::bind {

namespace py = pybind11;

namespace {

using std::chrono::duration;

constexpr std::array<std::string_view, 3> kLanes{"predictions", "reads",
                                                 "changes"};  // in the order of HttpLane

std::chrono::steady_clock::time_point after(double seconds) {
  constexpr double kMost = 1e8;  // three years; a clock has no more than 292
  SHOAL_CHECK(seconds >= 0, "the time is " + std::to_string(seconds) + " s: pass 0 or more");
  return std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                                                duration<double>(std::min(seconds, kMost)));
}

// Headers and paths are bytes that mostly are ASCII.
py::str latin1(std::string_view text) {
  return py::reinterpret_steal<py::str>(
      PyUnicode_DecodeLatin1(text.data(), static_cast<py::ssize_t>(text.size()), nullptr));
}

py::bytes bytes_of(std::string_view text) { return {text.data(), text.size()}; }

std::unique_ptr<HttpServer> make_server(std::shared_ptr<ByteBudget> budget, std::string host,
                                        std::uint16_t port, bool reuse_port, std::size_t connections,
                                        std::uint64_t body_bytes, double request_seconds, std::size_t threads,
                                        std::vector<std::string> predictions) {
  HttpOptions options;
  options.host = std::move(host);
  options.port = port;
  options.reuse_port = reuse_port;
  options.connections = connections;
  options.body_bytes = body_bytes;
  options.request_time =
      std::chrono::duration_cast<std::chrono::nanoseconds>(duration<double>(std::min(request_seconds, 1e8)));
  options.threads = threads;
  options.predictions = std::move(predictions);
  try {
    const py::gil_scoped_release nogil;
    return std::make_unique<HttpServer>(std::move(options), std::move(budget));
  } catch (const std::system_error& error) {
    // The number of a host that is not found is no errno.
    const int number = error.code().category() == std::system_category() ? error.code().value() : -1;
    PyErr_SetObject(PyExc_OSError, py::make_tuple(number, error.code().message()).ptr());
    throw py::error_already_set();
  }
}

HttpLane lane_of(std::string_view name) {
  const auto found = std::ranges::find(kLanes, name);
  SHOAL_CHECK(found != kLanes.end(), "there is no lane of this name: predictions, reads and changes are");
  return static_cast<HttpLane>(found - kLanes.begin());
}

// Headers of one name are joined, as HTTP has it.
py::dict headers_of(const HttpRequest& request) {
  py::dict headers;
  for (const HttpHeader& one : request.headers) {
    std::string name(one.name);
    std::ranges::transform(name, name.begin(), [](char c) {
      return 'A' <= c && c <= 'Z' ? static_cast<char>(c + ('a' - 'A')) : c;
    });
    const py::str key = latin1(name);
    const py::str value = latin1(one.value);
    if (headers.contains(key)) {
      headers[key] = py::str("{}, {}").format(headers[key], value);
    } else {
      headers[key] = value;
    }
  }
  return headers;
}

py::object take_request(HttpServer& server, std::string_view lane, double seconds) {
  const HttpLane from = lane_of(lane);
  const auto end = after(seconds);
  std::optional<CallQueue::Taken> taken;
  {
    const WithoutGil nogil;
    taken = server.take(from, end);
  }
  if (!taken) {
    return py::none();
  }
  const HttpRequest& request = taken->call->request;
  py::tuple found = py::make_tuple(taken->id, latin1(request.method), latin1(request.target),
                                   headers_of(request), bytes_of(request.body));
  taken->call->drop_body();
  return found;
}

void answer(HttpServer& server, std::uint64_t id, int status, const py::dict& headers,
            const py::bytes& body) {
  SHOAL_CHECK(status >= 200 && status < 600, "the status is " + std::to_string(status) + ": pass 200 to 599");
  HttpAnswer answer;  // before the request is taken back: it is answered even if this throws
  answer.status = status;
  for (const auto& [name, value] : headers) {
    const auto key = py::cast<std::string>(name);
    if (same_name(key, "content-type")) {
      answer.content_type = py::cast<std::string>(value);
      SHOAL_CHECK(answer.content_type.find_first_of("\r\n") == std::string::npos,
                  "the content type has a line end");
    } else {
      answer.add_header(key, py::cast<std::string>(value));
    }
  }
  answer.body = std::string_view(body);
  const py::gil_scoped_release nogil;
  const auto call = server.taken_back(id);
  SHOAL_CHECK(call != nullptr, "no request " + std::to_string(id) + " waits for an answer");
  call->answer = std::move(answer);
  call->finish();
}

py::dict counters(const HttpServer& server) {
  const HttpCounters& found = server.counters();
  py::dict requests;
  for (std::size_t status = 0; status < HttpCounters::kStatuses; ++status) {
    if (const std::uint64_t count = found.requests_of(status); count != 0) {
      requests[py::int_(status)] = count;
    }
  }
  py::dict closed;
  for (std::size_t reason = 0; reason < kClosedNames.size(); ++reason) {
    closed[py::str(kClosedNames[reason].data(), kClosedNames[reason].size())] = found.closed_at(reason);
  }
  py::list buckets;
  for (std::size_t i = 0; i <= HttpCounters::kBounds.size(); ++i) {
    buckets.append(found.bucket(i));
  }
  py::dict named;
  named["requests"] = requests;
  named["closed"] = closed;
  named["buckets"] = buckets;
  named["seconds"] = static_cast<double>(found.total_ns()) / 1e9;
  named["no_descriptors"] = found.no_descriptors();
  named["descriptor_error"] = found.descriptor_error();
  return named;
}

}  // namespace

void add_http(py::module_& module) {
  module.attr("HTTP_SECONDS") = py::cast(HttpCounters::kBounds);
  py::class_<ByteBudget, std::shared_ptr<ByteBudget>>(module, "ByteBudget")
      .def(py::init<std::uint64_t>(), py::arg("limit"))
      .def_property_readonly("held", &ByteBudget::held)
      .def("add", &ByteBudget::add, py::arg("bytes"))
      .def("give_back", &ByteBudget::give_back, py::arg("bytes"));
  py::class_<FastHandler, std::shared_ptr<FastHandler>>(module, "FastHandler");
  py::class_<HttpServer>(module, "HttpServer", py::release_gil_before_calling_cpp_dtor())
      .def(py::init(&make_server), py::arg("budget"), py::kw_only(), py::arg("host"), py::arg("port"),
           py::arg("reuse_port"), py::arg("connections"), py::arg("body_bytes"), py::arg("request_seconds"),
           py::arg("threads"), py::arg("predictions"))
      .def_property_readonly("port", &HttpServer::port)
      .def_property_readonly("stopped", &HttpServer::stopped)
      .def("take", &take_request, py::arg("lane"), py::arg("seconds"))
      .def("answer", &answer, py::arg("id"), py::arg("status"), py::arg("headers"), py::arg("body"))
      .def("set_fast", &HttpServer::set_fast, py::arg("handler").none(true))
      .def("counters", &counters)
      .def(
          "stop", [](HttpServer& server, double seconds) { server.stop(after(seconds)); }, py::arg("seconds"),
          py::call_guard<py::gil_scoped_release>());
}

}  // namespace shoal::bind
