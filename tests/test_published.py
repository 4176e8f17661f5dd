"""Published instances: three formats, their accounting, the table of all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import networkx as nx
import pytest

from gcpass.solvers.errors import InvalidProblemError
from gcpass.solvers.instance import read_problem
from gcpass.solvers.plain import budget_of, given_peak_bytes, plain_sequence
from gcpass.solvers.problem import Origin, Phase, Problem

INSTANCES = Path(__file__).parents[1].parent / "shared" / "instances"

LAYERED: dict[str, Any] = {
    "directed": True,
    "multigraph": False,
    "graph": {"name": "small", "order": [0, 3, 2, 1]},
    "nodes": [
        {"out_cost": 10, "param_cost": 99, "duration": 0, "name": 0},
        {"out_cost": 40, "param_cost": 0, "duration": 7, "name": 1},
        {"out_cost": 20, "param_cost": 0, "duration": 5, "name": 2},
        {"out_cost": 30, "param_cost": 0, "duration": 3, "name": 3},
    ],
    "links": [{"0": 0, "1": 2}, {"0": 0, "1": 3}, {"0": 2, "1": 1}, {"0": 3, "1": 1}],
}
FLAT = """4 4
10 0
40 7
20 5
30 3
0 2
0 3
2 1
3 1
0 3 2 1
"""


def checkmate(nodes: list[int], edges: list[tuple[int, int]]) -> dict[str, Any]:
    """Return a Checkmate graph; node v takes 10**v bytes and v units of time."""
    return {
        "directed": True,
        "multigraph": False,
        "graph": {"name": "net (MLSys)_1_train"},
        "nodes": [
            {
                "name": f"n{v}",
                "backward": False,
                "cost_cpu": v,
                "cost_ram": 10**v,
                "id": v,
            }
            for v in nodes
        ],
        "links": [{"source": u, "target": v} for u, v in edges],
    }


def read(tmp_path: Path, content: object) -> Problem:
    path = tmp_path / "instance"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return read_problem(path)


def refusal(tmp_path: Path, content: object) -> str:
    with pytest.raises(InvalidProblemError) as caught:
        read(tmp_path, content)
    return str(caught.value)


def graph(problem: Problem) -> list[tuple[int, float, tuple[int, ...]]]:
    """Return (size, cost, reads) of each operation of what must be a plain sequence."""
    found = []
    for i, op in enumerate(problem.operations):
        assert op.writes == (i,)
        assert op.phase is Phase.BACKWARD
        assert op.recomputable
        assert isinstance(op.cost_seconds, float)
        value = problem.values[i]
        assert (value.origin, value.held, value.savable) == (
            Origin.COMPUTED,
            False,
            True,
        )
        found.append((value.size_bytes, op.cost_seconds, op.reads))
    assert len(problem.values) == len(found)
    return found


# Nodes in the order 0, 3, 2, 1, renumbered: the source, then 3 and 2 that read it.
DIAMOND = [(10, 0.0, ()), (30, 3.0, (0,)), (20, 5.0, (0,)), (40, 7.0, (1, 2))]


@pytest.mark.parametrize("content", [LAYERED, FLAT], ids=["layered", "flat"])
def test_a_diamond_in_its_own_order(content: object, tmp_path: Path) -> None:
    problem = read(tmp_path, content)
    assert graph(problem) == DIAMOND
    # Steps: 10; 10 + 30; 10 + 30 + 20; 30 + 20 + 40.
    assert given_peak_bytes(problem) == 90


def test_a_result_that_nobody_reads_lives_for_its_own_step(tmp_path: Path) -> None:
    # Steps: 5; 5 + 100; 5 + 1: the 100 bytes of node 1 are gone.
    problem = read(tmp_path, "3 2\n5 1\n100 1\n1 1\n0 1\n0 2\n0 1 2\n")
    assert given_peak_bytes(problem) == 105
    # Steps: 5; 5 + 1; 5 + 100: node 0 lives on until node 1 has read it.
    problem = read(tmp_path, "3 2\n5 1\n100 1\n1 1\n0 1\n0 2\n0 2 1\n")
    assert given_peak_bytes(problem) == 105
    # Steps: 5; 5 + 1; 100: nobody reads node 0 any more.
    problem = read(tmp_path, "3 1\n5 1\n100 1\n1 1\n0 2\n0 2 1\n")
    assert given_peak_bytes(problem) == 100


def test_checkmate_order_follows_the_file(tmp_path: Path) -> None:
    # Without a predecessor, as the file lists them: 3 and 1. Node 3 lets 2 go, node 1
    # lets 0 go.
    problem = read(tmp_path, checkmate([0, 3, 2, 1], [(3, 2), (1, 0), (2, 0)]))
    assert graph(problem) == [
        (1000, 3.0, ()),
        (10, 1.0, ()),
        (100, 2.0, (0,)),
        (1, 0.0, (1, 2)),
    ]


def test_checkmate_agrees_with_networkx(tmp_path: Path) -> None:
    dag = nx.gn_graph(12, seed=3)  # edges to older nodes: ids are in reverse order
    document = nx.node_link_data(dag, edges="links")
    for node in document["nodes"]:
        node.update(cost_ram=node["id"] + 1, cost_cpu=0.5)
    order = list(nx.topological_sort(dag))
    assert order != sorted(order)
    at = {node: i for i, node in enumerate(order)}
    expected = [
        (node + 1, 0.5, tuple(sorted(at[u] for u in dag.predecessors(node))))
        for node in order
    ]
    assert graph(read(tmp_path, document)) == expected
    document["edges"] = document.pop("links")  # as networkx 3.6 writes it
    assert graph(read(tmp_path, document)) == expected


def test_names_may_be_text_and_edges_may_repeat(tmp_path: Path) -> None:
    document = checkmate([1, 2], [])
    for node in document["nodes"]:
        del node["id"]  # the name counts
    document["links"] = [{"source": "n1", "target": "n2"}] * 2
    assert graph(read(tmp_path, document)) == [(10, 1.0, ()), (100, 2.0, (0,))]


@pytest.mark.parametrize(
    "text", ["0 0\n", "\n1 0\n\n3 0.25\n0", "1 0\r\n3 25e-2\r\n0\r\n"]
)
def test_flat_text_with_blank_lines_and_other_numbers(
    text: str, tmp_path: Path
) -> None:
    expected = [] if text.startswith("0") else [(3, 0.25, ())]
    assert graph(read(tmp_path, text)) == expected


# What is wrong.


def layered(**changes: object) -> dict[str, Any]:
    return {**LAYERED, **changes}


NODES, LINKS = LAYERED["nodes"], LAYERED["links"]


@pytest.mark.parametrize(
    ("document", "says"),
    [
        (layered(directed=False), "the graph is undirected"),
        (layered(nodes=3), "nodes: expected an array"),
        (layered(nodes=[*NODES, 4]), "nodes[4]: expected an object"),
        (layered(nodes=[*NODES, NODES[0]]), "nodes[4]: a second node 0"),
        (layered(nodes=[*NODES, {"name": 9}]), "nodes[4]: no size"),
        (layered(nodes=[*NODES, {"out_cost": 1}]), "nodes[4].id: missing"),
        (layered(nodes=[{**NODES[0], "out_cost": -1}]), "nodes[0].out_cost: expected"),
        (layered(nodes=[{**NODES[0], "duration": "1"}]), "nodes[0].duration: expected"),
        (layered(nodes=[{"out_cost": 1, "name": 0}]), "nodes[0].duration: missing"),
        (layered(links=[{"0": 0, "1": 4}]), "links[0].1: no node 4"),
        (layered(links=[{"0": "0", "1": 2}]), "links[0].0: no node '0'"),
        (layered(links=[{"0": 0}]), "links[0].1: missing"),
        (layered(links=[{"source": 0}]), "links[0].target: missing"),
        ({k: v for k, v in LAYERED.items() if k != "links"}, "links: missing"),
        (layered(graph={"order": [0, 3, 2, 8]}), "graph.order[3]: no node 8"),
        (layered(graph={"order": [0, 3, 2]}), "names 3 different nodes in 3 places"),
        (layered(graph={"order": [0, 3, 2, 2]}), "names 3 different nodes in 4 places"),
        (layered(graph={"order": [0, 1, 2, 3]}), "node 1 reads node 2 but comes first"),
        (layered(links=[*LINKS, {"0": 1, "1": 0}]), "node 0 reads node 1 but comes"),
        (layered(links=[{"0": 2, "1": 2}]), "node 2 reads node 2 but comes first"),
        (checkmate([1, 2], [(1, 2), (2, 1)]), "the graph has a cycle"),
    ],
)
def test_wrong_node_link(document: object, says: str, tmp_path: Path) -> None:
    assert says in refusal(tmp_path, document)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("4\n", "line 1: expected 2 integers >= 0, got '4'"),
        ("4 x\n", "line 1: expected 2 integers >= 0, got '4 x'"),
        (FLAT.replace("10 0", "10 0\n1 1"), "4 nodes and 4 edges take 10 lines"),
        ("2 0\n1 1\n1 1\n", "2 nodes and 0 edges take 4 lines"),
        (FLAT.replace("40 7", "40"), "line 3: expected size and cost, got '40'"),
        (FLAT.replace("40 7", "40 7 1"), "line 3: expected size and cost"),
        (FLAT.replace("40 7", "40 nan"), "line 3: expected size and cost"),
        (FLAT.replace("40 7", "40 -7"), "line 3: expected size and cost"),
        (FLAT.replace("40 7", "4.5 7"), "line 3: expected an integer >= 0, got '4.5'"),
        (FLAT.replace("40 7", "-40 7"), "line 3: expected an integer >= 0"),
        (FLAT.replace("\n0 2", "\n0 4"), "line 6: no node 4 of 4"),
        (FLAT.replace("\n0 2", "\n0 -2"), "line 6: expected 2 integers"),
        (FLAT.replace("0 3 2 1", "0 3 2"), "line 10: expected 4 integers"),
        (FLAT.replace("0 3 2 1", "0 3 2 2"), "names 3 different nodes"),
        (FLAT.replace("0 3 2 1", "0 1 3 2"), "node 1 reads node 2 but comes first"),
        (FLAT.replace("0 3 2 1", "0 3 2 9"), "line 10: no node 9 of 4"),
        (FLAT.replace("40 7", "9" * 5000 + " 7"), "line 3: expected an integer"),
    ],
)
def test_wrong_flat_text(text: str, says: str, tmp_path: Path) -> None:
    assert says in refusal(tmp_path, text)


def test_an_edge_to_no_node() -> None:
    with pytest.raises(InvalidProblemError, match=r"edge \(0, 2\): no such node"):
        plain_sequence([1, 1], [1.0, 1.0], [(0, 2)], [0, 1])


# Budgets.


def test_a_fraction_counts_as_it_is_written() -> None:
    problem = plain_sequence([100], [1.0], [], [0])
    assert 0.55 * 100 > 55  # as binary floats, hence one byte more than is meant
    assert budget_of(problem, 0.55) == 55
    assert budget_of(problem, 0.551) == 56
    assert budget_of(problem, 1.0) == budget_of(problem, 1) == 100


@pytest.mark.parametrize("fraction", [0.0, -0.5, 1.0001, float("nan")])
def test_a_fraction_is_in_the_unit_interval(fraction: float) -> None:
    with pytest.raises(InvalidProblemError, match="budget fraction"):
        budget_of(plain_sequence([100], [1.0], [], [0]), fraction)


# The published files, where they are at hand.

TABLE = [  # file, n, m, peak, sum of costs, one-step floor in percent of the peak
    ("moccasin/random_layered_n100_*", 100, 236, 46319, 47769, 43.2),
    ("moccasin/random_layered_n250_*", 250, 944, 146840, 125569, 59.7),
    ("moccasin/random_layered_n500_*", 500, 2461, 284439, 255302, 17.4),
    ("moccasin/random_layered_n1000_*", 1000, 5875, 608619, 497270, 8.0),
    ("moccasin/fcn_8_vgg *_train*", 73, 149, 13484795520, 10275337746048, 61.5),
    ("moccasin/ResNet50 *_train*", 353, 751, 38059356160, 405670, 9.7),
    ("moccasin/MobileNet *_train*", 185, 367, 34701056000, 162080, 19.1),
    ("moccasin/segnet *_train*", 77, 151, 19943884288, 4933130, 41.6),
    ("moccasin/VGG16 *_train*", 45, 87, 15825108992, 15500, 83.1),
    ("moccasin/VGG19 *_train*", 51, 99, 17058234368, 9493135, 77.1),
    ("moccasin/vgg_unet *_train*", 71, 148, 20959461376, 31005, 39.5),
    ("own/gpt12.txt", 687, 968, 7340638208, 38231488, 33.7),
    ("own/gpt12f.txt", 363, 548, 4916854784, 21495340, 50.2),
    ("own/gpt48d.txt", 5561, 7207, 8943648768, 125639747, 27.6),
    ("own/gpt48d_fused.txt", 2094, 3302, 7710932994, 56051712, 16.0),
]
needs_instances = pytest.mark.skipif(
    not INSTANCES.is_dir(), reason="the published instances are not at hand"
)


def one_step_floor(problem: Problem) -> int:
    sizes = [value.size_bytes for value in problem.values]
    return max(
        sum(sizes[v] for v in (*op.reads, *op.writes)) for op in problem.operations
    )


@needs_instances
@pytest.mark.parametrize(("pattern", "n", "m", "peak", "cost", "floor"), TABLE)
def test_the_table_of_published_graphs(
    pattern: str, n: int, m: int, peak: int, cost: int, floor: float
) -> None:
    (path,) = INSTANCES.glob(pattern)
    found = graph(problem := read_problem(path))
    assert (len(found), sum(len(reads) for _, _, reads in found)) == (n, m)
    assert given_peak_bytes(problem) == peak
    assert sum(seconds for _, seconds, _ in found) == cost
    assert round(100 * one_step_floor(problem) / peak, 1) == floor


@needs_instances
def test_forward_graphs_have_no_freedom_below_their_peak() -> None:
    paths = sorted(INSTANCES.glob("moccasin/*_test_nx.json"))
    assert len(paths) == 7
    for path in paths:
        problem = read_problem(path)
        assert 22 <= len(problem.operations) <= 176
        assert one_step_floor(problem) == given_peak_bytes(problem)
