# _reader: bytes into arrays, and nothing else.
#
# Idea. A block of whole lines is walked once, from its first byte to its last. A newline ends every loop, so that
# no loop asks whether bytes are left: `block` has to end with one, which is checked before the walk begins.
# Numbers take an exact short cut and fall back to std::from_chars where the short cut cannot be sure.
#
#   block    whole lines of text          ...1 3:1 7:0.5\n-1 2:1\n
#   labels   one per row, 0 or 1
#   indptr   row r owns keys[indptr[r]:indptr[r + 1]], and values likewise
#   Parsed   (end, lines, row, skipped, fault, at), see Stop
#
# The caller owns every array. A parse appends at `row`, so that one set of arrays fills up over many blocks, and stops
# early, at the beginning of a line, when a further line may not fit; the caller makes room or takes the rows away,
# and calls again with start = end. Nothing of a line that is not wholly parsed is left behind.
#
# Invariants
#   I1  Bytes are read in [start, len(block)) only; eight at a time only where eight are left.
#   I2  rows are written below len(labels), keys and values below len(keys).
#   I3  On return indptr[row] is the number of keys in rows [0, row), and at `end` a line begins or the block ends.
#
# Threads. No state outside of the arguments; the GIL is released during the walk. A set of arrays belongs to one thread
# at a time.

from libc.stdint cimport INT64_MAX, UINT64_MAX, int64_t, uint8_t, uint16_t, uint64_t
from libc.string cimport memchr, memcpy

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.unicode cimport PyUnicode_AsUTF8AndSize


cdef extern from "<bit>" namespace "std" nogil:
    int bit_width(uint64_t)
    int countr_zero(uint64_t)


cdef extern from "<system_error>" namespace "std" nogil:
    cdef enum class errc "std::errc":
        result_out_of_range


cdef extern from "<charconv>" namespace "std" nogil:
    cdef cppclass from_chars_result:
        const char* ptr
        errc ec

    from_chars_result from_chars(const char*, const char*, float&)


cdef extern from *:
    """
    static_assert(std::endian::native == std::endian::little, "keys of text are defined on little-endian words");
    // Powers of ten that a double holds exactly.
    static constexpr double kTen[] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,  1e8,  1e9,  1e10, 1e11,
                                      1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};
    """
    const double* kTen


# What can be wrong with a line: the text of FAULTS[code], the code being Parsed's `fault`.
FAULTS = (
    "",
    "the label is not a number",
    "the label is neither 0/1 nor -1/+1: map the labels of the file to 0 and 1",
    "a feature is not \"key:value\" with a whole number as its key",
    "a key is larger than 2^64 - 1",
    "a feature has no \":value\" behind its key",
    "a value is not a finite decimal number",
    "a value is too large for float32",
    "40 columns are needed, divided by tabs: a label, 13 integers, 26 categories",
    "an integer column holds something else than a whole number",
    "an integer column is outside of 64 bits",
)

cdef enum:
    GOOD = 0
    LABEL_TEXT = 1
    LABEL_RANGE = 2
    KEY_TEXT = 3
    KEY_RANGE = 4
    VALUE_MISSING = 5
    VALUE_TEXT = 6
    VALUE_RANGE = 7
    COLUMNS = 8
    INTEGER_TEXT = 9
    INTEGER_RANGE = 10
    NO_ROOM = 11  # never leaves this file

cdef enum:
    INTEGERS = 13  # Criteo's columns 1 to 13
    CATEGORIES = 26  # Criteo's columns 14 to 39

# Where a parse stopped and what it did.
cdef struct Stop:
    size_t end  # first byte not consumed
    size_t at  # the byte at fault, when fault != GOOD
    int64_t lines  # consumed, blank and skipped ones included
    int64_t row  # rows now in the arrays
    int64_t skipped  # malformed lines left out
    int fault

# ---- small readers: each takes the place by pointer, moves it behind what it read, and returns a fault -----

cdef inline bint is_digit(uint8_t c) noexcept nogil:
    return <uint8_t>(c - 48) <= 9


cdef inline bint is_blank(uint8_t c) noexcept nogil:
    return c == 32 or c == 9 or c == 13


