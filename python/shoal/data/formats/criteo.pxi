# Criteo's logs: a label, 13 integers and 26 categories, separated by tabs.

cdef enum:
    INTEGERS = 13  # columns 1 to 13
    CATEGORIES = 26  # columns 14 to 39
    CRITEO_COLUMNS = 39
    CELL_BITS = 8  # leading bits of an integer by which its cell is chosen

# The parameters of the format: shoal.data.criteo.Buckets, and the seed of each column's field.
cdef struct CriteoTables:
    uint64_t[CRITEO_COLUMNS] seeds
    const uint64_t* floors
    const uint16_t* cells
    const uint64_t* numbers  # INTEGERS rows
    size_t buckets  # the length of a row


cdef inline int read_integer(const uint8_t** cursor, const uint8_t* end, int64_t* out) noexcept nogil:
    """[+-] digits as a signed 64-bit number."""
    cdef const uint8_t* p = cursor[0]
    cdef bint negative = p[0] == 45
    cdef uint64_t magnitude = 0
    cdef int fault
    if p[0] == 45 or p[0] == 43:
        p += 1
    fault = read_key(&p, end, &magnitude)
    if fault == KEY_TEXT:
        return INTEGER_TEXT
    if fault == KEY_RANGE or magnitude > <uint64_t>INT64_MAX:
        return INTEGER_RANGE
    out[0] = -<int64_t>magnitude if negative else <int64_t>magnitude
    cursor[0] = p
    return GOOD


cdef inline uint64_t negative_key(uint64_t seed, uint64_t magnitude) noexcept nogil:
    """The key of "SP-<magnitude>"."""
    cdef uint8_t[24] text
    cdef int i = 24
    while True:
        i -= 1
        text[i] = <uint8_t>(48 + magnitude % 10)
        magnitude //= 10
        if magnitude == 0:
            break
    text[i - 1] = 45
    text[i - 2] = 80
    text[i - 3] = 83
    i -= 3
    return token_key(seed, &text[i], <size_t>(24 - i), &text[0] + 24)


cdef inline size_t cell_of(uint64_t v) noexcept nogil:
    """The leading eight bits of v and the number of bits that follow: monotone in v, and v itself below 256.

    At most one bucket begins inside of a cell, and in most cells none: a search that starts there is short and its
    length predictable.
    """
    cdef int shift
    if v < 1 << CELL_BITS:
        return v
    shift = bit_width(v) - CELL_BITS
    return <size_t>(shift << (CELL_BITS - 1)) + (v >> shift)


cdef inline bint is_wide_token(const uint8_t* p, const uint8_t* end) noexcept nogil:
    """Whether eight bytes that are not control characters, and then a tab or a newline, follow: Criteo's categories."""
    cdef uint64_t blanks = 0x2020202020202020
    cdef uint64_t word
    if end - p <= 8:
        return False
    word = load8(p)  # a byte of 32 to 127 has bit 5 or 6; so have some above, which are no separators either
    return ((word | (word >> 1)) & blanks) == blanks and (p[8] == 9 or p[8] == 10)


cdef inline void put_column(
    Target* out, uint64_t* at, uint64_t key, int column, const uint8_t* begin, const uint8_t* end
) noexcept nogil:
    at[0] = key
    if out.origins:
        put_origin(out, at - out.keys, <uint64_t>(column + 1), begin, end)


