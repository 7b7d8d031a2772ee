# Vowpal Wabbit's text: [label [importance]] [tag]|namespace[:scale] name[:value] ... |namespace ...

cdef inline bint ends_name(uint8_t c) noexcept nogil:
    return c == 32 or c == 58 or c == 9 or c == 124 or c == 13 or c == 10  # space, ':', tab, '|', return, newline


cdef inline int read_value(const uint8_t** cursor, const uint8_t* end, float* out) noexcept nogil:
    """The number after a colon, up to the end of the word."""
    cdef int fault
    cursor[0] += 1
    fault = read_number(cursor, end, out)
    if fault == GOOD and (cursor[0][0] == 58 or not ends_name(cursor[0][0])):
        fault = VALUE_TEXT
    return fault


cdef inline int read_head(const uint8_t** cursor, const uint8_t* end, Target* out) noexcept nogil:
    """The text before the first bar, at which `cursor` ends: label, importance and tag."""
    cdef const uint8_t* p = cursor[0]
    cdef const uint8_t* word
    cdef int words = 0
    cdef float weight = 1.0
    cdef float initial = 0.0
    cdef int fault
    if not out.labelled:
        while p[0] != 124 and p[0] != 10:
            words |= not is_blank(p[0])
            p += 1
        cursor[0] = p
        return GOOD if p[0] == 124 else BAR_MISSING if words else BLANK
    while True:
        while is_blank(p[0]):
            p += 1
        cursor[0] = p
        if p[0] == 10:
            return BAR_MISSING if words else BLANK
        if p[0] == 124:
            break
        # A word that touches the bar or begins with a quote is a tag.
        word = p
        while not is_blank(p[0]) and p[0] != 124 and p[0] != 10:
            p += 1
        if p[0] == 124 or word[0] == 39:
            while is_blank(p[0]):
                p += 1
            if p[0] != 124:
                cursor[0] = p
                return BAR_MISSING
            break
        words += 1
        p = word
        if words == 1:
            fault = read_label(&p, end, out)
            if fault == GOOD and p[0] == 35:  # '#' does not begin a comment here
                fault = LABEL_TEXT
            if fault != GOOD:
                return fault
        elif words == 2:
            fault = read_number(&p, end, &weight)
            if fault != GOOD or not (is_blank(p[0]) or p[0] == 10) or weight < 0.0:
                return IMPORTANCE
        else:
            fault = read_number(&p, end, &initial)
            if fault != GOOD or not (is_blank(p[0]) or p[0] == 10) or initial != 0.0 or words > 3:
                return INITIAL
    cursor[0] = p
    if words == 0:
        return LABEL_MISSING
    out.weights[out.row] = weight
    return GOOD


cdef int vw_line(const uint8_t** cursor, const uint8_t* end, Target* out, const void* known) noexcept nogil:
    cdef uint64_t root = (<const uint64_t*>known)[0]  # the seed of field 0, where namespaces are tokens
    cdef const uint8_t* p
    cdef const uint8_t* name
    cdef uint64_t field = 0
    cdef uint64_t seed = 0
    cdef float scale
    cdef float value
    cdef size_t size
    cdef int fault = read_head(cursor, end, out)
    if fault != GOOD:
        return fault
    p = cursor[0]
    while p[0] == 124:
        p += 1
        name = p
        while not ends_name(p[0]):
            p += 1
        field = token_key(root, name, <size_t>(p - name), end)
        seed = field_seed(field)
        scale = 1.0
        if p[0] == 58:
            fault = read_value(&p, end, &scale)
            if fault != GOOD:
                cursor[0] = p
                return fault
        while True:
            while is_blank(p[0]):
                p += 1
            if p[0] == 124 or p[0] == 10:
                break
            cursor[0] = p
            name = p
            while not ends_name(p[0]):
                p += 1
            size = <size_t>(p - name)
            value = 1.0
            if p[0] == 58:
                fault = read_value(&p, end, &value)
                if fault != GOOD:
                    cursor[0] = p
                    return fault
            value *= scale
            if not -FLT_MAX <= value <= FLT_MAX:
                return VALUE_RANGE
            if out.nnz == out.room:
                return NO_ROOM
            out.keys[out.nnz] = token_key(seed, name, size, end)
            out.values[out.nnz] = value
            if out.origins:
                name = cursor[0]
                while not ends_name(name[0]):
                    name += 1
                put_origin(out, out.nnz, field, cursor[0], name)
            out.nnz += 1
    cursor[0] = p
    return GOOD


def parse_vw(const unsigned char[::1] block, size_t start, arrays, bint skip):
    """Append Vowpal Wabbit lines to ``arrays``, which have values and weights; see the head of the source."""
    cdef uint64_t root = field_seed(0)
    if arrays.values is None or arrays.weights is None:
        raise ValueError("values or weights is None: Vowpal Wabbit's text has both")
    return parse(block, start, arrays, skip, vw_line, &root)