cdef inline bint ends_token(uint8_t c) noexcept nogil:
    return c == 32 or c == 10 or c == 9 or c == 13 or c == 35  # space, newline, tab, return, '#'


cdef inline uint64_t load8(const uint8_t* p) noexcept nogil:
    cdef uint64_t word
    memcpy(&word, p, 8)
    return word


cdef int read_number_slowly(const uint8_t** place, const uint8_t* end, float* out) noexcept nogil:
    """A decimal number without sign by std::from_chars; too small becomes 0, as rounding would have it."""
    cdef const uint8_t* p = place[0]
    cdef const uint8_t* q
    cdef from_chars_result got = from_chars(<const char*>p, <const char*>end, out[0])
    cdef bint point = False
    cdef int64_t scale = 0  # the number is 0.ddd * 10^scale, once the exponent is added
    cdef int64_t exponent = 0
    cdef bint leading = True
    cdef bint negative
    place[0] = <const uint8_t*>got.ptr
    if got.ec == errc.result_out_of_range:
        # from_chars says out of range for both ends of the range and leaves `out` alone: tell them apart by magnitude.
        q = p
        while is_digit(q[0]) or q[0] == 46:
            if q[0] == 46:
                point = True
            else:
                leading = leading and q[0] == 48
                if not point and not leading:
                    scale += 1
                elif point and leading:
                    scale -= 1
            q += 1
        if q[0] == 101 or q[0] == 69:
            q += 1
            negative = q[0] == 45
            if q[0] == 45 or q[0] == 43:
                q += 1
            while is_digit(q[0]):
                exponent = min(exponent * 10 + (q[0] - 48), <int64_t>1 << 40)
                q += 1
            scale += -exponent if negative else exponent
        if scale > 0:
            return VALUE_RANGE
        out[0] = 0.0
    return GOOD


cdef inline int read_number(const uint8_t** place, const uint8_t* end, float* out) noexcept nogil:
    """[+-] digits [. digits] [e [+-] digits] as the nearest float32.

    The short cut. With the digits as an integer w of at most 19 digits and a power of ten that is exact as a double,
    w / 10^k takes two roundings, hence is within 2 units of the last place of the true value. Rounding that double to
    float32 is then right unless it lies as near to the middle between two floats; those few go the slow way.
    """
    cdef const uint8_t* p = place[0]
    cdef const uint8_t* first
    cdef const uint8_t* mark
    cdef uint64_t w = 0
    cdef int64_t digits
    cdef int64_t power = 0
    cdef int64_t exponent
    cdef double d
    cdef uint64_t bits
    cdef bint negative = p[0] == 45
    cdef bint negative_exponent
    cdef int fault
    if p[0] == 45 or p[0] == 43:
        p += 1
    first = p
    while is_digit(p[0]):
        w = w * 10 + (p[0] - 48)
        p += 1
    digits = p - first
    if p[0] == 46:
        p += 1
        mark = p
        while is_digit(p[0]):
            w = w * 10 + (p[0] - 48)
            p += 1
        power = mark - p
        digits -= power
    if digits == 0:
        return VALUE_TEXT
    if p[0] == 101 or p[0] == 69:
        mark = p
        p += 1
        negative_exponent = p[0] == 45
        if p[0] == 45 or p[0] == 43:
            p += 1
        if not is_digit(p[0]):
            place[0] = mark
            return VALUE_TEXT
        exponent = 0
        while is_digit(p[0]):
            exponent = min(exponent * 10 + (p[0] - 48), 9999)
            p += 1
        power += -exponent if negative_exponent else exponent
    if digits <= 19 and -22 <= power <= 10:
        d = <double>w
        if power < 0:
            d /= kTen[-power]
        elif power > 0:
            d *= kTen[power]
        memcpy(&bits, &d, 8)
        # 29 bits are lost on the way to float32; 0x10000000 in them is the middle.
        if (bits & 0x1FFFFFFF) - <uint64_t>0x0FFFFFFC > 8:
            out[0] = -<float>d if negative else <float>d
            place[0] = p
            return GOOD
    fault = read_number_slowly(&first, end, out)
    if negative:
        out[0] = -out[0]
    place[0] = first
    return fault


