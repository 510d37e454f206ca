"""Attention over lists of blocks, in Triton. cmake/compile_triton.py compiles it when ferry is built; nothing of
Python is left at run time. sparse_attention.cc starts the kernels.

A query sees keys between two bounds, both of which never fall along a sequence: from `low` of its own (its document's
first token, its window's first key) up to itself. So of the key blocks of a query block, in order, the first few are
cut by `low`, then come those that every query sees, and the last is cut by the diagonal. `spans` (spans.cu) holds the
four borders of each block, as places in its list: begin, whole, end of whole, end. The same holds of the query blocks
of a key block: the first is cut by the diagonal, the last few by `high`, one past the last query that sees a key.

Whole blocks have a loop of their own, without masks. Scores live in the log2 domain. A kernel's tiles are OWN rows of
what it sums for and STEP rows of what it sums over; a block of the lists is 2^own_shift tiles and 2^step_shift steps.
"""
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
SIZES = ("heads", "kv_heads", "layouts", "sequence", "blocks", "early", "section", "own_shift", "step_shift")


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
def turn_of(early, section, tiles):
    """Rank and head of a program. The `early` longest tiles of all heads come first, so that none is left for the
    end; then `section` heads at a time, whose keys fit the cache together."""
    program = tl.program_id(0)
    heads = tl.num_programs(0) // tiles
    first = early * heads
    rest = program - first
    size = section * (tiles - early)
    inside = rest % size
    rank = tl.where(program < first, program // heads, early + inside // section)
    head = tl.where(program < first, program % heads, rest // size * section + inside % section)
    return rank, head


@triton.jit
def span_of(spans, index):
    at = spans + index * 4
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def steps_of(begin, whole, whole_end, end, shift, CUT: tl.constexpr):
    if CUT:
        return (whole - begin + end - whole_end) << shift
    else:
        return (whole_end - whole) << shift


@triton.jit
def token_of(entries, i, begin, whole, whole_end, shift, STEP: tl.constexpr, CUT: tl.constexpr):
    """The first token of step i over the whole blocks, or over those that are cut: [begin, whole), and the last."""
    place = i >> shift
    if CUT:
        place = tl.where(place < whole - begin, begin + place, whole_end + place - (whole - begin))
    else:
        place = whole + place
    return ((tl.load(entries + place) << shift) + (i & ((1 << shift) - 1))) * STEP


@triton.jit
def attend(sums, total, top, queries, k, v, entries, begin, whole, whole_end, end, query, low, batch, kv_head, k_ld,
           v_ld, sequence, head_dim, scale_log2, step_shift, STEP: tl.constexpr, D: tl.constexpr, TMA: tl.constexpr,
           CUT: tl.constexpr):
    """The online softmax over a query tile's whole blocks, or over those that are cut."""
    for i in tl.range(0, steps_of(begin, whole, whole_end, end, step_shift, CUT)):
        key = token_of(entries, i, begin, whole, whole_end, step_shift, STEP, CUT)
        keys = step_tile(k, key, batch, kv_head, k_ld, sequence, head_dim, STEP, D, TMA)
        scores = tl.dot(queries, keys.T)
        if CUT:
            column = key + tl.arange(0, STEP)
            seen = (column[None, :] <= query[:, None]) & (column[None, :] >= low[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * scale_log2)
        base = new_top
        if CUT:  # of a row that has seen nothing yet
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.math.exp2(scores * scale_log2 - base[:, None])
        shrink = tl.math.exp2(top - base)
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None]
        values = step_tile(v, key, batch, kv_head, v_ld, sequence, head_dim, STEP, D, TMA)
        sums = tl.dot(weights.to(values.dtype), values, sums)
        top = new_top
    return sums, total, top


@triton.jit
def query_tile(spans, order, low_of, heads, kv_heads, layouts, sequence, blocks, early, section, own_shift,
               OWN: tl.constexpr):
    """The OWN queries that a program works for: their head, the first row, the borders of their block, and each
    query's `low`."""
    rank, turn = turn_of(early << own_shift, section, blocks << own_shift)
    batch, head = turn // heads, turn % heads
    kv_head = head // (heads // kv_heads)
    first_list = (batch * layouts + head % layouts) * blocks
    block = tl.load(order + first_list + (rank >> own_shift))
    row = ((block << own_shift) + (rank & ((1 << own_shift) - 1))) * OWN
    begin, whole, whole_end, end = span_of(spans, first_list + block)
    query = row + tl.arange(0, OWN)
    inside = query < sequence
    low = tl.load(low_of + batch * sequence + query, mask=inside, other=0)
    return turn, batch, head, kv_head, row, begin, whole, whole_end, end, query, inside, low


@triton.jit(do_not_specialize=SIZES)
def forward(q, k, v, out, lse, spans, order, entries, low_of, q_ld, k_ld, v_ld, out_ld, heads, kv_heads, layouts,
            sequence, head_dim, blocks, early, section, own_shift, step_shift, scale_log2, OWN: tl.constexpr,
            STEP: tl.constexpr, D: tl.constexpr, TMA: tl.constexpr):
    """A program a tile of OWN queries of one head of one sequence."""
    turn, batch, head, kv_head, row, begin, whole, whole_end, end, query, inside, low = query_tile(
        spans, order, low_of, heads, kv_heads, layouts, sequence, blocks, early, section, own_shift, OWN)
    queries = own_tile(q, row, batch, head, q_ld, sequence, head_dim, OWN, D, TMA)
    sums = tl.zeros([OWN, D], tl.float32)
    total = tl.zeros([OWN], tl.float32)
    top = tl.full([OWN], float("-inf"), tl.float32)
    sums, total, top = attend(sums, total, top, queries, k, v, entries, begin, whole, whole_end, end, query, low, batch,
                              kv_head, k_ld, v_ld, sequence, head_dim, scale_log2, step_shift, STEP, D, TMA, False)
    sums, total, top = attend(sums, total, top, queries, k, v, entries, begin, whole, whole_end, end, query, low, batch,
                              kv_head, k_ld, v_ld, sequence, head_dim, scale_log2, step_shift, STEP, D, TMA, True)
    # A row that sees nothing: output 0, log-sum-exp -inf.
    sums = sums / tl.where(total == 0, 1.0, total)[:, None]
    store_tile(out, sums, row, batch, head, out_ld, sequence, head_dim, OWN, D)
    tl.store(lse + turn.to(tl.int64) * sequence + query, top * LN2 + tl.log(total), mask=inside)


@triton.jit
def slopes_to_queries(sums, queries, douts, k, v, entries, begin, whole, whole_end, end, query, low, lse, delta, batch,
                      kv_head, k_ld, v_ld, sequence, head_dim, scale_log2, step_shift, STEP: tl.constexpr,
                      D: tl.constexpr, TMA: tl.constexpr, CUT: tl.constexpr):
    for i in tl.range(0, steps_of(begin, whole, whole_end, end, step_shift, CUT)):
        key = token_of(entries, i, begin, whole, whole_end, step_shift, STEP, CUT)
        keys = step_tile(k, key, batch, kv_head, k_ld, sequence, head_dim, STEP, D, TMA)
        values = step_tile(v, key, batch, kv_head, v_ld, sequence, head_dim, STEP, D, TMA)
        weights = tl.math.exp2(tl.dot(queries, keys.T) * scale_log2 - lse[:, None])
        if CUT:
            column = key + tl.arange(0, STEP)
            seen = (column[None, :] <= query[:, None]) & (column[None, :] >= low[:, None])
            weights = tl.where(seen, weights, 0.0)
        slopes = weights * (tl.dot(douts, values.T) - delta[:, None])
        sums = tl.dot(slopes.to(keys.dtype), keys, sums)
    return sums


@triton.jit(do_not_specialize=SIZES)
def backward_queries(q, k, v, dout, lse, delta, dq, spans, order, entries, low_of, q_ld, k_ld, v_ld, dout_ld, dq_ld,
                     heads, kv_heads, layouts, sequence, head_dim, blocks, early, section, own_shift, step_shift,
                     scale_log2, OWN: tl.constexpr, STEP: tl.constexpr, D: tl.constexpr, TMA: tl.constexpr):
    """A program a tile of OWN queries of one head of one sequence."""
    turn, batch, head, kv_head, row, begin, whole, whole_end, end, query, inside, low = query_tile(
        spans, order, low_of, heads, kv_heads, layouts, sequence, blocks, early, section, own_shift, OWN)
    at = turn.to(tl.int64) * sequence + query
    lse_of = tl.load(lse + at, mask=inside, other=0.0) * LOG2E
    delta_of = tl.load(delta + at, mask=inside, other=0.0)
    queries = own_tile(q, row, batch, head, q_ld, sequence, head_dim, OWN, D, TMA)
    douts = own_tile(dout, row, batch, head, dout_ld, sequence, head_dim, OWN, D, TMA)
    sums = tl.zeros([OWN, D], tl.float32)
    sums = slopes_to_queries(sums, queries, douts, k, v, entries, begin, whole, whole_end, end, query, low, lse_of,
                             delta_of, batch, kv_head, k_ld, v_ld, sequence, head_dim, scale_log2, step_shift, STEP, D,
                             TMA, False)
    sums = slopes_to_queries(sums, queries, douts, k, v, entries, begin, whole, whole_end, end, query, low, lse_of,
                             delta_of, batch, kv_head, k_ld, v_ld, sequence, head_dim, scale_log2, step_shift, STEP, D,
                             TMA, True)
    store_tile(dq, sums * (scale_log2 * LN2), row, batch, head, dq_ld, sequence, head_dim, OWN, D)


@triton.jit
def slopes_to_keys(dkeys, dvalues, keys, values, q, dout, lse, delta, entries, begin, whole, whole_end, end, batch, head,
                   column, high, q_ld, dout_ld, sequence, head_dim, scale_log2, step_shift, STEP: tl.constexpr,
                   D: tl.constexpr, TMA: tl.constexpr, CUT: tl.constexpr):
    for i in tl.range(0, steps_of(begin, whole, whole_end, end, step_shift, CUT)):
        row = token_of(entries, i, begin, whole, whole_end, step_shift, STEP, CUT)
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


@triton.jit(do_not_specialize=SIZES)
def backward_keys(q, k, v, dout, lse, delta, dk, dv, spans, order, entries, high_of, q_ld, k_ld, v_ld, dout_ld, dk_ld,
                  dv_ld, heads, kv_heads, layouts, sequence, head_dim, blocks, early, section, own_shift, step_shift,
                  scale_log2, OWN: tl.constexpr, STEP: tl.constexpr, D: tl.constexpr, TMA: tl.constexpr):
    """A program a tile of OWN keys of one key/value head of one sequence; the heads that read it in order."""
    rank, turn = turn_of(early << own_shift, section, blocks << own_shift)
    batch, kv_head = turn // kv_heads, turn % kv_heads
    group = heads // kv_heads
    orders = tl.minimum(layouts, kv_heads)
    block = tl.load(order + (batch * orders + kv_head % orders) * blocks + (rank >> own_shift))
    first = ((block << own_shift) + (rank & ((1 << own_shift) - 1))) * OWN
    column = first + tl.arange(0, OWN)
    high = tl.load(high_of + batch * sequence + column, mask=column < sequence, other=0)
    keys = own_tile(k, first, batch, kv_head, k_ld, sequence, head_dim, OWN, D, TMA)
    values = own_tile(v, first, batch, kv_head, v_ld, sequence, head_dim, OWN, D, TMA)
    dkeys = tl.zeros([OWN, D], tl.float32)
    dvalues = tl.zeros([OWN, D], tl.float32)
    for head in range(kv_head * group, (kv_head + 1) * group):
        begin, whole, whole_end, end = span_of(spans, (batch * layouts + head % layouts) * blocks + block)
        at = (batch * heads + head).to(tl.int64) * sequence
        dkeys, dvalues = slopes_to_keys(dkeys, dvalues, keys, values, q, dout, lse + at, delta + at, entries, begin, whole,
                                        whole_end, end, batch, head, column, high, q_ld, dout_ld, sequence, head_dim,
                                        scale_log2, step_shift, STEP, D, TMA, False)
        dkeys, dvalues = slopes_to_keys(dkeys, dvalues, keys, values, q, dout, lse + at, delta + at, entries, begin, whole,
                                        whole_end, end, batch, head, column, high, q_ld, dout_ld, sequence, head_dim,
                                        scale_log2, step_shift, STEP, D, TMA, True)
    store_tile(dk, dkeys * (scale_log2 * LN2), first, batch, kv_head, dk_ld, sequence, head_dim, OWN, D)
    store_tile(dv, dvalues, first, batch, kv_head, dv_ld, sequence, head_dim, OWN, D)
