# CSV and TSV with named columns. A cell may be in double quotes, in which a quote is written twice; a row is one line.

cdef enum:
    PASSED_OVER = 0
    LABEL = 1
    WEIGHT = 2
    NUMERIC = 3
    CATEGORICAL = 4
    LIST = 5
    VECTOR = 6

cdef enum:
    MISSING_FIRST = 1  # one of the texts of cells without a value begins with this byte
    ODD_FIRST = 2  # a text that is not the cell's own may, without a point or a plus sign: True, False, -0

cdef struct Text:
    const uint8_t* begin
    size_t size

# The parameters of the format: shoal.data.columns.BoundColumns.
cdef struct CsvColumns:
    size_t count
    const uint8_t* kinds
    const uint64_t* fields
    const uint64_t* seeds  # of the fields in which texts are hashed
    uint8_t separator
    uint8_t list_separator  # between the items of a list or a vector
    const Text* missing  # texts of cells without a value
    size_t missing_count
    const uint8_t* firsts  # what a cell that begins with this byte may be: MISSING_FIRST, ODD_FIRST
    bint empty_is_missing
    const Text* positive  # the label that counts as 1, or null: labels are numbers
    uint8_t* unquoted  # scratch memory for a cell
    const CsvColumns* unlabelled  # the columns of lines without a label, if there is no header; or null
    ScannedLines* lines  # null if a column is a list or a vector


cdef inline int read_cell(
    const uint8_t** cursor, const uint8_t* end, const CsvColumns* columns, Text* cell, const uint8_t** readable
) noexcept nogil:
    """One cell, up to its separator or newline; the bytes up to `readable` may be read."""
    cdef const uint8_t* p = cursor[0]
    cdef const uint8_t* stop
    cdef uint8_t* to = columns.unquoted
    cdef bint twice = False
    readable[0] = end
    if p[0] != 34:
        stop = byte_or_newline(p, end, columns.separator)
        cell.begin, cell.size = p, <size_t>(stop - p)
        if stop[0] == 10 and cell.size > 0 and (stop - 1)[0] == 13:
            cell.size -= 1
        cursor[0] = stop
        return GOOD
    p += 1
    cell.begin = p
    while True:
        stop = byte_or_newline(p, end, 34)
        if stop[0] == 10:
            return QUOTE_OPEN
        if stop[1] != 34:
            break
        memcpy(to, p, stop + 1 - p)  # with one of the two quotes
        to += stop + 1 - p
        p = stop + 2
        twice = True
    if twice:
        memcpy(to, p, stop - p)
        to += stop - p
        cell.begin = columns.unquoted
        readable[0] = to
        cell.size = <size_t>(to - columns.unquoted)
    else:
        cell.size = <size_t>(stop - cell.begin)
    stop += 1
    cursor[0] = stop
    if stop[0] == 13 and stop[1] == 10:
        stop += 1
    if stop[0] != columns.separator and stop[0] != 10:
        return QUOTE_CLOSED
    cursor[0] = stop
    return GOOD


cdef inline bint is_missing(const CsvColumns* columns, const Text* cell) noexcept nogil:
    cdef size_t i
    if cell.size == 0:
        return columns.empty_is_missing
    if columns.firsts[cell.begin[0]] & MISSING_FIRST:
        for i in range(columns.missing_count):
            if columns.missing[i].size == cell.size and memcmp(columns.missing[i].begin, cell.begin, cell.size) == 0:
                return True
    return False


cdef inline int read_whole_number(const Text* cell, const uint8_t* readable, float* out) noexcept nogil:
    """The number in a cell, without the blanks around it."""
    cdef const uint8_t* p = cell.begin
    cdef const uint8_t* stop = p + cell.size
    cdef int fault
    while p < stop and is_blank(p[0]):
        p += 1
    while p < stop and is_blank((stop - 1)[0]):
        stop -= 1
    if p == stop:
        return VALUE_TEXT
    # In the block a quote, separator or newline follows a cell and ends the number; an unquoted copy has no such end.
    if stop == readable:
        return VALUE_TEXT
    fault = read_number(&p, readable, out)
    return VALUE_TEXT if fault == GOOD and p != stop else fault


