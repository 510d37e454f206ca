"""Attention over lists of blocks, in Triton. cmake/compile_triton.py compiles it when ferry is built; nothing of
Python is left at run time. sparse_attention.h has the contract.

A query sees keys between two bounds, both of which never fall along a sequence: from `low` of its own (its document's
first token, its window's first key) up to itself. So of the key blocks of a query block, in order, the first few are
cut by `low`, then come those that every query sees, and the last is cut by the diagonal. `spans` (spans.cu) holds the
four borders of each block, as places in its list: begin, whole, end of whole, end. The same holds of the query blocks
of a key block: the first is cut by the diagonal, the last few by `high`, one past the last query that sees a key.

Whole blocks have a loop of their own, without masks. Scores live in the log2 domain.
"""
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def by_address(source, row, batch, head, ld, sequence, head_dim, ROWS: tl.constexpr, D: tl.constexpr):
    rows, cols = row + tl.arange(0, ROWS), tl.arange(0, D)
    at = (batch * sequence + rows).to(tl.int64)[:, None] * ld + (head * head_dim + cols)[None, :]
    return tl.load(source + at, mask=(rows < sequence)[:, None] & (cols < head_dim)[None, :], other=0.0)


@triton.jit
def step_tile(source, row, batch, head, ld, sequence, head_dim, ROWS: tl.constexpr, D: tl.constexpr, TMA: tl.constexpr):
    """ROWS rows of one head of one sequence, zero outside of both."""
    if TMA:
        return source.load([batch, row, head, 0]).reshape(ROWS, D)
    else:
        return by_address(source, row, batch, head, ld, sequence, head_dim, ROWS, D)


@triton.jit
def own_tile(source, row, batch, head, ld, sequence, head_dim, ROWS: tl.constexpr, D: tl.constexpr, TMA: tl.constexpr):
    """The tile that a program works for. What lies outside of it is anyone's: it meets zeros, or is not stored. A
    tile that is reshaped would be held in registers, of which there are none to spare."""
    if TMA:
        return source.load([batch * sequence + row, head * head_dim])
    else:
        return by_address(source, row, batch, head, ld, sequence, head_dim, ROWS, D)


@triton.jit
def store_tile(to, x, row, batch, head, ld, sequence, head_dim, ROWS: tl.constexpr, D: tl.constexpr):
    rows, cols = row + tl.arange(0, ROWS), tl.arange(0, D)
    at = (batch * sequence + rows).to(tl.int64)[:, None] * ld + (head * head_dim + cols)[None, :]
    tl.store(to + at, x.to(to.dtype.element_ty), mask=(rows < sequence)[:, None] & (cols < head_dim)[None, :])


