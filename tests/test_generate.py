"""Generated problems: the same for the same seed, and of the shape that is promised."""

from __future__ import annotations

import itertools
import statistics

import pytest

from gcpass.solvers.bound import given_order
from gcpass.solvers.errors import InvalidProblemError
from gcpass.solvers.generate import (
    OPERATIONS_PER_BLOCK,
    chain,
    random_chain,
    random_layered,
    transformer,
)
from gcpass.solvers.liveness import simulate
from gcpass.solvers.plain import given_peak_bytes, joint_sequence
from gcpass.solvers.problem import Origin, Phase, Problem, Value

PINNED_SIZES = [1470, 2160, 710, 1800, 2520, 560]
PINNED_TIMES = [0.0, 350.0, 367.0, 417.0, 681.0, 786.0]
PINNED_READS = [(24,), (24,), (25, 26, 27, 28)]
# n, width factor and edges of the four published random layered graphs
PUBLISHED = [(100, 0.27, 236), (250, 0.43, 944), (500, 0.36, 2461), (1000, 0.31, 5875)]


def layers_of(problem: Problem) -> list[int]:
    """Return the layer of each node: the longest way from the source."""
    layers: list[int] = []
    for op in problem.operations:
        layers.append(1 + max((layers[v] for v in op.reads), default=-1))
    return layers


def sizes_of(problem: Problem) -> list[int]:
    return [value.size_bytes for value in problem.values]


def edge_count(problem: Problem) -> int:
    return sum(len(op.reads) for op in problem.operations)


def test_a_seed_gives_the_same_graph_on_every_machine() -> None:
    problem = random_layered(30, width=0.3, seed=5)
    assert problem == random_layered(30, width=0.3, seed=5)
    assert problem != random_layered(30, width=0.3, seed=6)
    assert sizes_of(problem)[:6] == PINNED_SIZES
    assert [op.cost_seconds for op in problem.operations[:6]] == PINNED_TIMES
    assert [op.reads for op in problem.operations[-3:]] == PINNED_READS


@pytest.mark.parametrize(("nodes", "width", "edges"), PUBLISHED)
def test_look_alikes_of_the_published_graphs(
    nodes: int, width: float, edges: int
) -> None:
    problems = [random_layered(nodes, width=width, seed=seed) for seed in range(8)]
    assert all(len(problem.operations) == nodes for problem in problems)
    mean = statistics.fmean(edge_count(problem) for problem in problems)
    assert mean == pytest.approx(edges, rel=0.15)
    sizes = [size for problem in problems for size in sizes_of(problem)]
    assert statistics.fmean(sizes) == pytest.approx(1990, rel=0.1)
    assert statistics.median(sizes) == pytest.approx(1500, rel=0.15)
    assert statistics.stdev(sizes) == pytest.approx(1600, rel=0.1)
    assert {size % 10 for size in sizes} == {0}
    times = [op.cost_seconds for p in problems for op in p.operations[1:-1]]
    assert 1 <= min(times) < 50
    assert 950 < max(times) <= 1000
    assert statistics.fmean(times) == pytest.approx(500, rel=0.1)


@pytest.mark.parametrize("seed", range(4))
def test_layers_of_a_layered_graph(seed: int) -> None:
    problem = random_layered(400, width=0.5, seed=seed, variability=0.5)
    operations, layers = problem.operations, layers_of(problem)
    readers = problem.readers()
    assert [i for i, op in enumerate(operations) if not op.reads] == [0]
    assert [i for i in range(400) if not readers[i]] == [399]
    assert operations[0].cost_seconds == operations[-1].cost_seconds == 0.0
    assert layers == sorted(layers)
    assert layers.count(0) == layers.count(layers[-1]) == 1
    # 2 * 0.5 * sqrt(400) = 20 nodes a layer, half of it less or more; the last one
    # before the sink takes what is left.
    widths = [layers.count(layer) for layer in range(1, layers[-1] - 1)]
    assert all(10 <= width <= 30 for width in widths)
    assert 15 < statistics.fmean(widths) < 25


def test_skips_are_the_share_that_was_asked_for() -> None:
    def spans(skip_density: float) -> list[int]:
        problem = random_layered(1000, width=0.3, seed=1, skip_density=skip_density)
        layers = layers_of(problem)
        return [
            layers[i] - layers[v]
            for i, op in enumerate(problem.operations)
            for v in op.reads
        ]

    assert set(spans(0.0)) == {1}
    found = spans(0.14)
    assert sum(span > 1 for span in found) / len(found) == pytest.approx(0.14, abs=0.01)
    assert max(found) > 20


def test_density_is_that_between_layers() -> None:
    sparse = random_layered(300, width=0.4, seed=2, edge_density=0.0, skip_density=0)
    dense = random_layered(300, width=0.4, seed=2, edge_density=1.0, skip_density=0)
    # One edge for each node but the source, and few more for those without a reader.
    assert 299 <= edge_count(sparse) <= 2 * 299
    layers = layers_of(dense)
    widths = [layers.count(layer) for layer in range(layers[-1] + 1)]
    assert edge_count(dense) == sum(a * b for a, b in itertools.pairwise(widths))