cdef inline int read_truth(
    const CsvColumns* columns, const Text* cell, const uint8_t* readable, Target* out
) noexcept nogil:
    cdef float y = 0.0
    cdef int fault
    cdef uint8_t[CELL_BYTES] room
    cdef CellText text
    if columns.positive != NULL:
        text = respelled(cell.begin, cell.size, readable, room)
        out.labels[out.row] = (
            1.0 if text.size == columns.positive.size and memcmp(text.begin, columns.positive.begin, text.size) == 0
            else 0.0
        )
        return GOOD
    fault = read_whole_number(cell, readable, &y)
    if fault == VALUE_TEXT:
        return LABEL_TEXT
    if fault != GOOD:
        return LABEL_RANGE if out.classes == 0 else LABEL_CLASS
    return put_label(y, out)


cdef inline int put_cell(
    const CsvColumns* columns, size_t column, const Text* cell, const uint8_t* readable, Target* out,
    const uint8_t* begin, const uint8_t* end,
) noexcept nogil:
    """Store the cell from `begin` to `end`: the label, the weight, a feature, or nothing."""
    cdef float value = 1.0
    cdef int fault
    cdef uint8_t kind = columns.kinds[column]
    if not out.labelled and (kind == LABEL or kind == WEIGHT):
        return GOOD
    if is_missing(columns, cell):
        return CELL_MISSING if kind == LABEL or kind == WEIGHT else GOOD
    if kind == LABEL:
        return read_truth(columns, cell, readable, out)
    if kind == WEIGHT:
        fault = read_whole_number(cell, readable, &value)
        if fault != GOOD or value < 0.0:
            return IMPORTANCE
        out.weights[out.row] = value
        return GOOD
    if kind == NUMERIC:
        fault = read_whole_number(cell, readable, &value)
        if fault != GOOD:
            return fault
        out.keys[out.nnz] = token_key(columns.seeds[column], cell.begin, 0, readable)
    else:
        out.keys[out.nnz] = cell_key(columns.seeds[column], cell.begin, cell.size, readable)
    if out.values != NULL:
        out.values[out.nnz] = value
    if out.origins:
        if cell.begin != columns.unquoted:  # an unquoted copy is not in the block: span the cell with its quotes
            begin, end = cell.begin, cell.begin + cell.size
        put_origin(out, out.nnz, columns.fields[column], begin, end)
    out.nnz += 1
    return GOOD


cdef inline int put_list(
    const CsvColumns* columns, size_t column, const Text* cell, const uint8_t* readable, Target* out,
    const uint8_t** begin, const uint8_t* end,
) noexcept nogil:
    """Store a feature for each item of the cell from `begin` to `end`; one that is missing keeps its place.

    At a fault, `begin` is that of the item.
    """
    cdef bint nameless
    cdef bint copied = readable == columns.unquoted + cell.size
    cdef bint is_vector = columns.kinds[column] == VECTOR
    cdef const uint8_t* missing_item = <const uint8_t*><const char*>b"\0missing"
    cdef const uint8_t* p = cell.begin
    cdef const uint8_t* stop = cell.begin + cell.size
    cdef const uint8_t* behind
    cdef float value
    cdef int fault
    cdef Text text
    if is_missing(columns, cell) or (is_vector and cell.size == 0):
        return GOOD
    if copied and is_vector:
        columns.unquoted[cell.size] = 10  # it ends the last number
        readable += 1
    while p <= stop:
        behind = <const uint8_t*>memchr(p, columns.list_separator, stop - p)
        if behind == NULL:
            behind = stop
        text.begin, text.size = p, <size_t>(behind - p)
        # Leaves room for the other columns of the line.
        if out.nnz + <int64_t>columns.count > out.room:
            return NO_ROOM
        nameless = text.size == 0 or is_missing(columns, &text)
        value = 1.0
        if is_vector:
            value = 0.0
            fault = GOOD if nameless else read_whole_number(&text, readable, &value)
            if fault != GOOD:
                if not copied:
                    begin[0] = p
                return fault
            out.keys[out.nnz] = token_key(columns.seeds[column], p, 0, readable)
        elif nameless:
            out.keys[out.nnz] = token_key(columns.seeds[column], missing_item, 8, missing_item + 8)
        else:
            out.keys[out.nnz] = cell_key(columns.seeds[column], text.begin, text.size, readable)
        if out.values != NULL:
            out.values[out.nnz] = value
        if out.origins:
            if copied:
                put_origin(out, out.nnz, columns.fields[column], begin[0], end)
            else:
                put_origin(out, out.nnz, columns.fields[column], p, p if nameless else behind)
        out.nnz += 1
        p = behind + 1
    return GOOD


