"""Chunks of the gated delta rule (zse.kernels.delta) on a CPU: products of matrices instead of one token after another.

Within a chunk that begins with the state S, G_t the sum of the decays' logs up to token t (the UT form: Yang et al.,
arXiv 2406.06484, with decays as in arXiv 2412.06464; ours keeps the triangular system and solves it forward):

    (1 + L) D = beta (V - exp(G) K S),  L_ti = beta_t exp(G_t - G_i) k_t · k_i for i < t
    out = exp(G) Q S + P D,             P_ti = exp(G_t - G_i) q_t · k_i for i <= t
    S = exp(G_last) S + sum of exp(G_last - G_i) k_i D_i^T

No exponent is positive, whatever the decays. Of a token there are 6 * k size * v size operations, as in the recurrence,
and 4 * CHUNK / 2 * (k size + v size) more; but the state is read and written once a chunk, and sums stay in registers."""

from zse import kernel as zl
from zse.kernels.runs import KeepParams
from zse.kernels.small_product import ROWS, add_products, begin, column_steps, vectors

MAX_SIZE = 256  # of keys and values of a head
LINE = 16  # numbers of a cache line
AHEAD = 6  # rows that are brought nearer while one is read
STEPS = 16.0  # a sum of logs is a multiple of 1 / STEPS, whose differences are exact, and a rest


class DeltaParams(KeepParams):
    """qkv, b, a f32, rows so far apart. DECAY: "head" or "channel": what has a decay of its own. CHUNK: tokens."""

    qkv: zl.Ptr[zl.f32, "const"]
    b: zl.Ptr[zl.f32, "const"]
    a: zl.Ptr[zl.f32, "const"]
    A: zl.Ptr[zl.f32, "const"]
    dt_bias: zl.Ptr[zl.f32, "const"]
    out: zl.Ptr[zl.f32]
    qkv_stride: zl.index
    b_stride: zl.index
    a_stride: zl.index
    k_heads: zl.index
    v_heads: zl.index
    k_size: zl.index
    v_size: zl.index
    tiled: zl.index
    eps: zl.f32
    q_scale: zl.f32
    DECAY: zl.static
    CHUNK: zl.static


class DeltaScratch(zl.Record):
    """keys, queries [CHUNK, k size], turned [k size, CHUNK] keys; lower, scores [CHUNK, CHUNK]; change, given [CHUNK, v
    size], a tile of columns behind the other; sums: of logs of decays, [2, CHUNK] as multiples and rests of a head; of
    channels each token's own logs, [CHUNK, k size]; decay [k size]: of the whole chunk; beta, order (0, 1, ...)
    [CHUNK]."""

    keys: object
    queries: object
    turned: object
    lower: object
    scores: object
    change: object
    given: object
    sums: object
    decay: object
    beta: object
    order: object


@zl.inline
def key_head(p, head):
    """The k head of a v head."""
    return head % p.k_heads if p.tiled != 0 else head // (p.v_heads // p.k_heads)


@zl.inline
def softplus(x):
    """log(1 + exp(x)) within some ulp: what 1 + y loses of y, the quotient gives back; above 20 it is x."""
    y = zl.exp(min(x, 20.0))
    more = y + 1.0
    exact = zl.log(more) * (y / zl.where(more == 1.0, 1.0, more - 1.0))
    return zl.where(x > 20.0, x, zl.where(more == 1.0, y, exact))


@zl.inline
def head_step(p, head, token):
    """The log of a token's decay, of a head that has one."""
    return p.A[head] * softplus(p.a[token * p.a_stride + head] + p.dt_bias[head])


@zl.inline
def channel_steps(p, head, token, r):
    """The logs of the decays of a token's channels from r on."""
    L = zl.target.lanes
    at = head * p.k_size + r
    return softplus(zl.load(p.a + token * p.a_stride + at, L) + zl.load(p.dt_bias + at, L)) * p.A[head]


@zl.inline
def unit_rows(p, head, token, key, query):
    """Writes the token's k, and q / sqrt(k size), with length 1."""
    L = zl.target.lanes
    row = p.qkv + token * p.qkv_stride + key_head(p, head) * p.k_size
    for source, out, factor in zl.static(((row, query, p.q_scale), (row + p.k_heads * p.k_size, key, 1.0))):
        squares = zl.f32.x(L)(0)
        for r in range(0, p.k_size, L):
            value = zl.load(source + r, L)
            squares = zl.fma(value, value, squares)
        scale = factor / zl.sqrt(zl.reduce_add(squares) + p.eps)
        for r in range(0, p.k_size, L):
            zl.store(out + r, zl.load(source + r, L) * scale)


