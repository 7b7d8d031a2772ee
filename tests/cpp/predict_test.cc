// The prediction library: the golden exports, requests without allocations, and bodies of any bytes.

#include <bit>
#include <boost/json/serialize.hpp>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "failing_memory.h"
#include "predict/criteo_tables.h"
#include "predict/predictor.h"
#include "predict/request_bodies.h"

namespace shoal::predict::predict_test {
namespace {

namespace fs = std::filesystem;

const fs::path kGolden = fs::path(SHOAL_TESTS_DIR) / "golden" / "predictions";

std::vector<json::object> conformance() {
  std::ifstream file(kGolden / "conformance.jsonl");
  std::vector<json::object> cases;
  for (std::string line; std::getline(file, line);) {
    cases.push_back(parse_json(line).as_object());
  }
  return cases;
}

std::uint64_t bits_of(const json::value& text) {
  const std::string digits(text.as_string());
  std::uint64_t bits = 0;
  std::from_chars(digits.data(), digits.data() + digits.size(), bits, 16);
  return bits;
}

std::string body_of(const json::object& one) {
  std::string body = R"({"instances": [)";
  if (one.contains("line")) {
    body += json::serialize(one.at("line"));
  } else if (one.contains("columns")) {
    body += json::serialize(one.at("columns"));
  } else {
    body += R"({"keys": )" + json::serialize(one.at("keys")) + R"(, "values": )" +
            json::serialize(one.at("values")) + "}";
  }
  return body + "]}";
}

class Asked {
 public:
  explicit Asked(const std::string& name)
      : predictor_(kGolden / name, true, ""), version_(predictor_.now()) {}

  std::vector<double> predict(const std::string& body, std::string_view content_type = "") {
    const Features features =
        requests_.read({.body = body, .content_type = content_type}, version_->schema, 1U << 20U);
    std::vector<double> found(features.examples() * version_->model->outputs());
    version_->model->probabilities(features, found, scratch_, pool_);
    return found;
  }

  const Version& version() const { return *version_; }