cdef int read_row(
    const uint8_t** cursor, const uint8_t* end, Target* out, const CsvColumns* columns
) noexcept nogil:
    """The cells of a line, as many as there are columns."""
    cdef const uint8_t* p = cursor[0]
    cdef const uint8_t* readable = end
    cdef const uint8_t* behind
    cdef size_t column = 0
    cdef Text cell
    cdef int fault
    if p[0] == 10 or (p[0] == 13 and p[1] == 10):
        cursor[0] += 0 if p[0] == 10 else 1
        return BLANK
    if out.nnz + <int64_t>columns.count > out.room:
        return NO_ROOM
    while True:
        cursor[0] = p
        fault = read_cell(&p, end, columns, &cell, &readable)
        if fault == QUOTE_CLOSED:
            cursor[0] = p
        behind = p - 1 if fault == GOOD and p[0] == 10 and p > cursor[0] and (p - 1)[0] == 13 else p
        if fault == GOOD and columns.kinds[column] >= LIST:
            fault = put_list(columns, column, &cell, readable, out, cursor, behind)
        elif fault == GOOD and columns.kinds[column] != PASSED_OVER:
            fault = put_cell(columns, column, &cell, readable, out, cursor[0], behind)
        if fault != GOOD:
            return fault
        column += 1
        if p[0] == 10 or column == columns.count:
            break
        p += 1
    cursor[0] = p
    return GOOD if p[0] == 10 and column == columns.count else CELLS


cdef inline bint read_plain_number(const Text* cell, const uint8_t* end, float* out) noexcept nogil:
    """The number in a cell; False if there is none. An empty cell holds 0."""
    cdef uint32_t word
    if cell.size <= 4:
        # The digits at the upper end of the word, zeros before them: as in `read_integers`.
        word = (load4(cell.begin) ^ <uint32_t>0x30303030) * kToTop[cell.size + 1]
        if ((word + <uint32_t>0x76767676) | word) & <uint32_t>0x80808080 == 0:
            word = word * 10 + (word >> 8)
            out[0] = <float><int>(((word & 0x00FF00FF) * <uint32_t>0x00640001) >> 16)
            return True
    return read_whole_number(cell, end, out) == GOOD


cdef bint read_scanned_row(
    const uint8_t* p, const uint16_t* stops, const uint8_t* end, Target* out, const CsvColumns* columns
) noexcept nogil:
    """Read a line of as many cells as there are columns; False, and ``out.nnz`` is as before, if one is not as usual.

    A missing cell stores a feature too, over which the next one is stored: a branch would often be mispredicted.
    """
    cdef const uint8_t* text = columns.lines.text
    cdef size_t before = <size_t>(p - text) - 1  # wraps around at the beginning of the text, and back
    cdef uint64_t* keys = out.keys + out.nnz
    cdef float* values = out.values + out.nnz if out.values != NULL else NULL
    cdef int64_t count = 0
    cdef float value
    cdef Text cell
    cdef size_t column
    cdef bint keeps_empty = not columns.empty_is_missing
    cdef bint kept
    cdef bint number
    cdef uint8_t kind
    cdef uint8_t first
    cdef uint8_t pointed = columns.lines.pointed
    cdef const uint8_t* firsts = columns.firsts
    text += 1
    for column in range(columns.count):
        cell.begin = text + before
        cell.size = <size_t>stops[column] - before - 1
        before = stops[column]
        kind = columns.kinds[column]
        if column == columns.count - 1 and cell.size > 0 and cell.begin[cell.size - 1] == 13:
            cell.size -= 1
        if cell.begin[0] == 34:
            return False
        if kind == PASSED_OVER:
            continue
        if kind == LABEL or kind == WEIGHT:
            if put_cell(columns, column, &cell, end, out, cell.begin, cell.begin + cell.size) != GOOD:
                return False
            continue
        kept = (cell.size > 0) | keeps_empty
        first = firsts[cell.begin[0]]
        if unlikely(first & MISSING_FIRST):
            kept = not is_missing(columns, &cell)
        value = 1.0
        if kind == NUMERIC:
            number = read_plain_number(&cell, end, &value)
            if unlikely(kept & ((number == 0) | (cell.size == 0))):
                return False
            keys[count] = columns.seeds[column]
        elif unlikely((cell.size >= 19) | (first & ODD_FIRST)) or (
            pointed and unlikely(ends_oddly(load4(cell.begin + cell.size - 4)))
        ):
            keys[count] = unscrambled_cell_key(columns.seeds[column], cell.begin, cell.size, end)
        else:
            keys[count] = unscrambled_cell(columns.seeds[column], cell.begin, cell.size + 1, end)
        if values != NULL:
            values[count] = value
        if out.origins:
            put_origin(out, out.nnz + count, columns.fields[column], cell.begin, cell.begin + cell.size)
        count += kept
    scramble_block(keys, <size_t>count)
    out.nnz += count
    return True