cdef inline int read_label(const uint8_t** place, const uint8_t* end, float* out) noexcept nogil:
    """A number that is 0 or -1 (becomes 0) or 1; the place moves only behind a good one."""
    cdef const uint8_t* p = place[0]
    cdef float y = 0.0
    cdef int fault = read_number(&p, end, &y)
    if fault == VALUE_TEXT or (fault == GOOD and not ends_token(p[0])):
        return LABEL_TEXT
    if fault != GOOD or not (y == 1.0 or y == 0.0 or y == -1.0):
        return LABEL_RANGE
    out[0] = 1.0 if y == 1.0 else 0.0
    place[0] = p
    return GOOD


cdef inline int read_key(const uint8_t** place, uint64_t* out) noexcept nogil:
    """Digits as an unsigned 64-bit number."""
    cdef const uint8_t* p = place[0]
    cdef const uint8_t* first = p
    cdef uint64_t key = 0
    cdef uint64_t digit
    while is_digit(p[0]):
        key = key * 10 + (p[0] - 48)
        p += 1
    if p - first > 19:  # 10^19 - 1 fits, so only from here on it may have wrapped
        key = 0
        p = first
        while is_digit(p[0]):
            digit = p[0] - 48
            if key > (UINT64_MAX - digit) // 10:
                return KEY_RANGE
            key = key * 10 + digit
            p += 1
    if p == first:
        return KEY_TEXT
    place[0] = p
    out[0] = key
    return GOOD


# ---- keys of text ------------------------------------------------------------------------------------------

cdef inline uint64_t scramble(uint64_t x) noexcept nogil:
    """A bijection on 64 bits: the finaliser of splitmix64 (Stafford's variant 13)."""
    x = (x ^ (x >> 30)) * <uint64_t>0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * <uint64_t>0x94D049BB133111EB
    return x ^ (x >> 31)


cdef inline uint64_t field_seed(uint64_t field) noexcept nogil:
    return scramble(field + <uint64_t>0x9E3779B97F4A7C15)


cdef inline uint64_t token_key(uint64_t seed, const uint8_t* p, size_t n, const uint8_t* end) noexcept nogil:
    """The key of (field, token), field_seed(field) being given; the bytes up to `end` may be read.

    One scramble per eight bytes, the last eight overlapping the ones before where n is no multiple of eight. The
    rounds are bijections, so tokens of one field and one length up to eight bytes never share a key.
    """
    cdef uint64_t h = seed + n * <uint64_t>0x9E3779B97F4A7C15
    cdef uint64_t word = 0
    cdef size_t i = 0
    if n > 8:
        while i + 8 < n:
            h = scramble(h ^ load8(p + i))
            i += 8
        return scramble(h ^ load8(p + n - 8))
    if end - p >= 8:
        if n > 0:
            word = load8(p) & (UINT64_MAX >> (64 - 8 * n))
    else:
        while i < n:
            word |= <uint64_t>p[i] << (8 * i)
            i += 1
    return scramble(h ^ word)


def hash_tokens(tokens, uint64_t field, uint64_t[::1] keys):
    """Write the key of (field, token) for each of a list or tuple of str (taken as UTF-8) and bytes into ``keys``."""
    cdef uint64_t seed = field_seed(field)
    cdef const char* text
    cdef Py_ssize_t size
    cdef Py_ssize_t i = 0
    if len(keys) != len(tokens):
        raise ValueError(f"{len(tokens)} tokens need as many keys, got an array of {len(keys)}")
    for token in tokens:
        if isinstance(token, str):
            text = PyUnicode_AsUTF8AndSize(token, &size)
        elif isinstance(token, bytes):
            text = PyBytes_AS_STRING(token)
            size = PyBytes_GET_SIZE(token)
        else:
            raise TypeError(f"token {i} is a {type(token).__name__}: pass str or bytes")
        keys[i] = token_key(seed, <const uint8_t*>text, <size_t>size, <const uint8_t*>text + size)
        i += 1


# ---- libsvm ------------------------------------------------------------------------------------------------

