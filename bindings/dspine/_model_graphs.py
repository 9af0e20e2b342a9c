"""The graphs that llama.cpp builds for the models of a plan, by shape.

Each builder follows one file of the pinned llama.cpp: `_dense` src/models/llama.cpp and qwen3.cpp,
`_hybrid` qwen35.cpp with delta-net-base.cpp, `draft_graph` dflash.cpp with our dspine-graph.cpp;
the shared pieces are those of src/llama-graph.cpp. Only what takes memory is here.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from dspine._graph import (
    F16,
    I64,
    Graph,
    Peak,
    Tensor,
    constant,
    external,
    leaf,
    mul_mat,
    op,
    over,
    peak,
    permute,
    store,
    view,
)
from dspine._shapes import DELTA_NETS, DraftShape, Layer, ModelShape

ROTATED_FROM = 64  # quantized caches of a multiple of this head width are rotated


@dataclass(frozen=True)
class Cache:
    """One K and V cache: cells of a stream, streams, and the element types by name."""

    cells: int
    streams: int
    type_k: str
    type_v: str


@dataclass(frozen=True)
class Run:
    """What a reserved graph depends on beside the model.

    Attributes:
        tokens: rows of a ubatch. sequences: of how many sequences they are.
        outputs: rows whose logits are wanted.
        full, window: the caches of full and of sliding attention.
        rows: recurrent states kept for each sequence, 1 and one for each drafted token.
        taps: input indices of the layers that the drafter reads.
        flash: flash attention. on_device: all layers on one GPU.
    """

    tokens: int
    sequences: int
    outputs: int
    full: Cache
    window: Cache | None
    rows: int = 1
    taps: tuple[int, ...] = ()
    flash: bool = True
    on_device: bool = False


def _is_quantized(type_name: str) -> bool:
    return type_name not in ("f32", "f16", "bf16")


def _norm(x: Tensor) -> Tensor:
    """RMS norm and its weight."""
    return over(over(x))


class _Attention:
    """Inputs and nodes of attention over one cache."""

    def __init__(self, graph: Graph, run: Run, cache: Cache, layers: list[Layer]) -> None:
        self.graph, self.run, self.cache = graph, run, cache
        head_k = layers[0].head_k if layers else 0
        head_v = layers[0].head_v if layers else 0
        self.k_idxs = leaf(run.tokens, item=I64)
        # without flash attention V is kept transposed, and each of its values has an index
        per_row = 1 if run.flash else max((a.head_v * a.heads_kv for a in layers), default=1)
        self.v_idxs = leaf(run.tokens * per_row, item=I64)
        rows = run.tokens // cache.streams
        item = F16 if run.flash else 4
        self.mask = leaf(cache.cells, rows, 1, cache.streams, item=item)
        self.k_rot = self._rotation(cache.type_k, head_k, widest=True)
        self.v_rot = self._rotation(cache.type_v, head_v, widest=False)

    @staticmethod
    def _rotation(type_name: str, head: int, *, widest: bool) -> Tensor | None:
        if not head or not _is_quantized(type_name) or head % ROTATED_FROM:
            return None
        width = ROTATED_FROM
        while widest and head % (2 * width) == 0:
            width *= 2
        return leaf(width, width)

    def rotate(self, x: Tensor, rotation: Tensor | None) -> Tensor:
        """Times the rotation, [n, n], piece by piece."""
        if rotation is None:
            return x
        n = rotation.ne[0]
        count = x.ne[0] * x.ne[1] * x.ne[2] * x.ne[3] // n
        flat = view(x, (n, count))
        return view(op((n, count), rotation, flat), x.ne)

    def _store(self, k: Tensor, v: Tensor) -> None:
        """Write K and V [head, heads, tokens] into the cache."""
        tokens = self.run.tokens
        flat = view(k, (k.ne[0] * k.ne[1], tokens), (k.nb[2],))
        self.graph.expand(store(flat, self.k_idxs))
        flat = view(v, (v.ne[0] * v.ne[1], tokens), (v.nb[2],))
        if not self.run.flash:
            flat = view(flat, (1, flat.ne[0] * tokens))
        self.graph.expand(store(flat, self.v_idxs))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, v_before_k: bool) -> Tensor:
        """q, k, v [head, heads, tokens]: [head_v * heads, tokens]."""
        graph = self.graph
        heads_kv, head_k, head_v = k.ne[1], k.ne[0], v.ne[0]
        q, k = self.rotate(q, self.k_rot), self.rotate(k, self.k_rot)
        v = self.rotate(v, self.v_rot)
        graph.expand(q)
        for tensor in (v, k) if v_before_k else (k, v):
            graph.expand(tensor)
        self._store(k, v)
        out = self._flash(q, head_k, head_v, heads_kv) if self.run.flash else self._plain(q, head_v)
        graph.expand(out)
        return self.rotate(out, self.v_rot)

    def _split(self, q: Tensor) -> Tensor:
        streams = self.cache.streams
        rows = q.ne[2] // streams
        parts = view(q, (q.ne[0], q.ne[1], rows, streams), (q.nb[1], q.nb[2], q.nb[2] * rows))
        return permute(parts, 0, 2, 1, 3)

    def _flash(self, q: Tensor, head_k: int, head_v: int, heads_kv: int) -> Tensor:
        cache = self.cache
        heads, tokens = q.ne[1], q.ne[2]
        shape = (cache.cells, heads_kv, cache.streams)
        sources, extra = [self._split(q)], 0
        for type_name, head in ((cache.type_k, head_k), (cache.type_v, head_v)):
            if type_name == "f32":
                sources.append(op((head, *shape), external(1), item=F16))
            elif type_name != "f16" and self.run.on_device:
                # CUDA kernels for more than one row work on an F16 copy (fattn.cu)
                extra += F16 * head * shape[0] * shape[1] * shape[2]
        rows = tokens // cache.streams
        ne = (head_v, heads, rows, cache.streams)
        out = op(ne, *sources, self.mask, extra=extra)
        return view(out, (head_v * heads, tokens))

    def _plain(self, q: Tensor, head_v: int) -> Tensor:
        cache, heads, tokens = self.cache, q.ne[1], q.ne[2]
        rows = tokens // cache.streams
        kq = op((cache.cells, rows, heads, cache.streams), self._split(q))
        weights = over(kq, self.mask)
        out = permute(op((head_v, rows, heads, cache.streams), weights), 0, 2, 1, 3)
        return op((head_v * heads, tokens), out)


class _Builder:
    """Shared state while the graph of a target is built."""

    def __init__(self, shape: ModelShape, run: Run) -> None:
        self.shape, self.run, self.graph = shape, run, Graph()
        tokens = leaf(run.tokens)
        self.embedded = op((shape.n_embd, run.tokens), tokens)
        self.graph.expand(self.embedded)
        self.graph.expand(leaf(shape.n_embd, run.tokens))  # for batches of embeddings
        self.positions = leaf(run.tokens * shape.positions_per_token)
        self.out_ids = leaf(run.outputs)
        self.full = self._attention(run.full, swa=False)
        self.window = None if run.window is None else self._attention(run.window, swa=True)

    def _attention(self, cache: Cache, *, swa: bool) -> _Attention:
        layers = [a for a in self.shape.layers if a.swa == swa and not a.recurrent]
        return _Attention(self.graph, self.run, cache, layers)

    def rope(self, x: Tensor) -> Tensor:
        return over(x, self.positions)

    def ffn(self, x: Tensor, n_ff: int, *, bias: bool = False) -> Tensor:
        up = mul_mat(n_ff, x)
        up = over(up) if bias else up
        gate = mul_mat(n_ff, x)
        gate = over(gate) if bias else gate
        down = mul_mat(self.shape.n_embd, op(gate.ne, gate, up))
        return over(down) if bias else down

    def experts(self, x: Tensor, il: int) -> Tensor:
        """A mixture of experts, of which only the large tensors are here."""
        moe = self.shape.experts
        assert moe is not None
        rows = self.run.tokens
        chosen = op((moe.used, rows), over(mul_mat(moe.count, x)))
        wide = (moe.n_ff, moe.used, rows)
        up, gate = op(wide, x, chosen), op(wide, x, chosen)
        down = over(op((self.shape.n_embd, moe.used, rows), op(wide, gate, up), chosen), chosen)
        total = op((self.shape.n_embd, rows), down)
        if moe.shared_n_ff:
            total = over(total, self.ffn(x, moe.shared_n_ff))
        return total

    def feed_forward(self, x: Tensor, il: int) -> Tensor:
        layer = self.shape.layers[il]
        if layer.moe:
            return self.experts(x, il)
        return self.ffn(x, layer.n_ff, bias=layer.ffn_bias)

    def finish(self, logits: Tensor) -> tuple[Graph, Tensor]:
        logits.is_output = True
        self.graph.expand(logits)
        return self.graph, self.embedded


def _qkv(b: _Builder, x: Tensor, il: int) -> tuple[Tensor, Tensor, Tensor]:
    """Q, K and V [head, heads, tokens], from one weight or from three."""
    layer, tokens = b.shape.layers[il], b.run.tokens
    sizes = (
        (layer.head_k, layer.heads),
        (layer.head_k, layer.heads_kv),
        (layer.head_v, layer.heads_kv),
    )
    if layer.fused_qkv:
        width = sum(head * heads for head, heads in sizes)
        joint = mul_mat(width, x)
        joint = over(joint) if layer.qkv_bias else joint
        q, k, v = (view(joint, (h, n, tokens), (4 * h, joint.nb[1])) for h, n in sizes)
        return q, k, v
    made = []
    for head, heads in sizes:
        y = mul_mat(head * heads, x)
        y = over(y) if layer.qkv_bias else y
        made.append(view(y, (head, heads, tokens)))
    return made[0], made[1], made[2]


def _dense(shape: ModelShape, run: Run) -> tuple[Graph, Tensor]:
    b = _Builder(shape, run)
    x = b.embedded
    for il, layer in enumerate(shape.layers):
        x.is_output |= il in run.taps
        q, k, v = _qkv(b, _norm(x), il)
        if layer.qk_norm:
            q, k = _norm(q), _norm(k)
        attention = b.window if layer.swa and b.window is not None else b.full
        cur = attention(b.rope(q), b.rope(k), v, v_before_k=b.window is None)
        cur = mul_mat(shape.n_embd, cur)
        cur = over(cur) if layer.out_bias else cur
        if il == len(shape.layers) - 1:
            cur, x = (
                op((shape.n_embd, run.outputs), cur, b.out_ids),
                op((shape.n_embd, run.outputs), x, b.out_ids),
            )
        middle = over(cur, x)
        x = over(b.feed_forward(_norm(middle), il), middle)
        b.graph.expand(x)
    last = _norm(x)
    last.is_output = True
    return b.finish(mul_mat(shape.n_vocab, last))


def _gated_attention(b: _Builder, x: Tensor, il: int) -> Tensor:
    """Full attention of qwen35: the query projection makes a gate as well."""
    layer, tokens = b.shape.layers[il], b.run.tokens
    head, heads, kv = layer.head_k, layer.heads, layer.heads_kv
    joint = mul_mat(2 * head * heads, x)
    k, v = mul_mat(head * kv, x), mul_mat(layer.head_v * kv, x)
    strides = (8 * head, 8 * head * heads)
    q = view(joint, (head, heads, tokens), strides)
    q = _norm(q)
    k = _norm(view(k, (head, kv, tokens)))
    gate = op((head * heads, tokens), view(joint, (head, heads, tokens), strides))
    v = view(v, (layer.head_v, kv, tokens))
    cur = b.full(b.rope(q), b.rope(k), v, v_before_k=True)
    return mul_mat(b.shape.n_embd, over(cur, over(gate)))


def _delta_net(b: _Builder, x: Tensor, copy: Tensor) -> Tensor:
    """A gated delta net layer; `copy` selects the states of the sequences, [sequences]."""
    ssm, run, graph = b.shape.ssm, b.run, b.graph
    assert ssm is not None
    seqs = run.sequences
    steps = run.tokens // seqs
    heads, width = ssm.dt_rank, ssm.d_inner // ssm.dt_rank
    channels = ssm.d_inner + 2 * ssm.n_group * ssm.d_state
    mixed = view(mul_mat(channels, x), (channels, steps, seqs))
    z = mul_mat(ssm.d_inner, x)
    beta = over(view(mul_mat(heads, x), (1, heads, steps, seqs)))
    alpha = over(over(over(view(mul_mat(heads, x), (heads, steps, seqs)))))
    gate = view(alpha, (1, heads, steps, seqs))
    conv_state = op((ssm.conv_state, seqs), copy)
    graph.expand(conv_state)
    conv_state = view(conv_state, (ssm.d_conv - 1, channels, seqs))
    conv_in = op((ssm.d_conv - 1 + steps, channels, seqs), conv_state, permute(mixed, 1, 0, 2, 3))
    # one copy for each kept row, all of which only read
    graph.expand(store(view(conv_in, (ssm.d_conv - 1, channels, seqs), conv_in.nb[1:3])))
    state = op((ssm.state, seqs), copy)
    graph.expand(state)
    state = view(state, (width, width, heads, seqs))
    conv = over(op((channels, steps, seqs), conv_in))
    row = (4 * ssm.d_state, 4 * channels, 4 * channels * steps)
    keys = (ssm.d_state, ssm.n_group, steps, seqs)
    q, k = (over(op(keys, view(conv, keys, row))) for _ in range(2))
    values = view(conv, (width, heads, steps, seqs), (4 * width, *row[1:]))
    rows = steps * seqs + run.rows * width * seqs
    out = op((width * heads, rows), q, k, values, gate, beta, state)
    heads_out = view(out, (width, heads, steps, seqs))
    graph.expand(store(view(out, (width * width * heads, seqs, min(steps, run.rows)))))
    gated = over(over(over(heads_out)), over(view(z, (width, heads, steps, seqs))))
    done = mul_mat(b.shape.n_embd, view(gated, (ssm.d_inner, steps, seqs)))
    return view(done, (b.shape.n_embd, run.tokens))


def _hybrid(shape: ModelShape, run: Run) -> tuple[Graph, Tensor]:
    b = _Builder(shape, run)
    copy = view(leaf(run.sequences), (run.sequences,))
    x = b.embedded
    for il, layer in enumerate(shape.layers):
        x.is_output |= il in run.taps
        cur = _norm(x)
        b.graph.expand(cur)
        cur = _delta_net(b, cur, copy) if layer.recurrent else _gated_attention(b, cur, il)
        middle = over(cur, x)
        x = over(b.feed_forward(_norm(middle), il), middle)
        b.graph.expand(x)
    hidden = _norm(x)
    hidden.is_output = True
    rows = op((shape.n_embd, run.outputs), hidden, b.out_ids)
    rows.is_output = True
    return b.finish(mul_mat(shape.n_vocab, rows))


# Architectures whose graph is built here node for node; others are taken for one of them.
EXACT = frozenset({"llama", "qwen2", "qwen3", "qwen35"})


@functools.lru_cache(maxsize=256)
def target_peak(shape: ModelShape, run: Run) -> Peak:
    """Scratch memory of the target."""
    graph, embedded = (_hybrid if shape.arch in DELTA_NETS else _dense)(shape, run)
    return peak(graph, on_device=run.on_device, stays=[embedded])


class _Draft:
    """The decoder graph of a DSpine drafter (dflash.cpp, dspine-graph.cpp), operations fused."""

    def __init__(self, shape: DraftShape, run: Run) -> None:
        self.shape, self.run, self.graph = shape, run, Graph()
        self.blocks = run.sequences
        self.rows = run.tokens // run.sequences
        # only the reserve pass builds more rows than a block has, and those are not scored
        self.scored = min(self.rows, shape.block_size)
        self.tokens = leaf(run.tokens)
        self.embedded = op((shape.n_embd, run.tokens), self.tokens)
        self.positions = leaf(run.tokens * shape.positions_per_token)
        swa = [a for a in shape.layers if a.swa]
        full = [a for a in shape.layers if not a.swa]
        self.full = _Attention(self.graph, run, run.full, full)
        self.window = _Attention(self.graph, run, run.window, swa) if run.window else None
        if shape.rank:
            self.anchor = self.sent_by_anchors()

    def code(self, ids: Tensor) -> Tensor:
        return over(op((self.shape.rank, ids.ne[0]), external(1), ids))

    def sent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Message and gate of predecessors, [message, n] each."""
        return mul_mat(self.shape.message, x), mul_mat(self.shape.message, x)

    def sent_by(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Message and gate of tokens; of a folded table the two halves of a row."""
        if not self.shape.folded:
            return self.sent(self.code(ids))
        both = op((2 * self.shape.message, ids.ne[0]), external(1), ids)
        half = (self.shape.message, ids.ne[0])
        return view(both, half, (both.nb[1],)), view(both, half, (both.nb[1],))

    def sent_by_anchors(self) -> tuple[Tensor, Tensor]:
        """Of all tokens' rows the anchors'."""

        def anchors(x: Tensor) -> Tensor:
            return view(x, (x.ne[0], self.blocks), (self.rows * x.nb[1],))

        if not self.shape.folded:
            return self.sent(op((self.shape.rank, self.blocks), anchors(self.code(self.tokens))))
        message, gate = self.sent_by(self.tokens)
        return anchors(message), anchors(gate)

    def rows_view(self, x: Tensor, first: int, count: int) -> Tensor:
        nb = x.nb[1]
        return view(x, (x.ne[0], count, self.blocks), (nb, self.rows * nb))

    def layer(self, x: Tensor, layer: Layer) -> Tensor:
        """A decoder layer, without the injection."""
        tokens, n_embd = self.run.tokens, self.shape.n_embd
        y = _norm(x)
        q, k, v = (
            view(mul_mat(head * heads, y), (head, heads, tokens))
            for head, heads in (
                (layer.head_k, layer.heads),
                (layer.head_k, layer.heads_kv),
                (layer.head_v, layer.heads_kv),
            )
        )
        q, k = over(_norm(q), self.positions), over(_norm(k), self.positions)
        attention = self.window if layer.swa and self.window else self.full
        middle = over(mul_mat(n_embd, attention(q, k, v, v_before_k=self.window is None)), x)
        y = _norm(middle)
        up, gate = mul_mat(layer.n_ff, y), mul_mat(layer.n_ff, y)
        return over(mul_mat(n_embd, op(gate.ne, gate, up)), middle)

    def inject(self, h: Tensor) -> Tensor:
        """The adjacent injection after a layer."""
        if not self.shape.rank or self.rows < 2:
            return h
        tokens, message = self.run.tokens, self.shape.message
        gated = op((message, tokens, 2), h, mul_mat(self.shape.rank, h), *self.anchor)
        self.last = (h, gated)
        return over(h, mul_mat(self.shape.n_embd, view(gated, (message, tokens))))

    def lattice(self, logits: Tensor) -> None:
        """Candidates and their scores, packed into rows of the hidden size."""
        k, tokens, n_embd = self.shape.top_k, self.run.tokens, self.shape.n_embd
        if self.scored < 2:
            packed = view(over(constant(n_embd, 1, self.blocks)), (n_embd, tokens))
        else:
            candidates = op((k, tokens), logits)
            packed = op((n_embd, tokens), *self.last, *self.before(candidates), candidates, logits)
        packed.is_output = True
        self.graph.expand(packed)

    def before(self, candidates: Tensor) -> tuple[Tensor, ...]:
        """Message and gate of every candidate that has successors."""
        k, positions = self.shape.top_k, self.scored - 2
        if positions < 1:
            return ()
        ids = op((k, positions, self.blocks), self.rows_view(candidates, 1, positions))
        return self.sent_by(view(ids, (k * positions * self.blocks,)))

    def build(self) -> tuple[Graph, Tensor]:
        x = self.embedded
        for layer in self.shape.layers:
            x = self.inject(self.layer(x, layer))
        last = _norm(x)
        logits = mul_mat(self.shape.n_vocab, last)
        last.is_output = logits.is_output = True
        self.graph.expand(logits)
        if self.shape.rank:
            self.lattice(logits)
        return self.graph, self.embedded


@functools.lru_cache(maxsize=256)
def draft_peak(shape: DraftShape, run: Run) -> Peak:
    """Scratch memory of the drafter."""
    graph, embedded = _Draft(shape, run).build()
    return peak(graph, on_device=run.on_device, stays=[embedded])
