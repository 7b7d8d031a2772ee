# _reader: bytes into arrays, and nothing else. One file a format, all compiled into one module:
#
#   data/formats/scan.pxi     the walk over lines, faults, numbers: what all formats share
#   data/formats/tokens.pxi   keys of text
#   data/formats/libsvm.pxi   libsvm and libffm
#   data/formats/criteo.pxi   Criteo's tab-separated logs
#   data/formats/vw.pxi       Vowpal Wabbit's text
#   data/formats/csv.pxi      CSV and TSV with named columns
#
# Idea. A block of whole lines is walked once, from its first byte to its last. A newline ends every loop, so that
# no loop asks whether bytes are left: `block` has to end with one, which is checked before the walk begins.
# Numbers take an exact short cut and fall back to std::from_chars where the short cut cannot be sure.
#
#   block    whole lines of text          ...1 3:1 7:0.5\n-1 2:1\n
#   arrays   an object with these attributes; shoal.data.rows.Rows is one
#     labels    float32, one per row, 0 or 1
#     weights   float32, one per row, or None where the format has none
#     indptr    int64, row r owns keys[indptr[r]:indptr[r + 1]], and values, fields and spans likewise
#     keys      uint64
#     values    float32, or None where every value is 1
#     fields    uint64, the field of each feature, or None where nobody asked
#     spans     int64[, 2], where in the block the text of each feature begins and ends, or None where nobody asked
#     row       rows that are in the arrays already
#     labelled  whether lines have labels, and weights; else labels become NaN and weights 1, whatever stands there
#
# Every parse_*(block, start, arrays, ..., skip) appends the lines of block[start:] as rows from arrays.row on, and
# returns (end, lines, row, skipped, fault, at): block[start:end] was consumed, `lines` lines of it, and the arrays now
# hold `row` rows. With `fault` other than 0 the line at `end` is malformed at byte `at`: FAULTS[fault]; with `skip`
# such lines are counted in `skipped` instead. With no fault and `end` short of the block the arrays are full: labels
# if row == len(labels), else keys and what goes with them.
#
# The caller owns every array. A parse stops early, at the beginning of a line, when a further line may not fit; the
# caller makes room or takes the rows away, and calls again with start = end. Nothing of a line that is not wholly
# parsed is left behind.
#
# Invariants
#   I1  Bytes are read in [start, len(block)) only; eight at a time only where eight are left.
#   I2  rows are written below len(labels), features below len(keys).
#   I3  On return indptr[row] is the number of keys in rows [0, row), and at `end` a line begins or the block ends.
#
# Threads. No state outside of the arguments; the GIL is released during the walk. A set of arrays belongs to one thread
# at a time.

from libc.stdint cimport INT64_MAX, UINT64_MAX, int64_t, uint8_t, uint16_t, uint64_t
from libc.float cimport FLT_MAX
from libc.math cimport NAN
from libc.string cimport memchr, memcmp, memcpy, memset
from libcpp.vector cimport vector

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.unicode cimport PyUnicode_AsUTF8AndSize

include "data/formats/scan.pxi"
include "data/formats/tokens.pxi"
include "data/formats/libsvm.pxi"
include "data/formats/criteo.pxi"
include "data/formats/vw.pxi"
include "data/formats/csv.pxi"
