"""Attention over lists of blocks, in Triton. cmake/compile_triton.py compiles it when ferry is built; nothing of
Python is left at run time. sparse_attention.cc starts the kernels.

A query sees keys between two bounds, both of which never fall along a sequence: from `low` of its own (its document's
first token, its window's first key) up to itself. So of the key blocks of a query block, in order, the first few are
cut by `low`, then come those that every query sees, and the last is cut by the diagonal. `spans` (spans.cu) holds the
four borders of each block, as places in its list: begin, whole, end of whole, end. The same holds of the query blocks
of a key block: the first is cut by the diagonal, the last few by `high`, one past the last query that sees a key.

Whole blocks have a loop of their own, without masks. Scores live in the log2 domain. A kernel's tiles are OWN rows of
what it sums for and STEP rows of what it sums over; a block of the lists is 2^own_shift tiles and 2^step_shift steps.

With PART the operands are some queries of one sequence and some of its keys: `queries` from `query_first` on, `keys` from
`key_first` on. Their rows in memory are counted from there; entries of the lists, `low` and `high` are of the sequence.
Tiles are cut as in the whole sequence, so a part's first tile may begin before it. A block that sticks out of a part
counts as cut.
"""
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
SIZES = ("heads", "kv_heads", "layouts", "sequence", "blocks", "early", "section", "own_shift", "step_shift",
         "query_first", "queries", "key_first", "keys")


@triton.jit
def there(rows, sequence, PART: tl.constexpr):
    """Which of these rows are in memory."""
    if PART:
        return (rows >= 0) & (rows < sequence)
    else:
        return rows < sequence


@triton.jit
def in_memory(token, first, PART: tl.constexpr):
    """The row of a token of the sequence."""
    if PART:
        return token - first
    else:
        return token


@triton.jit
def rows_of(sequence, count, PART: tl.constexpr):
    """How many an operand has."""
    if PART:
        return count
    else:
        return sequence


@triton.jit
def first_row(row, first, own_shift, OWN: tl.constexpr, PART: tl.constexpr):
    """Of a tile, whose blocks are counted from the one in which the part begins."""
    if PART:
        return row - first % (OWN << own_shift)
    else:
        return row


@triton.jit
def by_address(source, row, batch, head, ld, sequence, head_dim, ROWS: tl.constexpr, D: tl.constexpr,
               PART: tl.constexpr):
    rows, cols = row + tl.arange(0, ROWS), tl.arange(0, D)
    at = (batch * sequence + rows).to(tl.int64)[:, None] * ld + (head * head_dim + cols)[None, :]
    return tl.load(source + at, mask=there(rows, sequence, PART)[:, None] & (cols < head_dim)[None, :], other=0.0)


@triton.jit
def step_tile(source, row, batch, head, ld, sequence, head_dim, ROWS: tl.constexpr, D: tl.constexpr,
              TMA: tl.constexpr, PART: tl.constexpr):
    """ROWS rows of one head of one sequence, zero outside of both."""
    if TMA:
        return source.load([batch, row, head, 0]).reshape(ROWS, D)
    else:
        return by_address(source, row, batch, head, ld, sequence, head_dim, ROWS, D, PART)


@triton.jit
def own_tile(source, row, batch, head, ld, sequence, head_dim, ROWS: tl.constexpr, D: tl.constexpr,
             TMA: tl.constexpr, PART: tl.constexpr):
    """The tile that a program works for. What lies outside of it is anyone's: it meets zeros, or is not stored. A
    tile that is reshaped would be held in registers, of which there are none to spare."""
    if TMA:
        return source.load([batch * sequence + row, head * head_dim])
    else:
        return by_address(source, row, batch, head, ld, sequence, head_dim, ROWS, D, PART)


