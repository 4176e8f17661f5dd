"""Where a generated wrapper computes what the plan asked for."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.gpu.program import Call, Graph

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")  # Inductor turns one into another


def library_calls(calls: list[Call]) -> list[str]:
    """Return the products, convolutions and attentions among calls, by kind."""
    return [kind for _, operator in calls if (kind := _kind(operator))]


def launched_calls(graph: Graph) -> list[str]:
    """Return the same as the wrapper runs them."""
    return [kind for kind, _ in _launches(graph) if kind]


def earlier_than_planned(graph: Graph, calls: list[Call]) -> dict[str, int]:
    """Return how many library calls too early kernels compute their values.

    Args:
        graph: what Inductor generated.
        calls: the plan's.

    Returns:
        for each value that a kernel computes by its planned name: the library calls
        between the kernel's first launch and the place of the value in the plan.
    """
    planned, before = {}, 0
    for name, operator in calls:
        planned[name] = before
        before += bool(_kind(operator))
    computed = _computed(graph)
    found: dict[str, int] = {}
    before = 0
    for kind, kernel in _launches(graph):
        before += bool(kind)
        for name in computed.get(kernel, ()):
            if name in planned:
                found.setdefault(name, planned[name] - before)
    return found


def _kind(operator: str) -> str:
    """Return the kind of a library call, "" for other operators."""
    name = operator.removeprefix("aten.").partition(".")[0]
    if name in _PRODUCTS:
        return "product"
    is_call = name.startswith("convolution") or "scaled_dot_product" in name
    return name if is_call else ""


def _launches(graph: Graph) -> Iterator[tuple[str, str]]:
    """Yield (kind of a library call, "") or ("", name of a kernel) in order."""
    _, _, body = graph.source.partition("\nasync_compile.wait(globals())")
    for line in body.splitlines():
        if line.lstrip().startswith(("#", "assert_")):
            continue
        called = re.search(r"(?:extern_kernels|torch\.ops\.aten)\.(\w+)", line)
        launched = re.match(r"\s+(\w+)\.run\(", line)
        if called and _kind(called[1]):
            yield _kind(called[1]), ""
        elif launched:
            yield "", launched[1]


def _computed(graph: Graph) -> dict[str, set[str]]:
    """Return the names of the values that each kernel computes, from its comment."""
    found: dict[str, set[str]] = {}
    pattern = r"# Graph fragment:\n((?:#.*\n)*)(\w+) = async_compile"
    for comment, kernel in re.findall(pattern, graph.source):
        names = re.findall(r"#   %(\w+) : .* = call_function", comment)
        found.setdefault(kernel, set()).update(names)
    return found
