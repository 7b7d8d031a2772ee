#include "replica/orders.h"

#include <string>
#include <type_traits>
#include <utility>

#include "base/byte_stream.h"
#include "base/check.h"
#include "shard/spec_bytes.h"

namespace shoal {

namespace {

template <class One>
concept HasFields = requires { One::fields(); };

// Calls use(field) for each field of a struct.
template <class One, class Use>
void each_field(const Use& use) {
  std::apply([&](const auto&... field) { (use(field), ...); }, One::fields());
}

// --- encoding ---------------------------------------------------------------------------------------------

template <class Value>
  requires(std::is_integral_v<Value> || std::is_enum_v<Value>)
void put(ByteWriter& to, const Value& value) {
  if constexpr (std::is_same_v<Value, bool>) {
    to.put(static_cast<std::uint8_t>(value));
  } else {
    to.put(value);
  }
}
void put(ByteWriter& to, const std::vector<std::byte>& bytes) {
  to.put(std::uint64_t{bytes.size()});
  to.put_raw(bytes);
}
void put(ByteWriter& to, const TableSpec& spec) { put(to, encode(spec)); }
void put(ByteWriter& to, const SlotRange& range) {
  to.put(std::uint64_t{range.first});
  to.put(std::uint64_t{range.end});
}
template <class One>
  requires HasFields<One>
void put(ByteWriter& to, const One& one);
template <class Value>
void put(ByteWriter& to, const std::vector<Value>& values) {
  to.put(std::uint64_t{values.size()});
  for (const Value& value : values) {
    put(to, value);
  }
}
template <class One>
  requires HasFields<One>
void put(ByteWriter& to, const One& one) {
  each_field<One>([&](const auto& field) { put(to, one.*field.member); });
}

// --- decoding ---------------------------------------------------------------------------------------------

template <class Value>
struct Taken;

template <class Value>
  requires(std::is_integral_v<Value>)
struct Taken<Value> {
  static Value from(ByteReader& in, const char* name) { return in.take<Value>(name); }
};
template <>
struct Taken<bool> {
  static bool from(ByteReader& in, const char* name) { return in.take_flag(name); }
};
template <>
struct Taken<Mode> {
  static Mode from(ByteReader& in, const char* name) { return in.take_enum(name, Mode::kAsp); }
};
template <>
struct Taken<std::vector<std::byte>> {
  static std::vector<std::byte> from(ByteReader& in, const char* name) {
    const auto bytes = in.take_raw(in.take_count(name, 1), name);
    return {bytes.begin(), bytes.end()};
  }
};
template <>
struct Taken<TableSpec> {
  static TableSpec from(ByteReader& in, const char* name) {
    return decode_spec(in.take_raw(in.take_count(name, 1), name));
  }
};
template <>
struct Taken<SlotRange> {
  static SlotRange from(ByteReader& in, const char* name) {
    const auto first = in.take<std::uint64_t>(name);
    return {.first = first, .end = in.take<std::uint64_t>(name)};
  }
};
template <class Value>
struct Taken<std::vector<Value>> {
  static std::vector<Value> from(ByteReader& in, const char* name) {
    std::vector<Value> values;
    for (std::size_t left = in.take_count(name, 1); left != 0; --left) {
      values.push_back(Taken<Value>::from(in, name));
    }
    return values;
  }
};
// Fields are listed in the order of the members.
template <class One>
  requires HasFields<One>
struct Taken<One> {
  static One from(ByteReader& in, const char* /*name*/ = "") {
    return std::apply(
        [&]<class... Value>(const Field<One, Value>&... field) {
          return One{Taken<Value>::from(in, field.name)...};
        },
        One::fields());
  }
};

// The order of this number, whose fields are taken.
template <std::size_t kNumber = 0>
Order take_order(ByteReader& from, std::size_t number) {
  if constexpr (kNumber < std::variant_size_v<Order>) {
    if (number != kNumber) {
      return take_order<kNumber + 1>(from, number);
    }
    return Taken<std::variant_alternative_t<kNumber, Order>>::from(from);
  }
  SHOAL_CHECK(false, "there is no order " + std::to_string(number));
}

}  // namespace

std::size_t KeptRecord::bytes() const noexcept {
  std::size_t sum = 0;
  for (const auto& frame : frames) {
    sum += frame.size();
  }
  return sum;
}

bool is_of_stream(const Order& order) noexcept {
  return std::holds_alternative<ReleaseArcs>(order) || std::holds_alternative<AbortCopy>(order) ||
         std::holds_alternative<JoinArcs>(order) || std::holds_alternative<CatchUpArcs>(order);
}

std::vector<std::byte> encode(const Order& order) {
  ByteWriter to;
  to.bytes().reserve(64);
  to.put(static_cast<std::uint8_t>(order.index()));
  std::visit([&](const auto& given) { put(to, given); }, order);
  return to.take();
}

Order decode_order(std::span<const std::byte> bytes) {
  ByteReader from(bytes, "an order");
  Order order = take_order(from, from.take<std::uint8_t>("its number"));
  from.done();
  if (const auto* const behind = std::get_if<CatchUpArcs>(&order); behind != nullptr) {
    SHOAL_CHECK(behind->stamps.size() == behind->arcs.size(),
                "an order has another number of stamps than of arcs");
  }
  return order;
}

}  // namespace shoal
