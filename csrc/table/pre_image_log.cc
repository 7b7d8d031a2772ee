#include "table/pre_image_log.h"

#include <algorithm>
#include <cstring>

namespace shoal {

std::vector<std::uint64_t> PreImageLog::missing(std::span<const std::uint64_t> hashes) {
  std::vector<std::byte*> logged(hashes.size());
  numbers_.find(hashes, logged);
  std::vector<std::uint64_t> missing;
  missing.reserve(hashes.size());
  for (std::size_t i = 0; i < hashes.size(); ++i) {
    if (logged[i] == nullptr) {
      missing.push_back(hashes[i]);
    }
  }
  return missing;
}

void PreImageLog::log(std::span<const std::uint64_t> hashes, std::span<const std::byte* const> pieces) {
  const auto there = static_cast<std::size_t>(
      std::ranges::count_if(pieces, [](const std::byte* piece) { return piece != nullptr; }));
  const std::size_t needed = (end_ + there) * piece_bytes_;
  if (needed > pieces_.bytes()) {
    pieces_.resize(std::max(Region::rounded(needed), pieces_.bytes() + pieces_.bytes() / 2));
  }
  numbers_.make_room(hashes.size());
  for (std::size_t i = 0; i < hashes.size(); ++i) {
    std::byte* const number = numbers_.insert(hashes[i]);
    const std::uint32_t at = pieces[i] == nullptr ? kNone : end_++;
    std::memcpy(number, &at, sizeof at);
    if (at != kNone) {
      std::memcpy(pieces_.data() + at * piece_bytes_, pieces[i], piece_bytes_);
    }
  }
}

void PreImageLog::log_from(SlotTable& table, std::span<const std::uint64_t> hashes) {
  const auto unlogged = missing(hashes);
  std::vector<std::byte*> rows(unlogged.size());
  table.find(unlogged, rows);
  log(unlogged, {rows.data(), rows.size()});
}

std::vector<PreImageLog::Piece> PreImageLog::entries() const {
  std::vector<Piece> pieces;
  pieces.reserve(numbers_.size());
  for (const SlotTable::Entry& entry : numbers_.entries()) {
    std::uint32_t at;
    std::memcpy(&at, entry.row, sizeof at);
    pieces.push_back({entry.hash, at == kNone ? nullptr : pieces_.data() + at * piece_bytes_});
  }
  return pieces;
}

std::vector<SlotTable::Entry> PreImageLog::laid_over(std::vector<SlotTable::Entry> now) const {
  const auto logged = entries();
  if (logged.empty()) {
    return now;
  }
  std::vector<SlotTable::Entry> then;
  then.reserve(now.size() + logged.size());
  auto next = now.begin();
  for (const Piece& piece : logged) {
    for (; next != now.end() && next->hash < piece.hash; ++next) {
      then.push_back(*next);
    }
    if (next != now.end() && next->hash == piece.hash) {
      ++next;
    }
    if (piece.bytes != nullptr) {
      then.push_back({piece.hash, piece.bytes});
    }
  }
  then.insert(then.end(), next, now.end());
  return then;
}

}  // namespace shoal