@triton.jit
def store_tile(to, x, row, batch, head, ld, sequence, head_dim, ROWS: tl.constexpr, D: tl.constexpr,
               PART: tl.constexpr):
    rows, cols = row + tl.arange(0, ROWS), tl.arange(0, D)
    at = (batch * sequence + rows).to(tl.int64)[:, None] * ld + (head * head_dim + cols)[None, :]
    mask = there(rows, sequence, PART)[:, None] & (cols < head_dim)[None, :]
    tl.store(to + at, x.to(to.dtype.element_ty), mask=mask)


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
def attend(sums, total, top, queries, k, v, entries, begin, whole, whole_end, end, last, low, batch, kv_head, k_ld,
           v_ld, keys_there, head_dim, scale_log2, step_shift, key_first, STEP: tl.constexpr, D: tl.constexpr,
           TMA: tl.constexpr, PART: tl.constexpr, CUT: tl.constexpr):
    """The online softmax over a query tile's whole blocks, or over those that are cut."""
    for i in tl.range(0, steps_of(begin, whole, whole_end, end, step_shift, CUT)):
        key = token_of(entries, i, begin, whole, whole_end, step_shift, STEP, CUT)
        at = in_memory(key, key_first, PART)
        keys = step_tile(k, at, batch, kv_head, k_ld, keys_there, head_dim, STEP, D, TMA, PART)
        scores = tl.dot(queries, keys.T)
        if CUT:
            column = key + tl.arange(0, STEP)
            seen = (column[None, :] <= last[:, None]) & (column[None, :] >= low[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * scale_log2)
        base = new_top
        if CUT:  # of a row that has seen nothing yet
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.math.exp2(scores * scale_log2 - base[:, None])
        shrink = tl.math.exp2(top - base)
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None]
        values = step_tile(v, at, batch, kv_head, v_ld, keys_there, head_dim, STEP, D, TMA, PART)
        sums = tl.dot(weights.to(values.dtype), values, sums)
        top = new_top
    return sums, total, top


@triton.jit
def query_tile(spans, order, low_of, heads, kv_heads, layouts, queries_there, blocks, early, section, own_shift,
               query_first, key_first, keys_there, OWN: tl.constexpr, PART: tl.constexpr):
    """The OWN queries that a program works for: their head, the first row, the borders of their block, and each
    query's row, and the first and last key that it may see."""
    rank, turn = turn_of(early << own_shift, section, blocks << own_shift)
    batch, head = turn // heads, turn % heads
    kv_head = head // (heads // kv_heads)
    first_list = (batch * layouts + head % layouts) * blocks
    block = tl.load(order + first_list + (rank >> own_shift))
    row = ((block << own_shift) + (rank & ((1 << own_shift) - 1))) * OWN
    row = first_row(row, query_first, own_shift, OWN, PART)
    begin, whole, whole_end, end = span_of(spans, first_list + block)
    query = row + tl.arange(0, OWN)
    inside = there(query, queries_there, PART)
    low = tl.load(low_of + batch * queries_there + query, mask=inside, other=0)
    last = query
    if PART:
        last = tl.minimum(query + query_first, key_first + keys_there - 1)
    return turn, batch, head, kv_head, row, begin, whole, whole_end, end, query, inside, low, last


@triton.jit(do_not_specialize=SIZES)
def forward(q, k, v, out, lse, spans, order, entries, low_of, q_ld, k_ld, v_ld, out_ld, heads, kv_heads, layouts,
            sequence, head_dim, blocks, early, section, own_shift, step_shift, scale_log2, query_first, queries,
            key_first, keys, OWN: tl.constexpr, STEP: tl.constexpr, D: tl.constexpr, TMA: tl.constexpr,
            PART: tl.constexpr):
    """A program a tile of OWN queries of one head of one sequence."""
    queries_there, keys_there = rows_of(sequence, queries, PART), rows_of(sequence, keys, PART)
    turn, batch, head, kv_head, row, begin, whole, whole_end, end, query, inside, low, last = query_tile(
        spans, order, low_of, heads, kv_heads, layouts, queries_there, blocks, early, section, own_shift, query_first,
        key_first, keys_there, OWN, PART)
    own = own_tile(q, row, batch, head, q_ld, queries_there, head_dim, OWN, D, TMA, PART)
    sums = tl.zeros([OWN, D], tl.float32)
    total = tl.zeros([OWN], tl.float32)
    top = tl.full([OWN], float("-inf"), tl.float32)
    sums, total, top = attend(sums, total, top, own, k, v, entries, begin, whole, whole_end, end, last, low, batch,
                              kv_head, k_ld, v_ld, keys_there, head_dim, scale_log2, step_shift, key_first, STEP, D,
                              TMA, PART, False)
    sums, total, top = attend(sums, total, top, own, k, v, entries, begin, whole, whole_end, end, last, low, batch,
                              kv_head, k_ld, v_ld, keys_there, head_dim, scale_log2, step_shift, key_first, STEP, D,
                              TMA, PART, True)
    # A row that sees nothing: output 0, log-sum-exp -inf.
    sums = sums / tl.where(total == 0, 1.0, total)[:, None]
    store_tile(out, sums, row, batch, head, out_ld, queries_there, head_dim, OWN, D, PART)
    tl.store(lse + turn.to(tl.int64) * queries_there + query, top * LN2 + tl.log(total), mask=inside)


