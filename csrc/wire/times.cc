#include "wire/times.h"

#include <cstring>

#include "base/crc32c.h"

namespace shoal::wire {

void set_times(std::span<std::byte, sizeof(Header)> header, const ServerTimes& times) noexcept {
  Header changed;
  std::memcpy(&changed, header.data(), sizeof changed);
  changed.flags |= kTimed;
  changed.aux = pack_times(times);
  std::memcpy(header.data(), &changed, sizeof changed);
  changed.header_crc = crc32c(header.first<offsetof(Header, header_crc)>());
  std::memcpy(header.data() + offsetof(Header, header_crc), &changed.header_crc, sizeof changed.header_crc);
}

}  // namespace shoal::wire
