# The text of a cell (docs/readers.md): one for each value, whatever carried it, so that equal values have equal keys.
#
#   text                 itself, but for what writers make of a boolean, a number and a moment:
#                        True, TRUE -> true      17.0 -> 17      2.02405e+13 -> 20240500000000
#                        2024-05-01T12:00:00.500000Z -> 2024-05-01 12:00:00.5
#   number               its shortest decimal digits, without an exponent; a whole number below 2^64 all of its digits
#
# Most texts are their own: a look at their ends decides it.

cdef extern from "<charconv>" namespace "std" nogil:
    cdef enum class chars_format "std::chars_format":
        scientific "std::chars_format::scientific"

    cdef cppclass to_chars_result:
        char* ptr

    to_chars_result to_chars(char*, char*, uint64_t)
    to_chars_result to_chars(char*, char*, double, chars_format)

cdef enum:
    CELL_BYTES = 128  # room for a text that is not the cell's own
    NUMBER_BYTES = 800  # room for a number of 400 digits

cdef struct CellText:
    const uint8_t* begin
    size_t size
    const uint8_t* end  # bytes up to here may be read


cdef inline uint32_t load2(const uint8_t* p) noexcept nogil:
    cdef uint16_t word
    memcpy(&word, p, 2)
    return word


cdef inline bint ends_oddly(uint32_t last) noexcept nogil:
    """Whether a text with these last four bytes may be another spelling: ".0", "00", "-0", "e+13" and "e-13"."""
    cdef uint32_t two = last >> 16
    return (two == 0x302E) | (two == 0x3030) | (two == 0x302D) | ((last & 0xF9FF) == 0x2965)


cdef inline bint is_truth(const uint8_t* p, size_t n) noexcept nogil:
    """Whether a text is a boolean of another spelling."""
    cdef uint32_t word
    if n == 4:
        word = load4(p)
        return (word == 0x65757254) | (word == 0x45555254)  # True, TRUE
    if n == 5:
        word = load4(p)
        return ((word == 0x736C6146) & (p[4] == 101)) | ((word == 0x534C4146) & (p[4] == 69))  # False, FALSE
    return False


cdef inline bint is_dated(const uint8_t* p, size_t n) noexcept nogil:
    """Whether a text may be a moment: 2024-05-01 12:00:00."""
    return n >= 19 and p[4] == 45 and p[7] == 45 and p[13] == 58 and p[16] == 58


cdef inline bint may_be_respelled(const uint8_t* p, size_t n) noexcept nogil:
    if n < 4:
        return n > 1 and p[n - 1] == 48 and not is_digit(p[n - 2])
    if n < 6:
        return ends_oddly(load4(p + n - 4)) or is_truth(p, n)
    return ends_oddly(load4(p + n - 4)) or is_dated(p, n) or (n > 9 and p[2] == 58 and p[5] == 58)


cdef inline int digits_at(const uint8_t* p, int count) noexcept nogil:
    """The number of `count` digits; -1 if there are others."""
    cdef int number = 0
    cdef int i
    for i in range(count):
        if not is_digit(p[i]):
            return -1
        number = number * 10 + (p[i] - 48)
    return number


cdef inline int64_t days_of(int64_t year, int64_t month, int64_t day) noexcept nogil:
    """Days since 0000-03-01 of the Gregorian calendar (H. Hinnant, days_from_civil)."""
    cdef int64_t y = year - (month <= 2)
    cdef int64_t era = (y if y >= 0 else y - 399) // 400
    cdef int64_t of_era = y - era * 400
    cdef int64_t of_year = (153 * (month - 3 if month > 2 else month + 9) + 2) // 5 + day - 1
    return era * 146097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year


cdef inline void put_digits(uint8_t* to, int64_t number, int count) noexcept nogil:
    cdef int i
    for i in range(count - 1, -1, -1):
        to[i] = <uint8_t>(48 + number % 10)
        number //= 10


cdef bint read_zone(const uint8_t* p, const uint8_t* stop, int* minutes) noexcept nogil:
    """Nothing, Z, or +hh, +hhmm or +hh:mm, as minutes ahead of UTC; False if it is something else."""
    cdef int hour
    cdef int minute = 0
    minutes[0] = 0
    if p == stop or (stop - p == 1 and p[0] == 90):
        return True
    if p[0] != 43 and p[0] != 45:
        return False
    if stop - p == 6 and p[3] == 58:
        minute = digits_at(p + 4, 2)
    elif stop - p == 5:
        minute = digits_at(p + 3, 2)
    elif stop - p != 3:
        return False
    hour = digits_at(p + 1, 2)
    if not 0 <= hour < 24 or not 0 <= minute < 60:
        return False
    minutes[0] = (hour * 60 + minute) * (-1 if p[0] == 45 else 1)
    return True