@triton.jit
def slopes_to_queries(sums, queries, douts, k, v, entries, begin, whole, whole_end, end, last, low, lse, delta, batch,
                      kv_head, k_ld, v_ld, keys_there, head_dim, scale_log2, step_shift, key_first,
                      STEP: tl.constexpr, D: tl.constexpr, TMA: tl.constexpr, PART: tl.constexpr, CUT: tl.constexpr):
    for i in tl.range(0, steps_of(begin, whole, whole_end, end, step_shift, CUT)):
        key = token_of(entries, i, begin, whole, whole_end, step_shift, STEP, CUT)
        at = in_memory(key, key_first, PART)
        keys = step_tile(k, at, batch, kv_head, k_ld, keys_there, head_dim, STEP, D, TMA, PART)
        values = step_tile(v, at, batch, kv_head, v_ld, keys_there, head_dim, STEP, D, TMA, PART)
        weights = tl.math.exp2(tl.dot(queries, keys.T) * scale_log2 - lse[:, None])
        if CUT:
            column = key + tl.arange(0, STEP)
            seen = (column[None, :] <= last[:, None]) & (column[None, :] >= low[:, None])
            weights = tl.where(seen, weights, 0.0)
        slopes = weights * (tl.dot(douts, values.T) - delta[:, None])
        sums = tl.dot(slopes.to(keys.dtype), keys, sums)
    return sums


@triton.jit(do_not_specialize=SIZES)
def backward_queries(q, k, v, dout, lse, delta, dq, spans, order, entries, low_of, q_ld, k_ld, v_ld, dout_ld, dq_ld,
                     heads, kv_heads, layouts, sequence, head_dim, blocks, early, section, own_shift, step_shift,
                     scale_log2, query_first, queries, key_first, keys, OWN: tl.constexpr, STEP: tl.constexpr,
                     D: tl.constexpr, TMA: tl.constexpr, PART: tl.constexpr):
    """A program a tile of OWN queries of one head of one sequence."""
    queries_there, keys_there = rows_of(sequence, queries, PART), rows_of(sequence, keys, PART)
    turn, batch, head, kv_head, row, begin, whole, whole_end, end, query, inside, low, last = query_tile(
        spans, order, low_of, heads, kv_heads, layouts, queries_there, blocks, early, section, own_shift, query_first,
        key_first, keys_there, OWN, PART)
    at = turn.to(tl.int64) * queries_there + query
    lse_of = tl.load(lse + at, mask=inside, other=0.0) * LOG2E
    delta_of = tl.load(delta + at, mask=inside, other=0.0)
    own = own_tile(q, row, batch, head, q_ld, queries_there, head_dim, OWN, D, TMA, PART)
    douts = own_tile(dout, row, batch, head, dout_ld, queries_there, head_dim, OWN, D, TMA, PART)
    sums = tl.zeros([OWN, D], tl.float32)
    sums = slopes_to_queries(sums, own, douts, k, v, entries, begin, whole, whole_end, end, last, low, lse_of,
                             delta_of, batch, kv_head, k_ld, v_ld, keys_there, head_dim, scale_log2, step_shift,
                             key_first, STEP, D, TMA, PART, False)
    sums = slopes_to_queries(sums, own, douts, k, v, entries, begin, whole, whole_end, end, last, low, lse_of,
                             delta_of, batch, kv_head, k_ld, v_ld, keys_there, head_dim, scale_log2, step_shift,
                             key_first, STEP, D, TMA, PART, True)
    store_tile(dq, sums * (scale_log2 * LN2), row, batch, head, dq_ld, queries_there, head_dim, OWN, D, PART)


