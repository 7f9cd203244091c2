"""Triton kernel of `ragged_attention`. Importing it needs Triton.

`TRITON_INTERPRET=1`, set before the import, runs it on any CPU.
"""

# mypy: ignore-errors
# Names in capitals are known when the kernel is compiled, as Triton's own code writes them.

import triton
import triton.language as tl


@triton.jit
def places_in_memory(
    n,  # [COLUMNS] places of one slot
    exists,  # [COLUMNS] which of them there are
    slot,
    table,
    columns,
    slot_stride,  # of keys and values
    place_stride,
    PAGE: tl.constexpr,
):
    """Return where the keys of `n` lie in one head, and which of them exist: a page may be missing."""
    if PAGE > 0:
        page = tl.load(table + slot * columns + n // PAGE, mask=exists, other=0)
        exists = exists & (page > 0)
        at = page.to(tl.int64) * slot_stride + n % PAGE * place_stride
    else:
        at = slot * slot_stride + n * place_stride
    return at, exists


@triton.jit
def seen_in_tree(
    n,  # [COLUMNS] places of keys
    root,  # place of the tree's first node
    width,
    bits_at,  # [ROWS, 1] addresses of the queries' ancestor words
    positions_at,  # address of the row's positions
    real,  # [ROWS] which queries there are
):
    """Return [ROWS, COLUMNS] whether a key is no node or an ancestor of the query, and the keys' positions."""
    node = n - root
    inside = (node >= 0) & (node < width)
    node = tl.where(inside, node, 0)
    word = tl.load(bits_at + node[None, :] // 64, mask=inside[None, :] & real[:, None], other=-1)
    position = tl.load(positions_at + node, mask=inside, other=0)
    return (word >> (node % 64)[None, :] & 1) != 0, tl.where(inside, position, n)


@triton.jit
def attend_part(
    query,  # [B, heads, q, d], the last one contiguous
    keys,  # [slots, kv_heads, places, d], the last one contiguous; with pages [pages, kv_heads, PAGE, d]
    values,
    slots,  # [B] int64
    table,  # [slots, columns] int32, read with pages: the pages of each slot, 0 for none
    columns,
    places,  # [B, q] int64, `spare` and above for padding
    positions,  # [B, q] int64, read of trees
    base,  # [B] int64, read of trees: the place of each row's first node
    ancestors,  # [B, q, WORDS] int64, see `ancestor_words`
    partial,  # [B, kv_heads, parts, M, d] float32: each part's own attention
    weight,  # [B, kv_heads, parts, M] float32: the logarithm of each part's sum of exponentials
    spare,
    part_len,
    groups,
    width,  # q
    scale,
    query_row,  # strides of queries
    query_head,
    query_token,
    slot_stride,  # of keys and values
    head_stride,
    place_stride,
    DIM: tl.constexpr,
    WINDOW: tl.constexpr,  # tokens that a query attends to, itself among them (0: all)
    SOFTCAP: tl.constexpr,  # 0: none
    PAGE: tl.constexpr,  # tokens of a page, 0: slots are no pages
    WORDS: tl.constexpr,  # 0: rows are chains, else trees
    ROWS: tl.constexpr,  # groups · q rounded up to what matrix units take
    COLUMNS: tl.constexpr,  # keys a step
    DIMS: tl.constexpr,  # DIM rounded up
):
    """Attend to one part of one row's keys for one key head, with all its folded queries (group · width + token)."""
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m, d = tl.arange(0, ROWS), tl.arange(0, DIMS)
    group, token = m // width, m % width
    real = m < groups * width
    place = tl.load(places + row * width + token, mask=real, other=spare)
    place = tl.where(place >= spare, -1, place)  # padding sees nothing
    slot = tl.load(slots + row)
    q_at = query + row * query_row + (head * groups + group)[:, None] * query_head + token[:, None] * query_token
    q = tl.load(q_at + d[None, :], mask=(place >= 0)[:, None] & (d < DIM)[None, :], other=0.0)
    begin = part * part_len
    end = tl.minimum(begin + part_len, tl.max(place, 0) + 1)
    position = place
    if WORDS > 0:
        root = tl.load(base + row)
        bits_at = ancestors + (row * width + token)[:, None] * WORDS
        position = tl.load(positions + row * width + token, mask=place >= 0, other=-1)
    if WINDOW > 0:  # what no query of the row sees is not read
        earliest = tl.min(tl.where(place < 0, end, place), 0) - WINDOW + 1
        begin = tl.maximum(begin, earliest)

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mean = tl.zeros([ROWS, DIMS], tl.float32)
    for first in range(begin, end, COLUMNS):
        n = first + tl.arange(0, COLUMNS)
        row_at, exists = places_in_memory(n, n < end, slot, table, columns, slot_stride, place_stride, PAGE)
        at = (row_at + head * head_stride)[:, None] + d[None, :]
        there = exists[:, None] & (d < DIM)[None, :]
        k = tl.load(keys + at, mask=there, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if SOFTCAP > 0:
            scores = SOFTCAP * (2.0 * tl.sigmoid(2.0 * scores / SOFTCAP) - 1.0)  # tanh
        seen = (n[None, :] <= place[:, None]) & exists[None, :]
        key_position = n
        if WORDS > 0:
            related, key_position = seen_in_tree(n, root, width, bits_at, positions + row * width, real)
            seen = seen & related
        if WINDOW > 0:
            seen = seen & (key_position[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        ground = tl.where(higher == float("-inf"), 0.0, higher)
        fade = tl.exp(top - ground)
        share = tl.exp(scores - ground[:, None])
        total = total * fade + tl.sum(share, 1)
        v = tl.load(values + at, mask=there, other=0.0)
        mean = mean * fade[:, None] + tl.dot(share.to(v.dtype), v, input_precision="ieee")
        top = higher

    empty = total == 0.0
    parts = tl.num_programs(2)
    out = ((row * tl.num_programs(1) + head) * parts + part) * ROWS + m
    log_sum = tl.where(empty, float("-inf"), top + tl.log(tl.where(empty, 1.0, total)))
    tl.store(weight + out, log_sum)
    mean = mean / tl.where(empty, 1.0, total)[:, None]
    tl.store(partial + out[:, None] * DIM + d[None, :], mean, mask=(d < DIM)[None, :])


@triton.jit
def join_parts(
    partial,  # [B, kv_heads, parts, ROWS, DIM] float32, as `attend_part` writes them
    weight,  # [B, kv_heads, parts, ROWS] float32
    back,  # [tokens] int64, the cell of each token in [B, q], read if INDEXED. Else tokens fill the cells in order
    out,  # [tokens, heads, DIM]
    parts,
    groups,
    width,  # q
    INDEXED: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIMS: tl.constexpr,  # DIM rounded up
    PARTS: tl.constexpr,  # parts rounded up
    STEP: tl.constexpr,  # parts that are read at once
):
    """Weigh the parts of one token's attention in one head by their sums. A query that saw no key gives 0."""
    token, head = tl.program_id(0), tl.program_id(1)
    at = token
    if INDEXED:
        at = tl.load(back + token)
    row, kv_heads = at // width, tl.num_programs(1) // groups
    m = head % groups * width + at % width
    first = (row * kv_heads + head // groups) * parts * ROWS + m
    every = tl.arange(0, PARTS)
    sums = tl.load(weight + first + every * ROWS, mask=every < parts, other=float("-inf"))
    top = tl.max(sums, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(sums - top), 0)
    d, mean = tl.arange(0, DIMS), tl.zeros([DIMS], tl.float32)
    for begin in range(0, parts, STEP):
        part = begin + tl.arange(0, STEP)
        share = tl.exp(tl.load(weight + first + part * ROWS, mask=part < parts, other=float("-inf")) - top)
        there = (part < parts)[:, None] & (d < DIM)[None, :]
        part_mean = tl.load(partial + (first + part * ROWS)[:, None] * DIM + d[None, :], mask=there, other=0.0)
        mean += tl.sum(share[:, None] * part_mean, 0)
    mean = mean / tl.where(total == 0.0, 1.0, total)
    to = out + (token * tl.num_programs(1) + head) * DIM + d
    tl.store(to, mean.to(out.dtype.element_ty), mask=d < DIM)