cdef int libsvm_line(
    const uint8_t** place, const uint8_t* end, int64_t* count, uint64_t[::1] keys, float[::1] values
) noexcept nogil:
    """The features of one line, from behind its label to its newline, where the place is left."""
    cdef const uint8_t* p = place[0]
    cdef int64_t nnz = count[0]
    cdef int64_t room = keys.shape[0]
    cdef uint64_t key = 0
    cdef float value = 0.0
    cdef int fault = GOOD
    while True:
        while is_blank(p[0]):
            p += 1
        if not is_digit(p[0]):
            if p[0] == 10:
                break
            if p[0] == 35:
                p = <const uint8_t*>memchr(p, 10, end - p)
                break
            if end - p > 4 and p[0] == 113 and p[1] == 105 and p[2] == 100 and p[3] == 58:
                place[0] = p
                p += 4
                fault = read_key(&p, &key)
                if fault == GOOD and not ends_token(p[0]):
                    fault = KEY_TEXT
                if fault != GOOD:
                    return fault
                continue
            fault = KEY_TEXT
            break
        place[0] = p
        fault = read_key(&p, &key)
        if fault != GOOD:
            break
        if p[0] != 58:
            fault = VALUE_MISSING if ends_token(p[0]) else KEY_TEXT
            break
        p += 1
        fault = read_number(&p, end, &value)
        if fault != GOOD:
            break
        if not ends_token(p[0]):
            fault = VALUE_TEXT
            break
        if nnz == room:
            fault = NO_ROOM
            break
        keys[nnz] = key
        values[nnz] = value
        nnz += 1
    place[0] = p
    count[0] = nnz
    return fault


cdef void libsvm_lines(
    const uint8_t* begin, const uint8_t* end, bint skip, Stop* stop,
    float[::1] labels, int64_t[::1] indptr, uint64_t[::1] keys, float[::1] values,
) noexcept nogil:
    cdef const uint8_t* p = begin + stop.end
    cdef const uint8_t* line
    cdef int64_t rows = labels.shape[0]
    cdef int64_t row = stop.row
    cdef int64_t nnz = indptr[row]
    cdef float label = 0.0
    cdef int fault
    while p < end:
        line = p
        while is_blank(p[0]):
            p += 1
        if p[0] == 10 or p[0] == 35:
            p = <const uint8_t*>memchr(p, 10, end - p) + 1
            stop.lines += 1
            continue
        if row == rows:
            p = line
            break
        fault = read_label(&p, end, &label)
        if fault == GOOD:
            fault = libsvm_line(&p, end, &nnz, keys, values)
        if fault == GOOD:
            labels[row] = label
            row += 1
            indptr[row] = nnz
        else:
            nnz = indptr[row]
            if fault == NO_ROOM or not skip:
                stop.at = p - begin
                stop.fault = GOOD if fault == NO_ROOM else fault
                p = line
                break
            p = <const uint8_t*>memchr(p, 10, end - p)
            stop.skipped += 1
        p += 1
        stop.lines += 1
    stop.end = p - begin
    stop.row = row


def parse_libsvm(
    const unsigned char[::1] block, size_t start, float[::1] labels, int64_t[::1] indptr, uint64_t[::1] keys,
    float[::1] values, int64_t row, bint skip,
):
    """Append the lines of ``block[start:]`` as rows from ``row`` on; see the head of the source and docs/readers.md.

    Returns
    -------
    (end, lines, row, skipped, fault, at)
        ``block[start:end]`` was consumed, ``lines`` lines of it, and the arrays now hold ``row`` rows. With ``fault``
        other than 0 the line at ``end`` is malformed at byte ``at``: ``FAULTS[fault]``; with ``skip`` such lines are
        counted in ``skipped`` instead. With no fault and ``end`` short of the block the arrays are full: ``labels`` if
        ``row == len(labels)``, else ``keys`` and ``values``.
    """
    cdef Stop stop
    check_arrays(block, start, labels, indptr, keys, row)
    if values.shape[0] != keys.shape[0]:
        raise ValueError(f"keys and values must be as long, got {keys.shape[0]} and {values.shape[0]}")
    stop.end, stop.at, stop.lines, stop.row, stop.skipped, stop.fault = start, 0, 0, row, 0, GOOD
    if start < <size_t>block.shape[0]:
        with nogil:
            libsvm_lines(&block[0], &block[0] + block.shape[0], skip, &stop, labels, indptr, keys, values)
    return stop.end, stop.lines, stop.row, stop.skipped, stop.fault, stop.at


