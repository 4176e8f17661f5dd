"""Readers for instances as others publish them; the result is a plain sequence.

Three forms, told apart by content:

- **random layered graphs**: networkx node-link JSON, node size ``out_cost`` (bytes),
  time ``duration``, edge ends under ``"0"`` and ``"1"``, initial order ``graph.order``;
- **Checkmate graphs**: node-link JSON, ``cost_ram`` (bytes), ``cost_cpu``, edge ends
  ``source`` and ``target``, initial order `networkx.topological_sort` of the graph
  with nodes and edges as the file lists them;
- **flat text**: ``n m``, n lines ``size cost``, m lines ``u v`` (u produces, v reads),
  the initial order.

Times become ``cost_seconds`` in the file's own unit, which differs from file to file:
overheads in percent do not depend on it. Weights and inputs count 0 bytes.

Sources: the data of MOCCASIN, B. Bartan et al., 2023, arXiv:2304.14463; random layered
graphs, M. Gagrani et al., 2022, arXiv:2207.05899, appendix A; Checkmate, P. Jain et
al., 2020, arXiv:1910.02653.
"""

from __future__ import annotations

from collections.abc import Sequence

from gcpass.solvers.errors import InvalidProblemError
from gcpass.solvers.fields import Record, as_float, shown
from gcpass.solvers.plain import plain_sequence
from gcpass.solvers.problem import Problem

_LINKS = ("links", "edges")  # networkx wrote "links" before 3.6, "edges" since
_ENDS = (("source", "target"), ("0", "1"))
_SIZE_AND_TIME = (("out_cost", "duration"), ("cost_ram", "cost_cpu"))
_NAMES = ("id", "name")  # the first that a node has is its name


def is_node_link(data: object) -> bool:
    """Return whether parsed JSON looks like a networkx node-link graph."""
    return isinstance(data, dict) and "nodes" in data


def problem_from_node_link(data: object) -> Problem:
    """Return the problem of a parsed node-link graph of either kind.

    Raises:
        InvalidProblemError: names the place that is wrong; the graph is undirected or
            has a cycle, or its order is none.
    """
    document = Record(data, "")
    if document.flag("directed", True) is False:
        raise InvalidProblemError("directed: the graph is undirected")
    names: dict[str, int] = {}  # by repr: 1 and "1" are different nodes
    sizes: list[int] = []
    costs: list[float] = []
    for i, item in enumerate(document.array("nodes")):
        node = Record(item, f"nodes[{i}]")
        name = node.get(_first(node, _NAMES))
        if repr(name) in names:
            raise InvalidProblemError(f"nodes[{i}]: a second node {shown(name)}")
        names[repr(name)] = i
        size, time = _size_and_time(node)
        sizes.append(node.integer(size))
        costs.append(node.number(time))
    edges = []
    links = _first(document, _LINKS)
    for i, item in enumerate(document.array(links)):
        link = Record(item, f"{links}[{i}]")
        ends = _ENDS[0] if _ENDS[0][0] in link.data else _ENDS[1]
        edges.append((_node(link, ends[0], names), _node(link, ends[1], names)))
    order = _given_order(document, names)
    if order is None:
        order = _topological_order(len(sizes), edges)
    return plain_sequence(sizes, costs, edges, order)


def problem_from_flat_text(text: str) -> Problem:
    """Return the problem of a flat text.

    Raises:
        InvalidProblemError: names the line that is wrong.
    """
    lines = [
        (number, line.split())
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip()
    ]
    if not lines:
        raise InvalidProblemError("line 1: expected two numbers, n and m")
    nodes, links = _integers(*lines[0], count=2)
    expected = 1 + nodes + links + (nodes > 0)
    if len(lines) != expected:
        raise InvalidProblemError(
            f"{nodes} nodes and {links} edges take {expected} lines (n m, a node or an "
            f"edge a line, the order), got {len(lines)}"
        )
    sizes, costs = [], []
    for number, words in lines[1 : 1 + nodes]:
        sizes.append(_integers(number, words[:1], count=1)[0])
        costs.append(_cost(number, words))
    edges = []
    for number, words in lines[1 + nodes : 1 + nodes + links]:
        source, target = _integers(number, words, count=2, below=nodes)
        edges.append((source, target))
    last = lines[-1] if nodes else (1, [])
    order = _integers(*last, count=nodes, below=nodes)
    return plain_sequence(sizes, costs, edges, order)


def _first(record: Record, names: Sequence[str]) -> str:
    """Return the first of several names that a record has, else the first."""
    return next((name for name in names if name in record.data), names[0])


def _size_and_time(node: Record) -> tuple[str, str]:
    for size, time in _SIZE_AND_TIME:
        if size in node.data:
            return size, time
    sizes = " or ".join(size for size, _ in _SIZE_AND_TIME)
    raise InvalidProblemError(f"{node.place}: no size; expected {sizes}")


def _node(link: Record, end: str, names: dict[str, int]) -> int:
    name = link.get(end)
    if repr(name) not in names:
        raise InvalidProblemError(f"{link.place}.{end}: no node {shown(name)}")
    return names[repr(name)]


def _given_order(document: Record, names: dict[str, int]) -> list[int] | None:
    """Return the order that the file gives, None when it gives none."""
    graph = Record(document.data.get("graph", {}), "graph")
    if "order" not in graph.data:
        return None
    order = []
    for i, name in enumerate(graph.array("order")):
        if repr(name) not in names:
            raise InvalidProblemError(f"graph.order[{i}]: no node {shown(name)}")
        order.append(names[repr(name)])
    return order


def _topological_order(nodes: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    import networkx as nx

    graph = nx.DiGraph()
    graph.add_nodes_from(range(nodes))
    graph.add_edges_from(edges)
    try:
        return list(nx.topological_sort(graph))
    except nx.NetworkXUnfeasible as error:
        raise InvalidProblemError("the graph has a cycle") from error


def _integers(
    number: int, words: Sequence[str], *, count: int, below: int | None = None
) -> list[int]:
    """Return the integers of a line, each in [0, below)."""
    if len(words) != count or not all(_is_decimal(word) for word in words):
        what = "an integer >= 0" if count == 1 else f"{count} integers >= 0"
        raise InvalidProblemError(
            f"line {number}: expected {what}, got {shown(' '.join(words))}"
        )
    found = [int(word) for word in words]
    for value in found:
        if below is not None and value >= below:
            raise InvalidProblemError(f"line {number}: no node {value} of {below}")
    return found


def _is_decimal(word: str) -> bool:
    """Return whether a word is a number that `int` reads without a limit."""
    return word.isascii() and word.isdigit() and len(word) < 1000


def _cost(number: int, words: Sequence[str]) -> float:
    try:
        (cost,) = (float(word) for word in words[1:])
    except ValueError:
        cost = -1.0
    found = as_float(cost)
    if found is None or found < 0:
        raise InvalidProblemError(
            f"line {number}: expected size and cost, got {shown(' '.join(words))}"
        )
    return found