@triton.jit
def slopes_to_keys(dkeys, dvalues, keys, values, q, dout, lse, delta, entries, begin, whole, whole_end, end, batch, head,
                   first, high, q_ld, dout_ld, queries_there, head_dim, scale_log2, step_shift, query_first,
                   STEP: tl.constexpr, D: tl.constexpr, TMA: tl.constexpr, PART: tl.constexpr, CUT: tl.constexpr):
    """`first`, `high`: the first query that sees each key, and one past the last."""
    for i in tl.range(0, steps_of(begin, whole, whole_end, end, step_shift, CUT)):
        token = token_of(entries, i, begin, whole, whole_end, step_shift, STEP, CUT)
        row = in_memory(token, query_first, PART)
        query = row + tl.arange(0, STEP)
        queries = step_tile(q, row, batch, head, q_ld, queries_there, head_dim, STEP, D, TMA, PART)
        inside = there(query, queries_there, PART)
        lse_of = tl.load(lse + query, mask=inside, other=0.0) * LOG2E
        weights = tl.math.exp2(tl.dot(keys, queries.T) * scale_log2 - lse_of[None, :])
        if CUT:
            position = query
            if PART:
                position = query + query_first
            seen = (position[None, :] >= first[:, None]) & (position[None, :] < high[:, None])
            weights = tl.where(seen, weights, 0.0)
        douts = step_tile(dout, row, batch, head, dout_ld, queries_there, head_dim, STEP, D, TMA, PART)
        dvalues = tl.dot(weights.to(douts.dtype), douts, dvalues)
        delta_of = tl.load(delta + query, mask=inside, other=0.0)
        slopes = weights * (tl.dot(values, douts.T) - delta_of[None, :])
        dkeys = tl.dot(slopes.to(queries.dtype), queries, dkeys)
    return dkeys, dvalues


@triton.jit(do_not_specialize=SIZES)
def backward_keys(q, k, v, dout, lse, delta, dk, dv, spans, order, entries, high_of, q_ld, k_ld, v_ld, dout_ld, dk_ld,
                  dv_ld, heads, kv_heads, layouts, sequence, head_dim, blocks, early, section, own_shift, step_shift,
                  scale_log2, query_first, queries, key_first, keys, OWN: tl.constexpr, STEP: tl.constexpr,
                  D: tl.constexpr, TMA: tl.constexpr, PART: tl.constexpr):
    """A program a tile of OWN keys of one key/value head of one sequence; the heads that read it in order."""
    queries_there, keys_there = rows_of(sequence, queries, PART), rows_of(sequence, keys, PART)
    rank, turn = turn_of(early << own_shift, section, blocks << own_shift)
    batch, kv_head = turn // kv_heads, turn % kv_heads
    group = heads // kv_heads
    orders = tl.minimum(layouts, kv_heads)
    block = tl.load(order + (batch * orders + kv_head % orders) * blocks + (rank >> own_shift))
    row = ((block << own_shift) + (rank & ((1 << own_shift) - 1))) * OWN
    row = first_row(row, key_first, own_shift, OWN, PART)
    column = row + tl.arange(0, OWN)
    high = tl.load(high_of + batch * keys_there + column, mask=there(column, keys_there, PART), other=0)
    first = column
    if PART:
        first = tl.maximum(column + key_first, query_first)
    own = own_tile(k, row, batch, kv_head, k_ld, keys_there, head_dim, OWN, D, TMA, PART)
    values = own_tile(v, row, batch, kv_head, v_ld, keys_there, head_dim, OWN, D, TMA, PART)
    dkeys = tl.zeros([OWN, D], tl.float32)
    dvalues = tl.zeros([OWN, D], tl.float32)
    for head in range(kv_head * group, (kv_head + 1) * group):
        begin, whole, whole_end, end = span_of(spans, (batch * layouts + head % layouts) * blocks + block)
        at = (batch * heads + head).to(tl.int64) * queries_there
        dkeys, dvalues = slopes_to_keys(dkeys, dvalues, own, values, q, dout, lse + at, delta + at, entries, begin,
                                        whole, whole_end, end, batch, head, first, high, q_ld, dout_ld, queries_there,
                                        head_dim, scale_log2, step_shift, query_first, STEP, D, TMA, PART, False)
        dkeys, dvalues = slopes_to_keys(dkeys, dvalues, own, values, q, dout, lse + at, delta + at, entries, begin,
                                        whole, whole_end, end, batch, head, first, high, q_ld, dout_ld, queries_there,
                                        head_dim, scale_log2, step_shift, query_first, STEP, D, TMA, PART, True)
    store_tile(dk, dkeys * (scale_log2 * LN2), row, batch, kv_head, dk_ld, keys_there, head_dim, OWN, D, PART)
    store_tile(dv, dvalues, row, batch, kv_head, dv_ld, keys_there, head_dim, OWN, D, PART)
