# CSV and TSV with named columns. A cell may be in double quotes, in which a quote is written twice; a row is one line.

cdef extern from "text/csv.h" namespace "shoal::text" nogil:
    cdef enum class CellKind(uint8_t):
        kWeight
        kNumeric
        kList
        kVector

    cdef cppclass CsvColumn:
        CellKind kind
        uint64_t field
        uint64_t seed

    cdef cppclass CsvColumns:
        vector[CsvColumn] all
        vector[CsvColumn] unlabelled
        uint8_t separator
        uint8_t list_separator
        MissingTexts missing
        optional[string] positive

    Stop csv_lines "shoal::text::parse_csv"(
        span[Byte], size_t, Target&, bint, const CsvColumns&, span[uint8_t]
    ) noexcept

# What a parse knows: the columns, and memory for a cell.
cdef struct Csv:
    const CsvColumns* columns
    uint8_t* scratch


cdef Stop read_csv(span[Byte] block, size_t start, Target* out, bint skip, const void* known) noexcept nogil:
    cdef const Csv* csv = <const Csv*>known
    return csv_lines(block, start, out[0], skip, csv.columns[0], span[uint8_t](csv.scratch, block.size()))


cdef put_columns(columns, str of, bint weighted, bint valued, vector[CsvColumn]* to):
    """Check and append the columns of a line, ``of`` unlabelled lines or of all."""
    cdef const uint8_t[::1] kinds = columns.kinds
    cdef const uint64_t[::1] fields = columns.fields
    cdef const uint64_t[::1] hashed = columns.hashed
    cdef CsvColumn column
    cdef Py_ssize_t i
    if kinds.shape[0] == 0 or kinds.shape[0] != fields.shape[0] or kinds.shape[0] != hashed.shape[0]:
        raise ValueError(
            f"kinds, fields and hashed{of} must be as long, and not empty, got {kinds.shape[0]}, {fields.shape[0]} and "
            f"{hashed.shape[0]}"
        )
    for i in range(kinds.shape[0]):
        column.kind = <CellKind>kinds[i]
        if not weighted and column.kind == CellKind.kWeight:
            raise ValueError(f"weights is None, and a column{of} is the weight")
        if not valued and (column.kind == CellKind.kNumeric or column.kind == CellKind.kVector):
            raise ValueError(f"values is None, and a column{of} is numeric or a vector")
        column.field, column.seed = fields[i], field_seed(hashed[i])
        to.push_back(column)


def parse_csv(const unsigned char[::1] block, size_t start, arrays, columns, bint skip):
    """Append rows of CSV to ``arrays``, by ``columns``, a `shoal.data.columns.BoundColumns`; see docs/readers.md."""
    cdef CsvColumns known
    cdef vector[string] missing = columns.missing
    cdef bytes scratch
    cdef Csv csv
    put_columns(columns, "", arrays.weights is not None, arrays.values is not None, &known.all)
    if columns.unlabelled is not None and not arrays.labelled:
        put_columns(columns.unlabelled, " of unlabelled", True, arrays.values is not None, &known.unlabelled)
    known.separator, known.list_separator = columns.separator, columns.list_separator
    known.missing = MissingTexts(missing)
    if columns.positive is not None:
        known.positive = <string>columns.positive
    # Uninitialized: it is allocated for each batch and rarely used.
    scratch = PyBytes_FromStringAndSize(NULL, block.shape[0])
    csv.columns, csv.scratch = &known, <uint8_t*>PyBytes_AS_STRING(scratch)
    return parse(block, start, arrays, skip, read_csv, &csv)
