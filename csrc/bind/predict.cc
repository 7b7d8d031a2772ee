// What predicts from requests: the inputs of a model, bodies, and models of exports.

#include <pybind11/native_enum.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bind/array.h"
#include "bind/bind.h"
#include "predict/click_model.h"
#include "predict/description.h"
#include "predict/request_bodies.h"
#include "predict/table_model.h"

namespace shoal::bind {

namespace {

using predict::ClickModel;
using predict::InputSchema;
using predict::Model;
using predict::OnnxRuntime;
using predict::Protocol;
using predict::RequestBodies;
using predict::TableModel;

std::shared_ptr<InputSchema> make_schema(const std::string& description, const std::string& fields_of) {
  const auto parsed = predict::parse_json(description);
  SHOAL_CHECK(parsed.is_object(), "the description of a model is not an object");
  return std::make_shared<InputSchema>(predict::read_schema(parsed.get_object(), fields_of));
}

// What `make` makes of an object that describes a model, and of a function from names to tables. Models are used by
// threads without Python; the tables in Python live as long as their model.
template <class Make>
auto make_model(const std::string& description, const py::dict& tables, const Make& make) {
  const auto parsed = predict::parse_json(description);
  SHOAL_CHECK(parsed.is_object(), "the description of a model is not an object");
  auto model = make(parsed.get_object(), [&](std::string_view name) -> const ExportReader* {
    const py::str key(name.data(), name.size());
    return tables.contains(key) ? tables[key].cast<const ExportReader*>() : nullptr;
  });
  using Made = typename decltype(model)::element_type;
  auto kept = std::make_unique<py::object>(tables.attr("copy")());
  return std::shared_ptr<Made>(model.release(), [kept = kept.release()](const Made* one) {
    delete one;
    const py::gil_scoped_acquire gil;
    delete kept;
  });
}

std::shared_ptr<TableModel> make_table_model(const std::string& description, const py::dict& tables) {
  return make_model(description, tables, [](const auto& described, const auto& table) {
    return std::make_unique<TableModel>(predict::read_description(described), table);
  });
}

std::shared_ptr<ClickModel> make_click_model(const std::string& description, const py::dict& tables,
                                             const std::string& tower,
                                             const std::shared_ptr<OnnxRuntime>& runtime) {
  return make_model(description, tables, [&](const auto& described, const auto& table) {
    return std::make_unique<ClickModel>(described, runtime, tower, table);
  });
}

predict::Features features_of(const Array<std::int64_t>& indptr, const Array<std::uint64_t>& keys,
                              const std::optional<Array<float>>& values,
                              const std::optional<Array<std::uint64_t>>& fields) {
  return {.offsets = in(indptr),
          .keys = in(keys),
          .values = values ? in(*values) : std::span<const float>(),
          .fields = fields ? in(*fields) : std::span<const std::uint64_t>()};
}

std::uint64_t bytes(const Model& model, const Array<std::int64_t>& indptr, const Array<std::uint64_t>& keys,
                    const std::optional<Array<float>>& values,
                    const std::optional<Array<std::uint64_t>>& fields) {
  const predict::Features features = features_of(indptr, keys, values, fields);
  const py::gil_scoped_release nogil;
  return model.bytes(features);
}

Array<double> probabilities(const Model& model, const Array<std::int64_t>& indptr,
                            const Array<std::uint64_t>& keys, const std::optional<Array<float>>& values,
                            const std::optional<Array<std::uint64_t>>& fields, PoolWithScratch& pool) {
  const predict::Features features = features_of(indptr, keys, values, fields);
  Array<double> result = model.is_multiclass() ? fresh<double>(features.examples(), model.outputs())
                                               : fresh<double>(features.examples());
  const auto to = out(result);
  const py::gil_scoped_release nogil;
  predict::ModelScratch scratch;
  model.probabilities(features, to, scratch, pool.threads);
  return result;
}

Array<double> margins(const ClickModel& model, const Array<std::int64_t>& indptr,
                      const Array<std::uint64_t>& keys, const std::optional<Array<float>>& values,
                      const std::optional<Array<std::uint64_t>>& fields, PoolWithScratch& pool) {
  const predict::Features features = features_of(indptr, keys, values, fields);
  Array<double> result = fresh<double>(features.examples());
  const auto to = out(result);
  const py::gil_scoped_release nogil;
  model.margins(features, to, pool.threads);
  return result;
}

// (indptr, keys, values or None, fields or None, unknown columns)
py::tuple read(RequestBodies& requests, const InputSchema& schema, Protocol protocol, const py::buffer& body,
               const std::string& content_type, const std::string& json_bytes, bool is_multiclass,
               std::size_t limit) {
  const py::buffer_info info = body.request();
  const predict::Request request{
      .protocol = protocol,
      .body = {static_cast<const char*>(info.ptr), static_cast<std::size_t>(info.size * info.itemsize)},
      .content_type = content_type,
      .json_bytes = json_bytes,
      .is_multiclass = is_multiclass};
  predict::Features features;
  {
    const py::gil_scoped_release nogil;
    features = requests.read(request, schema, limit);
  }
  py::object values = py::none();
  if (requests.builder().is_valued()) {
    values = copied(features.values);
  }
  py::object fields = py::none();
  if (schema.needs_fields()) {
    fields = copied(features.fields);
  }
  const auto& unknown = requests.builder().unknown();
  return py::make_tuple(copied(features.offsets), copied(features.keys), values, fields,
                        std::vector<std::string>(unknown.begin(), unknown.end()));
}

// (body, content type, bytes of JSON before raw data, or 0)
py::tuple write(const RequestBodies& requests, std::uint64_t version, const std::string& name,
                const Array<double>& probabilities, bool is_multiclass) {
  const std::size_t outputs =
      is_multiclass && probabilities.ndim() == 2 ? static_cast<std::size_t>(probabilities.shape(1)) : 1;
  predict::Answer answer;
  requests.write(version, name, in(probabilities), outputs, is_multiclass, answer);
  return py::make_tuple(py::bytes(answer.body), std::string(answer.content_type), answer.json_bytes);
}

}  // namespace

void add_predict(py::module_& module) {
  static py::exception<predict::TooLarge> too_large(module, "TooLargeError", PyExc_ValueError);
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) {
        std::rethrow_exception(thrown);
      }
    } catch (const predict::TooLarge& error) {
      py::set_error(too_large, error.what());
    } catch (const predict::BadBody& error) {
      py::set_error(PyExc_ValueError, error.what());
    } catch (const predict::BadExample& error) {
      py::set_error(PyExc_ValueError, error.what());
    }
  });
  py::native_enum<Protocol>(module, "ServingProtocol", "enum.Enum")
      .value("SHOAL", Protocol::kShoal)
      .value("TENSORFLOW", Protocol::kTensorFlow)
      .value("INFERENCE", Protocol::kInference)
      .finalize();
  py::class_<InputSchema, std::shared_ptr<InputSchema>>(module, "InputSchema")
      .def(py::init(&make_schema), py::arg("description"), py::arg("fields_of") = "")
      .def("takes", &InputSchema::takes);
  py::class_<OnnxRuntime, std::shared_ptr<OnnxRuntime>>(module, "OnnxRuntime")
      .def_static(
          "open",
          [](const std::string& path) {
            return std::const_pointer_cast<OnnxRuntime>(OnnxRuntime::open(path));
          },
          py::arg("path") = "", py::call_guard<py::gil_scoped_release>());
  py::class_<Model, std::shared_ptr<Model>>(module, "ExportedModel")
      .def("bytes", &bytes, py::arg("indptr").noconvert(), py::arg("keys").noconvert(),
           py::arg("values").noconvert().none(true), py::arg("fields").noconvert().none(true))
      .def("probabilities", &probabilities, py::arg("indptr").noconvert(), py::arg("keys").noconvert(),
           py::arg("values").noconvert().none(true), py::arg("fields").noconvert().none(true),
           py::arg("pool"));
  py::class_<TableModel, Model, std::shared_ptr<TableModel>>(module, "TableModel")
      .def(py::init(&make_table_model), py::arg("description"), py::arg("tables"));
  py::class_<ClickModel, Model, std::shared_ptr<ClickModel>>(module, "ClickModel")
      .def(py::init(&make_click_model), py::arg("description"), py::arg("tables"), py::arg("tower"),
           py::arg("runtime"))
      .def("margins", &margins, py::arg("indptr").noconvert(), py::arg("keys").noconvert(),
           py::arg("values").noconvert().none(true), py::arg("fields").noconvert().none(true),
           py::arg("pool"));
  py::class_<RequestBodies>(module, "RequestBodies")
      .def(py::init<>())
      .def("read", &read, py::arg("schema"), py::arg("protocol"), py::arg("body"),
           py::arg("content_type") = "", py::arg("json_bytes") = "", py::arg("is_multiclass") = false,
           py::kw_only(), py::arg("limit"))
      .def("write", &write, py::arg("version"), py::arg("name"), py::arg("probabilities").noconvert(),
           py::arg("is_multiclass"));
  std::vector<std::string> missing(std::begin(predict::kMissingTexts), std::end(predict::kMissingTexts));
  module.attr("MISSING_TEXTS") = py::tuple(py::cast(missing));
}

}  // namespace shoal::bind
