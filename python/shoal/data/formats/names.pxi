# Names of features: what is written before the text of each, and that text.

def join_names(
    const uint8_t[::1] text,
    const int64_t[:, ::1] spans,
    const uint8_t[::1] heads,
    const uint64_t[::1] head_ends,
    const int64_t[::1] head_of,
    bint numbers,
    bint cells,
    uint8_t[::1] joined,
    uint64_t[::1] ends,
):
    """Write each name, head and text, into ``joined``, and where it ends into ``ends``; return the bytes that are used.

    Name i is the head ``head_of[i]``, which ends at its ``head_ends``, and text[spans[i, 0]:spans[i, 1]]. With
    ``numbers`` that text is numbers between colons, which lose their leading zeros; with ``cells`` it is that of a
    cell, which may have another one (csrc/text/cell.h). ``joined`` has room for all, and CELL_BYTES more for each of
    these.
    """
    cdef CellRoom room
    cdef CellText cell
    cdef Py_ssize_t n = head_of.shape[0]
    cdef Py_ssize_t i
    cdef uint64_t needed = 0
    cdef uint64_t used = 0
    cdef uint64_t begin
    cdef int64_t at
    cdef bint begins
    cdef const uint8_t* head_bytes = &heads[0] if heads.shape[0] > 0 else NULL
    cdef const uint8_t* text_bytes = &text[0] if text.shape[0] > 0 else NULL
    cdef uint8_t* to = &joined[0] if joined.shape[0] > 0 else NULL
    if spans.shape[0] != n or spans.shape[1] != 2 or ends.shape[0] != n:
        raise ValueError(f"{n} names need spans[{n}, 2] and as many ends, got {spans.shape[0]} and {ends.shape[0]}")
    for i in range(head_ends.shape[0]):
        if head_ends[i] > <uint64_t>heads.shape[0] or (i > 0 and head_ends[i] < head_ends[i - 1]):
            raise ValueError(f"the ends of heads fall, or exceed {heads.shape[0]} bytes, at {i}")
    for i in range(n):
        if not 0 <= head_of[i] < head_ends.shape[0]:
            raise ValueError(f"name {i} has head {head_of[i]}, of {head_ends.shape[0]}")
        if not 0 <= spans[i, 0] <= spans[i, 1] <= text.shape[0]:
            raise ValueError(f"the text of name {i} is from {spans[i, 0]} to {spans[i, 1]}, of {text.shape[0]} bytes")
        begin = head_ends[head_of[i] - 1] if head_of[i] > 0 else 0
        needed += head_ends[head_of[i]] - begin + <uint64_t>(spans[i, 1] - spans[i, 0])
        if cells:
            needed += CELL_BYTES
    if needed > <uint64_t>joined.shape[0]:
        raise ValueError(f"the names take {needed} bytes, got room for {joined.shape[0]}")
    with nogil:
        for i in range(n):
            begin = head_ends[head_of[i] - 1] if head_of[i] > 0 else 0
            if head_ends[head_of[i]] > begin:
                memcpy(to + used, head_bytes + begin, head_ends[head_of[i]] - begin)
                used += head_ends[head_of[i]] - begin
            if cells and spans[i, 1] > spans[i, 0]:
                cell = text_of_cell(
                    text_bytes + spans[i, 0], <size_t>(spans[i, 1] - spans[i, 0]), text_bytes + spans[i, 1], room
                )
                memcpy(to + used, cell.begin, cell.size)
                used += cell.size
            elif not numbers:
                if spans[i, 1] > spans[i, 0]:
                    memcpy(to + used, text_bytes + spans[i, 0], <size_t>(spans[i, 1] - spans[i, 0]))
                    used += <uint64_t>(spans[i, 1] - spans[i, 0])
            else:
                begins = True
                for at in range(spans[i, 0], spans[i, 1]):
                    if (
                        begins and text_bytes[at] == c"0" and at + 1 < spans[i, 1]
                        and text_bytes[at + 1] != c":"
                    ):
                        continue
                    to[used] = text_bytes[at]
                    used += 1
                    begins = text_bytes[at] == c":"
            ends[i] = used
    return used
