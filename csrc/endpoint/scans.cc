#include "endpoint/scans.h"

#include <tuple>
#include <utility>

namespace shoal {

namespace {

auto name_of(const wire::Header& header) noexcept {
  return std::tuple(header.worker, header.incarnation, header.sequence, header.epoch, header.op, header.table,
                    header.aux);
}

void compute(Scan& scan) {
  try {
    scan.work(scan);
  } catch (...) {  // carried to the reply: an exception must not leave a thread
    scan.failure = std::current_exception();
  }
}

}  // namespace

Scans::Scans(std::function<void(Scan&)> done)
    : queue_(WorkQueue<Scan>::AtEnd::kDrops, compute, std::move(done)) {}

bool Scans::has(const wire::Header& header, std::string_view peer) {
  return queue_.find([&](const Scan& scan) { return name_of(scan.header) == name_of(header); },
                     [&](Scan& scan) { scan.peer = peer; });  // it may have reconnected
}

}  // namespace shoal