@triton.jit
def turn_of(program, heads, early, section, blocks):
    """Rank and head of a program. The `early` longest blocks of all heads come first, so that none is left for the
    end; then `section` heads at a time, whose keys fit the cache together."""
    first = early * heads
    rest = program - first
    size = section * (blocks - early)
    inside = rest % size
    is_first = program < first
    rank = tl.where(is_first, program // heads, early + inside // section)
    head = tl.where(is_first, program % heads, rest // size * section + inside % section)
    return rank, head


@triton.jit
def cut_place(j, begin, whole, whole_end):
    """The j-th of the places that are cut: [begin, whole), then those from whole_end on."""
    return tl.where(j < whole - begin, begin + j, whole_end + j - (whole - begin))


@triton.jit
def attend(sums, total, top, queries, k, v, entries, begin, whole, whole_end, end, parts, query, low, batch, kv_head,
           k_ld, v_ld, sequence, head_dim, scale_log2, STEP: tl.constexpr, D: tl.constexpr, TMA: tl.constexpr,
           LISTED: tl.constexpr, CUT: tl.constexpr, WARP_SPECIALIZE: tl.constexpr):
    """One pass of the online softmax over a query tile's whole blocks, or over those that are cut."""
    if CUT:
        count = (whole - begin + end - whole_end) * parts
    else:
        count = (whole_end - whole) * parts
    for i in tl.range(0, count, warp_specialize=WARP_SPECIALIZE):
        if CUT:
            place = cut_place(i // parts, begin, whole, whole_end)
        else:
            place = whole + i // parts
        if LISTED:
            place = tl.load(entries + place)
        key = (place * parts + i % parts) * STEP
        keys = step_tile(k, key, batch, kv_head, k_ld, sequence, head_dim, STEP, D, TMA)
        scores = tl.dot(queries, keys.T)
        if CUT:
            columns = key + tl.arange(0, STEP)
            seen = (columns[None, :] <= query[:, None]) & (columns[None, :] >= low[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * scale_log2)
        if CUT:  # a row that has seen nothing yet
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
        else:
            base = new_top
        weights = tl.math.exp2(scores * scale_log2 - base[:, None])
        shrink = tl.math.exp2(top - base)
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None]
        values = step_tile(v, key, batch, kv_head, v_ld, sequence, head_dim, STEP, D, TMA)
        sums = tl.dot(weights.to(values.dtype), values, sums)
        top = new_top
    return sums, total, top


@triton.jit
def forward(q, k, v, out, lse, spans, order, entries, low_of, q_ld, k_ld, v_ld, out_ld, heads, kv_heads, list_heads,
            sequence, head_dim, blocks, early, section, own_parts, parts, scale_log2, OWN: tl.constexpr,
            STEP: tl.constexpr, D: tl.constexpr, TMA: tl.constexpr, LISTED: tl.constexpr, WARP_SPECIALIZE: tl.constexpr):
    """A program a tile of OWN queries of one head of one sequence."""
    rank, turn = turn_of(tl.program_id(0), tl.num_programs(0) // (blocks * own_parts), early * own_parts, section,
                         blocks * own_parts)
    batch, head = turn // heads, turn % heads
    kv_head = head // (heads // kv_heads)
    list_head = batch * list_heads + head % list_heads
    block = tl.load(order + list_head * blocks + rank // own_parts)
    row = (block * own_parts + rank % own_parts) * OWN
    span = spans + (list_head * blocks + block) * 4
    begin, whole, whole_end, end = tl.load(span), tl.load(span + 1), tl.load(span + 2), tl.load(span + 3)
    query = row + tl.arange(0, OWN)
    inside = query < sequence
    low = tl.load(low_of + batch * sequence + query, mask=inside, other=0)
    queries = own_tile(q, row, batch, head, q_ld, sequence, head_dim, OWN, D, TMA)
    sums = tl.zeros([OWN, D], tl.float32)
    total = tl.zeros([OWN], tl.float32)
    top = tl.full([OWN], float("-inf"), tl.float32)
    sums, total, top = attend(sums, total, top, queries, k, v, entries, begin, whole, whole_end, end, parts, query, low,
                              batch, kv_head, k_ld, v_ld, sequence, head_dim, scale_log2, STEP, D, TMA, LISTED, False,
                              WARP_SPECIALIZE)
    sums, total, top = attend(sums, total, top, queries, k, v, entries, begin, whole, whole_end, end, parts, query, low,
                              batch, kv_head, k_ld, v_ld, sequence, head_dim, scale_log2, STEP, D, TMA, LISTED, True,
                              False)
    # A row that sees nothing: output 0, log-sum-exp -inf.
    sums = sums / tl.where(total == 0, 1.0, total)[:, None]
    store_tile(out, sums, row, batch, head, out_ld, sequence, head_dim, OWN, D)
    tl.store(lse + turn.to(tl.int64) * sequence + query, top * LN2 + tl.log(total), mask=inside)


@triton.jit
def slopes_to_queries(sums, queries, douts, k, v, entries, begin, whole, whole_end, end, parts, query, low, lse, delta,
                      batch, kv_head, k_ld, v_ld, sequence, head_dim, scale_log2, STEP: tl.constexpr, D: tl.constexpr,
                      TMA: tl.constexpr, LISTED: tl.constexpr, CUT: tl.constexpr):
    if CUT:
        count = (whole - begin + end - whole_end) * parts
    else:
        count = (whole_end - whole) * parts
    for i in tl.range(0, count):
        if CUT:
            place = cut_place(i // parts, begin, whole, whole_end)
        else:
            place = whole + i // parts
        if LISTED:
            place = tl.load(entries + place)
        key = (place * parts + i % parts) * STEP
        keys = step_tile(k, key, batch, kv_head, k_ld, sequence, head_dim, STEP, D, TMA)
        values = step_tile(v, key, batch, kv_head, v_ld, sequence, head_dim, STEP, D, TMA)
        weights = tl.math.exp2(tl.dot(queries, keys.T) * scale_log2 - lse[:, None])
        if CUT:
            columns = key + tl.arange(0, STEP)
            seen = (columns[None, :] <= query[:, None]) & (columns[None, :] >= low[:, None])
            weights = tl.where(seen, weights, 0.0)
        slopes = weights * (tl.dot(douts, values.T) - delta[:, None])
        sums = tl.dot(slopes.to(keys.dtype), keys, sums)
    return sums


@triton.jit
def backward_queries(q, k, v, dout, lse, delta, dq, spans, order, entries, low_of, q_ld, k_ld, v_ld, dout_ld, dq_ld,
                     heads, kv_heads, list_heads, sequence, head_dim, blocks, early, section, own_parts, parts,
                     scale_log2, OWN: tl.constexpr, STEP: tl.constexpr, D: tl.constexpr, TMA: tl.constexpr,
                     LISTED: tl.constexpr):
    """A program a tile of OWN queries of one head of one sequence."""
    rank, turn = turn_of(tl.program_id(0), tl.num_programs(0) // (blocks * own_parts), early * own_parts, section,
                         blocks * own_parts)
    batch, head = turn // heads, turn % heads
    kv_head = head // (heads // kv_heads)
    list_head = batch * list_heads + head % list_heads
    block = tl.load(order + list_head * blocks + rank // own_parts)
    row = (block * own_parts + rank % own_parts) * OWN
    span = spans + (list_head * blocks + block) * 4
    begin, whole, whole_end, end = tl.load(span), tl.load(span + 1), tl.load(span + 2), tl.load(span + 3)
    query = row + tl.arange(0, OWN)
    inside = query < sequence
    low = tl.load(low_of + batch * sequence + query, mask=inside, other=0)
    at = turn.to(tl.int64) * sequence + query
    lse_of = tl.load(lse + at, mask=inside, other=0.0) * LOG2E
    delta_of = tl.load(delta + at, mask=inside, other=0.0)
    queries = own_tile(q, row, batch, head, q_ld, sequence, head_dim, OWN, D, TMA)
    douts = own_tile(dout, row, batch, head, dout_ld, sequence, head_dim, OWN, D, TMA)
    sums = tl.zeros([OWN, D], tl.float32)
    sums = slopes_to_queries(sums, queries, douts, k, v, entries, begin, whole, whole_end, end, parts, query, low, lse_of,
                             delta_of, batch, kv_head, k_ld, v_ld, sequence, head_dim, scale_log2, STEP, D, TMA, LISTED,
                             False)
    sums = slopes_to_queries(sums, queries, douts, k, v, entries, begin, whole, whole_end, end, parts, query, low, lse_of,
                             delta_of, batch, kv_head, k_ld, v_ld, sequence, head_dim, scale_log2, STEP, D, TMA, LISTED,
                             True)
    store_tile(dq, sums * (scale_log2 * LN2), row, batch, head, dq_ld, sequence, head_dim, OWN, D)


@triton.jit
def slopes_to_keys(dkeys, dvalues, keys, values, q, dout, lse, delta, entries, begin, whole, whole_end, end, parts,
                   batch, head, column, high, q_ld, dout_ld, sequence, head_dim, scale_log2, STEP: tl.constexpr,
                   D: tl.constexpr, TMA: tl.constexpr, LISTED: tl.constexpr, CUT: tl.constexpr):
    if CUT:
        count = (whole - begin + end - whole_end) * parts
    else:
        count = (whole_end - whole) * parts
    for i in tl.range(0, count):
        if CUT:
            place = cut_place(i // parts, begin, whole, whole_end)
        else:
            place = whole + i // parts
        if LISTED:
            place = tl.load(entries + place)
        row = (place * parts + i % parts) * STEP
        query = row + tl.arange(0, STEP)
        queries = step_tile(q, row, batch, head, q_ld, sequence, head_dim, STEP, D, TMA)
        lse_of = tl.load(lse + query, mask=query < sequence, other=0.0) * LOG2E
        weights = tl.math.exp2(tl.dot(keys, queries.T) * scale_log2 - lse_of[None, :])
        if CUT:
            seen = (query[None, :] >= column[:, None]) & (query[None, :] < high[:, None])
            weights = tl.where(seen, weights, 0.0)
        douts = step_tile(dout, row, batch, head, dout_ld, sequence, head_dim, STEP, D, TMA)
        dvalues = tl.dot(weights.to(douts.dtype), douts, dvalues)
        delta_of = tl.load(delta + query, mask=query < sequence, other=0.0)
        slopes = weights * (tl.dot(values, douts.T) - delta_of[None, :])
        dkeys = tl.dot(slopes.to(queries.dtype), queries, dkeys)
    return dkeys, dvalues


@triton.jit
def backward_keys(q, k, v, dout, lse, delta, dk, dv, spans, order, entries, high_of, q_ld, k_ld, v_ld, dout_ld, dk_ld,
                  dv_ld, heads, kv_heads, list_heads, sequence, head_dim, blocks, early, section, own_parts, parts,
                  scale_log2, OWN: tl.constexpr, STEP: tl.constexpr, D: tl.constexpr, TMA: tl.constexpr,
                  LISTED: tl.constexpr):
    """A program a tile of OWN keys of one key/value head of one sequence."""
    rank, turn = turn_of(tl.program_id(0), tl.num_programs(0) // (blocks * own_parts), early * own_parts, section,
                         blocks * own_parts)
    batch, kv_head = turn // kv_heads, turn % kv_heads
    group = heads // kv_heads
    order_heads = tl.minimum(list_heads, kv_heads)
    block = tl.load(order + (batch * order_heads + kv_head % order_heads) * blocks + rank // own_parts)
    first = (block * own_parts + rank % own_parts) * OWN
    column = first + tl.arange(0, OWN)
    high = tl.load(high_of + batch * sequence + column, mask=column < sequence, other=0)
    keys = own_tile(k, first, batch, kv_head, k_ld, sequence, head_dim, OWN, D, TMA)
    values = own_tile(v, first, batch, kv_head, v_ld, sequence, head_dim, OWN, D, TMA)
    dkeys = tl.zeros([OWN, D], tl.float32)
    dvalues = tl.zeros([OWN, D], tl.float32)
    for head in range(kv_head * group, (kv_head + 1) * group):
        span = spans + ((batch * list_heads + head % list_heads) * blocks + block) * 4
        begin, whole, whole_end, end = tl.load(span), tl.load(span + 1), tl.load(span + 2), tl.load(span + 3)
        at = (batch * heads + head).to(tl.int64) * sequence
        dkeys, dvalues = slopes_to_keys(dkeys, dvalues, keys, values, q, dout, lse + at, delta + at, entries, begin, whole,
                                        whole_end, end, parts, batch, head, column, high, q_ld, dout_ld, sequence,
                                        head_dim, scale_log2, STEP, D, TMA, LISTED, False)
        dkeys, dvalues = slopes_to_keys(dkeys, dvalues, keys, values, q, dout, lse + at, delta + at, entries, begin, whole,
                                        whole_end, end, parts, batch, head, column, high, q_ld, dout_ld, sequence,
                                        head_dim, scale_log2, STEP, D, TMA, LISTED, True)
    store_tile(dk, dkeys * (scale_log2 * LN2), first, batch, kv_head, dk_ld, sequence, head_dim, OWN, D)
    store_tile(dv, dvalues, first, batch, kv_head, dv_ld, sequence, head_dim, OWN, D)
