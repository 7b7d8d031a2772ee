# libsvm: label key:value key:value ...           libffm: label field:key:value field:key:value ...

cdef extern from "text/libsvm.h" namespace "shoal::text" nogil:
    Stop libsvm_lines "shoal::text::parse_libsvm"(span[Byte], size_t, Target&, bint) noexcept
    Stop libffm_lines "shoal::text::parse_libffm"(span[Byte], size_t, Target&, bint) noexcept


cdef Stop read_libsvm(span[Byte] block, size_t start, Target* out, bint skip, const void* known) noexcept nogil:
    return libsvm_lines(block, start, out[0], skip)


cdef Stop read_libffm(span[Byte] block, size_t start, Target* out, bint skip, const void* known) noexcept nogil:
    return libffm_lines(block, start, out[0], skip)


def parse_libsvm(const unsigned char[::1] block, size_t start, arrays, bint skip):
    """Append libsvm lines to ``arrays``, which have values; see the head of the source and docs/readers.md."""
    if arrays.values is None:
        raise ValueError("values is None: libsvm has values")
    return parse(block, start, arrays, skip, read_libsvm, NULL)


def parse_libffm(const unsigned char[::1] block, size_t start, arrays, bint skip):
    """Append libffm lines to ``arrays``, which have values; see the head of the source and docs/readers.md."""
    if arrays.values is None:
        raise ValueError("values is None: libffm has values")
    return parse(block, start, arrays, skip, read_libffm, NULL)
