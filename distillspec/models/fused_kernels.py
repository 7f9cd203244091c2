"""Triton kernels between the products of Llama layers, for `fused_layers`. Importing it needs Triton.

Each does in one launch what torch does in three to ten. Sums are float32. What torch rounds between two operations is
rounded here too, except inside a rotation.
"""

# mypy: ignore-errors
# Names in capitals are known when the kernel is compiled, as Triton's own code writes them.

import triton
import triton.language as tl


@triton.jit
def add_norm(
    states,  # [N, width], changed in place: `delta` is added
    delta,  # [N, width]
    weight,  # [width]
    out,  # [N, width]: the sum by its root mean square, times `weight`
    width,
    eps,
    ADDS: tl.constexpr,  # False: there is no `delta`
    WIDTH: tl.constexpr,  # width rounded up
):
    """Add to a token's states and normalise them."""
    at, d = tl.program_id(0) * width, tl.arange(0, WIDTH)
    there = d < width
    x = tl.load(states + at + d, mask=there, other=0.0)
    if ADDS:
        added = tl.load(delta + at + d, mask=there, other=0.0)
        x = (x.to(tl.float32) + added.to(tl.float32)).to(states.dtype.element_ty)
        tl.store(states + at + d, x, mask=there)
    wide = x.to(tl.float32)
    size = tl.sqrt(tl.sum(wide * wide, 0) / width + eps)
    normed = (wide / size).to(states.dtype.element_ty)
    by = tl.load(weight + d, mask=there, other=0.0)
    tl.store(out + at + d, (by.to(tl.float32) * normed.to(tl.float32)).to(out.dtype.element_ty), mask=there)


@triton.jit
def turn_and_keep(
    product,  # [N, (heads + 2 · kv_heads) · DIM]: queries, keys and values side by side
    cosines,  # [positions, DIM]
    sines,
    positions,  # [N] int64
    places,  # [N] int64, `spare` and above for tokens that only pad
    rows,  # [N] int64, where a token's keys lie in the cache: the slot or page
    inside,  # [N] int64, and the place in it
    back,  # [N] int64, the place of each token in `query`
    query,  # [rectangle, heads, DIM]
    keys,  # [slots or pages, kv_heads, places, DIM], the last one contiguous
    values,
    spare,
    heads,
    kv_heads,
    row_stride,  # of keys and values
    head_stride,
    place_stride,
    DIM: tl.constexpr,
    HALF: tl.constexpr,  # DIM / 2 rounded up
):
    """Rotate one head of a token's queries or keys to its position, and put it, or a head of its values, in place."""
    n, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, HALF)
    there = d < DIM // 2
    at = product + (n * tl.num_programs(1) + head) * DIM
    low = tl.load(at + d, mask=there, other=0.0)
    high = tl.load(at + DIM // 2 + d, mask=there, other=0.0)
    token_offset = tl.load(rows + n) * row_stride + tl.load(inside + n) * place_stride
    if head < heads + kv_heads:
        turn = tl.load(positions + n) * DIM
        cos_low = tl.load(cosines + turn + d, mask=there, other=0.0).to(tl.float32)
        sin_low = tl.load(sines + turn + d, mask=there, other=0.0).to(tl.float32)
        cos_high = tl.load(cosines + turn + DIM // 2 + d, mask=there, other=0.0).to(tl.float32)
        sin_high = tl.load(sines + turn + DIM // 2 + d, mask=there, other=0.0).to(tl.float32)
        wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
        turned_low = (wide_low * cos_low - wide_high * sin_low).to(product.dtype.element_ty)
        turned_high = (wide_high * cos_high + wide_low * sin_high).to(product.dtype.element_ty)
        if head < heads:
            # A token that only pads would be written over a real one.
            real = d < tl.where(tl.load(places + n) < spare, DIM // 2, 0)
            query_at = query + (tl.load(back + n) * heads + head) * DIM
            tl.store(query_at + d, turned_low, mask=real)
            tl.store(query_at + DIM // 2 + d, turned_high, mask=real)
        else:
            key_at = keys + token_offset + (head - heads) * head_stride
            tl.store(key_at + d, turned_low, mask=there)
            tl.store(key_at + DIM // 2 + d, turned_high, mask=there)
    else:
        value_at = values + token_offset + (head - heads - kv_heads) * head_stride
        tl.store(value_at + d, low, mask=there)
        tl.store(value_at + DIM // 2 + d, high, mask=there)


@triton.jit
def gate(
    product,  # [N, 2 · inner]: gate and up side by side
    out,  # [N, inner]: silu(gate) · up
    inner,
    BLOCK: tl.constexpr,
):
    """Compute a part of a token's gated states."""
    n, d = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = d < inner
    at = product + n * 2 * inner + d
    opened = tl.load(at, mask=there, other=0.0).to(tl.float32)
    up = tl.load(at + inner, mask=there, other=0.0).to(tl.float32)
    opened = (opened * tl.sigmoid(opened)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + n * inner + d, (opened * up).to(out.dtype.element_ty), mask=there)
