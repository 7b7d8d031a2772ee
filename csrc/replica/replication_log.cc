// A stream sends its records in order, keeps those that are not acknowledged, and sends them again from the
// first one when its connection was replaced or the backup reports a gap. If there is nothing to send, it
// sends keep-alive messages, which name the last record: a lost record is noticed after kAliveMs.
//
// A copy of an arc travels in its stream, between the records: COPY_BEGIN at the position as of which the arc
// is copied, its pieces (replica/arc_copy.h) in chunks, no faster than the copy rate, and COPY_END. From
// COPY_BEGIN on the stream has the arc's records as well, which the backup keeps: where they become many, the
// copy rate is ignored. The arc is in sync once the backup reports that it has executed them.
//
// Records have *stamps*, viewstamps of Oki and Liskov (PODC'88): a stamp is above all those of former
// primaries of the same arcs, and of the log's records before. So the copy of the greatest stamp has all that
// any has, and serves next; it sends the others what they lack, before its own records. For this a backup
// keeps the records that other streams have too, until they are below the *floor*: acknowledged by all
// streams. Each message names it.

#include "replica/replication_log.h"

#include <algorithm>
#include <utility>

#include "base/byte_stream.h"

namespace shoal {

using wire::Header;
using wire::Record;
using wire::Status;

std::size_t LogRecord::bytes() const noexcept {
  std::size_t bytes = sizeof(Header);
  for (std::size_t i = 0; i < count; ++i) {
    bytes += frames.at(i).bytes.size();
  }
  return bytes;
}

bool ReplicationLog::Stream::is_in_sync(std::size_t slot) const noexcept {
  return std::ranges::any_of(in_sync,
                             [&](const SlotRange& range) { return slot >= range.first && slot < range.end; });
}

ReplicationLog::Stream* ReplicationLog::find(StreamId id) noexcept {
  const auto found = streams_.find(id);
  return found == streams_.end() ? nullptr : &found->second;
}

ReplicationLog::Stream& ReplicationLog::open(StreamId id, const std::string& address,
                                             const std::string& server_key) {
  Stream& stream = streams_[id];
  stream.id = id;
  stream.address = address;
  stream.server_key = server_key;
  stream.heard = stream.last_sent = now_;
  return stream;
}

void ReplicationLog::close(StreamId id) { streams_.erase(id); }

// --- appending --------------------------------------------------------------------------------------------

bool ReplicationLog::touches(const Stream& stream, std::span<const SlotRange> arcs) noexcept {
  return arcs.empty() ||
         std::ranges::any_of(arcs, [&](const SlotRange& arc) { return stream.has(arc.first); });
}

bool ReplicationLog::have_several(std::span<const SlotRange> arcs) const noexcept {
  return streams_.size() > 1 && (arcs.empty() || std::ranges::any_of(arcs, [&](const SlotRange& arc) {
                                   return std::ranges::count_if(streams_, [&](const auto& one) {
                                            return one.second.has(arc.first);
                                          }) > 1;
                                 }));
}

void ReplicationLog::add(Stream& stream, Entry entry) {
  const std::size_t bytes = entry.record->bytes();
  const bool is_kept = stream.copy && stream.copy->has_begun && entry.record->kind == Record::kRequest;
  stream.entries.push_back(std::move(entry));
  stream.bytes += bytes;
  if (is_kept) {
    stream.copy->kept_bytes += bytes;
  }
}

void ReplicationLog::add_copy(Stream& stream, Record kind, SharedFrame frame) {
  LogRecord record{.kind = kind, .count = 1};
  record.frames[0] = std::move(frame);
  // It is acknowledged before any record that is appended from now on, so that nothing else has to wait for
  // it.
  add(stream, {.record = std::make_shared<const LogRecord>(std::move(record)),
               .position = position_ + 1,
               .stamp = stamp_ + 1});
}

void ReplicationLog::begin_copy(Stream& stream, std::shared_ptr<ArcCopy> source) {
  Copy& copy = *stream.copy;
  copy.total = source->bytes();
  ByteWriter head;
  head.bytes().reserve(32);
  head.put(std::uint64_t{copy.range.first});
  head.put(std::uint64_t{copy.range.end});
  head.put(copy.total);
  const auto bytes = std::make_shared<const std::vector<std::byte>>(head.take());
  add_copy(stream, Record::kCopyBegin, {.bytes = *bytes, .owner = bytes});
  copy.source = std::move(source);
  copy.has_begun = true;
}

std::size_t ReplicationLog::take_pieces(Copy& copy, std::size_t allowed) {
  std::size_t taken = 0;
  while (taken < allowed && copy.can_take()) {
    copy.pieces.push_back(std::make_shared<const std::vector<std::byte>>(copy.source->next()));
    taken += copy.pieces.back()->size();
    copy.taken_bytes += copy.pieces.back()->size();
    if (copy.source->done()) {
      copy.source.reset();
    }
  }
  return taken;
}

std::size_t ReplicationLog::append_chunks(Stream& stream, std::uint64_t allowed) {
  Copy& copy = *stream.copy;
  std::size_t appended = 0;
  while (!copy.pieces.empty() && appended < allowed && stream.bytes < kMaxCopyAhead) {
    const Copy::Piece piece = copy.pieces.front();
    const auto chunk =
        std::span(*piece).subspan(copy.offset, std::min(kChunkBytes, piece->size() - copy.offset));
    add_copy(stream, Record::kCopyChunk, {.bytes = chunk, .owner = piece});
    copy.offset += chunk.size();
    copy.bytes += chunk.size();
    appended += chunk.size();
    if (copy.offset == piece->size()) {
      copy.taken_bytes -= piece->size();
      copy.pieces.pop_front();
      copy.offset = 0;
    }
  }
  if (copy.source == nullptr && copy.pieces.empty()) {
    add_copy(stream, Record::kCopyEnd, {});
    copy.end_sequence = stream.last();
  }
  return appended;
}

// --- commits ----------------------------------------------------------------------------------------------

std::uint64_t ReplicationLog::committed() const noexcept {
  std::uint64_t position = position_;
  for (const auto& [id, stream] : streams_) {
    if (!stream.entries.empty()) {
      position = std::min(position, stream.entries.front().position - 1);
    }
  }
  return position;
}

std::uint64_t ReplicationLog::floor() const noexcept {
  std::uint64_t stamp = stamp_;
  for (const auto& [id, stream] : streams_) {
    if (!stream.entries.empty()) {
      stamp = std::min(stamp, stream.entries.front().stamp - 1);
    }
  }
  return stamp;
}

bool ReplicationLog::is_stopped() const noexcept {
  return std::ranges::any_of(streams_, [&](const auto& stream) {
    return stream.second.stopped() || now_ - stream.second.heard > kSilentMs;
  });
}

std::size_t ReplicationLog::unacknowledged_bytes() const noexcept {
  std::size_t greatest = 0;
  for (const auto& [id, stream] : streams_) {
    greatest = std::max(greatest, stream.bytes);
  }
  return greatest;
}

// --- sending ----------------------------------------------------------------------------------------------

bool ReplicationLog::next_message(Stream& stream, StreamMessage& message) noexcept {
  if (stream.stopped()) {
    return false;
  }
  message.count = 0;
  const std::uint64_t next = stream.sent + 1;
  if (next > stream.last() || stream.sent_bytes > kMaxSentBytes) {
    if (!stream.alive_due) {
      return false;
    }
    stream.alive_due = false;
    // The backup has all up to the stamp, if it has all that was sent.
    Header header = wire::RecordHeader{.stream = stream.id,
                                       .position = stream.sent,
                                       .stamp = next > stream.last() ? stamp_ : 0,
                                       .floor = floor()}
                        .header();
    wire::encode(header, {}, message.header);
    stream.last_sent = now_;
    return true;
  }
  const Entry& entry = stream.entries[next - stream.acknowledged - 1];
  const LogRecord& record = *entry.record;
  wire::RecordHeader about{.stream = stream.id, .position = next, .kind = record.kind};
  if (record.kind != Record::kCopyChunk && record.kind != Record::kCopyEnd) {
    about.stamp = entry.stamp;
    about.floor = floor();
    about.is_shared = entry.is_shared;
  }
  std::size_t covered = record.count;  // frames
  if (record.kind == Record::kRequest) {
    about.status =
        entry.is_whole ? static_cast<std::uint32_t>(record.status) : wire::RecordHeader::kNotCompared;
    about.end_slot = record.end_slot;
    about.applied = entry.applied;
    covered = 0;  // it has a header of its own
  }
  std::array<wire::Frame, wire::kMaxFrames> payload;
  for (std::size_t i = 0; i < record.count; ++i) {
    message.frames.at(i) = record.frames.at(i);
    payload.at(i) = record.frames.at(i).bytes;
  }
  message.count = record.count;
  Header header = about.header();
  wire::encode(header, std::span(payload).first(covered), message.header);
  stream.sent = next;
  stream.sent_bytes += record.bytes();
  stream.last_sent = now_;
  stream.alive_due = false;
  return true;
}

void ReplicationLog::acknowledge(Stream& stream, const wire::RecordReply& reply,
                                 std::string_view text) noexcept {
  stream.heard = now_;
  if (reply.status == Status::kFenced) {
    stream.fenced = true;
    return;
  }
  // Any other status refuses one message, damaged on its way, and repeats its number.
  const bool is_position =
      reply.status == Status::kOk || reply.status == Status::kRetry || reply.status == Status::kInternal;
  // The backup has executed nothing that was not sent; a greater number belongs to no record.
  if (is_position && reply.position > stream.acknowledged && reply.position <= stream.last()) {
    while (stream.acknowledged < reply.position) {
      const std::size_t bytes = stream.entries.front().record->bytes();
      stream.entries.pop_front();
      stream.bytes -= bytes;
      ++stream.acknowledged;
      if (stream.acknowledged <= stream.sent) {
        stream.sent_bytes -= bytes;
      }
    }
    stream.sent = std::max(stream.sent, stream.acknowledged);
    stream.gap_ms = kGapMs;
    stream.rewind_at = kNever;
  }
  if (is_position && stream.copy && stream.copy->end_sequence != 0 &&
      reply.position >= stream.copy->end_sequence && reply.arrived == stream.copy->range.first + 1) {
    // The vectors have room: the assignment that listed the arc has reserved it.
    stream.in_sync.push_back(stream.copy->range);
    std::ranges::sort(stream.in_sync, {}, &SlotRange::first);
    stream.arrived.push_back(stream.copy->range);
    stream.copy.reset();
  }
  if (reply.status == Status::kRetry || !is_position) {
    // Perhaps this is the last report: the backup makes another one only when another message arrives.
    stream.rewind_at = std::min(stream.rewind_at, stream.rewound + stream.gap_ms);
    rewind_if_due(stream);
  } else if (reply.status == Status::kInternal && stream.fault.empty()) {
    try {
      stream.fault = text.empty() ? "the backup has diverged" : std::string(text);
    } catch (const std::bad_alloc&) {
      stream.fault = "diverged";  // short enough to need no memory
    }
  }
}

void ReplicationLog::rewind(Stream& stream) noexcept {
  stream.sent = stream.acknowledged;
  stream.sent_bytes = 0;
  stream.rewound = now_;
  stream.rewind_at = kNever;
}

void ReplicationLog::rewind_if_due(Stream& stream) noexcept {
  if (stream.rewind_at <= now_) {
    rewind(stream);
    stream.gap_ms = std::min(2 * stream.gap_ms, kMaxGapMs);
  }
}

void ReplicationLog::stop(const char* why) noexcept {
  for (auto& [id, stream] : streams_) {
    try {
      stream.fault = why;
    } catch (const std::bad_alloc&) {
      stream.fault = "no memory";  // short enough to need none
    }
  }
}

void ReplicationLog::on_time(Milliseconds now) noexcept {
  now_ = std::max(now_, now);
  for (auto& [id, stream] : streams_) {
    if (stream.stopped()) {
      continue;
    }
    rewind_if_due(stream);
    if (now_ - stream.last_sent >= kAliveMs) {
      stream.alive_due = true;
    }
  }
}

Milliseconds ReplicationLog::next_time() const noexcept {
  Milliseconds next = kNever;
  for (const auto& [id, stream] : streams_) {
    if (stream.stopped()) {
      continue;
    }
    next = std::min({next, stream.last_sent + kAliveMs, stream.rewind_at});
  }
  return next;
}

}  // namespace shoal
