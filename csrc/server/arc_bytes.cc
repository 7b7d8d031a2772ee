// Arc: its whole state as bytes and back, to make an equal arc at another endpoint.
//
//   piece   u32 magic | u8 version | u8 kind | u16 0 | u32 number | u32 crc32c of the body | body
//
//   kHead   u32 slots of the table, first, end | u64 budget per slot (0: none) | u32 tables
//   kTable  u32 number | u32 length, description (shard/spec_bytes.h) | text why a step was not made | state (Shard::save_state)
//   kSlot   the state of a slot, in the order of the slots, after the piece of its table
//   kTail   job, mode, clocks, windows, last ticks, pending pushes; the last piece

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/byte_stream.h"
#include "base/check.h"
#include "base/crc32c.h"
#include "server/arc.h"
#include "shard/spec_bytes.h"

namespace shoal {

namespace {

constexpr std::uint32_t kMagic = 0x43524153;  // "SARC"
constexpr std::uint8_t kVersion = 1;
constexpr std::size_t kHeadBytes = 16;
constexpr std::size_t kMaxText = 4096;
enum class Kind : std::uint8_t { kHead, kTable, kSlot, kTail };

std::vector<std::byte> finished(Kind kind, std::size_t number, ByteWriter& out) {
  std::vector<std::byte> piece = out.take();
  ByteWriter head;
  head.put(kMagic);
  head.put(kVersion);
  head.put(kind);
  head.put(std::uint16_t{0});
  head.put(static_cast<std::uint32_t>(number));
  head.put(crc32c(std::span(piece).subspan(kHeadBytes)));
  std::ranges::copy(head.bytes(), piece.begin());
  return piece;
}

ByteWriter begun() {
  ByteWriter out;
  out.extend(kHeadBytes);
  return out;
}

// The pieces in their order.
class Pieces {
 public:
  explicit Pieces(std::span<const std::span<const std::byte>> pieces) : pieces_(pieces) {}

  ByteReader next(Kind kind) {
    SHOAL_CHECK(number_ < pieces_.size(),
                "a copy of an arc ends after " + std::to_string(number_) + " pieces");
    const auto piece = pieces_[number_];
    ByteReader head(piece, "a piece of an arc");
    head.check(head.take<std::uint32_t>("magic") == kMagic, "magic", "is not that of a piece");
    const auto version = head.take<std::uint8_t>("version");
    head.check(version == kVersion, "version",
               "is " + std::to_string(version) + ", and this server reads " + std::to_string(kVersion));
    head.check(head.take_enum("kind", Kind::kTail) == kind && head.take<std::uint16_t>("kind") == 0, "kind",
               "is not that of piece " + std::to_string(number_));
    head.check(head.take<std::uint32_t>("number") == number_, "number", "is not " + std::to_string(number_));
    const auto crc = head.take<std::uint32_t>("checksum");
    const auto body = piece.subspan(kHeadBytes);
    head.check(crc32c(body) == crc, "checksum", "does not fit piece " + std::to_string(number_));
    ++number_;
    return {body, "a copy of an arc"};
  }
  void done() const {
    SHOAL_CHECK(number_ == pieces_.size(),
                "a copy of an arc goes on after its last piece, number " + std::to_string(number_ - 1));
  }

 private:
  std::span<const std::span<const std::byte>> pieces_;
  std::size_t number_ = 0;
};

}  // namespace

std::vector<std::vector<std::byte>> Arc::save() const {
  std::vector<std::vector<std::byte>> pieces;
  const auto add = [&](Kind kind, ByteWriter& out) { pieces.push_back(finished(kind, pieces.size(), out)); };
  for (const auto& [id, table] : tables_) {
    SHOAL_CHECK(
        table.loading == nullptr && !table.shard->has_snapshot(),
        "table " + std::to_string(id) + " is being saved or loaded: copy the arc when that has ended");
  }
  ByteWriter head = begun();
  head.put(static_cast<std::uint32_t>(slots_.count()));
  head.put(static_cast<std::uint32_t>(first_));
  head.put(static_cast<std::uint32_t>(end_));
  head.put(slot_bytes().value_or(0));
  head.put(static_cast<std::uint32_t>(tables_.size()));
  add(Kind::kHead, head);
  for (const auto& [id, table] : tables_) {
    ByteWriter out = begun();
    out.put(id);
    const auto spec = encode(table.shard->spec());
    out.put(static_cast<std::uint32_t>(spec.size()));
    out.put_raw(spec);
    out.put_text(std::string_view(table.full).substr(0, kMaxText));
    table.shard->save_state(out);
    add(Kind::kTable, out);
    for (std::size_t s = first_; s < end_; ++s) {
      ByteWriter slot = begun();
      table.shard->save_state(Slot{static_cast<std::uint32_t>(s)}, slot);
      add(Kind::kSlot, slot);
    }
  }
  ByteWriter tail = begun();
  tail.put(job_);
  tail.put(mode_);
  tail.put(staleness_);
  tail.put(static_cast<std::uint8_t>(mean_ ? 1 : 0));
  tail.put(applied_);
  clocks_.save(tail);
  // A rank's window is made by its first call, also where that was refused: one without a write is not written.
  std::size_t ranks = dedup_.size();
  while (ranks != 0 && (dedup_[ranks - 1] == nullptr || dedup_[ranks - 1]->is_new())) {
    --ranks;
  }
  tail.put(static_cast<std::uint32_t>(ranks));
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    const bool has_window = dedup_[rank] != nullptr && !dedup_[rank]->is_new();
    tail.put(static_cast<std::uint8_t>(has_window ? 1 : 0));
    if (has_window) {
      dedup_[rank]->save(tail);
    }
  }
  ranks = tick_tables_.size();
  while (ranks != 0 && tick_tables_[ranks - 1].empty()) {
    --ranks;
  }
  tail.put(static_cast<std::uint32_t>(ranks));
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    tail.put_array(std::span<const std::uint32_t>(tick_tables_[rank]));
  }
  pending_.save(tail);
  add(Kind::kTail, tail);
  return pieces;
}

