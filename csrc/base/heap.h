// The C library's heap, where its habits do not suit a server's.

#pragma once

namespace shoal {

// Has the heap keep what is freed for whoever asks next, of the whole process and for good. glibc gives large blocks back
// to the system as they are freed: where messages of megabytes come and go, each is then made of fresh pages, which takes
// longer than receiving it. Elsewhere nothing happens.
void keep_freed_memory() noexcept;

}  // namespace shoal
