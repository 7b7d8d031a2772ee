# Keys of text: the fixed hash of (field, token), docs/readers.md.

cdef inline uint64_t scramble(uint64_t x) noexcept nogil:
    """A bijection on 64 bits: the finalizer of splitmix64 (Stafford's variant 13)."""
    x = (x ^ (x >> 30)) * <uint64_t>0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * <uint64_t>0x94D049BB133111EB
    return x ^ (x >> 31)


cdef inline uint64_t field_seed(uint64_t field) noexcept nogil:
    return scramble(field + <uint64_t>0x9E3779B97F4A7C15)


cdef inline uint64_t unscrambled_key(uint64_t seed, const uint8_t* p, size_t n, const uint8_t* end) noexcept nogil:
    """What becomes the key of (field, token) by a last `scramble`.

    One scramble per eight bytes, the last eight overlapping the previous ones if n is not a multiple of eight. The
    rounds are bijections, so tokens of one field and one length up to eight bytes never share a key.
    """
    cdef uint64_t h = seed + n * <uint64_t>0x9E3779B97F4A7C15
    cdef uint64_t word = 0
    cdef size_t i = 0
    if n > 8:
        while i + 8 < n:
            h = scramble(h ^ load8(p + i))
            i += 8
        return h ^ load8(p + n - 8)
    if end - p >= 8:
        if n > 0:
            word = load8(p) & (UINT64_MAX >> (64 - 8 * n))
    else:
        while i < n:
            word |= <uint64_t>p[i] << (8 * i)
            i += 1
    return h ^ word


cdef inline uint64_t token_key(uint64_t seed, const uint8_t* p, size_t n, const uint8_t* end) noexcept nogil:
    """The key of (field, token), with seed = field_seed(field); the bytes up to `end` may be read."""
    return scramble(unscrambled_key(seed, p, n, end))


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
