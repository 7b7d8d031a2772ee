# Vowpal Wabbit's text: [label [importance]] [tag]|namespace[:scale] name[:value] ... |namespace ...

cdef extern from "text/vw.h" namespace "shoal::text" nogil:
    Stop vw_lines "shoal::text::parse_vw"(span[Byte], size_t, Target&, bint) noexcept


cdef Stop read_vw(span[Byte] block, size_t start, Target* out, bint skip, const void* known) noexcept nogil:
    return vw_lines(block, start, out[0], skip)


def parse_vw(const unsigned char[::1] block, size_t start, arrays, bint skip):
    """Append Vowpal Wabbit lines to ``arrays``, which have values and weights; see the head of the source."""
    if arrays.values is None or arrays.weights is None:
        raise ValueError("values or weights is None: Vowpal Wabbit's text has both")
    return parse(block, start, arrays, skip, read_vw, NULL)