cdef bint read_scanned_csv(
    const uint8_t* p, const uint8_t* end, Target* out, const CsvColumns* columns
) noexcept nogil:
    """Read a line by the ends of its cells: False if it is to be read in the other way."""
    cdef const uint16_t* stops = NULL
    cdef size_t cells
    if columns.lines == NULL or out.nnz + <int64_t>columns.count > out.room:
        return False
    if p[0] == 10 or (p[0] == 13 and p[1] == 10):
        return False
    if p - out.block < 4:  # the four bytes before the end of a cell are read
        return False
    cells = scanned_line(columns.lines, p, end, columns.separator, &stops)
    if columns.lines.line == 1:
        columns.lines.pointed = (
            memchr(p, 46, columns.lines.size) != NULL or memchr(p, 43, columns.lines.size) != NULL
        )
    if cells == columns.count:
        return read_scanned_row(p, stops, end, out, columns)
    if columns.unlabelled != NULL and cells == columns.unlabelled.count:
        return read_scanned_row(p, stops, end, out, columns.unlabelled)
    return False


cdef int csv_line(const uint8_t** cursor, const uint8_t* end, Target* out, const void* known) noexcept nogil:
    cdef const CsvColumns* columns = <const CsvColumns*>known
    cdef const uint8_t* line = cursor[0]
    cdef const uint8_t* at
    cdef int fault
    cdef int without
    if read_scanned_csv(line, end, out, columns):
        cursor[0] = columns.lines.next - 1
        return GOOD
    fault = read_row(cursor, end, out, columns)
    if columns.unlabelled == NULL or fault == GOOD or fault == BLANK or fault == NO_ROOM:
        return fault
    # The number of cells decides whether there is a label: no line is valid both ways.
    at = cursor[0]
    cursor[0] = line
    out.nnz = out.indptr[out.row]
    without = read_row(cursor, end, out, columns.unlabelled)
    if without == GOOD or without == NO_ROOM:
        return without
    cursor[0] = at
    return fault