# ---- Criteo ------------------------------------------------------------------------------------------------

cdef inline int read_integer(const uint8_t** place, int64_t* out) noexcept nogil:
    """[+-] digits as a signed 64-bit number."""
    cdef const uint8_t* p = place[0]
    cdef bint negative = p[0] == 45
    cdef uint64_t magnitude = 0
    cdef int fault
    if p[0] == 45 or p[0] == 43:
        p += 1
    fault = read_key(&p, &magnitude)
    if fault == KEY_TEXT:
        return INTEGER_TEXT
    if fault == KEY_RANGE or magnitude > <uint64_t>INT64_MAX:
        return INTEGER_RANGE
    out[0] = -<int64_t>magnitude if negative else <int64_t>magnitude
    place[0] = p
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
    """The leading five bits of v and how many follow: ascends with v, and is v itself below 32."""
    cdef int shift
    if v < 32:
        return v
    shift = bit_width(v) - 5
    return <size_t>(16 * shift) + (v >> shift)


cdef inline const uint8_t* tab_or_newline(const uint8_t* p, const uint8_t* end) noexcept nogil:
    cdef uint64_t ones = 0x0101010101010101
    cdef uint64_t tops = 0x8080808080808080
    cdef uint64_t word
    cdef uint64_t tab
    cdef uint64_t newline
    cdef uint64_t found
    while end - p >= 8:
        word = load8(p)
        tab = word ^ (ones * 9)
        newline = word ^ (ones * 10)
        # A zero byte sets its top bit. So may a byte above a zero byte, which does not matter: the lowest one counts.
        found = ((tab - ones) & ~tab & tops) | ((newline - ones) & ~newline & tops)
        if found != 0:
            return p + (countr_zero(found) >> 3)
        p += 8
    while p[0] != 9 and p[0] != 10:
        p += 1
    return p


cdef int criteo_line(
    const uint8_t** place, const uint8_t* end, int64_t* count, uint64_t[::1] keys, const uint64_t* seeds,
    const uint64_t[::1] floors, const uint16_t[::1] cells, const uint64_t[:, ::1] numbers,
) noexcept nogil:
    """The 39 columns behind the label, from the first tab to the newline, where the place is left."""
    cdef const uint8_t* p = place[0]
    cdef const uint8_t* stop
    cdef int64_t nnz = count[0]
    cdef int64_t v = 0
    cdef size_t bucket
    cdef size_t size
    cdef int column
    cdef int fault
    for column in range(INTEGERS):
        place[0] = p
        if p[0] != 9:
            return COLUMNS if column == 0 or p[0] == 10 or p[0] == 13 else INTEGER_TEXT
        p += 1
        if p[0] == 9:
            continue
        place[0] = p
        fault = read_integer(&p, &v)
        if fault != GOOD:
            return COLUMNS if p[0] == 10 or p[0] == 13 else fault
        if v < 0:
            keys[nnz] = negative_key(seeds[column], <uint64_t>-v)
        else:
            bucket = cells[cell_of(<uint64_t>v)]
            while floors[bucket + 1] <= <uint64_t>v:
                bucket += 1
            keys[nnz] = numbers[column, bucket]
        nnz += 1
    for column in range(INTEGERS, INTEGERS + CATEGORIES):
        if p[0] != 9:
            place[0] = p
            return COLUMNS if p[0] == 10 or p[0] == 13 else INTEGER_TEXT
        p += 1
        stop = tab_or_newline(p, end)
        size = <size_t>(stop - p)
        if stop[0] == 10 and size > 0 and (stop - 1)[0] == 13:
            size -= 1
        if size > 0:
            keys[nnz] = token_key(seeds[column], p, size, end)
            nnz += 1
        p = stop
    place[0] = p
    count[0] = nnz
    return GOOD if p[0] == 10 else COLUMNS


