"""How much scratch memory a llama.cpp graph needs, from its shapes alone.

A `Graph` is built by the operations that a model's graph uses, in the order in which llama.cpp
adds them; `peak` then places its tensors as ggml's graph allocator does (ggml/src/ggml-alloc.c at
the pin: best fit, results that overwrite an input in place, inputs first, outputs never freed).
The result is what llama.cpp logs as "compute buffer size", to the byte where the graph is the
same. Shapes are in ggml order (row width first), sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

HOST, DEVICE = 0, 1
F32, F16, I64 = 4, 2, 8  # bytes of an element; indices are as wide as F32
ALIGNMENT = {HOST: 32, DEVICE: 128}  # TENSOR_ALIGNMENT of ggml, and that of the CUDA backend
ENDLESS = 1 << 62

Ne = tuple[int, int, int, int]


def _strides(ne: Ne, item: int) -> Ne:
    one = item * ne[0]
    two = one * ne[1]
    return item, one, two, two * ne[2]


def padded(size: int, alignment: int) -> int:
    """`size` rounded up to a multiple of `alignment`."""
    return -(-size // alignment) * alignment


class Tensor:
    """A node or leaf: shape `ne` and strides `nb` as in ggml, and the allocator's state."""

    __slots__ = (
        "children",
        "extra",
        "inplace",
        "is_input",
        "is_output",
        "item",
        "live",
        "nb",
        "ne",
        "offset",
        "outside",
        "place",
        "size",
        "srcs",
        "view_src",
        "views",
    )

    def __init__(
        self,
        ne: Ne,
        item: int,
        srcs: tuple[Tensor, ...] = (),
        *,
        nb: Ne | None = None,
        inplace: bool = False,
        view_src: Tensor | None = None,
        is_input: bool = False,
        outside: bool = False,
        extra: int = 0,
    ) -> None:
        self.ne = ne
        self.nb = _strides(ne, item) if nb is None else nb
        self.item = item
        self.srcs = srcs
        self.inplace = inplace
        self.view_src = view_src
        self.is_input = is_input
        self.is_output = False
        self.outside = outside  # weights and caches: in buffers of their own
        self.extra = extra  # bytes that a backend reserves behind the tensor
        self.place = HOST
        self.size = self.children = self.views = self.offset = 0
        self.live = False

    @property
    def nbytes(self) -> int:
        """Bytes from the first to behind the last element, as ggml_nbytes counts."""
        if 0 in self.ne:
            return 0
        return self.item + sum((n - 1) * b for n, b in zip(self.ne, self.nb, strict=True))

    def same_layout(self, other: Tensor) -> bool:
        """Whether one can overwrite the other in place."""
        return self.item == other.item and self.ne == other.ne and self.nb == other.nb


class Graph:
    """Nodes in the order of evaluation; operations return tensors, `expand` adds them."""

    def __init__(self) -> None:
        self.nodes: list[Tensor] = []
        self.leafs: list[Tensor] = []
        self._seen: set[Tensor] = set()

    def expand(self, tensor: Tensor) -> None:
        """Add a tensor after all that it depends on, sources from left to right."""
        stack = [(tensor, iter(tensor.srcs))]
        if tensor in self._seen or tensor.outside:
            return
        self._seen.add(tensor)
        while stack:
            node, sources = stack[-1]
            for src in sources:
                if src not in self._seen and not src.outside:
                    self._seen.add(src)
                    stack.append((src, iter(src.srcs)))
                    break
            else:
                (self.nodes if node.srcs else self.leafs).append(node)
                stack.pop()


def external(*ne: int) -> Tensor:
    """A weight or a cache, which is in a buffer of its own."""
    return Tensor(_four(ne), F32, outside=True)


def _four(ne: Iterable[int]) -> Ne:
    a, b, c, d = (*ne, 1, 1, 1)[:4]
    return a, b, c, d


def leaf(*ne: int, item: int = F32) -> Tensor:
    """An input of the graph."""
    return Tensor(_four(ne), item, is_input=True)


def constant(*ne: int) -> Tensor:
    """A tensor that is only written to: allocated like an input, freed like any other."""
    return Tensor(_four(ne), F32)


def op(ne: Iterable[int], *srcs: Tensor, item: int = F32, extra: int = 0) -> Tensor:
    """A node with a result of its own."""
    return Tensor(_four(ne), item, srcs, extra=extra)


def over(first: Tensor, *others: Tensor) -> Tensor:
    """An element-wise node: its result may overwrite an input of the same layout."""
    return Tensor(first.ne, first.item, (first, *others), inplace=True)


def mul_mat(width: int, x: Tensor) -> Tensor:
    """x [n, ...] times a weight [n, width]: [width, ...]."""
    return Tensor((width, *x.ne[1:]), F32, (x,))


def view(x: Tensor, ne: Iterable[int], nb: Sequence[int] = ()) -> Tensor:
    """Another shape over the same bytes; `nb` are the strides of dimensions 1 and up."""
    shape = _four(ne)
    base = x if x.view_src is None else x.view_src
    strides = list(_strides(shape, x.item))
    strides[1 : 1 + len(nb)] = nb
    for i in range(1 + len(nb), 4):
        strides[i] = strides[i - 1] * shape[i - 1]
    return Tensor(
        shape,
        x.item,
        (x,),
        nb=(strides[0], strides[1], strides[2], strides[3]),
        view_src=base,
    )


def permute(x: Tensor, *axes: int) -> Tensor:
    """ggml_permute: dimension i becomes dimension axes[i]."""
    ne, nb = [0] * 4, [0] * 4
    for i, axis in enumerate(axes):
        ne[axis], nb[axis] = x.ne[i], x.nb[i]
    base = x if x.view_src is None else x.view_src
    return Tensor(
        (ne[0], ne[1], ne[2], ne[3]), x.item, (x,), nb=(nb[0], nb[1], nb[2], nb[3]), view_src=base
    )


