# Shared by all formats: the faults of a line, and the arrays of Python as those of csrc/text/target.h.

cdef extern from "text/fault.h" namespace "shoal::text" nogil:
    cdef enum class Fault(int):
        kGood

    size_t kFaults
    string_view fault_text(Fault)

cdef extern from "text/target.h" namespace "shoal::text" nogil:
    cdef cppclass Target:
        span[float] labels
        span[float] weights
        span[int64_t] indptr
        span[uint64_t] keys
        span[float] values
        span[uint64_t] fields
        span[int64_t] spans
        span[int64_t] ends
        bint labelled
        int64_t classes
        size_t row
        size_t nnz

    cdef cppclass Stop:
        size_t end
        size_t lines
        size_t skipped
        Fault fault
        size_t at

# A parser of csrc/text, with what it knows of the format.
ctypedef Stop (*Parser)(span[Byte] block, size_t start, Target* out, bint skip, const void* known) noexcept nogil


cdef str text_of(Fault fault):
    cdef string_view text = fault_text(fault)
    return text.data()[:text.size()].decode()


# What can be wrong with a line: the text of FAULTS[code], the code being the `fault` of a parse.
FAULTS = tuple([text_of(<Fault><int>code) for code in range(kFaults)])


cdef object parse(
    const unsigned char[::1] block, size_t start, object arrays, bint skip, Parser parser, const void* known
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
    cdef size_t rows = <size_t>labels.shape[0]
    cdef size_t room = <size_t>keys.shape[0]
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
    out.row, out.nnz = <size_t>row, <size_t>indptr[row]
    out.labelled, out.classes = arrays.labelled, arrays.classes
    stop.end = start
    if start < <size_t>block.shape[0] and out.row < rows:
        out.labels = span[float](&labels[0], rows)
        out.indptr = span[int64_t](&indptr[0], rows + 1)
        out.ends = span[int64_t](&ends[0, 0], 2 * rows)
        if weights is not None:
            out.weights = span[float](&weights[0], rows)
        if room > 0:
            out.keys = span[uint64_t](&keys[0], room)
            if values is not None:
                out.values = span[float](&values[0], room)
            if fields is not None:
                out.fields = span[uint64_t](&fields[0], room)
            if spans is not None:
                out.spans = span[int64_t](&spans[0, 0], 2 * room)
        with nogil:
            stop = parser(span[Byte](&block[0], <size_t>block.shape[0]), start, &out, skip, known)
    return stop.end, stop.lines, out.row, stop.skipped, <int>stop.fault, stop.at
