# Criteo's logs: a label, 13 integers and 26 categories, separated by tabs.

cdef enum:
    INTEGERS = 13  # columns 1 to 13
    CATEGORIES = 26  # columns 14 to 39
    CRITEO_COLUMNS = 39
    CELL_BITS = 8  # leading bits of an integer by which its cell is chosen
    SMALL_INTEGERS = 10000  # integers of up to four digits

# The parameters of the format: shoal.data.criteo.Buckets, and the seed of each column's field.
cdef struct CriteoTables:
    uint64_t[CRITEO_COLUMNS] seeds
    const uint64_t* floors
    const uint16_t* cells
    const uint8_t* small
    const uint64_t* numbers  # INTEGERS rows
    size_t buckets  # the length of a row
    ScannedLines* lines


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


cdef inline uint64_t integer_key(const CriteoTables* tables, int column, int64_t v) noexcept nogil:
    cdef size_t bucket
    if v < 0:
        return negative_key(tables.seeds[column], <uint64_t>-v)
    bucket = tables.cells[cell_of(<uint64_t>v)]
    while tables.floors[bucket + 1] <= <uint64_t>v:
        bucket += 1
    return tables.numbers[<size_t>column * tables.buckets + bucket]


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
        put_column(out, at, integer_key(tables, column, v), column, cursor[0], p)
        at += 1
    for column in range(INTEGERS, INTEGERS + CATEGORIES):
        if p[0] != 9:
            cursor[0] = p
            return COLUMNS if p[0] == 10 or p[0] == 13 else INTEGER_TEXT
        p += 1
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


cdef bint read_large_integer(
    const uint8_t* p, const uint8_t* stop, const uint8_t* end, const CriteoTables* tables, int column, uint64_t* key
) noexcept nogil:
    """Store the key of an integer that is not up to four digits; False if the cell does not hold one."""
    cdef int64_t v = 0
    if read_integer(&p, end, &v) != GOOD or p != stop:
        return False
    key[0] = integer_key(tables, column, v)
    return True


cdef int64_t read_integers(
    const uint8_t* text, size_t before, const uint16_t* stops, const uint8_t* end, const CriteoTables* tables,
    uint64_t* keys,
) noexcept nogil:
    """Store the keys of 13 cells; returns their number, or -1 if one is malformed.

    The first cell begins behind text[before]. A cell without text stores a key too, over which the next one is stored:
    a branch would often be mispredicted.
    """
    cdef const uint64_t* numbers = tables.numbers
    cdef size_t size
    cdef uint32_t word = 0
    cdef int64_t count = 0
    cdef int column
    text += 1
    for column in range(INTEGERS):
        size = stops[column] - before  # with the tab
        if size <= 5:
            # The digits at the upper end of the word, zeros before them.
            word = (load4(text + before) ^ <uint32_t>0x30303030) * kToTop[size]
        # A byte above 9 sets its top bit. So may the next byte, by the carry, which does not matter.
        if unlikely(size > 5 or ((word + <uint32_t>0x76767676) | word) & <uint32_t>0x80808080):
            if not read_large_integer(
                text + before, text + stops[column] - 1, end, tables, column, &keys[count]
            ):
                return -1
        else:
            word = word * 10 + (word >> 8)  # two numbers of two digits
            keys[count] = numbers[tables.small[((word & 0x00FF00FF) * <uint32_t>0x00640001) >> 16]]
        count += size > 1
        numbers += tables.buckets
        before = stops[column]
    return count


cdef int64_t read_categories(
    const uint8_t* text, size_t before, const uint16_t* stops, const uint8_t* end, const CriteoTables* tables,
    uint64_t* keys,
) noexcept nogil:
    """Store the keys of 26 cells; returns their number. The parameters are those of `read_integers`."""
    cdef const uint64_t* seeds = tables.seeds + INTEGERS
    cdef size_t size
    cdef int64_t count = 0
    cdef int last = CATEGORIES - 1
    cdef int i
    text += 1
    for i in range(last):
        size = stops[i] - before  # with the tab
        keys[count] = unscrambled_cell(seeds[i], text + before, size, end)
        count += size > 1
        before = stops[i]
    size = stops[last] - before
    if size > 1 and text[before + size - 2] == 13:
        size -= 1
    keys[count] = unscrambled_cell(seeds[last], text + before, size, end)
    count += size > 1
    scramble_block(keys, <size_t>count)
    return count


