// Filter: encodes the arrays of pulls and pushes into fewer bytes (Li et al., OSDI 2014). docs/filters.md has
// what users see.
//
// Some filters are exact: servers receive the same bits. The others are unbiased: the expected value of what
// arrives is what was passed. Their errors are counted, and do not depend on how a call was cut or how often
// it was sent.
//
//   gradients  --threshold--> small rows: zeros, or larger --gradients--> 16 bits --zeros--> packed
//   hashes     --key_caching--> 16 bytes, if the server has the list
//   weights    by the server: --weights--> 16 bits --zeros--> packed
//
// The random numbers of a push are a function of (seed, worker, sequence of the call, hash): a part that is
// cut again after a change of the map has the same values.
//
// Threads: one at a time; the owner locks.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <list>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "transport/shared_frame.h"
#include "wire/digest.h"
#include "wire/wire.h"

namespace shoal::client {

// The digests of the key lists that an endpoint has received, at most kMost: the least recently used one
// goes.
class KnownLists {
 public:
  static constexpr std::size_t kMost = 4096;

  bool contains(const Digest& digest) const { return places_.contains(digest); }
  void add(const Digest& digest);
  void remove(const Digest& digest);

 private:
  struct Hash {
    std::size_t operator()(const Digest& digest) const noexcept { return digest.first; }
  };
  std::list<Digest> lists_;  // the most recently used one last
  std::unordered_map<Digest, std::list<Digest>::iterator, Hash> places_;
};

struct FilterOptions {
  bool key_caching = false;
  bool zeros = false;
  wire::Dtype gradients = wire::Dtype::kFloat32;
  wire::Dtype weights = wire::Dtype::kFloat32;
  double threshold = 0;
  std::uint64_t seed = 0;  // with the numbers of the worker
  std::uint32_t job = 0;   // seed of digests
};

struct FilterCounts {
  std::uint64_t pushes = 0;  // messages
  std::uint64_t pulls = 0;
  std::int64_t key_bytes_saved = 0;
  std::int64_t gradient_bytes_saved = 0;
  std::int64_t weight_bytes_saved = 0;
  std::uint64_t lists_sent = 0;
  std::uint64_t lists_named = 0;  // by digest
  std::uint64_t lists_lost = 0;   // the server had none: sent after all
  std::uint64_t rows_dropped = 0;
  std::uint64_t rows_raised = 0;
  double gradient_error = 0;  // sum of (sent - passed)^2 over all gradients
  double largest_error = 0;   // of a gradient, by rounding to 16 bits
};

// The frames of a message behind its header.
struct Payload {
  std::array<SharedFrame, wire::kMaxFrames> frames{};
  std::size_t count = 0;

  void add(SharedFrame frame) { frames.at(count++) = std::move(frame); }
};

// The frames of a part, and what its header says of them.
struct EncodedPayload {
  Payload payload{};
  wire::Dtype dtype = wire::Dtype::kNone;
  bool is_packed = false;
  bool keep = false;               // the list is to be kept
  bool is_counted = false;         // the last frame says how often each row occurred
  std::optional<Digest> digest{};  // of the list; sent in its place unless `keep`
};

class Filter {
 public:
  static constexpr std::size_t kMinKeys = 16;  // below this a digest saves too little

  explicit Filter(const FilterOptions& options) : options_(options) {}

  EncodedPayload pull(const SharedFrame& hashes, const KnownLists& known);
  // After it a pull can name its key list.
  EncodedPayload prefetch(const SharedFrame& hashes, const KnownLists& known);
  // `grads`: one row of dim floats for each hash. `whole`: changes of whole rows, without a threshold.
  EncodedPayload push(const SharedFrame& hashes, const SharedFrame& grads, std::size_t dim,
                      std::uint64_t sequence, const KnownLists& known, bool whole);

  // A list was sent as a digest first, and then completely.
  void lost(std::size_t bytes) noexcept;
  // The answer to a pull came with `came` bytes instead of `plain`.
  void pulled(std::size_t plain, std::size_t came) noexcept;

  const FilterCounts& counts() const noexcept { return counts_; }

 private:
  void name(EncodedPayload& sent, const SharedFrame& hashes, const KnownLists& known);

  FilterOptions options_;
  FilterCounts counts_;
};

// A frame of bytes of its own.
SharedFrame own_frame(std::size_t bytes, std::span<std::byte>& room);

}  // namespace shoal::client
