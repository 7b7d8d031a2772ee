# libsvm: label key:value key:value ...           libffm: label field:key:value field:key:value ...

cdef inline int read_pairs(
    const uint8_t** cursor, const uint8_t* end, Target* out, bint fielded
) noexcept nogil:
    """The features of one line, from the end of its label to its newline, at which `cursor` ends."""
    cdef const uint8_t* p = cursor[0]
    cdef const uint8_t* colon
    cdef int64_t nnz = out.nnz
    cdef uint64_t field = 0
    cdef uint64_t key = 0
    cdef float value = 0.0
    cdef int malformed = FIELD_TEXT if fielded else KEY_TEXT
    cdef int fault = GOOD
    while True:
        while is_blank(p[0]):
            p += 1
        if not is_digit(p[0]):
            if p[0] == 10:
                break
            if p[0] == 35:
                p = <const uint8_t*>memchr(p, 10, end - p)
                break
            if not fielded and end - p > 4 and p[0] == 113 and p[1] == 105 and p[2] == 100 and p[3] == 58:
                cursor[0] = p
                p += 4
                fault = read_key(&p, end, &key)
                if fault == GOOD and not ends_token(p[0]):
                    fault = KEY_TEXT
                if fault != GOOD:
                    return fault
                continue
            fault = malformed
            break
        cursor[0] = p
        if fielded:
            fault = read_key(&p, end, &field)
            if fault == GOOD and p[0] != 58:
                fault = FIELD_TEXT
            if fault != GOOD:
                break
            p += 1
        fault = read_key(&p, end, &key)
        if fault != GOOD:
            fault = malformed if fault == KEY_TEXT else fault
            break
        if p[0] != 58:
            fault = VALUE_MISSING if ends_token(p[0]) else malformed
            break
        p += 1
        if p[0] == 49 and ends_token(p[1]):
            value = 1.0
            p += 1
        else:
            fault = read_number(&p, end, &value)
            if fault != GOOD:
                break
            if not ends_token(p[0]):
                fault = VALUE_TEXT
                break
        if nnz == out.room:
            fault = NO_ROOM
            break
        out.keys[nnz] = key
        out.values[nnz] = value
        if out.origins:
            colon = p
            while colon[0] != 58:
                colon -= 1
            put_origin(out, nnz, field, cursor[0], colon)
        nnz += 1
    cursor[0] = p
    out.nnz = nnz
    return fault


cdef inline void pass_over_label(const uint8_t** cursor) noexcept nogil:
    """Skip the first word unless it is a feature, which has a colon."""
    cdef const uint8_t* p = cursor[0]
    while not ends_token(p[0]) and p[0] != 58:
        p += 1
    if p[0] != 58:
        cursor[0] = p


cdef inline int read_labelled_pairs(
    const uint8_t** cursor, const uint8_t* end, Target* out, bint fielded
) noexcept nogil:
    cdef int fault
    while is_blank(cursor[0][0]):
        cursor[0] += 1
    if cursor[0][0] == 10 or cursor[0][0] == 35:
        cursor[0] = <const uint8_t*>memchr(cursor[0], 10, end - cursor[0])
        return BLANK
    if not out.labelled:
        pass_over_label(cursor)
        return read_pairs(cursor, end, out, fielded)
    fault = read_label(cursor, end, out)
    return fault if fault != GOOD else read_pairs(cursor, end, out, fielded)


cdef int libsvm_line(const uint8_t** cursor, const uint8_t* end, Target* out, const void* known) noexcept nogil:
    return read_labelled_pairs(cursor, end, out, False)


cdef int libffm_line(const uint8_t** cursor, const uint8_t* end, Target* out, const void* known) noexcept nogil:
    return read_labelled_pairs(cursor, end, out, True)


def parse_libsvm(const unsigned char[::1] block, size_t start, arrays, bint skip):
    """Append libsvm lines to ``arrays``, which have values; see the head of the source and docs/readers.md."""
    if arrays.values is None:
        raise ValueError("values is None: libsvm has values")
    return parse(block, start, arrays, skip, libsvm_line, NULL)


def parse_libffm(const unsigned char[::1] block, size_t start, arrays, bint skip):
    """Append libffm lines to ``arrays``, which have values; see the head of the source and docs/readers.md."""
    if arrays.values is None:
        raise ValueError("values is None: libffm has values")
    return parse(block, start, arrays, skip, libffm_line, NULL)
