# Shared by all formats: the faults of a line, the loop over lines, and the parsers of numbers.

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
    from_chars_result from_chars(const char*, const char*, double&)


cdef extern from *:
    """
    static_assert(std::endian::native == std::endian::little, "keys of text are defined on little-endian words");
    // Powers of ten that a double holds exactly.
    static constexpr double kTen[] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,  1e8,  1e9,  1e10, 1e11,
                                      1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};
    """
    const double* kTen


# What can be wrong with a line: the text of FAULTS[code], the code being the `fault` of a parse.
FAULTS = (
    "",
    "the label is not a number",
    "the label is neither 0/1 nor -1/+1: map the labels of the file to 0 and 1, or train with --classes",
    "a feature is not \"key:value\" with a whole number as its key",
    "a key is larger than 2^64 - 1",
    "a feature has no \":value\" behind its key",
    "a value is not a finite decimal number",
    "a value is too large for float32",
    "40 columns are needed, divided by tabs: a label, 13 integers, 26 categories",
    "an integer column holds something else than a whole number",
    "an integer column is outside of 64 bits",
    "a feature is not \"field:key:value\" with whole numbers as its field and key",
    "there is no label: examples to learn from need one",
    "there is no \"|\" before the features",
    "the importance is not a number of 0 or more",
    "a third number stands before the features: an initial prediction cannot be learned from",
    "there are more or fewer cells than columns",
    "a cell in quotes has no closing quote on its line: a row is one line, so replace line breaks in its cells",
    "something stands between a closing quote and the end of its cell",
    "the label or the weight is missing",
    "the label is not the number of a class, which are 0 to the number of classes - 1",
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
    FIELD_TEXT = 11
    LABEL_MISSING = 12
    BAR_MISSING = 13
    IMPORTANCE = 14
    INITIAL = 15
    CELLS = 16
    QUOTE_OPEN = 17
    QUOTE_CLOSED = 18
    CELL_MISSING = 19
    LABEL_CLASS = 20
    # Internal: not returned by this module.
    NO_ROOM = 100
    BLANK = 101  # a line without an example

# Where a parse stopped and what it did.
cdef struct Stop:
    size_t end  # first byte not consumed
    size_t at  # the byte at fault, when fault != GOOD
    int64_t lines  # consumed, blank and skipped ones included
    int64_t skipped  # malformed lines left out
    int fault

# The caller's arrays, their capacity and the number of elements in use.
cdef struct Target:
    float* labels
    float* weights  # null: not asked for, as values, fields and spans
    int64_t* indptr
    uint64_t* keys
    float* values
    uint64_t* fields
    int64_t* spans  # two for each feature, relative to the block's first byte
    int64_t* ends  # two for each row
    bint labelled  # whether labels and weights are read; else they are skipped, if present
    int64_t classes  # labels are their numbers; 0: labels are 0/1 or -1/+1
    bint origins  # whether fields or spans are requested: if not, one test per feature
    const uint8_t* block
    int64_t rows  # capacity
    int64_t room  # capacity for features
    int64_t row  # rows in use
    int64_t nnz  # features in use, including those of the current line

# Reads one line: its label, its weight if there is one, its features. `cursor` advances from the line's first byte to
# its newline, or to the byte at fault.
ctypedef int (*ReadLine)(const uint8_t** cursor, const uint8_t* end, Target* out, const void* known) noexcept nogil


cdef void put_origin(
    Target* out, int64_t feature, uint64_t field, const uint8_t* begin, const uint8_t* end
) noexcept nogil:
    """Store the field of a feature and the offsets of its text, if requested."""
    if out.fields != NULL:
        out.fields[feature] = field
    if out.spans != NULL:
        out.spans[2 * feature] = begin - out.block
        out.spans[2 * feature + 1] = end - out.block


cdef void walk(
    const uint8_t* begin, const uint8_t* end, bint skip, Target* out, Stop* stop, ReadLine read, const void* known
) noexcept nogil:
    """Read lines until the block ends, the arrays are full, or a line is malformed and `skip` is false."""
    cdef const uint8_t* p = begin + stop.end
    cdef const uint8_t* line
    cdef int fault
    while p < end and out.row < out.rows:
        line = p
        fault = read(&p, end, out, known)
        if fault == GOOD:
            if not out.labelled:
                out.labels[out.row] = NAN
                if out.weights != NULL:
                    out.weights[out.row] = 1.0
            out.row += 1
            out.indptr[out.row] = out.nnz
            out.ends[2 * out.row - 2] = p + 1 - begin
            out.ends[2 * out.row - 1] = stop.skipped
        elif fault != BLANK:
            out.nnz = out.indptr[out.row]
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


cdef object parse(
    const unsigned char[::1] block, size_t start, object arrays, bint skip, ReadLine read, const void* known
):
    """Check the preconditions, whole lines, arrays of matching lengths and a valid start, then parse."""
    cdef float[::1] labels = arrays.labels
    cdef float[::1] weights = arrays.weights
    cdef int64_t[::1] indptr = arrays.indptr
    cdef uint64_t[::1] keys = arrays.keys
    cdef float[::1] values = arrays.values
    cdef uint64_t[::1] fields = arrays.fields
    cdef int64_t[:, ::1] spans = arrays.spans
    cdef int64_t[:, ::1] ends = arrays.ends
    cdef int64_t row = arrays.row
    cdef bint labelled = arrays.labelled
    cdef int64_t classes = arrays.classes
    cdef Target out
    cdef Stop stop
    if start > <size_t>block.shape[0]:
        raise ValueError(f"start is {start}, the block ends at {block.shape[0]}")
    if block.shape[0] > 0 and block[block.shape[0] - 1] != 10:
        raise ValueError("the block must hold whole lines: its last byte must be a newline")
    if indptr.shape[0] != labels.shape[0] + 1:
        raise ValueError(f"{labels.shape[0]} labels need {labels.shape[0] + 1} in indptr, got {indptr.shape[0]}")
    if weights is not None and weights.shape[0] != labels.shape[0]:
        raise ValueError(f"labels and weights must be as long, got {labels.shape[0]} and {weights.shape[0]}")
    if values is not None and values.shape[0] != keys.shape[0]:
        raise ValueError(f"keys and values must be as long, got {keys.shape[0]} and {values.shape[0]}")
    if fields is not None and fields.shape[0] != keys.shape[0]:
        raise ValueError(f"keys and fields must be as long, got {keys.shape[0]} and {fields.shape[0]}")
    if spans is not None and (spans.shape[0] != keys.shape[0] or spans.shape[1] != 2):
        raise ValueError(f"{keys.shape[0]} keys need spans of as many pairs, got {spans.shape[0]} x {spans.shape[1]}")
    if ends.shape[0] != labels.shape[0] or ends.shape[1] != 2:
        raise ValueError(f"{labels.shape[0]} labels need ends of as many pairs, got {ends.shape[0]} x {ends.shape[1]}")
    if not 0 <= row <= labels.shape[0]:
        raise ValueError(f"row is {row}, the arrays have room for {labels.shape[0]}")
    if not 0 <= indptr[row] <= keys.shape[0]:
        raise ValueError(f"indptr[{row}] is {indptr[row]}, the arrays have room for {keys.shape[0]} keys")
    stop.end, stop.at, stop.lines, stop.skipped, stop.fault = start, 0, 0, 0, GOOD
    out.rows, out.room, out.row, out.nnz = labels.shape[0], keys.shape[0], row, indptr[row]
    if start < <size_t>block.shape[0] and out.row < out.rows:
        out.labels = &labels[0]
        out.indptr = &indptr[0]
        out.ends = &ends[0, 0]
        out.labelled = labelled
        out.classes = classes
        out.weights = out.values = NULL
        out.keys = out.fields = NULL
        out.spans = NULL
        out.origins = fields is not None or spans is not None
        out.block = &block[0]
        if weights is not None:
            out.weights = &weights[0]
        if out.room > 0:
            out.keys = &keys[0]
            if values is not None:
                out.values = &values[0]
            if fields is not None:
                out.fields = &fields[0]
            if spans is not None:
                out.spans = &spans[0, 0]
        with nogil:
            walk(&block[0], &block[0] + block.shape[0], skip, &out, &stop, read, known)
    return stop.end, stop.lines, out.row, stop.skipped, stop.fault, stop.at


# ---- small parsers: each advances `cursor` past the text that it read, and returns a fault ---------------------

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


cdef inline uint32_t load4(const uint8_t* p) noexcept nogil:
    cdef uint32_t word
    memcpy(&word, p, 4)
    return word


cdef inline const uint8_t* byte_or_newline(const uint8_t* p, const uint8_t* end, uint8_t byte) noexcept nogil:
    cdef uint64_t ones = 0x0101010101010101
    cdef uint64_t tops = 0x8080808080808080
    cdef uint64_t word
    cdef uint64_t sought
    cdef uint64_t newline
    cdef uint64_t found
    while end - p >= 8:
        word = load8(p)
        sought = word ^ (ones * byte)
        newline = word ^ (ones * 10)
        # A zero byte sets its top bit. So may a byte above a zero byte, which does not matter: the lowest one counts.
        found = ((sought - ones) & ~sought & tops) | ((newline - ones) & ~newline & tops)
        if found != 0:
            return p + (countr_zero(found) >> 3)
        p += 8
    while p[0] != byte and p[0] != 10:
        p += 1
    return p


cdef int read_number_slowly(const uint8_t** cursor, const uint8_t* end, float* out) noexcept nogil:
    """A decimal number without sign by std::from_chars; a number that is too small rounds to 0."""
    cdef const uint8_t* p = cursor[0]
    cdef const uint8_t* q
    cdef from_chars_result got = from_chars(<const char*>p, <const char*>end, out[0])
    cdef bint point = False
    cdef int64_t scale = 0  # the number is 0.ddd * 10^scale, once the exponent is added
    cdef int64_t exponent = 0
    cdef bint leading = True
    cdef bint negative
    cursor[0] = <const uint8_t*>got.ptr
    if got.ec == errc.result_out_of_range:
        # from_chars returns out_of_range for overflow and underflow and leaves `out` unchanged: the magnitude decides.
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


cdef inline int read_number(const uint8_t** cursor, const uint8_t* end, float* out) noexcept nogil:
    """[+-] digits [. digits] [e [+-] digits] as the nearest float32.

    Fast path (Clinger): with the digits as an integer w of at most 19 digits and a power of ten that is exact as a
    double, w / 10^k takes two roundings, so it is within 2 ulp of the true value. Rounding that double to float32 is
    correct unless it is that close to the midpoint of two floats; these few numbers take the slow path.
    """
    cdef const uint8_t* p = cursor[0]
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
            cursor[0] = mark
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
        # 29 bits are lost on the way to float32; 0x10000000 in them is the midpoint.
        if (bits & 0x1FFFFFFF) - <uint64_t>0x0FFFFFFC > 8:
            out[0] = -<float>d if negative else <float>d
            cursor[0] = p
            return GOOD
    fault = read_number_slowly(&first, end, out)
    if negative:
        out[0] = -out[0]
    cursor[0] = first
    return fault


cdef inline int put_label(float y, Target* out) noexcept nogil:
    """Store a number that is 0 or -1 (becomes 0) or 1; or, of several classes, the number of one."""
    if out.classes > 0:
        if not (0.0 <= y < out.classes and y == <float><int64_t>y):
            return LABEL_CLASS
        out.labels[out.row] = y
        return GOOD
    if not (y == 1.0 or y == 0.0 or y == -1.0):
        return LABEL_RANGE
    out.labels[out.row] = 1.0 if y == 1.0 else 0.0
    return GOOD


cdef inline int read_label(const uint8_t** cursor, const uint8_t* end, Target* out) noexcept nogil:
    """Store the label of the current row; `cursor` advances only past a valid one."""
    cdef const uint8_t* p = cursor[0]
    cdef float y = 0.0
    cdef int fault = read_number(&p, end, &y)
    if fault == VALUE_TEXT or (fault == GOOD and not ends_token(p[0])):
        return LABEL_TEXT
    if fault != GOOD:
        return LABEL_RANGE if out.classes == 0 else LABEL_CLASS
    fault = put_label(y, out)
    if fault == GOOD:
        cursor[0] = p
    return fault


cdef inline int read_key(const uint8_t** cursor, const uint8_t* end, uint64_t* out) noexcept nogil:
    """Digits as an unsigned 64-bit number, the first eight in parallel (SWAR)."""
    cdef const uint8_t* p = cursor[0]
    cdef const uint8_t* first = p
    cdef uint64_t key = 0
    cdef uint64_t digit
    cdef uint64_t word
    cdef uint64_t others
    cdef int count
    if end - p >= 8:
        word = load8(p) ^ <uint64_t>0x3030303030303030
        # A byte above 9 sets its top bit. So may the next byte, by the carry, which does not matter.
        others = ((word + <uint64_t>0x7676767676767676) | word) & <uint64_t>0x8080808080808080
        count = countr_zero(others) >> 3  # 8 if there is none
        if count == 0:
            return KEY_TEXT
        word = word << (64 - 8 * count)  # the digits before the first are zeros
        word = word * 10 + (word >> 8)
        key = (
            (word & <uint64_t>0x000000FF000000FF) * <uint64_t>0x000F424000000064
            + ((word >> 16) & <uint64_t>0x000000FF000000FF) * <uint64_t>0x0000271000000001
        ) >> 32
        p += count
    while is_digit(p[0]):
        key = key * 10 + (p[0] - 48)
        p += 1
    if p - first > 19:  # 10^19 - 1 fits, so only a longer number may have wrapped
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
    cursor[0] = p
    out[0] = key
    return GOOD
