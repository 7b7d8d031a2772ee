// What can be wrong with a line of text.

#pragma once

#include <cstddef>
#include <string_view>

namespace shoal::text {

// The numbers are those of shoal._reader.FAULTS, the texts of all faults in this order.
enum class Fault : int {
  kGood,
  kLabelText,
  kLabelRange,
  kKeyText,
  kKeyRange,
  kValueMissing,
  kValueText,
  kValueRange,
  kColumns,
  kIntegerText,
  kIntegerRange,
  kFieldText,
  kLabelMissing,
  kBarMissing,
  kImportance,
  kInitial,
  kCells,
  kQuoteOpen,
  kQuoteClosed,
  kCellMissing,
  kLabelClass,
  kCount,  // of the faults above
  // Of this room alone; no Stop has these.
  kNoRoom,  // the arrays have no room for the line
  kBlank,   // a line without an example
};

inline constexpr std::size_t kFaults = static_cast<std::size_t>(Fault::kCount);

// A sentence without a full stop; empty for kGood.
std::string_view fault_text(Fault fault) noexcept;

}  // namespace shoal::text
