// Statistic: a number of a struct of statistics. The table of a struct, beside it, is what replies, the dicts
// of Python and the metrics of servers follow: a number that is added to both is everywhere.

#pragma once

#include <algorithm>
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

// Adds the numbers of a struct to those of others, in the order of the table.
template <class Table, class Struct>
void add_statistics(const Table& table, const Struct& added, std::uint64_t* numbers) {
  for (const auto& statistic : table) {
    const std::uint64_t number = statistic.of(added);
    *numbers = statistic.is_of_greatest ? std::max(*numbers, number) : *numbers + number;
    ++numbers;
  }
}

// The function of a statistic that is a member.
template <auto member>
constexpr auto number_of = []<class Struct, class Number>(Number Struct::*) {
  return +[](const Struct& statistics) { return static_cast<std::uint64_t>(statistics.*member); };
}(member);

}  // namespace shoal