@zl.inline
def bring(row, size):
    """`size` numbers nearer: rows of a batch are far apart, which no hardware foresees."""
    for i in range(0, size, LINE):
        zl.prefetch(row + i)


@zl.inline
def take_values(p, w, values, t):
    """Row t of change = values, or nothing."""
    L = zl.target.lanes
    for vecs in zl.static(column_steps(vectors())):
        for c in range(begin(p.v_size, vecs, vectors()), p.v_size // (vecs * L) * (vecs * L), vecs * L):
            line = w.change + c * p.CHUNK + t * (vecs * L)
            for v in zl.static(range(vecs)):
                value = zl.f32.x(L)(0) if values is None else zl.load(values + c + v * L, L)
                zl.store(line + v * L, value)


@zl.inline
def load_chunk(p, w, head, token, count, rows):
    """Keys, queries, values (as change), beta and the sums of logs of `count` tokens; those up to `rows` are nothing, and decay no more."""
    L, C, K, V = zl.target.lanes, p.CHUNK, p.k_size, p.v_size
    total = zl.f64(0)
    for t in range(rows):
        if t < count:
            after = p.qkv + (token + t + AHEAD) * p.qkv_stride
            bring(after + key_head(p, head) * K, K)
            bring(after + (p.k_heads + key_head(p, head)) * K, K)
            bring(after + 2 * p.k_heads * K + head * V, V)
            take_values(p, w, p.qkv + (token + t) * p.qkv_stride + 2 * p.k_heads * K + head * V, t)
            unit_rows(p, head, token + t, w.keys + t * K, w.queries + t * K)
            w.beta[t] = 1.0 / (1.0 + zl.exp(p.b[(token + t) * p.b_stride + head] * -1.0))
        else:
            w.beta[t] = 0.0
            for r in range(0, K, L):
                zl.store(w.keys + t * K + r, zl.f32.x(L)(0))
                zl.store(w.queries + t * K + r, zl.f32.x(L)(0))
            take_values(p, w, None, t)
        if p.DECAY == "head":
            if t < count:
                total += zl.f64(head_step(p, head, token + t))
            whole = zl.round_even(zl.f32(total) * STEPS) / STEPS
            w.sums[t] = whole
            w.sums[C + t] = zl.f32(total - zl.f64(whole))
        else:
            for r in range(0, K, L):
                logs = zl.f32.x(L)(0)
                if t < count:
                    logs = channel_steps(p, head, token + t, r)
                zl.store(w.sums + t * K + r, logs)


@zl.inline
def turn_keys(p, w, rows):
    """turned = keys^T."""
    for r in range(p.k_size):
        for t in range(rows):
            w.turned[r * p.CHUNK + t] = w.keys[t * p.k_size + r]


@zl.inline
def head_scores(p, w, rows):
    """lower and scores of a decay of the head, on and below the diagonal of tiles."""
    L, C, K = zl.target.lanes, p.CHUNK, p.k_size
    turn_keys(p, w, rows)
    for t in range(0, rows, ROWS):
        lines = [part + (t + r) * K for part in (w.keys, w.queries) for r in zl.static(range(ROWS))]
        seen = (t + ROWS + L - 1) // L * L
        for count in zl.static(column_steps(vectors() // 2)):
            for i in range(begin(seen, count, vectors() // 2), seen // (count * L) * (count * L), count * L):
                sums = [[zl.f32.x(L)(0) for _ in range(count)] for _ in range(2 * ROWS)]
                add_products(sums, lines, w.turned + i, C, K)
                for v in zl.static(range(count)):
                    at = i + v * L
                    order = zl.load(w.order + at, L)
                    for r in zl.static(range(ROWS)):
                        wholes = w.sums[t + r] - zl.load(w.sums + at, L)
                        decay = zl.exp(min(wholes + (w.sums[C + t + r] - zl.load(w.sums + C + at, L)), 0.0))
                        row, place = zl.f32(t + r), (t + r) * C + at
                        lower = sums[r][v] * decay * (w.beta[t + r] * -1.0)
                        zl.store(w.lower + place, zl.where(order < row, lower, 0.0))
                        zl.store(w.scores + place, zl.where(order <= row, sums[ROWS + r][v] * decay, 0.0))


@zl.inline
def channel_scores(p, w, rows):
    """lower and scores of decays of channels. The logs between two tokens are added from the later one backwards: their
    sum has the digits that a difference of sums since the chunk began may not have."""
    L, C, K = zl.target.lanes, p.CHUNK, p.k_size
    by_key = zl.local_array(zl.f32, C * L)
    by_query = zl.local_array(zl.f32, C * L)
    for t in range(rows):
        for i in range(t + 1):
            zl.store(by_key + i * L, zl.f32.x(L)(0))
            zl.store(by_query + i * L, zl.f32.x(L)(0))
        for r in range(0, K, L):
            own, query = zl.load(w.keys + t * K + r, L), zl.load(w.queries + t * K + r, L)
            logs = zl.f32.x(L)(0)
            for back in range(t + 1):
                i = t - back
                key = zl.load(w.keys + i * K + r, L) * zl.exp(logs)
                zl.store(by_key + i * L, zl.fma(own, key, zl.load(by_key + i * L, L)))
                zl.store(by_query + i * L, zl.fma(query, key, zl.load(by_query + i * L, L)))
                logs += zl.load(w.sums + i * K + r, L)
        for i in range(t + 1):
            w.lower[t * C + i] = zl.reduce_add(zl.load(by_key + i * L, L)) * (w.beta[t] * -1.0)
            w.scores[t * C + i] = zl.reduce_add(zl.load(by_query + i * L, L))
        for after in range(t + 1, t // ROWS * ROWS + ROWS):
            w.scores[t * C + after] = 0.0


@zl.inline
def channel_factors(p, w, rows):
    """With decays of channels: turned keys times what decays of them until the chunk's end; then keys and queries times
    what decays since it began; the decay of the whole chunk."""
    L, C, K = zl.target.lanes, p.CHUNK, p.k_size
    line = zl.local_array(zl.f32, L)
    for r in range(0, K, L):
        left = zl.f32.x(L)(0)
        for back in range(rows):
            t = rows - 1 - back
            zl.store(line, zl.load(w.keys + t * K + r, L) * zl.exp(left))
            for lane in range(L):
                w.turned[(r + lane) * C + t] = line[lane]
            left += zl.load(w.sums + t * K + r, L)
        zl.store(w.decay + r, zl.exp(left))
        logs = zl.f32.x(L)(0)
        for t in range(rows):
            logs += zl.load(w.sums + t * K + r, L)
            zl.store(w.keys + t * K + r, zl.load(w.keys + t * K + r, L) * zl.exp(logs))
            zl.store(w.queries + t * K + r, zl.load(w.queries + t * K + r, L) * zl.exp(logs))


@zl.inline
def from_state(p, w, rows, state):
    """What the state before the chunk gives: change = beta (V - exp(G) K S), given = exp(G) Q S. Columns of S are copied
    first: where they lie, 512 bytes from row to row, they would have half of the first cache's sets, which are too few."""
    L, K, V = zl.target.lanes, p.k_size, p.v_size
    columns = zl.local_array(zl.f32, MAX_SIZE * vectors() * L)
    for vecs in zl.static(column_steps(vectors())):
        for c in range(begin(V, vecs, vectors()), V // (vecs * L) * (vecs * L), vecs * L):
            for k in range(K):
                for v in zl.static(range(vecs)):
                    zl.store(columns + (k * vecs + v) * L, zl.load(state + k * V + c + v * L, L))
            for t in range(0, rows, ROWS):
                factors = [zl.f32(1) for _ in range(ROWS)]
                if p.DECAY == "head":
                    for r in zl.static(range(ROWS)):
                        factors[r] = zl.exp(w.sums[t + r] + w.sums[p.CHUNK + t + r])
                sums = [[zl.f32.x(L)(0) for _ in range(vecs)] for _ in range(ROWS)]
                add_products(sums, [w.keys + (t + r) * K for r in zl.static(range(ROWS))], columns, vecs * L, K)
                for r in zl.static(range(ROWS)):
                    line = w.change + c * p.CHUNK + (t + r) * (vecs * L)
                    for v in zl.static(range(vecs)):
                        change = (zl.load(line + v * L, L) - sums[r][v] * factors[r]) * w.beta[t + r]
                        zl.store(line + v * L, change)
                sums = [[zl.f32.x(L)(0) for _ in range(vecs)] for _ in range(ROWS)]
                add_products(sums, [w.queries + (t + r) * K for r in zl.static(range(ROWS))], columns, vecs * L, K)
                for r in zl.static(range(ROWS)):
                    for v in zl.static(range(vecs)):
                        zl.store(w.given + c * p.CHUNK + ((t + r) * vecs + v) * L, sums[r][v] * factors[r])


@zl.inline
def solve(p, w, head, token, count, rows):
    """change = D, row after row of tiles; out = given + P D."""
    L, C, V = zl.target.lanes, p.CHUNK, p.v_size
    for vecs in zl.static(column_steps(vectors())):
        step = vecs * L
        for c in range(begin(V, vecs, vectors()), V // step * step, step):
            change = w.change + c * C
            for t in range(0, rows, ROWS):
                lines = [w.lower + (t + r) * C for r in zl.static(range(ROWS))]
                sums = tile_at(change + t * step, step, vecs)
                add_products(sums, lines, change, step, t)
                for r in zl.static(range(ROWS)):
                    for before in zl.static(range(r)):
                        factor = zl.f32.x(L)(lines[r][t + before])
                        for v in zl.static(range(vecs)):
                            sums[r][v] = zl.fma(sums[before][v], factor, sums[r][v])
                    for v in zl.static(range(vecs)):
                        zl.store(change + (t + r) * step + v * L, sums[r][v])
                given = tile_at(w.given + c * C + t * step, step, vecs)
                add_products(given, [w.scores + (t + r) * C for r in zl.static(range(ROWS))], change, step, t + ROWS)
                for r in zl.static(range(ROWS)):
                    if t + r < count:
                        out = p.out + ((token + t + r) * p.v_heads + head) * V + c
                        for v in zl.static(range(vecs)):
                            zl.store(out + v * L, given[r][v])


@zl.inline
def tile_at(place, row, vecs):
    """ROWS rows of `vecs` vectors in registers."""
    L = zl.target.lanes
    return [[zl.load(place + r * row + v * L, L) for v in zl.static(range(vecs))] for r in zl.static(range(ROWS))]


@zl.inline
def next_state(p, w, rows, state):
    """S = exp(G_last) S + what the chunk's keys and changes leave of themselves."""
    L, C, K, V = zl.target.lanes, p.CHUNK, p.k_size, p.v_size
    last = rows - 1
    if p.DECAY == "head":
        for t in range(rows):  # beta is done with
            w.beta[t] = zl.exp((w.sums[last] - w.sums[t]) + (w.sums[C + last] - w.sums[C + t]))
        for r in range(0, K, L):
            zl.store(w.decay + r, zl.splat(zl.exp(w.sums[last] + w.sums[C + last]), L))
    for vecs in zl.static(column_steps(vectors())):
        step = vecs * L
        for c in range(begin(V, vecs, vectors()), V // step * step, step):
            change = w.change + c * C
            if p.DECAY == "head":
                for t in range(rows):
                    for v in zl.static(range(vecs)):
                        place = change + t * step + v * L
                        zl.store(place, zl.load(place, L) * w.beta[t])
            for k in range(0, K, ROWS):
                lines = [state + (k + r) * V + c for r in zl.static(range(ROWS))]
                sums = [
                    [zl.load(lines[r] + v * L, L) * w.decay[k + r] for v in zl.static(range(vecs))]
                    for r in zl.static(range(ROWS))
                ]
                add_products(sums, [w.turned + (k + r) * C for r in zl.static(range(ROWS))], change, step, rows)
                for r in zl.static(range(ROWS)):
                    for v in zl.static(range(vecs)):
                        zl.store(lines[r] + v * L, sums[r][v])


@zl.inline
def delta_chunks(p, head, first, last, state, short):
    """Chunks of a run while at least `short` tokens are left; the first token that is left."""
    C = p.CHUNK
    w = DeltaScratch(
        keys=zl.local_array(zl.f32, C * MAX_SIZE),
        queries=zl.local_array(zl.f32, C * MAX_SIZE),
        turned=zl.local_array(zl.f32, C * MAX_SIZE),
        lower=zl.local_array(zl.f32, C * C),
        scores=zl.local_array(zl.f32, C * C),
        change=zl.local_array(zl.f32, C * MAX_SIZE),
        given=zl.local_array(zl.f32, C * MAX_SIZE),
        sums=zl.local_array(zl.f32, 2 * C if p.DECAY == "head" else C * MAX_SIZE),
        decay=zl.local_array(zl.f32, MAX_SIZE),
        beta=zl.local_array(zl.f32, C),
        order=zl.local_array(zl.f32, C),
    )
    for i in range(C):
        w.order[i] = zl.f32(i)
    token = first + 0
    while last - token >= short:
        count = min(last - token, C)
        rows = (count + ROWS - 1) // ROWS * ROWS
        load_chunk(p, w, head, token, count, rows)
        if p.DECAY == "head":
            head_scores(p, w, rows)
        else:
            channel_scores(p, w, rows)
            channel_factors(p, w, rows)
        from_state(p, w, rows, state)
        solve(p, w, head, token, count, rows)
        next_state(p, w, rows, state)
        token += count
    return token
