#include "tier/read_queue.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <exception>
#include <new>

#include "base/memory.h"

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <sys/syscall.h>
#if defined(__NR_io_uring_setup) && defined(IORING_FEAT_FAST_POLL)  // Linux 5.7: has IORING_OP_READ
#define SHOAL_IO_URING
#endif
#endif

namespace shoal {

namespace {

// 0, or an error number.
int read_fully(int file, const ReadQueue::Read& read, std::size_t done = 0) noexcept {
  while (done < read.bytes) {
    const ssize_t got =
        pread(file, read.to + done, read.bytes - done, static_cast<off_t>(read.offset + done));
    if (got < 0 && errno != EINTR) {
      return errno;
    }
    if (got == 0) {
      return ENODATA;
    }
    done += got > 0 ? static_cast<std::size_t>(got) : 0;
  }
  return 0;
}

}  // namespace

#ifdef SHOAL_IO_URING

// The two rings that a thread shares with the kernel (Axboe, "Efficient IO with io_uring", 2019): entries are
// submitted at the tail of the first, and completions taken from the head of the second.
class ReadQueue::Ring {
 public:
  // Null if the kernel has none for this process.
  static std::unique_ptr<Ring> make() noexcept {
    io_uring_params params{};
    const long file = syscall(__NR_io_uring_setup, kDepth, &params);
    if (file < 0) {
      return nullptr;
    }
    try {
      if ((params.features & IORING_FEAT_SINGLE_MMAP) != 0) {
        return std::unique_ptr<Ring>(new Ring(static_cast<int>(file), params));
      }
    } catch (const std::bad_alloc&) {
    }
    close(static_cast<int>(file));
    return nullptr;
  }
  ~Ring() { close(file_); }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  int run(int file, std::span<const Read> reads, const std::function<void(std::size_t)>& use) {
    int error = 0;
    std::exception_ptr thrown;
    std::size_t next = 0;
    unsigned in_flight = 0;
    unsigned unsubmitted = 0;
    while (in_flight != 0 || (next < reads.size() && error == 0 && thrown == nullptr)) {
      while (next < reads.size() && in_flight < kDepth && error == 0 && thrown == nullptr) {
        push(file, reads[next], next);
        ++next;
        ++in_flight;
        ++unsubmitted;
      }
      // A quarter of them at a time: fewer system calls, and the disk still has plenty to do.
      const unsigned wanted = std::max(1U, next == reads.size() ? in_flight / 2 : in_flight / 4);
      const long entered = syscall(__NR_io_uring_enter, file_, unsubmitted, wanted,
                                   static_cast<unsigned>(IORING_ENTER_GETEVENTS), nullptr, 0);
      if (entered >= 0) {
        unsubmitted -= static_cast<unsigned>(entered);
      } else if (errno != EINTR && errno != EAGAIN && errno != EBUSY) {
        // Nothing was submitted: entries that the kernel has not seen are taken back.
        error = errno;
        in_flight -= unsubmitted;
        store(sq_tail_, load(sq_tail_) - unsubmitted);
        unsubmitted = 0;
      }
      std::uint32_t head = load(cq_head_);
      for (const std::uint32_t tail = load(cq_tail_); head != tail; ++head) {
        const io_uring_cqe& done = completions_[head & cq_mask_];
        const auto i = static_cast<std::size_t>(done.user_data);
        const int result = done.res;
        --in_flight;
        // A part of a read, or none where the ring was short of memory, is finished here.
        const int failed = result == static_cast<int>(reads[i].bytes) ? 0
                           : result < 0 && result != -EAGAIN && result != -EINTR
                               ? -result
                               : read_fully(file, reads[i], static_cast<std::size_t>(std::max(0, result)));
        if (failed != 0) {
          error = failed;
        } else if (error == 0 && thrown == nullptr) {
          try {
            use(i);
          } catch (...) {
            thrown = std::current_exception();
          }
        }
      }
      store(cq_head_, head);
    }
    if (thrown != nullptr) {
      std::rethrow_exception(thrown);
    }
    return error;
  }

 private:
  Ring(int file, const io_uring_params& params)
      : file_(file),
        rings_(file, IORING_OFF_SQ_RING,
               std::max<std::size_t>(params.sq_off.array + params.sq_entries * sizeof(std::uint32_t),
                                     params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe)),
               FileMapping::Access::kWrite),
        submissions_map_(file, IORING_OFF_SQES, params.sq_entries * sizeof(io_uring_sqe),
                         FileMapping::Access::kWrite),
        submissions_(reinterpret_cast<io_uring_sqe*>(submissions_map_.data())),
        sq_tail_(number(params.sq_off.tail)),
        sq_mask_(*number(params.sq_off.ring_mask)),
        sq_array_(number(params.sq_off.array)),
        cq_head_(number(params.cq_off.head)),
        cq_tail_(number(params.cq_off.tail)),
        cq_mask_(*number(params.cq_off.ring_mask)),
        completions_(reinterpret_cast<io_uring_cqe*>(rings_.data() + params.cq_off.cqes)) {}

  std::uint32_t* number(std::uint32_t offset) const noexcept {
    return reinterpret_cast<std::uint32_t*>(rings_.data() + offset);
  }
  static std::uint32_t load(std::uint32_t* at) noexcept {
    return std::atomic_ref(*at).load(std::memory_order_acquire);
  }
  static void store(std::uint32_t* at, std::uint32_t value) noexcept {
    std::atomic_ref(*at).store(value, std::memory_order_release);
  }

  void push(int file, const Read& read, std::size_t number) noexcept {
    const std::uint32_t tail = load(sq_tail_);
    const std::uint32_t at = tail & sq_mask_;
    io_uring_sqe& entry = submissions_[at];
    std::memset(&entry, 0, sizeof entry);
    entry.opcode = IORING_OP_READ;
    entry.fd = file;
    entry.off = read.offset;
    entry.addr = reinterpret_cast<std::uintptr_t>(read.to);
    entry.len = read.bytes;
    entry.user_data = number;
    sq_array_[at] = at;
    store(sq_tail_, tail + 1);
  }

  int file_;
  FileMapping rings_;
  FileMapping submissions_map_;
  io_uring_sqe* submissions_;
  std::uint32_t* sq_tail_;
  std::uint32_t sq_mask_;
  std::uint32_t* sq_array_;
  std::uint32_t* cq_head_;
  std::uint32_t* cq_tail_;
  std::uint32_t cq_mask_;
  io_uring_cqe* completions_;
};

#else

class ReadQueue::Ring {
 public:
  static std::unique_ptr<Ring> make() noexcept { return nullptr; }
  int run(int, std::span<const Read>, const std::function<void(std::size_t)>&) { return ENOSYS; }
};

#endif

ReadQueue::ReadQueue(Engine engine) : ring_(engine == Engine::kBest ? Ring::make() : nullptr) {
  if (ring_ == nullptr) {
    pool_ = std::make_unique<ThreadPool>(kThreads);
  }
}

ReadQueue::~ReadQueue() = default;

int ReadQueue::run(int file, std::span<const Read> reads, const std::function<void(std::size_t)>& use) {
  if (ring_ != nullptr) {
    return ring_->run(file, reads, use);
  }
  std::atomic<int> error{0};
  pool_->run(reads.size(), [&](std::size_t i) {
    const int failed = error.load() != 0 ? 0 : read_fully(file, reads[i]);
    if (failed != 0) {
      error.store(failed);
    }
  });
  for (std::size_t i = 0; i < reads.size() && error.load() == 0; ++i) {
    use(i);
  }
  return error.load();
}

}  // namespace shoal