cdef bint put_moment(const uint8_t* p, size_t n, uint8_t* out, size_t* size) noexcept nogil:
    """Write a date and a time in UTC: without zeros at the end, and the date alone at midnight; False: it is none."""
    cdef const uint8_t* stop = p + n
    cdef const uint8_t* fraction
    cdef const uint8_t* last
    cdef int year
    cdef int month
    cdef int day
    cdef int hour
    cdef int minute
    cdef int second
    cdef int ahead = 0
    cdef int64_t minutes
    cdef int64_t days
    cdef int64_t era
    cdef int64_t of_era
    cdef int64_t year_of_era
    cdef int64_t of_year
    cdef int64_t shifted
    if not is_dated(p, n) or (p[10] != 32 and p[10] != 84):
        return False
    year, month, day = digits_at(p, 4), digits_at(p + 5, 2), digits_at(p + 8, 2)
    hour, minute, second = digits_at(p + 11, 2), digits_at(p + 14, 2), digits_at(p + 17, 2)
    if year < 1 or not 1 <= month <= 12 or not 1 <= day <= 31:
        return False
    if not 0 <= hour < 24 or not 0 <= minute < 60 or not 0 <= second < 60:
        return False
    fraction = last = p + 19
    if fraction < stop and fraction[0] == 46:
        last = fraction + 1
        while last < stop and is_digit(last[0]):
            last += 1
        if last - fraction < 2 or last - fraction > 10:
            return False
    if not read_zone(last, stop, &ahead):
        return False
    minutes = hour * 60 + minute - ahead
    days = days_of(year, month, day)
    if days_of(year + month // 12, month % 12 + 1, 1) <= days:  # the 31st of a shorter month
        return False
    if not 0 <= minutes < 1440:
        days += 1 if minutes >= 1440 else -1
        minutes -= 1440 if minutes >= 1440 else -1440
        era = (days if days >= 0 else days - 146096) // 146097
        of_era = days - era * 146097
        year_of_era = (of_era - of_era // 1460 + of_era // 36524 - of_era // 146096) // 365
        of_year = of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
        shifted = (5 * of_year + 2) // 153
        day = <int>(of_year - (153 * shifted + 2) // 5 + 1)
        month = <int>(shifted + 3 if shifted < 10 else shifted - 9)
        year = <int>(year_of_era + era * 400 + (month <= 2))
        if not 1 <= year <= 9999:
            return False
    put_digits(out, year, 4)
    put_digits(out + 5, month, 2)
    put_digits(out + 8, day, 2)
    out[4] = out[7] = 45
    size[0] = 10
    while last > fraction and (last - 1)[0] == 48:
        last -= 1
    if last == fraction + 1:
        last = fraction
    if minutes == 0 and second == 0 and last == fraction:
        return True
    out[10] = 32
    put_digits(out + 11, minutes // 60, 2)
    put_digits(out + 14, minutes % 60, 2)
    put_digits(out + 17, second, 2)
    out[13] = out[16] = 58
    memcpy(out + 19, fraction, last - fraction)
    size[0] = 19 + <size_t>(last - fraction)
    return True


cdef CellText respelled(const uint8_t* p, size_t n, const uint8_t* end, uint8_t* room) noexcept nogil:
    """The text of a cell with this text; ``room`` has CELL_BYTES."""
    cdef CellText text
    cdef const uint8_t* stop = p + n
    cdef const uint8_t* first = p
    text.begin, text.size, text.end = p, n, end
    if is_truth(p, n):
        text.begin, text.size = <const uint8_t*><const char*>(b"true" if n == 4 else b"false"), n
        text.end = text.begin + n
    elif n > 1 and (stop - 1)[0] == 48:
        # Zeros behind a point: of a whole number, or of seconds.
        while stop > p and (stop - 1)[0] == 48:
            stop -= 1
        if stop > p and (stop - 1)[0] == 46 and stop - p > 1:
            stop -= 1
            if first[0] == 45:
                first += 1
            if stop - first == 8 and first == p and is_time(p):
                text.size = 8
            elif first < stop and all_digits(first, stop) and (first[0] != 48 or stop - first == 1):
                text.size = <size_t>(stop - p)
        elif n > 9 and is_time(p) and p[8] == 46 and all_digits(p + 9, p + n) and stop - p > 9:
            text.size = <size_t>(stop - p)
        if text.size == 2 and p[0] == 45 and p[1] == 48:
            text.begin, text.size = p + 1, 1
    if n > 4 and (load2(p + n - 4) == 0x2B65 or load2(p + n - 4) == 0x2D65):
        text.size = put_exponential(p, n, room)
        if text.size > 0:
            text.begin, text.end = room, room + CELL_BYTES
        else:
            text.size = n
    if text.size >= 19 and put_moment(p, n, room, &text.size):
        text.begin, text.end = room, room + CELL_BYTES
    return text


cdef inline bint is_time(const uint8_t* p) noexcept nogil:
    """Whether eight bytes are a time: 12:34:56."""
    return (
        p[2] == 58 and p[5] == 58 and digits_at(p, 2) >= 0 and digits_at(p + 3, 2) >= 0 and digits_at(p + 6, 2) >= 0
    )


cdef inline bint all_digits(const uint8_t* p, const uint8_t* stop) noexcept nogil:
    while p < stop and is_digit(p[0]):
        p += 1
    return p == stop


cdef uint64_t respelled_key(uint64_t seed, const uint8_t* p, size_t n, const uint8_t* end) noexcept nogil:
    cdef uint8_t[CELL_BYTES] room
    cdef CellText text = respelled(p, n, end, room)
    return unscrambled_key(seed, text.begin, text.size, text.end)


cdef inline uint64_t unscrambled_cell_key(
    uint64_t seed, const uint8_t* p, size_t n, const uint8_t* end
) noexcept nogil:
    """What becomes the key of a cell with this text by a last `scramble`; the bytes up to `end` may be read."""
    if unlikely(may_be_respelled(p, n)):
        return respelled_key(seed, p, n, end)
    return unscrambled_key(seed, p, n, end)


cdef inline uint64_t cell_key(uint64_t seed, const uint8_t* p, size_t n, const uint8_t* end) noexcept nogil:
    """The key of a cell with this text."""
    return scramble(unscrambled_cell_key(seed, p, n, end))


cdef size_t put_plain(const uint8_t* p, size_t n, uint8_t* out) noexcept nogil:
    """Write a decimal number without an exponent, and without zeros that say nothing; 0 if it is none or too long."""
    cdef const uint8_t* stop = p + n
    cdef const uint8_t* q
    cdef uint8_t* to = out
    cdef bint negative = n > 0 and p[0] == 45
    cdef int64_t digits = 0  # from the first that is not 0
    cdef int64_t point = 0  # the number is 0.ddd * 10^point
    cdef int64_t exponent = 0
    cdef bint behind = False
    cdef bint shrinks = False
    cdef int64_t i
    cdef uint8_t[400] found
    if n > 0 and (p[0] == 45 or p[0] == 43):
        p += 1
    q = p
    while q < stop and (is_digit(q[0]) or q[0] == 46):
        if q[0] == 46:
            behind = True
        elif digits > 0 or q[0] != 48:
            if digits == 400:
                return 0
            found[digits] = q[0]
            digits += 1
            if not behind:
                point += 1
        elif behind:
            point -= 1
        q += 1
    if q == p:
        return 0
    if q < stop and (q[0] == 101 or q[0] == 69):
        q += 1
        shrinks = q < stop and q[0] == 45
        if q < stop and (q[0] == 45 or q[0] == 43):
            q += 1
        while q < stop and is_digit(q[0]):
            exponent = min(exponent * 10 + (q[0] - 48), <int64_t>1 << 20)
            q += 1
        point += -exponent if shrinks else exponent
    if q != stop or point < -390 or point > 390:
        return 0
    while digits > 0 and found[digits - 1] == 48:
        digits -= 1
    if digits == 0:
        out[0] = 48
        return 1
    if negative:
        to[0] = 45
        to += 1
    if point <= 0:
        to[0] = 48
        to += 1
    for i in range(min(point, <int64_t>0), max(point, digits)):
        if i == point:
            to[0] = 46
            to += 1
        to[0] = found[i] if 0 <= i < digits else 48
        to += 1
    return <size_t>(to - out)


cdef size_t put_number(double number, uint8_t* out) noexcept nogil:
    """Write a finite number."""
    cdef double size = -number if number < 0 else number
    cdef uint8_t[64] text
    cdef uint8_t* to = out
    cdef char* stop
    if size < 18446744073709551616.0 and size == <double><uint64_t>size:
        if number < 0:
            to[0] = 45
            to += 1
        return <size_t>(<uint8_t*>to_chars(<char*>to, <char*>to + 24, <uint64_t>size).ptr - out)
    stop = to_chars(<char*>text, <char*>text + 64, number, chars_format.scientific).ptr
    return put_plain(text, <size_t>(<uint8_t*>stop - text), out)


cdef size_t put_exponential(const uint8_t* p, size_t n, uint8_t* out) noexcept nogil:
    """Write the number in a text that ends as e+13; 0 if it holds none, or one of many digits."""
    cdef uint8_t[NUMBER_BYTES] text
    cdef double number = 0.0
    cdef size_t size
    cdef from_chars_result read
    if digits_at(p + n - 2, 2) < 0 or not (is_digit(p[0]) or (p[0] == 45 and is_digit(p[1]))):
        return 0
    read = from_chars(<const char*>p, <const char*>p + n, number)
    if <const uint8_t*>read.ptr != p + n or read.ec == errc.result_out_of_range:
        return 0
    size = put_number(number, text)
    if size > CELL_BYTES:
        return 0
    memcpy(out, text, size)
    return size


def number_texts(const double[::1] numbers, int64_t[::1] ends):
    """Return the texts of cells that hold numbers, one after the other, and write where each begins and ends.

    What is not finite has the text "nan", "inf" or "-inf".
    """
    cdef vector[uint8_t] texts
    cdef uint8_t[NUMBER_BYTES] text
    cdef size_t size
    cdef double number
    cdef Py_ssize_t i
    if ends.shape[0] != numbers.shape[0] + 1:
        raise ValueError(f"{numbers.shape[0]} numbers need {numbers.shape[0] + 1} ends, got {ends.shape[0]}")
    ends[0] = 0
    with nogil:
        for i in range(numbers.shape[0]):
            number = numbers[i]
            if number - number == 0.0:
                size = put_number(number, text)
            else:
                size = 3 if number != number or number > 0 else 4
                memcpy(text, b"nan" if number != number else b"inf" if number > 0 else b"-inf", size)
            texts.insert(texts.end(), text, text + size)
            ends[i + 1] = <int64_t>texts.size()
    return PyBytes_FromStringAndSize(<const char*>texts.data(), <Py_ssize_t>texts.size())


def plain_texts(const unsigned char[::1] data, const int64_t[::1] offsets, int64_t[::1] ends):
    """Return texts of decimal numbers without exponents and needless zeros, and write where each begins and ends.

    Other texts, and numbers of more than 390 digits, stay as they are.
    """
    cdef vector[uint8_t] texts
    cdef uint8_t[NUMBER_BYTES] text
    cdef const uint8_t* given = &data[0] if data.shape[0] > 0 else NULL
    cdef size_t size
    cdef Py_ssize_t i
    check_offsets(offsets, data.shape[0], ends.shape[0] - 1)
    ends[0] = 0
    with nogil:
        for i in range(ends.shape[0] - 1):
            size = put_plain(given + offsets[i], <size_t>(offsets[i + 1] - offsets[i]), text)
            if size > 0:
                texts.insert(texts.end(), text, text + size)
            else:
                texts.insert(texts.end(), given + offsets[i], given + offsets[i + 1])
            ends[i + 1] = <int64_t>texts.size()
    return PyBytes_FromStringAndSize(<const char*>texts.data(), <Py_ssize_t>texts.size())


cdef check_offsets(const int64_t[::1] offsets, Py_ssize_t size, Py_ssize_t count):
    """Check that there are as many texts, in order and within the data."""
    cdef Py_ssize_t i
    if offsets.shape[0] != count + 1:
        raise ValueError(f"{count} cells need {count + 1} offsets, got {offsets.shape[0]}")
    for i in range(offsets.shape[0] - 1):
        if offsets[i] > offsets[i + 1]:
            raise ValueError(f"offsets fall from {offsets[i]} to {offsets[i + 1]} at {i}")
    if offsets[0] < 0 or offsets[offsets.shape[0] - 1] > size:
        raise ValueError(f"offsets run from {offsets[0]} to {offsets[offsets.shape[0] - 1]}, of {size} bytes")


def hash_cells(const unsigned char[::1] data, const int64_t[::1] offsets, uint64_t field, uint64_t[::1] keys):
    """Write the key of each cell, whose text is data[offsets[i]:offsets[i + 1]], into ``keys``."""
    cdef uint64_t seed = field_seed(field)
    cdef const uint8_t* text = &data[0] if data.shape[0] > 0 else NULL
    cdef Py_ssize_t i
    check_offsets(offsets, data.shape[0], keys.shape[0])
    with nogil:
        for i in range(keys.shape[0]):
            keys[i] = cell_key(
                seed, text + offsets[i], <size_t>(offsets[i + 1] - offsets[i]), text + data.shape[0]
            )


def cell_text(bytes text):
    """Return the text of a cell with this text."""
    cdef uint8_t[CELL_BYTES] room
    cdef const uint8_t* begin = <const uint8_t*>PyBytes_AS_STRING(text)
    cdef size_t size = <size_t>PyBytes_GET_SIZE(text)
    cdef CellText found
    if not may_be_respelled(begin, size):
        return text
    found = respelled(begin, size, begin + size, room)
    return PyBytes_FromStringAndSize(<const char*>found.begin, <Py_ssize_t>found.size)
