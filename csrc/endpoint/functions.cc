// Functions of all rows that change none. They are computed beside the requests if the rows are many
// (endpoint/scans.h), but for workers under BSP. These may take longer than a worker waits before it asks
// again: the answer to the last one of each worker is kept, and answers its repetitions.

#include <algorithm>
#include <functional>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "base/units.h"
#include "endpoint/reads.h"

namespace shoal {

using wire::Header;
using wire::Op;
using wire::Status;

namespace {

// Of an answer that is kept for its repetition.
constexpr std::size_t kMaxKeptBytes = 4 * MiB;
constexpr std::size_t kFewRows = std::size_t{1} << 16U;  // less than a millisecond

// What a function reads of one arc.
struct Part {
  std::shared_ptr<Shard> shard;  // it may outlive the table
  std::size_t first;
  std::size_t end;
  std::uint32_t clock;
};

std::vector<Part> parts_of(const ServiceState& state, const Header& header) {
  std::vector<Part> parts;
  for (const ArcGroup::Served& served : state.arcs.served()) {
    parts.push_back({served.arc->find(header.table)->shard, served.first, served.end,
                     served.arc->store_clock(header.job, header.table, header.clock)});
  }
  return parts;
}

std::vector<double> reduced(std::span<const Part> parts, Function function,
                            std::span<const double> parameters) {
  std::vector<std::vector<double>> found;
  for (const Part& part : parts) {
    found.push_back(reduce(*part.shard, function, parameters, part.first, part.end));
  }
  return join(function, parameters, found);
}

std::vector<std::uint64_t> swept(std::span<const Part> parts, std::span<const double> parameters) {
  const auto rules = Lifecycle::expiries(parameters);
  std::vector<std::uint64_t> sums;
  for (const Part& part : parts) {
    const auto words = part.shard->sweep(part.first, part.end, part.clock, rules, true);
    sums.resize(std::max(sums.size(), words.size()));
    std::ranges::transform(words, sums, sums.begin(), std::plus<>());
  }
  return sums;
}

// Has a function of many rows computed beside the requests; nullopt: it is computed now.
std::optional<Outcome> begin_scan(ServiceState& state, const RequestContext& request) {
  const Header& header = request.header;
  const bool is_of_a_clock = !request.is_anonymous() && state.arcs.mode(header.job) == Mode::kBsp;
  const Function function{header.aux};
  if (state.scans == nullptr || is_of_a_clock || (header.op == Op::kReduce && function == Function::kMap)) {
    return std::nullopt;
  }
  if (state.scans->has(header, request.peer)) {
    return Refusal{Status::kDeferred};
  }
  std::vector<Part> parts = parts_of(state, header);
  std::size_t rows = 0;
  for (const Part& part : parts) {
    rows += part.shard->size();
  }
  if (rows <= kFewRows) {
    return std::nullopt;
  }
  const auto given = request.doubles();
  const auto work = [parts = std::move(parts), parameters = std::vector<double>(given.begin(), given.end()),
                     function](Scan& scan) {
    if (scan.header.op == Op::kReduce) {
      scan.numbers = reduced(parts, function, parameters);
    } else {
      scan.words = swept(parts, parameters);
    }
  };
  const bool is_begun = state.scans->add(
      {.peer = Peer(request.peer), .header = header, .received_ns = request.received_ns, .work = work});
  return Refusal{is_begun ? Status::kDeferred : Status::kOverloaded};
}

// Where the answer to a worker's function is kept.
FunctionAnswer& kept_answer(ServiceState& state, const RequestContext& request) {
  auto& answers = state.job_of(request).functions;
  const std::uint32_t rank = request.header.worker;
  if (rank >= answers.size()) {
    answers.resize(rank + std::size_t{1});
  }
  if (answers[rank] == nullptr) {
    answers[rank] = std::make_unique<FunctionAnswer>();
  }
  return *answers[rank];
}

Outcome answer_of(const RequestContext& request, std::span<const double> numbers,
                  std::span<const std::uint64_t> words) {
  return request.header.op == Op::kReduce ? numbers_answer(numbers, request.header.aux, request.out)
                                          : words_answer(words, request.out);
}

}  // namespace

Outcome answer_function(ServiceState& state, RequestContext& request) {
  if (auto begun = begin_scan(state, request)) {
    return *std::move(begun);
  }
  const Header& header = request.header;
  FunctionAnswer computed;
  FunctionAnswer& last =
      request.is_anonymous() ? computed : kept_answer(state, request);  // readers share a rank
  const auto name = [](const Header& of) {
    return std::tuple(of.incarnation, of.sequence, of.epoch, of.op, of.table, of.aux);
  };
  if (header.sequence == 0 || name(last.request) != name(header)) {
    last = {};
    const std::vector<Part> parts = parts_of(state, header);
    if (header.op == Op::kReduce) {
      last.numbers = reduced(parts, Function{header.aux}, request.doubles());
    } else {
      last.words = swept(parts, request.doubles());
    }
    last.request = header;
  }
  Outcome outcome = answer_of(request, last.numbers, last.words);
  if (last.numbers.size() * sizeof(double) + last.words.size() * sizeof(std::uint64_t) > kMaxKeptBytes) {
    last = {};
  }
  return outcome;
}

Outcome answer_scan(ServiceState& state, const Scan& scan, RequestContext& request) {
  if (scan.failure != nullptr) {
    std::rethrow_exception(scan.failure);
  }
  return state.has_newest_map(request) ? answer_of(request, scan.numbers, scan.words) : wrong_epoch();
}

}  // namespace shoal