 private:
  Predictor predictor_;
  std::shared_ptr<const Version> version_;
  RequestBodies requests_;
  ModelScratch scratch_;
  ThreadPool pool_{1};
};

// The C library's exp may round the last bit in another way on another processor.
#if defined(__x86_64__)
constexpr double kUnits = 0;
#else
constexpr double kUnits = 2;
#endif

TEST(the_golden_exports_predict_their_bits) {
  std::map<std::string, Asked> exports;
  const auto cases = conformance();
  CHECK(cases.size() > 500);
  for (const json::object& one : cases) {
    const std::string name(one.at("export").as_string());
    Asked& asked = exports.try_emplace(name, name).first->second;
    const std::vector<double> found = asked.predict(body_of(one));
    const json::array& bits = one.at("bits").as_array();
    CHECK_EQ(found.size(), bits.size());
    for (std::size_t k = 0; k < found.size(); ++k) {
      const auto expected = std::bit_cast<double>(bits_of(bits[k]));
      CHECK(std::abs(found[k] - expected) <= kUnits * std::numeric_limits<double>::epsilon() * expected);
    }
  }
}

TEST(requests_from_keys_allocate_nothing_once_the_memory_has_grown) {
  for (const char* const name : {"lr", "lr-normalized", "lr-isotonic", "fm", "multinomial", "delta"}) {
    const Predictor predictor(kGolden / name, true, "");
    const auto version = predictor.now();
    ModelScratch scratch;
    ThreadPool pool(1);
    const std::vector<std::int64_t> offsets{0, 3, 3, 5};
    const std::vector<std::uint64_t> keys{17, 4, 0, ~std::uint64_t{0}, 9};
    const std::vector<float> values{1.0F, 0.5F, -2.0F, 1.0F, 3.0F};
    std::vector<double> found(3 * version->model->outputs());
    const Features features{.offsets = offsets, .keys = keys, .values = values};
    version->model->probabilities(features, found, scratch, pool);
    check::allocations_left = 0;
    version->model->probabilities(features, found, scratch, pool);
    check::allocations_left = -1;
  }
}

// Parts of bodies, of which some make sense.
std::string random_body(std::mt19937_64& random, const std::vector<std::string>& parts) {
  std::string body(parts[random() % 6]);  // a whole one
  if (random() % 4 == 0) {
    return body;
  }
  if (random() % 2 == 0) {  // with some other bytes
    for (std::size_t k = random() % 4; k > 0; --k) {
      body[random() % body.size()] = static_cast<char>(random());
    }
    return body.substr(0, random() % 2 == 0 ? body.size() : random() % body.size());
  }
  body.clear();
  for (std::size_t k = random() % 12; k > 0; --k) {
    if (random() % 8 == 0) {
      body += static_cast<char>(random());
    } else {
      body += parts[random() % parts.size()];
    }
  }
  return body;
}

TEST(bodies_of_any_bytes_are_read_or_refused) {
  const std::vector<std::string> parts{
      R"({"instances": [{"keys": [1, 18446744073709551615], "values": [1, 0.5]}, {"keys": []}]})",
      R"({"instances": [{"site": "a.com", "price": 0.5, "seen": ["a", null], "dwell": [1, 2]}, {}]})",
      R"({"inputs": [{"name": "keys", "shape": [2, 1], "datatype": "UINT64", "data": [[1], [2]]}]})",
      "click,site,price,user,seen,dwell\n1,a,2,b,c|d,1|2\n",
      "1 1:1 2:0.5\n0 7:1 # no\n",
      R"({"inputs": {"keys": [[1, 2], [3]]}})",
      "{\"instances\": [",
      "{\"keys\": [",
      "1",
      "18446744073709551616",
      "-1",
      "1e400",
      "]",
      "}",
      "]}",
      ", \"values\": [",
      "\"fields\": [",
      "\"site\": ",
      "\"\\ud83d\\ude00\"",
      "\"a.com\"",
      "null",
      "true",
      ",",
      "[[",
      "{\"inputs\": [",
      "{\"name\": \"site\", \"shape\": [2], \"datatype\": \"BYTES\", \"data\": [\"a\", \"b\"]}",
      "\"signature_name\": \"x\"",
      "{\"site\": \"a.com\", \"price\": 0.5}",
      "0 1:1 2:0.5\n",
      "0|u x y:2 |site b\n",
      "click,site,price,user,seen,dwell\n",
      "1,a,2,b,c|d,1|2\n",
      "\"",
      "\xff\xfe",
      "\t\t\t",
      "\r\n",
      "{\"columns\": {"};
  std::mt19937_64 random(1);
  for (const char* const name : {"lr", "columns", "criteo", "libffm", "vw", "libsvm"}) {
    Asked asked(name);
    RequestBodies requests;
    std::size_t read = 0;
    for (int i = 0; i < 4000; ++i) {
      const std::string body = random_body(random, parts);
      const auto protocol = static_cast<Protocol>(random() % 3);
      constexpr std::string_view kKinds[] = {"application/json", "text/plain", "text/csv"};
      const std::string head = std::to_string(random() % (body.size() + 2));
      try {
        requests.read({.protocol = protocol,
                       .body = body,
                       .content_type = kKinds[random() % 3],
                       .json_bytes = random() % 2 == 0 ? std::string_view() : std::string_view(head)},
                      asked.version().schema, 1U << 14U);
        ++read;
      } catch (const BadBody&) {
      } catch (const BadExample&) {
      } catch (const TooLarge&) {
      }
    }
    CHECK(read > 0);
  }
}

TEST(a_request_takes_no_more_memory_than_it_may) {
  Asked asked("lr");
  RequestBodies requests;
  std::string body = R"({"instances": [{"keys": [)";
  for (int i = 0; i < 2000; ++i) {
    body += i == 0 ? "1" : ",1";
  }
  body += "]}]}";
  CHECK_THROWS(requests.read({.body = body}, asked.version().schema, 20'000), "send fewer");
  CHECK(requests.read({.body = body}, asked.version().schema, 200'000).keys.size() == 2000);
}

TEST(bounds_of_Criteos_buckets_are_those_of_the_logarithm) {
  const text::CriteoTables& tables = criteo_tables();
  CHECK_EQ(tables.floors.size(), 1910U);
  for (std::size_t b = 3; b + 1 < tables.floors.size(); ++b) {
    const auto first = static_cast<long double>(tables.floors[b]);
    const long double below = std::log(first - 1);
    const long double at = std::log(first);
    // Bucket b holds v with floor(ln(v)^2) == b - 2.
    CHECK(at * at >= static_cast<long double>(b - 2) - 1e-15L);
    CHECK(below * below < static_cast<long double>(b - 2) + 1e-12L);
  }
}

}  // namespace
}  // namespace shoal::predict::predict_test
