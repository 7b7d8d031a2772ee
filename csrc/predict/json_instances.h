// JsonInstances: {"instances": [...]} to examples, in one pass over the text.
//
// Boost.JSON calls the handler for each value, and the handler the builder: nothing but the examples is made.
//
// Threads: working memory of one caller at a time.

#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "predict/example_builder.h"

namespace shoal::predict {

// A body that is not as it has to be, before any instance: the message says why.
class BadBody : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class JsonInstances {
 public:
  JsonInstances();
  ~JsonInstances();

  // Adds the instances of a body. `allowed`: names of further members of the body, each a text, or empty.
  // Throws BadBody, BadExample, TooLarge.
  void read(std::string_view body, std::string_view allowed, ExampleBuilder& into);

 private:
  struct Parser;
  std::unique_ptr<Parser> parser_;
};

}  // namespace shoal::predict