@pytest.mark.parametrize("nodes", [3, 4, 5])
def test_the_smallest_layered_graphs(nodes: int) -> None:
    problem = random_layered(nodes, width=0.1, seed=0, skip_density=0.0)
    # Layers of one node: a path.
    expected = [(), *((i,) for i in range(nodes - 1))]
    assert [op.reads for op in problem.operations] == expected


@pytest.mark.parametrize(
    "wrong",
    [
        {"nodes": 2},
        {"width": 0.0},
        {"seed": -1},
        {"variability": 1.5},
        {"edge_density": 1.1},
        {"skip_density": 1.0},
        {"skip_density": float("nan")},
    ],
    ids=str,
)
def test_arguments_out_of_range(wrong: dict[str, float]) -> None:
    arguments = {"nodes": 10, "width": 0.3, "seed": 0, **wrong}
    with pytest.raises(InvalidProblemError):
        random_layered(**arguments)  # type: ignore[arg-type]


# Steps of training.


def test_a_chain_of_two_layers() -> None:
    problem = chain(2, 10, 1.0)
    # input x; h1, h2; tangent g2; gradients g1 and g0, the last one held.
    assert [v.origin for v in problem.values] == [
        Origin.INPUT,
        Origin.COMPUTED,
        Origin.COMPUTED,
        Origin.TANGENT,
        Origin.COMPUTED,
        Origin.COMPUTED,
    ]
    assert [v.held for v in problem.values] == [False] * 5 + [True]
    assert [op.reads for op in problem.operations] == [(0,), (1,), (1, 3), (0, 4)]
    assert [op.writes for op in problem.operations] == [(1,), (2,), (4,), (5,)]
    assert [op.phase for op in problem.operations] == [Phase.FORWARD] * 2 + [
        Phase.BACKWARD
    ] * 2
    # h1, the tangent and the new gradient meet in the first backward layer.
    assert given_peak_bytes(problem) == 30


@pytest.mark.parametrize("seed", range(3))
def test_a_random_chain_has_the_links_of_a_chain(seed: int) -> None:
    problem = random_chain(6, seed=seed)
    assert problem == random_chain(6, seed=seed)
    assert problem != random_chain(6, seed=seed + 1)
    uniform = chain(6, 1, 1.0)
    assert [(op.reads, op.writes, op.phase) for op in problem.operations] == [
        (op.reads, op.writes, op.phase) for op in uniform.operations
    ]
    sizes = sizes_of(problem)
    assert all(1024 <= size < 65536 for size in sizes)
    assert len(set(sizes[:7])) == 7
    assert sizes[7:] == sizes[6::-1]  # a gradient is as large as its value
    for layer in range(6):
        forward = problem.operations[layer].cost_seconds
        backward = problem.operations[11 - layer].cost_seconds
        assert 1e-6 <= forward <= 1e-4
        assert forward <= backward <= 3 * forward


@pytest.mark.parametrize("fused", [False, True])
def test_a_transformer_grows_by_its_blocks(fused: bool) -> None:
    small, large = transformer(3, fused=fused), transformer(5, fused=fused)
    assert len(small.operations) == 3 * OPERATIONS_PER_BLOCK
    assert len(large.operations) == 5 * OPERATIONS_PER_BLOCK
    for problem in (small, large):
        sequence, boundary = given_order(problem)
        assert boundary == 10 * len(problem.operations) // OPERATIONS_PER_BLOCK
        assert len(sequence) == len(problem.operations)
    more = given_peak_bytes(large) - given_peak_bytes(small)
    profile = [
        simulate(transformer(n, fused=fused), *given_order(transformer(n, fused=fused)))
        for n in (3, 4)
    ]
    # Every block adds what it saves.
    assert more == 2 * (profile[1].saved_bytes - profile[0].saved_bytes)


# As plain sequences.


def test_a_chain_as_a_plain_sequence() -> None:
    problem = joint_sequence(chain(2, 10, 1.0))
    # h1, h2, the loss that turns h2 into a gradient, g1, g0.
    assert [op.reads for op in problem.operations] == [(), (0,), (1,), (0, 2), (3,)]
    assert [op.cost_seconds for op in problem.operations] == [1.0, 1.0, 0.0, 1.0, 1.0]
    assert set(problem.values) == {Value(size_bytes=10)}
    assert {op.phase for op in problem.operations} == {Phase.BACKWARD}


def test_a_transformer_as_a_plain_sequence() -> None:
    training = transformer(4, dropout=True)
    problem = joint_sequence(training)
    assert len(problem.operations) == 4 * OPERATIONS_PER_BLOCK + 1
    assert all(op.recomputable for op in problem.operations)
    computed = [v.size_bytes for v in training.values if v.origin is not Origin.INPUT]
    assert sum(sizes_of(problem)) == sum(computed)
    total = sum(op.cost_seconds for op in training.operations)
    assert sum(op.cost_seconds for op in problem.operations) == pytest.approx(total)
    # The same moment is the highest: nothing but held gradients ends earlier, and at
    # that moment none is there yet.
    assert given_peak_bytes(problem) == given_peak_bytes(training)


def test_thirty_thousand_operations() -> None:
    problem = random_layered(30_000, width=0.3, seed=0)
    assert len(problem.operations) == 30_000
    assert len(joint_sequence(transformer(1304)).operations) == 29_993
