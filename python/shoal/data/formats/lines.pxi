# The cells of the next lines, which base/line_scan.h finds 64 bytes at a time. A parser takes the usual lines from
# here; lines that are long, at the end of the block or in any way unusual, are read byte by byte.

cdef extern from "base/line_scan.h" namespace "shoal" nogil:
    cdef cppclass LineScan:
        size_t lines
        uint16_t* first_stop
        uint16_t* stops

    void scan_lines(const uint8_t*, size_t, uint8_t, LineScan&)

cdef extern from "base/mix_block.h" namespace "shoal" nogil:
    void scramble_block(uint64_t*, size_t)

cdef extern from *:
    """
    // By the size of a cell with its separator, up to 9 or 5 bytes.
    static constexpr uint64_t kLowBytes[] = {0, 0, 0xff, 0xffff, 0xffffff, 0xffffffff, 0xffffffffff, 0xffffffffffff,
                                             0xffffffffffffff, 0xffffffffffffffff};
    static constexpr uint64_t kLength = 0x9e3779b97f4a7c15;  // what a byte adds to the seed: `token_key`
    static constexpr uint64_t kLengths[] = {0, 0, kLength, 2 * kLength, 3 * kLength, 4 * kLength, 5 * kLength,
                                            6 * kLength, 7 * kLength, 8 * kLength};
    // The product with it moves the cell's text to the upper end of a word, zeros below.
    static constexpr uint32_t kToTop[] = {0, 0, 1 << 24, 1 << 16, 1 << 8, 1};
    """
    const uint64_t* kLowBytes
    const uint64_t* kLengths
    const uint32_t* kToTop
    bint unlikely(bint) nogil  # of Cython: a hint to the compiler

# The lines that have been scanned, and the next one of them.
cdef struct ScannedLines:
    LineScan scan
    const uint8_t* text  # where the scan begins
    const uint8_t* next
    size_t size  # bytes of the lines of the scan
    size_t line  # the number of the next one in the scan
    bint pointed  # whether they hold a point or a plus sign


cdef inline size_t scanned_line(
    ScannedLines* lines, const uint8_t* p, const uint8_t* end, uint8_t separator, const uint16_t** stops
) noexcept nogil:
    """The number of cells of the line at p, 0 if it is not to be read here; their ends are text + stops[0 to n - 1].

    The eight bytes from the beginning of each cell may be read. ``lines.next`` is behind its newline.
    """
    cdef size_t first
    cdef size_t count
    while lines.next < p and lines.line < lines.scan.lines:  # blank lines are not read here
        lines.line += 1
        lines.next = lines.text + lines.scan.stops[lines.scan.first_stop[lines.line] - 1] + 1
    if lines.next != p or lines.line == lines.scan.lines:
        scan_lines(p, <size_t>(end - p), separator, lines.scan)
        lines.text, lines.line = p, 0
        if lines.scan.lines == 0:
            return 0
        lines.size = <size_t>lines.scan.stops[lines.scan.first_stop[lines.scan.lines] - 1] + 1
    first = lines.scan.first_stop[lines.line]
    count = lines.scan.first_stop[lines.line + 1] - first
    stops[0] = &lines.scan.stops[0] + first
    lines.next = lines.text + stops[0][count - 1] + 1
    lines.line += 1
    return count if end - lines.next >= 7 else 0


cdef inline void begin_lines(ScannedLines* lines) noexcept nogil:
    lines.next = NULL
    lines.line = lines.scan.lines = 0


cdef inline uint64_t unscrambled_cell(
    uint64_t seed, const uint8_t* p, size_t size, const uint8_t* end
) noexcept nogil:
    """What becomes the key of (field, token) by a `scramble`; `size` counts the token and its separator."""
    if unlikely(size > 9):
        return unscrambled_key(seed, p, size - 1, end)
    return (seed + kLengths[size]) ^ (load8(p) & kLowBytes[size])
