#include "shard/spec_bytes.h"

#include <optional>
#include <string>
#include <utility>

#include "base/byte_stream.h"

namespace shoal {

namespace {

constexpr std::uint8_t kVersion = 1;
constexpr std::size_t kMaxName = 256;
constexpr const char* kParameter = "parameter";

void put(ByteWriter& out, const NamedRule& rule) {
  out.put_text(rule.name);
  out.put(static_cast<std::uint8_t>(rule.params.size()));
  for (const auto& [name, value] : rule.params) {
    out.put_text(name);
    out.put(value);
  }
}

NamedRule take_rule(ByteReader& in, const char* field) {
  NamedRule rule{in.take_text(field, kMaxName), {}};
  for (auto left = in.take<std::uint8_t>(kParameter); left != 0; --left) {
    std::string name = in.take_text(kParameter, kMaxName);
    in.check(rule.params.empty() || rule.params.rbegin()->first < name, kParameter,
             "names must ascend: " + name);
    rule.params.emplace_hint(rule.params.end(), std::move(name), in.take<double>(kParameter));
  }
  return rule;
}

}  // namespace

std::vector<std::byte> encode(const TableSpec& spec) {
  ByteWriter out;
  out.put(kVersion);
  out.put(static_cast<std::uint32_t>(spec.dim));
  out.put(spec.dtype);
  put(out, {std::string(spec.optimizer.name()), spec.optimizer.params()});
  put(out, {std::string(spec.init.name()), {{kParameter, spec.init.parameter()}}});
  out.put(spec.init.seed());
  out.put(spec.seed);
  out.put(static_cast<std::uint8_t>(spec.lifecycle.admits_all() ? 0 : 1));
  if (!spec.lifecycle.admits_all()) {
    put(out, named(spec.lifecycle.admit()));
  }
  out.put(static_cast<std::uint8_t>(spec.lifecycle.expire().size()));
  for (const Expiry& rule : spec.lifecycle.expire()) {
    put(out, named(rule));
  }
  return out.take();
}

TableSpec decode_spec(std::span<const std::byte> bytes) {
  ByteReader in(bytes, "a table's description");
  const auto version = in.take<std::uint8_t>("version");
  in.check(version == kVersion, "version",
           "is " + std::to_string(version) + ", and this server reads " + std::to_string(kVersion));
  const auto dim = in.take_between<std::uint32_t>("dim", 1, Rows::kMaxDim);
  const auto dtype = in.take_enum("dtype", Dtype::kBfloat16);
  NamedRule optimizer = take_rule(in, "optimizer");
  const NamedRule init = take_rule(in, "init");
  in.check(init.params.size() == 1 && init.params.contains(kParameter), "init", "needs one parameter");
  const auto init_seed = in.take<std::uint64_t>("init seed");
  const auto seed = in.take<std::uint64_t>("seed");
  std::optional<NamedRule> admit;
  if (in.take_flag("admission rules")) {
    admit = take_rule(in, "admission rule");
  }
  std::vector<NamedRule> expire;
  for (auto left = in.take_between<std::uint8_t>("expiry rules", 0, Expiry::kKinds); left != 0; --left) {
    expire.push_back(take_rule(in, "expiry rule"));
  }
  in.done();
  TableSpec spec{.dim = dim,
                 .dtype = dtype,
                 .optimizer = Optimizer(optimizer.name, std::move(optimizer.params)),
                 .init = Init(init.name, init.params.at(kParameter), init_seed),
                 .seed = seed,
                 .lifecycle = Lifecycle(admit, expire)};
  Rows(spec.dim, spec.dtype, spec.optimizer, spec.lifecycle.metadata());  // checks what fits together
  in.check(encode(spec).size() == bytes.size(), "a parameter", "has no effect");
  return spec;
}

}  // namespace shoal
