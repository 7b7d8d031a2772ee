// Statistic: a number of a struct of statistics. The table of a struct, beside it, is what replies, the dicts
// of Python and the metrics of servers follow: a number that is added to both is everywhere.

#pragma once

#include <cstdint>

namespace shoal {

// What a server reports of a number to Prometheus.
enum class Reported : std::uint8_t { kNot, kCounter, kGauge };

template <class Struct>
struct Statistic {
  const char* name;
  std::uint64_t (*of)(const Struct&);
  Reported reported = Reported::kNot;
  const char* help = "";        // of a number that is reported
  bool is_of_greatest = false;  // of several structs together: the greatest number, not the sum
};

// The function of a statistic that is a member.
template <auto member>
constexpr auto number_of = []<class Struct, class Number>(Number Struct::*) {
  return +[](const Struct& statistics) { return static_cast<std::uint64_t>(statistics.*member); };
}(member);

}  // namespace shoal