def parse_csv(const unsigned char[::1] block, size_t start, arrays, columns, bint skip):
    """Append rows of CSV to ``arrays``, by ``columns``, a `shoal.data.columns.BoundColumns`; see docs/readers.md."""
    cdef const uint8_t[::1] kinds = columns.kinds
    cdef const uint64_t[::1] fields = columns.fields
    cdef const uint64_t[::1] hashed = columns.hashed
    cdef tuple missing = columns.missing
    cdef bytes positive = columns.positive
    cdef vector[uint64_t] seeds
    cdef vector[Text] empties
    cdef uint8_t[256] firsts
    cdef bytes unquoted
    cdef Text truth
    cdef CsvColumns known
    cdef CsvColumns without
    cdef ScannedLines lines
    cdef const uint8_t[::1] fewer_kinds
    cdef const uint64_t[::1] fewer_fields
    cdef const uint64_t[::1] fewer_hashed
    cdef vector[uint64_t] fewer_seeds
    cdef size_t i
    cdef bytes text
    if kinds.shape[0] == 0 or kinds.shape[0] != fields.shape[0] or kinds.shape[0] != hashed.shape[0]:
        raise ValueError(
            f"kinds, fields and hashed must be as long, and not empty, got {kinds.shape[0]}, {fields.shape[0]} and "
            f"{hashed.shape[0]}"
        )
    if arrays.weights is None and WEIGHT in columns.kinds:
        raise ValueError("weights is None, and a column is the weight")
    if arrays.values is None and (NUMERIC in columns.kinds or VECTOR in columns.kinds):
        raise ValueError("values is None, and a column is numeric or a vector")
    for i in range(<size_t>fields.shape[0]):
        seeds.push_back(field_seed(hashed[i]))
    memset(firsts, 0, 256)
    firsts[84] = firsts[70] = firsts[45] = ODD_FIRST
    known.empty_is_missing = False
    for text in missing:
        if len(text) == 0:
            known.empty_is_missing = True
            continue
        truth.begin, truth.size = <const uint8_t*>PyBytes_AS_STRING(text), <size_t>PyBytes_GET_SIZE(text)
        firsts[truth.begin[0]] |= MISSING_FIRST
        empties.push_back(truth)
    known.positive = NULL
    if positive is not None:
        truth.begin, truth.size = <const uint8_t*>PyBytes_AS_STRING(positive), <size_t>PyBytes_GET_SIZE(positive)
        known.positive = &truth
    # Uninitialized: it is allocated for each batch and rarely used.
    unquoted = PyBytes_FromStringAndSize(NULL, block.shape[0])
    known.count = <size_t>kinds.shape[0]
    known.kinds, known.fields, known.seeds = &kinds[0], &fields[0], seeds.data()
    known.separator, known.list_separator = columns.separator, columns.list_separator
    known.missing, known.missing_count, known.firsts = empties.data(), empties.size(), firsts
    known.unquoted = <uint8_t*>PyBytes_AS_STRING(unquoted)
    known.unlabelled = NULL
    begin_lines(&lines)
    known.lines = NULL
    if LIST not in columns.kinds and VECTOR not in columns.kinds:
        known.lines = &lines
    if columns.unlabelled is not None and not arrays.labelled:
        without = known
        fewer_kinds, fewer_fields = columns.unlabelled.kinds, columns.unlabelled.fields
        fewer_hashed = columns.unlabelled.hashed
        if (
            fewer_kinds.shape[0] == 0 or fewer_kinds.shape[0] != fewer_fields.shape[0]
            or fewer_kinds.shape[0] != fewer_hashed.shape[0]
        ):
            raise ValueError(
                f"kinds, fields and hashed of unlabelled must be as long, and not empty, got {fewer_kinds.shape[0]}, "
                f"{fewer_fields.shape[0]} and {fewer_hashed.shape[0]}"
            )
        if arrays.values is None and (NUMERIC in columns.unlabelled.kinds or VECTOR in columns.unlabelled.kinds):
            raise ValueError("values is None, and a column of unlabelled is numeric or a vector")
        for i in range(<size_t>fewer_hashed.shape[0]):
            fewer_seeds.push_back(field_seed(fewer_hashed[i]))
        without.count = <size_t>fewer_kinds.shape[0]
        without.kinds, without.fields, without.seeds = &fewer_kinds[0], &fewer_fields[0], fewer_seeds.data()
        known.unlabelled = &without
    return parse(block, start, arrays, skip, csv_line, &known)


def read_numbers(
    const unsigned char[::1] data, const int64_t[::1] offsets, const uint8_t[::1] there, float[::1] numbers
):
    """Write the number in each text that is there, NaN for the others; return the first that holds none, and its fault.

    A number is what csv has in a numeric column. (-1, 0): all are good.
    """
    cdef const uint8_t* text = &data[0] if data.shape[0] > 0 else NULL
    cdef uint8_t[NUMBER_BYTES] copy
    cdef Text cell
    cdef vector[uint8_t] longer
    cdef uint8_t* to
    cdef Py_ssize_t i
    cdef int fault = GOOD
    check_offsets(offsets, data.shape[0], numbers.shape[0])
    if there.shape[0] != numbers.shape[0]:
        raise ValueError(f"{numbers.shape[0]} numbers need as many in there, got {there.shape[0]}")
    with nogil:
        for i in range(numbers.shape[0]):
            numbers[i] = NAN
            if not there[i]:
                continue
            cell.size = <size_t>(offsets[i + 1] - offsets[i])
            to = copy
            if cell.size >= NUMBER_BYTES:
                longer.resize(cell.size + 1)
                to = longer.data()
            if cell.size > 0:
                memcpy(to, text + offsets[i], cell.size)
            to[cell.size] = 10  # it ends the number
            cell.begin = to
            fault = read_whole_number(&cell, to + cell.size + 1, &numbers[i])
            if fault != GOOD:
                break
    return (i if fault != GOOD else -1), fault
