// Settings of the C library's heap for servers.

#pragma once

namespace shoal {

// Makes the heap of the whole process keep freed memory for reuse, permanently. By default glibc returns
// large freed blocks to the system; messages of megabytes would then be written to fresh pages each time,
// which takes longer than receiving them. No effect with other C libraries.
void keep_freed_memory() noexcept;

}  // namespace shoal