cdef int read_columns(
    const uint8_t** cursor, const uint8_t* end, Target* out, const CriteoTables* tables, bint behind_label
) noexcept nogil:
    """The columns of a line, each after a tab; in a line without a label the first column has no tab.

    ``out.nnz`` changes only if the line is valid.
    """
    cdef const uint8_t* p = cursor[0]
    cdef const uint8_t* stop
    cdef uint64_t* at = out.keys + out.nnz  # a local: a store through it could otherwise change its address
    cdef int64_t v = 0
    cdef size_t bucket
    cdef size_t size
    cdef int column
    cdef int fault
    for column in range(INTEGERS):
        cursor[0] = p
        if column > 0 or behind_label:
            if p[0] != 9:
                return COLUMNS if column == 0 or p[0] == 10 or p[0] == 13 else INTEGER_TEXT
            p += 1
        if p[0] == 9:
            continue
        cursor[0] = p
        fault = read_integer(&p, end, &v)
        if fault != GOOD:
            return COLUMNS if p[0] == 10 or p[0] == 13 else fault
        if v < 0:
            put_column(out, at, negative_key(tables.seeds[column], <uint64_t>-v), column, cursor[0], p)
        else:
            bucket = tables.cells[cell_of(<uint64_t>v)]
            while tables.floors[bucket + 1] <= <uint64_t>v:
                bucket += 1
            put_column(out, at, tables.numbers[<size_t>column * tables.buckets + bucket], column, cursor[0], p)
        at += 1
    for column in range(INTEGERS, INTEGERS + CATEGORIES):
        if p[0] != 9:
            cursor[0] = p
            return COLUMNS if p[0] == 10 or p[0] == 13 else INTEGER_TEXT
        p += 1
        if is_wide_token(p, end):
            put_column(out, at, token_key(tables.seeds[column], p, 8, end), column, p, p + 8)
            at += 1
            p += 8
            continue
        stop = byte_or_newline(p, end, 9)
        size = <size_t>(stop - p)
        if stop[0] == 10 and size > 0 and (stop - 1)[0] == 13:
            size -= 1
        if size > 0:
            put_column(out, at, token_key(tables.seeds[column], p, size, end), column, p, p + size)
            at += 1
        p = stop
    cursor[0] = p
    if p[0] != 10:
        return COLUMNS
    out.nnz = at - out.keys
    return GOOD


cdef int criteo_line(const uint8_t** cursor, const uint8_t* end, Target* out, const void* known) noexcept nogil:
    cdef const CriteoTables* tables = <const CriteoTables*>known
    cdef const uint8_t* p = cursor[0]
    cdef const uint8_t* at
    cdef int fault
    if p[0] == 10 or (p[0] == 13 and p[1] == 10):
        cursor[0] += 0 if p[0] == 10 else 1
        return BLANK
    if out.nnz > out.room - CRITEO_COLUMNS:
        return NO_ROOM
    if out.labelled:
        fault = read_label(cursor, end, out)
        return fault if fault != GOOD else read_columns(cursor, end, out, tables, True)
    # The number of tabs decides whether there is a label: no line is valid both ways.
    cursor[0] = byte_or_newline(p, end, 9)
    fault = read_columns(cursor, end, out, tables, True)
    if fault == GOOD:
        return GOOD
    at = cursor[0]
    cursor[0] = p
    if read_columns(cursor, end, out, tables, False) == GOOD:
        return GOOD
    cursor[0] = at
    return fault


cdef int64_t greatest(const uint16_t[::1] cells) noexcept nogil:
    cdef int64_t most = 0
    cdef Py_ssize_t i
    for i in range(cells.shape[0]):
        most = max(most, cells[i])
    return most


def parse_criteo(
    const unsigned char[::1] block, size_t start, arrays, const uint64_t[::1] floors, const uint16_t[::1] cells,
    const uint64_t[:, ::1] numbers, bint skip,
):
    """Append Criteo lines to ``arrays``; every value is 1, and values are not written.

    ``floors`` ascends from 0 and ends with 2^64 - 1: bucket b holds the integers in [floors[b], floors[b + 1]).
    ``cells[cell_of(v)]`` is the bucket of the least integer in v's cell, and ``numbers[c, b]`` the key of bucket b in
    integer column c + 1. ``keys`` is full when fewer than 39 are left.
    """
    cdef CriteoTables tables
    cdef int column
    if cells.shape[0] <= <Py_ssize_t>cell_of(INT64_MAX):
        raise ValueError(f"cells must cover 63 bits, {cell_of(INT64_MAX) + 1} entries, got {cells.shape[0]}")
    if numbers.shape[0] != INTEGERS or numbers.shape[1] != floors.shape[0] - 1:
        raise ValueError(
            f"numbers must be {INTEGERS} x {floors.shape[0] - 1}, got {numbers.shape[0]} x {numbers.shape[1]}"
        )
    if floors.shape[0] < 2 or floors[floors.shape[0] - 1] != UINT64_MAX:
        raise ValueError("floors must end with 2^64 - 1")
    if greatest(cells) >= floors.shape[0] - 1:
        raise ValueError(f"cells must name buckets below {floors.shape[0] - 1}, got {greatest(cells)}")
    for column in range(CRITEO_COLUMNS):
        tables.seeds[column] = field_seed(<uint64_t>(column + 1))
    tables.floors, tables.cells, tables.numbers = &floors[0], &cells[0], &numbers[0, 0]
    tables.buckets = <size_t>numbers.shape[1]
    return parse(block, start, arrays, skip, criteo_line, &tables)
