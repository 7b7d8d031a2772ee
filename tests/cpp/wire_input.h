// One input of the wire fuzzer: a message made of arbitrary bytes, and the invariants of its decoding.
//
//   byte 0        bit 0: replies are due; bit 1: sizes and checksums of the header are corrected first, so
//                 that the later checks are reached
//   then, repeatedly: u16 length, the bytes of a frame; the last frame may be truncated
//
// tests/fuzz/wire/fuzz_wire.cc feeds it from libFuzzer, wire_corpus_test.cc from the committed corpus;
// tests/cluster/protocol/test_wire.py reads the same files.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "base/crc32c.h"
#include "wire/wire.h"

namespace shoal::wire {

struct Input {
  static constexpr std::uint64_t kLimit = 4096;  // of the payload: small, so that small inputs meet it

  Limits limits;
  std::vector<std::vector<std::byte>> frames;

  explicit Input(std::span<const std::byte> bytes) {
    const unsigned mode = bytes.empty() ? 0 : std::to_integer<unsigned>(bytes[0]);
    limits = {.payload_bytes = kLimit, .replies = (mode & 1U) != 0};
    for (std::size_t at = 1; at + 2 <= bytes.size();) {
      std::size_t size =
          std::to_integer<std::size_t>(bytes[at]) + 256 * std::to_integer<std::size_t>(bytes[at + 1]);
      at += 2;
      size = std::min(size, bytes.size() - at);
      frames.emplace_back(bytes.begin() + static_cast<std::ptrdiff_t>(at),
                          bytes.begin() + static_cast<std::ptrdiff_t>(at + size));
      at += size;
    }
    if ((mode & 2U) != 0) {
      set_right();
    }
  }

 private:
  void put(std::size_t at, std::uint32_t number) {
    std::memcpy(frames[0].data() + at, &number, sizeof number);
  }

  void set_right() {
    if (frames.empty() || frames[0].size() != sizeof(Header)) {
      return;
    }
    std::size_t bytes = 0;
    std::uint32_t crc = 0;
    for (std::size_t i = 1; i < frames.size(); ++i) {
      bytes += frames[i].size();
      crc = crc32c(frames[i], crc);
    }
    Header header;
    std::memcpy(&header, frames[0].data(), sizeof header);
    if (header.op == Op::kReplicate && !header.is_reply() && Record{header.aux} == Record::kRequest) {
      bytes = 0;  // a nested message has sizes and checksums of its own
      crc = 0;
    }
    put(offsetof(Header, payload_bytes), static_cast<std::uint32_t>(bytes));
    put(offsetof(Header, payload_crc), crc);
    put(offsetof(Header, header_crc), crc32c(std::span(frames[0]).first(offsetof(Header, header_crc))));
  }
};

template <class T>
bool is_aligned_and_ascends(std::span<const T> values) {
  for (std::size_t i = 1; i < values.size(); ++i) {
    if (values[i - 1] >= values[i]) {
      return false;
    }
  }
  return reinterpret_cast<std::uintptr_t>(values.data()) % alignof(T) == 0;
}

// "" where all that the header of the decoder promises holds, else what does not. `good`: the message was
// taken.
inline const char* check_input(std::span<const std::byte> bytes, bool& good) {
  const Input input(bytes);
  const std::vector<Frame> frames(input.frames.begin(), input.frames.end());
  Decoded got;
  const Fault fault = decode(frames, input.limits, got);
  good = !fault;
  if (fault) {
    if (fault.message().empty()) {
      return "a fault without a message";
    }
    if (got.header.magic != 0 && std::memcmp(&got.header, frames[0].data(), sizeof(Header)) != 0) {
      return "a header that was not sent";
    }
    return "";
  }
  const Header& header = got.header;
  const std::uint64_t cells = std::uint64_t{header.count} * header.dim;
  if (!is_aligned_and_ascends(got.hashes) || !is_aligned_and_ascends(got.tables)) {
    return "order or alignment";
  }
  if (!got.hashes.empty() && got.hashes.size() != header.count) {
    return "as many hashes as the header says";
  }
  if (got.values.size() > Input::kLimit || (!got.floats().empty() && got.floats().size() != cells)) {
    return "as many values as the header says, within the limit";
  }
  if (got.digest.size() != ((header.flags & kDigest) != 0 ? 16U : 0U)) {
    return "a digest where there is one";
  }
  // Encoding the decoded message gives the same message.
  Header again = header;
  std::array<std::byte, sizeof(Header)> head;
  encode(again, std::span(frames).subspan(got.nested.empty() ? 1 : frames.size()), head);
  if (std::memcmp(head.data(), frames[0].data(), head.size()) != 0) {
    return "encoding what was decoded";
  }
  if (!got.nested.empty() &&
      (got.nested.size() + 1 != frames.size() || got.nested[0].size() < sizeof(Header))) {
    return "a nested message with a header";
  }
  // And the same bytes elsewhere in memory are the same message.
  std::vector<std::vector<std::byte>> moved;
  std::vector<Frame> views;
  for (const Frame frame : frames) {
    moved.emplace_back(frame.size() + 1);
    std::copy(frame.begin(), frame.end(), moved.back().begin() + 1);
  }
  for (const auto& frame : moved) {
    views.push_back(std::span(frame).subspan(1));
  }
  Decoded other;
  if (decode(views, input.limits, other)) {
    return "the same bytes, not aligned";
  }
  const auto same = [](const auto& a, const auto& b) {
    return a.size_bytes() == b.size_bytes() &&
           (a.empty() || std::memcmp(a.data(), b.data(), a.size_bytes()) == 0);
  };
  if (!same(got.hashes, other.hashes) || !same(got.values, other.values) ||
      !same(got.numbers, other.numbers) || !same(got.tables, other.tables) || !same(got.slots, other.slots) ||
      got.text != other.text) {
    return "the same bytes, not aligned: another message";
  }
  return "";
}

}  // namespace shoal::wire
