"""The graph allocator's peak, on graphs small enough to place by hand."""

from __future__ import annotations

import pytest
from dspine._graph import (
    DEVICE,
    HOST,
    Graph,
    Peak,
    Tensor,
    _Blocks,
    constant,
    external,
    leaf,
    op,
    over,
    peak,
    permute,
    store,
    view,
)

ROW = 1024  # bytes of the tensors here: 256 values


def _peak(*outputs: Tensor, on_device: bool = False, stays: tuple[Tensor, ...] = ()) -> Peak:
    graph = Graph()
    for tensor in outputs:
        tensor.is_output = True
        graph.expand(tensor)
    return peak(graph, on_device=on_device, stays=stays)


def _rows(size: Peak) -> float:
    return size.host / ROW


def test_a_chain_overwrites_in_place() -> None:
    assert _rows(_peak(over(over(over(leaf(256)))))) == 1
    assert _rows(_peak(op((256,), op((256,), op((256,), leaf(256)))))) == 2


def test_an_input_that_is_needed_again_is_not_overwritten() -> None:
    x = op((256,), leaf(256))
    assert _rows(_peak(over(over(x), x))) == 2


def test_an_output_stays() -> None:
    x = op((256,), leaf(256))
    x.is_output = True
    y = op((256,), x)
    y.is_output = True
    assert _rows(_peak(op((256,), y))) == 3


def test_another_layout_is_not_overwritten() -> None:
    x = op((16, 16), leaf(256))
    assert _rows(_peak(over(permute(x, 1, 0, 2, 3)))) == 2
    assert _rows(_peak(over(view(x, (256,))))) == 2  # never over a view, as ggml does


def test_a_view_keeps_what_it_shows() -> None:
    x = op((256,), leaf(256))
    part = view(x, (64,))
    kept = op((256,), op((256,), leaf(256)), part)
    assert _rows(_peak(kept)) == 3


def test_a_hole_is_filled_by_what_fits_best() -> None:
    blocks = _Blocks(32)
    places = [blocks.take(size) for size in (100, 64, 32, 64, 96, 32)]
    for i, size in ((0, 100), (2, 32), (4, 96)):
        blocks.give(places[i], size)
    assert blocks.take(32) == places[2]
    assert blocks.take(90) == places[4]
    assert blocks.take(100) == places[0]
    assert blocks.take(1000) == blocks.peak - 1000


def test_neighbours_are_joined() -> None:
    blocks = _Blocks(32)
    places = [blocks.take(64) for _ in range(4)]
    for i in (0, 2, 1, 3):
        blocks.give(places[i], 64)
    assert blocks.take(256) == 0
    assert blocks.peak == 256


def test_weights_and_caches_take_nothing() -> None:
    graph = Graph()
    graph.expand(store(op((256,), external(256), leaf(256))))
    assert _rows(peak(graph, on_device=False)) == 2


def test_sizes_are_padded() -> None:
    assert _peak(op((1,), leaf(1))).host == 64
    assert _peak(op((1,), leaf(1)), on_device=True).device == 256
    # strided: from the first to behind the last element
    assert view(leaf(64), (4, 2), (40,)).nbytes == 40 + 16


def test_a_device_has_copies_of_its_inputs() -> None:
    tokens, mask = leaf(256), leaf(1024)
    rows = op((512,), tokens)
    done = op((256,), op((256,), rows, mask))
    found = _peak(done, on_device=True, stays=(rows,))
    assert found.host == (1 + 4 + 2) * ROW
    assert found.device == (2 + 4 + 1) * ROW  # the last result takes the place of a copy
    assert (tokens.place, rows.place, done.place) == (HOST, HOST, DEVICE)


def test_a_constant_is_on_the_device() -> None:
    found = _peak(over(constant(256)), on_device=True)
    assert (found.host, found.device) == (0, ROW)


def test_the_order_is_that_of_the_sources() -> None:
    graph = Graph()
    a, b = op((1,), leaf(1)), op((2,), leaf(2))
    c = op((3,), b, a, b)
    graph.expand(c)
    graph.expand(a)
    assert graph.nodes == [b, a, c]
    assert [x.ne[0] for x in graph.leafs] == [2, 1]


@pytest.mark.parametrize("extra", [0, 4096])
def test_what_a_kernel_reserves_counts(extra: int) -> None:
    with_extra = op((256,), leaf(256), extra=extra)
    assert _peak(op((256,), with_extra)).host == 3 * ROW + extra - ROW
