// Copy-on-write snapshots of the arc's shards (shard/shard_copy.h). Clocks, windows and pending pushes are
// copied at the beginning, rows with each piece, while the arc continues to change.

#include "replica/arc_copy.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "base/crc32c.h"
#include "shard/spec_bytes.h"

namespace shoal {

namespace {

constexpr std::uint32_t kMagic = 0x43524153;  // "SARC"
constexpr std::uint8_t kVersion = 4;
constexpr std::uint32_t kMaxJobs = 65536;
constexpr std::size_t kHeadBytes = ArcRestorer::kHeadBytes;
constexpr std::size_t kMaxText = 4096;
enum class Kind : std::uint8_t { kHead, kTable, kSlot, kTail };

ByteWriter begun() {
  ByteWriter out;
  out.extend(kHeadBytes);
  return out;
}

// Fills the first kHeadBytes.
std::vector<std::byte> finished(Kind kind, std::size_t number, std::vector<std::byte> piece) {
  const auto body = std::span(piece).subspan(kHeadBytes);
  ByteWriter head;
  head.put(kMagic);
  head.put(kVersion);
  head.put(kind);
  head.put(std::uint16_t{0});
  head.put(static_cast<std::uint32_t>(number));
  head.put(crc32c(body));
  head.put(std::uint64_t{body.size()});
  std::ranges::copy(head.bytes(), piece.begin());
  return piece;
}

}  // namespace

std::vector<std::vector<std::byte>> Arc::save() const {
  ArcCopy copy(*this);
  std::vector<std::vector<std::byte>> pieces;
  while (!copy.done()) {
    pieces.push_back(copy.next());
  }
  return pieces;
}

ArcCopy::ArcCopy(const Arc& arc)
    : range_{.first = arc.first_, .end = arc.end_},
      pieces_(2 + arc.tables_.size() * (1 + arc.end_ - arc.first_)) {
  for (const auto& [id, table] : arc.tables_) {
    SHOAL_CHECK(
        table.loading == nullptr && !table.shard->changes().has_snapshot(),
        "table " + std::to_string(id) + " is being saved or loaded: copy the arc when that has ended");
  }
  ByteWriter head = begun();
  head.put(static_cast<std::uint32_t>(arc.slots_.count()));
  head.put(static_cast<std::uint32_t>(arc.first_));
  head.put(static_cast<std::uint32_t>(arc.end_));
  head.put(arc.slot_bytes().value_or(0));
  head.put(static_cast<std::uint32_t>(arc.tables_.size()));
  head_ = head.take();
  ByteWriter tail = begun();
  tail.put(static_cast<std::uint32_t>(arc.jobs_.all().size()));
  for (const auto& job : arc.jobs_.all()) {
    job->save(tail);
  }
  tail_ = tail.take();
  bytes_ = head_.size() + tail_.size();
  for (const auto& [id, table] : arc.tables_) {
    Table& copied = tables_.emplace_back();
    {
      const Shard::PausedWriters paused(*table.shard);  // a tier's own thread moves rows meanwhile
      copied.shard.emplace(table.shard);
    }
    ByteWriter out = begun();
    out.put(id);
    const auto spec = encode(table.shard->spec());
    out.put(static_cast<std::uint32_t>(spec.size()));
    out.put_raw(spec);
    out.put(table.failed_step ? table.failed_step->status : wire::Status::kOk);
    out.put_text(table.failed_step ? std::string_view(table.failed_step->text).substr(0, kMaxText)
                                   : std::string_view());
    out.put(table.reached);
    out.put_raw(copied.shard->table());
    copied.piece = out.take();
    bytes_ += copied.piece.size() + copied.shard->bytes();
  }
}

std::vector<std::byte> ArcCopy::next() {
  const std::size_t number = next_++;
  if (number == 0) {
    return finished(Kind::kHead, number, std::move(head_));
  }
  if (tables_.empty()) {
    return finished(Kind::kTail, number, std::move(tail_));
  }
  Table& table = tables_.front();
  if (!table.piece.empty()) {
    slot_ = range_.first;
    return finished(Kind::kTable, number, std::exchange(table.piece, {}));
  }
  ByteWriter out = begun();
  table.shard->take(Slot{static_cast<std::uint32_t>(slot_)}, out);
  if (++slot_ == range_.end) {
    tables_.pop_front();
  }
  return finished(Kind::kSlot, number, out.take());
}

void ArcCopy::cancel() noexcept {
  cancelled_ = true;
  tables_.clear();
}

// --- restoring --------------------------------------------------------------------------------------------

std::uint64_t ArcRestorer::piece_bytes(std::span<const std::byte> front) {
  ByteReader head(front, "a piece of an arc");
  head.check(head.take<std::uint32_t>("magic") == kMagic, "magic", "is not that of a piece");
  head.take_raw(12, "head");
  const auto body = head.take<std::uint64_t>("length");
  head.check(body <= std::uint64_t{1} << 48U, "length", "is beyond any machine");
  return kHeadBytes + body;
}

void ArcRestorer::add(std::span<const std::byte> piece) {
  SHOAL_CHECK(!is_whole_, "a copy of an arc continues after its last piece, number " +
                              std::to_string(number_ - std::size_t{1}));
  Kind kind = Kind::kTail;
  if (number_ == 0) {
    kind = Kind::kHead;
  } else if (shard_ != nullptr && slot_ != arc_->end_) {
    kind = Kind::kSlot;
  } else if (tables_ != 0) {
    kind = Kind::kTable;
  }
  ByteReader head(piece, "a piece of an arc");
  head.check(head.take<std::uint32_t>("magic") == kMagic, "magic", "is not that of a piece");
  const auto version = head.take<std::uint8_t>("version");
  head.check(version == kVersion, "version",
             "is " + std::to_string(version) + ", and this server reads " + std::to_string(kVersion));
  head.check(head.take_enum("kind", Kind::kTail) == kind && head.take<std::uint16_t>("kind") == 0, "kind",
             "is not that of piece " + std::to_string(number_));
  head.check(head.take<std::uint32_t>("number") == number_, "number", "is not " + std::to_string(number_));
  const auto crc = head.take<std::uint32_t>("checksum");
  head.check(head.take<std::uint64_t>("length") == head.left(), "length",
             "is not that of piece " + std::to_string(number_));
  const auto body = piece.subspan(kHeadBytes);
  head.check(crc32c(body) == crc, "checksum", "does not fit piece " + std::to_string(number_));
  ++number_;
  ByteReader in(body, "a copy of an arc");
  switch (kind) {
    case Kind::kHead:
      add_head(in);
      break;
    case Kind::kTable:
      add_table(in);
      break;
    case Kind::kSlot:
      ShardCopy::restore(*shard_, Slot{static_cast<std::uint32_t>(slot_++)}, in);
      break;
    case Kind::kTail:
      add_tail(in);
      break;
  }
  in.done();
}

void ArcRestorer::add_head(ByteReader& in) {
  const Slots slots(in.take<std::uint32_t>("slots"));  // checks the number
  const auto first =
      in.take_between<std::uint32_t>("first slot", 0, static_cast<std::uint32_t>(slots.count()));
  const auto end =
      in.take_between<std::uint32_t>("end slot", first, static_cast<std::uint32_t>(slots.count()));
  arc_.reset(new Arc(slots, first, end));
  arc_->set_tier(tier_);
  if (const auto slot_bytes = in.take<std::uint64_t>("budget"); slot_bytes != 0) {
    in.check(slot_bytes <= Budget::kMaxShare, "budget", "is beyond any machine");
    arc_->apply(SetMemory{.slot_bytes = slot_bytes});
  }
  tables_ = in.take<std::uint32_t>("tables");
}

void ArcRestorer::add_table(ByteReader& in) {
  const auto id = in.take<std::uint32_t>("table");
  in.check(dims_.empty() || dims_.rbegin()->first < id, "table", "must come in the order of their numbers");
  const auto size = in.take<std::uint32_t>("description");
  const TableSpec spec = decode_spec(in.take_raw(size, "description"));
  dims_[id] = spec.dim;
  auto shard = arc_->shard_maker()(spec);
  const auto status = in.take_enum("reason", wire::Status::kResourceExhausted);
  std::string reason = in.take_text("reason", kMaxText);
  const auto reached = in.take<std::uint32_t>("clock of ended jobs");
  ShardCopy::restore(*shard, in);
  shard_ = shard.get();
  slot_ = arc_->first_;
  arc_->apply(AddShardOp{.id = id, .shard = std::move(shard)});
  Arc::Table& table = *arc_->find(id);
  table.reached = reached;
  if (status != wire::Status::kOk) {
    table.failed_step = {status, std::move(reason)};
  }
  --tables_;
}

void ArcRestorer::add_tail(ByteReader& in) {
  constexpr const char* kField = "jobs";
  std::vector<std::unique_ptr<JobState>> jobs;
  for (auto left = in.take_between<std::uint32_t>(kField, 1, kMaxJobs); left != 0; --left) {
    auto job = std::make_unique<JobState>();
    job->restore(in, arc_->slots_, {arc_->first_, arc_->end_}, dims_);
    in.check(job->is_named != jobs.empty(), kField, "begin with the default job, and the others are named");
    in.check(!job->is_named || (job->number != kDefaultJob && std::ranges::find(jobs, job->number,
                                                                                [](const auto& other) {
                                                                                  return other->number;
                                                                                }) == jobs.end()),
             kField, "have a number twice");
    jobs.push_back(std::move(job));
  }
  arc_->jobs_.replace(std::move(jobs));
  is_whole_ = true;
}

std::unique_ptr<Arc> ArcRestorer::finish() {
  SHOAL_CHECK(is_whole_, "a copy of an arc ends after " + std::to_string(number_) + " pieces");
  return std::move(arc_);
}

}  // namespace shoal