def store(*srcs: Tensor) -> Tensor:
    """A node that writes into a cache: nothing is allocated for it."""
    return Tensor((1, 1, 1, 1), F32, srcs, view_src=_CACHE)


_CACHE = external(1)


class _Blocks:
    """Free blocks of one buffer, ordered by address; the last one is endless."""

    def __init__(self, alignment: int) -> None:
        self.alignment = alignment
        self.free: list[list[int]] = [[0, ENDLESS]]
        self.peak = 0

    def take(self, size: int) -> int:
        """Address of `size` bytes: the smallest block that fits, later ones first on a tie."""
        free = self.free
        best, best_size = -1, ENDLESS
        for i in range(len(free) - 1):
            length = free[i][1]
            if size <= length <= best_size:
                best, best_size = i, length
        block = free[best]  # -1: the endless one
        address = block[0]
        block[0] += size
        block[1] -= size
        if block[1] == 0:
            del free[best]
        self.peak = max(self.peak, address + size)
        return address

    def give(self, address: int, size: int) -> None:
        """Return bytes, joining them with the blocks beside them."""
        free = self.free
        end = address + size
        for i, block in enumerate(free):
            if block[0] + block[1] == address:
                block[1] += size
                if i + 1 < len(free) and free[i + 1][0] == end:
                    block[1] += free[i + 1][1]
                    del free[i + 1]
                return
            if block[0] == end:
                block[0] = address
                block[1] += size
                return
            if block[0] > end:
                free.insert(i, [address, size])
                return
        free.append([address, size])


@dataclass(frozen=True)
class Peak:
    """Largest extent of the scratch buffers in bytes; `device` is 0 on a CPU-only machine."""

    host: int
    device: int


class _Allocator:
    """One pass of ggml_gallocr over a graph."""

    def __init__(self) -> None:
        self.buffers = {place: _Blocks(ALIGNMENT[place]) for place in (HOST, DEVICE)}

    def allocate(self, node: Tensor) -> None:
        if node.live or node.view_src is not None or node.outside:
            return
        node.live = True
        alignment = ALIGNMENT[node.place]
        node.size = padded(node.nbytes + node.extra, alignment)
        if node.inplace and self._overwrite(node):
            return
        node.offset = self.buffers[node.place].take(node.size)

    def _overwrite(self, node: Tensor) -> bool:
        """Put the result where an input is that nobody else needs; never over a view."""
        for parent in node.srcs:
            if not parent.live or parent.is_output or not node.same_layout(parent):
                continue
            if parent.children == 1 and parent.views == 0:
                node.offset = parent.offset
                parent.live = False
                if parent.size > node.size:
                    rest = parent.offset + node.size
                    self.buffers[node.place].give(rest, parent.size - node.size)
                return True
        return False

    def release(self, node: Tensor) -> None:
        if not node.is_output:
            self.buffers[node.place].give(node.offset, node.size)
            node.live = False

    def _drop_view(self, base: Tensor) -> None:
        if base.outside:
            return
        base.views -= 1
        if base.views == 0 and base.children == 0 and base.live:
            self.release(base)

    def run(self, leafs: list[Tensor], nodes: list[Tensor]) -> Peak:
        for tensor in leafs:
            self.allocate(tensor)
        for node in nodes:
            if node.view_src is not None and not node.view_src.outside:
                node.view_src.views += 1
            for src in node.srcs:
                src.children += 1
        for node in nodes:
            self.allocate(node)
            for parent in node.srcs:
                parent.children -= 1
                if parent.children or parent.views:
                    continue
                base = parent.view_src
                if base is None:
                    if parent.live:
                        self.release(parent)
                else:
                    self._drop_view(base)
        return Peak(self.buffers[HOST].peak, self.buffers[DEVICE].peak)


def peak(graph: Graph, *, on_device: bool, stays: Iterable[Tensor] = ()) -> Peak:
    """Scratch memory of a graph.

    Args:
        graph: a graph with its outputs marked; it is used up.
        on_device: all but `stays` runs on one GPU, whose inputs are copied there.
        stays: nodes that run on the host all the same (the rows of the token embeddings).
    """
    if not on_device:
        return _Allocator().run(graph.leafs, graph.nodes)
    host = set(stays)
    first = [node for node in graph.nodes if node in host]
    second = [node for node in graph.nodes if node not in host]
    on_host = {tensor for tensor in graph.leafs if tensor.is_input} | host
    for tensor in graph.leafs:
        tensor.place = HOST if tensor.is_input else DEVICE
    for node in second:  # views of what the host holds are the host's
        if node.view_src is not None and node.view_src in on_host:
            on_host.add(node)
    copies: dict[Tensor, Tensor] = {}
    for node in second:
        if node in on_host:
            continue
        node.place = DEVICE
        node.srcs = tuple(_copied(src, on_host, copies) for src in node.srcs)
    keep = [Tensor(t.ne, t.item, (t,), view_src=_CACHE) for t in copies]
    starts = [tensor for pair in zip(keep, copies.values(), strict=True) for tensor in pair]
    return _Allocator().run(graph.leafs, [*first, *starts, *second])


def _copied(src: Tensor, on_host: set[Tensor], copies: dict[Tensor, Tensor]) -> Tensor:
    """The device's copy of a tensor that is on the host."""
    if src not in on_host:
        return src
    if src not in copies:
        copies[src] = Tensor(src.ne, src.item, nb=src.nb)
        copies[src].place = DEVICE
    return copies[src]
