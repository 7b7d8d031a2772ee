# _reader: parsers that turn bytes into arrays. They are csrc/text, in C++; here arrays are checked, the GIL is released
# and faults come back as numbers. One file for each format, all compiled into one module:
#
#   data/formats/target.pxi   shared by all formats: the faults of a line, the arrays
#   data/formats/libsvm.pxi   libsvm and libffm
#   data/formats/criteo.pxi   Criteo's tab-separated logs
#   data/formats/vw.pxi       Vowpal Wabbit's text
#   data/formats/cells.pxi    the text of a cell with a value, its key and its number; keys of tokens
#   data/formats/csv.pxi      CSV and TSV with named columns
#   data/formats/names.pxi    names of features
#
#   block    whole lines of text          ...1 3:1 7:0.5\n-1 2:1\n
#   arrays   an object with these attributes; shoal.data.rows.RowBuffer is one
#     labels    float32, one per row, 0 or 1; the number of a class if classes > 0
#     weights   float32, one per row, or None if the format has none
#     indptr    int64; row r has keys[indptr[r]:indptr[r + 1]], and values, fields and spans likewise
#     keys      uint64
#     values    float32, or None if every value is 1
#     fields    uint64, the field of each feature, or None if not requested
#     ends      int64[, 2], of each row: the byte behind its line, and the lines that this parse has skipped before it
#     spans     int64[, 2], the offsets of each feature's text in the block, or None if not requested
#     row       the number of rows already in the arrays
#     labelled  whether lines have labels and weights; if not, labels become NaN and weights 1 for any line
#     classes   number of classes of labels that are their numbers; 0: labels are 0/1 or -1/+1
#
# Every parse_*(block, start, arrays, ..., skip) appends the lines of block[start:] as rows from arrays.row on, and
# returns (end, lines, row, skipped, fault, at): block[start:end] was consumed, `lines` lines of it, and the arrays now
# hold `row` rows. If `fault` is not 0, the line at `end` is malformed at byte `at`: FAULTS[fault]; with `skip` such
# lines are counted in `skipped` instead. If there is no fault and `end` is before the end of the block, the arrays are
# full: labels if row == len(labels), otherwise keys and the arrays of the same length.
#
# The caller owns every array. A parse stops early, at the beginning of a line, if the next line may not fit; the caller
# enlarges the arrays or removes the rows, and calls again with start = end. A line is appended wholly or not at all.
#
# Threads. No state outside of the arguments; the GIL is released during a parse. A set of arrays belongs to one thread
# at a time.

from libc.stdint cimport UINT8_MAX, UINT64_MAX, int64_t, uint8_t, uint16_t, uint64_t
from libc.string cimport memcpy
from libcpp.optional cimport optional
from libcpp.string cimport string
from libcpp.string_view cimport string_view
from libcpp.vector cimport vector

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.unicode cimport PyUnicode_AsUTF8AndSize

ctypedef const uint8_t Byte
ctypedef const uint16_t const_uint16_t
ctypedef const uint64_t const_uint64_t
ctypedef const int64_t const_int64_t
ctypedef const double const_double

# (libcpp.span declares that a constructor throws.)
cdef extern from "<span>" namespace "std" nogil:
    cdef cppclass span[T]:
        span()
        span(T*, size_t)
        size_t size()

include "data/formats/target.pxi"
include "data/formats/cells.pxi"
include "data/formats/libsvm.pxi"
include "data/formats/criteo.pxi"
include "data/formats/vw.pxi"
include "data/formats/csv.pxi"
include "data/formats/names.pxi"