cdef void put_origins(
    const uint8_t* text, size_t before, const uint16_t* stops, Target* out
) noexcept nogil:
    """Store the origins of the features of 39 cells."""
    cdef int64_t feature = out.nnz
    cdef size_t size
    cdef int column
    for column in range(CRITEO_COLUMNS):
        size = stops[column] - before - 1
        if column == CRITEO_COLUMNS - 1 and size > 0 and text[before + size] == 13:
            size -= 1
        if size > 0:
            put_origin(out, feature, <uint64_t>(column + 1), text + before + 1, text + before + 1 + size)
            feature += 1
        before = stops[column]


cdef bint read_scanned_columns(
    size_t before, const uint16_t* stops, const uint8_t* end, Target* out, const CriteoTables* tables
) noexcept nogil:
    """Read the 39 cells behind text[before]; False, and ``out.nnz`` is as before, if one is malformed."""
    cdef const uint8_t* text = tables.lines.text
    cdef int64_t categories
    cdef int64_t integers = read_integers(text, before, stops, end, tables, out.keys + out.nnz)
    if integers < 0:
        return False
    categories = read_categories(
        text, stops[INTEGERS - 1], stops + INTEGERS, end, tables, out.keys + out.nnz + integers
    )
    if out.origins:
        put_origins(text, before, stops, out)
    out.nnz += integers + categories
    return True


cdef int criteo_line(const uint8_t** cursor, const uint8_t* end, Target* out, const void* known) noexcept nogil:
    cdef const CriteoTables* tables = <const CriteoTables*>known
    cdef const uint8_t* p = cursor[0]
    cdef const uint8_t* at
    cdef const uint16_t* stops = NULL
    cdef size_t cells
    cdef int fault
    if p[0] == 10 or (p[0] == 13 and p[1] == 10):
        cursor[0] += 0 if p[0] == 10 else 1
        return BLANK
    if out.nnz > out.room - CRITEO_COLUMNS:
        return NO_ROOM
    cells = scanned_line(tables.lines, p, end, 9, &stops)
    if out.labelled:
        if out.classes == 0 and (p[0] | 1) == 49 and p[1] == 9:
            out.labels[out.row] = p[0] - 48
            cursor[0] += 1
        else:
            fault = read_label(cursor, end, out)
            if fault != GOOD:
                return fault
        if (
            cells == CRITEO_COLUMNS + 1 and cursor[0] == tables.lines.text + stops[0]
            and read_scanned_columns(stops[0], stops + 1, end, out, tables)
        ):
            cursor[0] = tables.lines.next - 1
            return GOOD
        return read_columns(cursor, end, out, tables, True)
    if (cells == CRITEO_COLUMNS + 1 and read_scanned_columns(stops[0], stops + 1, end, out, tables)) or (
        # The first column begins behind no tab: the offset before it may wrap around, and comes back.
        cells == CRITEO_COLUMNS
        and read_scanned_columns(<size_t>(p - tables.lines.text) - 1, stops, end, out, tables)
    ):
        cursor[0] = tables.lines.next - 1
        return GOOD
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
    ``cells[cell_of(v)]`` is the bucket of the least integer in v's cell, ``small[v]`` that of v, for v below 10,000,
    and ``numbers[c, b]`` the key of bucket b in integer column c + 1. ``keys`` is full when fewer than 39 are left.
    """
    cdef CriteoTables tables
    cdef ScannedLines lines
    cdef int column
    if cells.shape[0] <= <Py_ssize_t>cell_of(INT64_MAX):
        raise ValueError(f"cells must cover 63 bits, {cell_of(INT64_MAX) + 1} entries, got {cells.shape[0]}")
    if small.shape[0] != SMALL_INTEGERS:
        raise ValueError(f"small must cover {SMALL_INTEGERS} integers, got {small.shape[0]}")
    if numbers.shape[0] != INTEGERS or numbers.shape[1] != floors.shape[0] - 1:
        raise ValueError(
            f"numbers must be {INTEGERS} x {floors.shape[0] - 1}, got {numbers.shape[0]} x {numbers.shape[1]}"
        )
    if floors.shape[0] <= UINT8_MAX + 1:
        raise ValueError(f"small may name any of {UINT8_MAX + 1} buckets, got {floors.shape[0] - 1}")
    if floors[floors.shape[0] - 1] != UINT64_MAX:
        raise ValueError("floors must end with 2^64 - 1")
    if greatest(cells) >= floors.shape[0] - 1:
        raise ValueError(f"cells must name buckets below {floors.shape[0] - 1}, got {greatest(cells)}")
    for column in range(CRITEO_COLUMNS):
        tables.seeds[column] = field_seed(<uint64_t>(column + 1))
    tables.floors, tables.cells, tables.small, tables.numbers = &floors[0], &cells[0], &small[0], &numbers[0, 0]
    tables.buckets = <size_t>numbers.shape[1]
    begin_lines(&lines)
    tables.lines = &lines
    return parse(block, start, arrays, skip, criteo_line, &tables)