cdef void criteo_lines(
    const uint8_t* begin, const uint8_t* end, bint skip, Stop* stop,
    float[::1] labels, int64_t[::1] indptr, uint64_t[::1] keys,
    const uint64_t[::1] floors, const uint16_t[::1] cells, const uint64_t[:, ::1] numbers,
) noexcept nogil:
    cdef const uint8_t* p = begin + stop.end
    cdef const uint8_t* line
    cdef int64_t rows = labels.shape[0]
    cdef int64_t room = keys.shape[0] - (INTEGERS + CATEGORIES)
    cdef int64_t row = stop.row
    cdef int64_t nnz = indptr[row]
    cdef float label = 0.0
    cdef uint64_t[39] seeds
    cdef int column
    cdef int fault
    for column in range(INTEGERS + CATEGORIES):
        seeds[column] = field_seed(<uint64_t>(column + 1))
    while p < end:
        line = p
        if p[0] == 10 or (p[0] == 13 and p[1] == 10):
            p += 1 if p[0] == 10 else 2
            stop.lines += 1
            continue
        if row == rows or nnz > room:
            break
        fault = read_label(&p, end, &label)
        if fault == GOOD:
            fault = criteo_line(&p, end, &nnz, keys, seeds, floors, cells, numbers)
        if fault == GOOD:
            labels[row] = label
            row += 1
            indptr[row] = nnz
        else:
            nnz = indptr[row]
            if not skip:
                stop.at = p - begin
                stop.fault = fault
                p = line
                break
            p = <const uint8_t*>memchr(p, 10, end - p)
            stop.skipped += 1
        p += 1
        stop.lines += 1
    stop.end = p - begin
    stop.row = row


cdef int64_t greatest(const uint16_t[::1] cells) noexcept nogil:
    cdef int64_t most = 0
    cdef Py_ssize_t i
    for i in range(cells.shape[0]):
        most = max(most, cells[i])
    return most


def parse_criteo(
    const unsigned char[::1] block, size_t start, float[::1] labels, int64_t[::1] indptr, uint64_t[::1] keys,
    const uint64_t[::1] floors, const uint16_t[::1] cells, const uint64_t[:, ::1] numbers, int64_t row, bint skip,
):
    """Append the lines of ``block[start:]`` as rows from ``row`` on; every value is 1, and none is written.

    ``floors`` ascends from 0 and ends with 2^64 - 1: bucket b holds the integers in [floors[b], floors[b + 1]).
    ``cells[cell_of(v)]`` is the bucket of the least integer in v's cell, and ``numbers[c, b]`` the key of bucket b in
    integer column c + 1. ``keys`` is full when fewer than 39 are left.

    Returns
    -------
    (end, lines, row, skipped, fault, at)
        As `parse_libsvm`.
    """
    cdef Stop stop
    check_arrays(block, start, labels, indptr, keys, row)
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
    stop.end, stop.at, stop.lines, stop.row, stop.skipped, stop.fault = start, 0, 0, row, 0, GOOD
    if start < <size_t>block.shape[0]:
        with nogil:
            criteo_lines(
                &block[0], &block[0] + block.shape[0], skip, &stop, labels, indptr, keys, floors, cells, numbers
            )
    return stop.end, stop.lines, stop.row, stop.skipped, stop.fault, stop.at


cdef int check_arrays(
    const unsigned char[::1] block, size_t start, float[::1] labels, int64_t[::1] indptr, uint64_t[::1] keys,
    int64_t row,
) except -1:
    """What every parse relies on: whole lines, arrays that agree, and a sane place to go on from."""
    if start > <size_t>block.shape[0]:
        raise ValueError(f"start is {start}, the block ends at {block.shape[0]}")
    if block.shape[0] > 0 and block[block.shape[0] - 1] != 10:
        raise ValueError("the block must hold whole lines: its last byte must be a newline")
    if indptr.shape[0] != labels.shape[0] + 1:
        raise ValueError(f"{labels.shape[0]} labels need {labels.shape[0] + 1} in indptr, got {indptr.shape[0]}")
    if not 0 <= row <= labels.shape[0]:
        raise ValueError(f"row is {row}, the arrays have room for {labels.shape[0]}")
    if not 0 <= indptr[row] <= keys.shape[0]:
        raise ValueError(f"indptr[{row}] is {indptr[row]}, the arrays have room for {keys.shape[0]} keys")
    return 0