std::unique_ptr<Arc> Arc::restore(std::span<const std::span<const std::byte>> given) {
  Pieces pieces(given);
  ByteReader head = pieces.next(Kind::kHead);
  const Slots slots(head.take<std::uint32_t>("slots"));  // checks the number
  const auto first =
      head.take_between<std::uint32_t>("first slot", 0, static_cast<std::uint32_t>(slots.count()));
  const auto end =
      head.take_between<std::uint32_t>("end slot", first, static_cast<std::uint32_t>(slots.count()));
  std::unique_ptr<Arc> arc(new Arc(slots, first, end));
  if (const auto slot_bytes = head.take<std::uint64_t>("budget"); slot_bytes != 0) {
    head.check(slot_bytes <= std::uint64_t{1} << 48U, "budget", "is beyond any machine");
    arc->set_memory(slot_bytes);
  }
  auto tables = head.take<std::uint32_t>("tables");
  head.done();
  std::map<std::uint32_t, std::size_t> dims;
  for (; tables != 0; --tables) {
    ByteReader in = pieces.next(Kind::kTable);
    const auto id = in.take<std::uint32_t>("table");
    in.check(dims.empty() || dims.rbegin()->first < id, "table", "must come in the order of their numbers");
    const auto size = in.take<std::uint32_t>("description");
    const TableSpec spec = decode_spec(in.take_raw(size, "description"));
    dims[id] = spec.dim;
    auto shard = arc->make_shard(spec);
    std::string full = in.take_text("reason", kMaxText);
    shard->restore_state(in);
    in.done();
    for (std::size_t s = first; s < end; ++s) {
      ByteReader slot = pieces.next(Kind::kSlot);
      shard->restore_state(Slot{static_cast<std::uint32_t>(s)}, slot);
      slot.done();
    }
    arc->add_table(id, std::move(shard));
    arc->find(id)->full = std::move(full);
  }
  ByteReader tail = pieces.next(Kind::kTail);
  arc->job_ = tail.take<std::uint32_t>("job");
  arc->mode_ = tail.take_enum("mode", Mode::kAsp);
  arc->staleness_ = tail.take<std::uint32_t>("staleness");
  arc->mean_ = tail.take_flag("mean");
  arc->applied_ = tail.take<std::uint32_t>("applied");
  arc->clocks_ = Clocks::restore(tail);
  arc->dedup_.resize(tail.take_between<std::uint32_t>("windows", 0, Clocks::kMaxWorkers));
  for (auto& window : arc->dedup_) {
    if (tail.take_flag("window")) {
      window = std::make_unique<DedupWindow>(first, end);
      window->restore(tail);
    }
  }
  arc->tick_tables_.resize(tail.take_between<std::uint32_t>("last ticks", 0, Clocks::kMaxWorkers));
  for (auto& named : arc->tick_tables_) {
    named = tail.take_array<std::uint32_t>("last tick");
  }
  arc->pending_ = PendingPushes::restore(tail, slots, {first, end}, dims);
  tail.check(arc->mode_ != Mode::kBsp || arc->pending_.empty() || arc->pending_.next() >= arc->applied_,
             "pending pushes", "are of a clock that is applied");
  tail.done();
  pieces.done();
  return arc;
}

}  // namespace shoal
