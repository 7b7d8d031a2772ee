#include <pybind11/pybind11.h>

#include "bind/bind.h"

PYBIND11_MODULE(_core, module) {
  module.doc() =
      "The engine: arrays in, arrays out. Use the functions and classes of shoal, which say what they take.";
  shoal::bind::add_base(module);
  shoal::bind::add_build(module);
  shoal::bind::add_batch(module);
  shoal::bind::add_cache(module);
  shoal::bind::add_kernel(module);
  shoal::bind::add_names(module);
  shoal::bind::add_table_spec(module);
  shoal::bind::add_shard(module);
  shoal::bind::add_tier(module);
  shoal::bind::add_user_step(module);
  shoal::bind::add_user_function(module);
  shoal::bind::add_wire(module);
  shoal::bind::add_requests(module);
  shoal::bind::add_client(module);
  shoal::bind::add_endpoint(module);
  shoal::bind::add_data_loop(module);
  shoal::bind::add_export(module);
  shoal::bind::add_http(module);
  shoal::bind::add_predict(module);
  shoal::bind::add_serve(module);
}
