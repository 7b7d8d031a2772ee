#include "text/fault.h"

#include <array>

#include "base/check.h"

namespace shoal::text {

namespace {

constexpr std::array<std::string_view, kFaults> kTexts = {
    "",
    "the label is not a number",
    "the label is neither 0/1 nor -1/+1: map the labels of the file to 0 and 1, or train with --classes",
    "a feature is not \"key:value\" with a whole number as its key",
    "a key is larger than 2^64 - 1",
    "a feature has no \":value\" behind its key",
    "a value is not a finite decimal number",
    "a value is too large for float32",
    "40 columns are needed, divided by tabs: a label, 13 integers, 26 categories",
    "an integer column holds something else than a whole number",
    "an integer column is outside of 64 bits",
    "a feature is not \"field:key:value\" with whole numbers as its field and key",
    "there is no label: examples to learn from need one",
    "there is no \"|\" before the features",
    "the importance is not a number of 0 or more",
    "a third number stands before the features: an initial prediction cannot be learned from",
    "there are more or fewer cells than columns",
    "a cell in quotes has no closing quote on its line: a row is one line, so replace line breaks in its "
    "cells",
    "something stands between a closing quote and the end of its cell",
    "the label or the weight is missing",
    "the label is not the number of a class, which are 0 to the number of classes - 1",
};
static_assert(!kTexts.back().empty(), "every fault has a text");

}  // namespace

std::string_view fault_text(Fault fault) noexcept {
  SHOAL_DCHECK(fault >= Fault::kGood && fault < Fault::kCount);
  return kTexts[static_cast<std::size_t>(fault)];
}

}  // namespace shoal::text
