# Criteo's logs: a label, 13 integers and 26 categories, separated by tabs.

cdef extern from "text/criteo.h" namespace "shoal::text" nogil:
    cdef cppclass CriteoTables:
        span[const_uint64_t] floors
        span[const_uint16_t] cells
        span[Byte] small
        span[const_uint64_t] numbers

    const size_t INTEGERS "shoal::text::CriteoTables::kIntegers"
    const size_t SMALL_INTEGERS "shoal::text::CriteoTables::kSmallIntegers"
    const size_t CELLS "shoal::text::CriteoTables::kCells"

    Stop criteo_lines "shoal::text::parse_criteo"(span[Byte], size_t, Target&, bint, const CriteoTables&) noexcept


cdef Stop read_criteo(span[Byte] block, size_t start, Target* out, bint skip, const void* known) noexcept nogil:
    return criteo_lines(block, start, out[0], skip, (<const CriteoTables*>known)[0])


cdef uint16_t greatest(const uint16_t[::1] cells) noexcept nogil:
    cdef uint16_t most = 0
    cdef Py_ssize_t i
    for i in range(cells.shape[0]):
        most = max(most, cells[i])
    return most


def parse_criteo(
    const unsigned char[::1] block, size_t start, arrays, const uint64_t[::1] floors, const uint16_t[::1] cells,
    const uint8_t[::1] small, const uint64_t[:, ::1] numbers, bint skip,
):
    """Append Criteo lines to ``arrays``; every value is 1, and values are not written.

    ``floors`` ascends from 0 and ends with 2^64 - 1: bucket b holds the integers in [floors[b], floors[b + 1]).
    ``cells`` has the bucket of the least integer in each cell of csrc/text/criteo.h, ``small`` that of each integer
    below 10,000, and ``numbers[c, b]`` is the key of bucket b in integer column c + 1. ``keys`` is full when fewer
    than 39 are left.
    """
    cdef CriteoTables tables
    if <size_t>cells.shape[0] < CELLS:
        raise ValueError(f"cells must cover 63 bits, {CELLS} entries, got {cells.shape[0]}")
    if <size_t>small.shape[0] != SMALL_INTEGERS:
        raise ValueError(f"small must cover {SMALL_INTEGERS} integers, got {small.shape[0]}")
    if <size_t>numbers.shape[0] != INTEGERS or numbers.shape[1] != floors.shape[0] - 1:
        raise ValueError(
            f"numbers must be {INTEGERS} x {floors.shape[0] - 1}, got {numbers.shape[0]} x {numbers.shape[1]}"
        )
    if floors.shape[0] <= UINT8_MAX + 1:
        raise ValueError(f"small may name any of {UINT8_MAX + 1} buckets, got {floors.shape[0] - 1}")
    if floors[floors.shape[0] - 1] != UINT64_MAX:
        raise ValueError("floors must end with 2^64 - 1")
    if greatest(cells) >= floors.shape[0] - 1:
        raise ValueError(f"cells must name buckets below {floors.shape[0] - 1}, got {greatest(cells)}")
    tables.floors = span[const_uint64_t](&floors[0], <size_t>floors.shape[0])
    tables.cells = span[const_uint16_t](&cells[0], <size_t>cells.shape[0])
    tables.small = span[Byte](&small[0], <size_t>small.shape[0])
    tables.numbers = span[const_uint64_t](&numbers[0, 0], <size_t>(numbers.shape[0] * numbers.shape[1]))
    return parse(block, start, arrays, skip, read_criteo, &tables)
