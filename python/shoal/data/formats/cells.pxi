# The text of a cell with a value, its key and its number: csrc/text/cell.h; and keys of tokens.

cdef extern from "text/token_key.h" namespace "shoal::text" nogil:
    uint64_t field_seed(uint64_t field) noexcept
    uint64_t token_key(uint64_t seed, const uint8_t* p, size_t n, const uint8_t* end) noexcept

cdef extern from "text/cell.h" namespace "shoal::text" nogil:
    cdef cppclass CellText:
        const uint8_t* begin
        size_t size

    cdef cppclass CellRoom:
        pass

    cdef cppclass MissingTexts:
        MissingTexts()
        MissingTexts(const vector[string]&) except +

    const size_t CELL_BYTES "shoal::text::kCellBytes"

    CellText text_of_cell "shoal::text::cell_text"(
        const uint8_t* p, size_t n, const uint8_t* end, CellRoom& room
    ) noexcept

cdef extern from "text/cells.h" namespace "shoal::text" nogil:
    cdef cppclass NumbersRead:
        size_t count
        Fault fault

    void keys_of_cells "shoal::text::hash_cells"(
        span[Byte] data, span[const_int64_t] offsets, uint64_t field, span[uint64_t] keys
    ) noexcept
    vector[uint8_t] texts_of_numbers "shoal::text::number_texts"(
        span[const_double] numbers, span[int64_t] ends
    ) except +
    vector[uint8_t] texts_without_exponents "shoal::text::plain_texts"(
        span[Byte] data, span[const_int64_t] offsets, span[int64_t] ends
    ) except +
    NumbersRead numbers_of_cells "shoal::text::read_numbers"(
        span[Byte] data, span[const_int64_t] offsets, span[Byte] there, span[float] numbers
    ) except +


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


cdef span[Byte] bytes_of(const unsigned char[::1] data) noexcept:
    return span[Byte](&data[0], <size_t>data.shape[0]) if data.shape[0] > 0 else span[Byte]()


cdef span[const_int64_t] offsets_of(const int64_t[::1] offsets, Py_ssize_t size, Py_ssize_t count) except *:
    """Check that there are as many texts, in order and within the data."""
    cdef Py_ssize_t i
    if offsets.shape[0] != count + 1:
        raise ValueError(f"{count} cells need {count + 1} offsets, got {offsets.shape[0]}")
    for i in range(offsets.shape[0] - 1):
        if offsets[i] > offsets[i + 1]:
            raise ValueError(f"offsets fall from {offsets[i]} to {offsets[i + 1]} at {i}")
    if offsets[0] < 0 or offsets[offsets.shape[0] - 1] > size:
        raise ValueError(f"offsets run from {offsets[0]} to {offsets[offsets.shape[0] - 1]}, of {size} bytes")
    return span[const_int64_t](&offsets[0], <size_t>offsets.shape[0])


cdef bytes joined(const vector[uint8_t]& texts):
    return PyBytes_FromStringAndSize(<const char*>texts.data(), <Py_ssize_t>texts.size())


def hash_cells(const unsigned char[::1] data, const int64_t[::1] offsets, uint64_t field, uint64_t[::1] keys):
    """Write the key of each cell, whose text is data[offsets[i]:offsets[i + 1]], into ``keys``."""
    cdef span[Byte] text = bytes_of(data)
    cdef span[const_int64_t] cells = offsets_of(offsets, data.shape[0], keys.shape[0])
    cdef span[uint64_t] out
    if keys.shape[0] > 0:
        out = span[uint64_t](&keys[0], <size_t>keys.shape[0])
    with nogil:
        keys_of_cells(text, cells, field, out)


def number_texts(const double[::1] numbers, int64_t[::1] ends):
    """Return the texts of cells that hold numbers, one after the other, and write where each begins and ends.

    What is not finite has the text "nan", "inf" or "-inf".
    """
    cdef span[const_double] given
    cdef vector[uint8_t] texts
    if ends.shape[0] != numbers.shape[0] + 1:
        raise ValueError(f"{numbers.shape[0]} numbers need {numbers.shape[0] + 1} ends, got {ends.shape[0]}")
    if numbers.shape[0] > 0:
        given = span[const_double](&numbers[0], <size_t>numbers.shape[0])
    with nogil:
        texts = texts_of_numbers(given, span[int64_t](&ends[0], <size_t>ends.shape[0]))
    return joined(texts)


def plain_texts(const unsigned char[::1] data, const int64_t[::1] offsets, int64_t[::1] ends):
    """Return texts of decimal numbers without exponents and needless zeros, and write where each begins and ends.

    Other texts, and numbers of more than 390 digits, stay as they are.
    """
    cdef span[Byte] text = bytes_of(data)
    cdef span[const_int64_t] cells = offsets_of(offsets, data.shape[0], ends.shape[0] - 1)
    cdef vector[uint8_t] texts
    with nogil:
        texts = texts_without_exponents(text, cells, span[int64_t](&ends[0], <size_t>ends.shape[0]))
    return joined(texts)


def read_numbers(
    const unsigned char[::1] data, const int64_t[::1] offsets, const uint8_t[::1] there, float[::1] numbers
):
    """Write the number in each text that is there, NaN for the others; return the first that holds none, and its fault.

    A number is what csv has in a numeric column. (-1, 0): all are good.
    """
    cdef span[Byte] text = bytes_of(data)
    cdef span[const_int64_t] cells = offsets_of(offsets, data.shape[0], numbers.shape[0])
    cdef span[Byte] is_there = bytes_of(there)
    cdef span[float] out
    cdef NumbersRead got
    if there.shape[0] != numbers.shape[0]:
        raise ValueError(f"{numbers.shape[0]} numbers need as many in there, got {there.shape[0]}")
    if numbers.shape[0] > 0:
        out = span[float](&numbers[0], <size_t>numbers.shape[0])
    with nogil:
        got = numbers_of_cells(text, cells, is_there, out)
    return (-1 if got.fault == Fault.kGood else got.count), <int>got.fault


def cell_text(bytes text):
    """Return the text of a cell with this text."""
    cdef CellRoom room
    cdef const uint8_t* begin = <const uint8_t*>PyBytes_AS_STRING(text)
    cdef size_t size = <size_t>PyBytes_GET_SIZE(text)
    cdef CellText found = text_of_cell(begin, size, begin + size, room)
    return PyBytes_FromStringAndSize(<const char*>found.begin, <Py_ssize_t>found.size)
