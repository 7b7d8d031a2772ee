#include <pybind11/pybind11.h>

#include "bind/bind.h"

PYBIND11_MODULE(_core, module) {
  module.doc() =
      "The engine: arrays in, arrays out. Use the functions and classes of shoal, which say what they take.";
  shoal::bind::add_base(module);
  shoal::bind::add_route(module);
  shoal::bind::add_kernel(module);
  shoal::bind::add_store(module);
  shoal::bind::add_net(module);
  shoal::bind::add_frozen(module);
}
