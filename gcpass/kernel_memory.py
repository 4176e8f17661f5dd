"""Bytes alive over the nodes of Inductor's scheduler while it fuses them.

Nodes are numbered in the scheduler's order before fusion. The nodes of a fused kernel,
and what is pulled in front of it, are at the place of its first. A node writes in
place as `decide_inplace_update` of Inductor's scheduler (torch 2.13.0) has it: over
memory that only it still reads, at the indices that it writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from gcpass.sizes import allocated_bytes, hint_int
from gcpass.torch_private import (
    FixedLayout,
    Layout,
    MultiOutput,
    NonOwningLayout,
    NopKernelSchedulerNode,
    V,
)

_Ints: TypeAlias = "npt.NDArray[np.int64]"

WORKSPACE = "gcpass_workspace"  # key of a node's meta: bytes needed while it runs
TOLERANCE = 1 / 512  # of the peak: a fused reduction writes a few numbers earlier


class KernelMemory:
    """The memory of a scheduler's nodes, fused so far.

    Args:
        scheduler: Inductor's; its nodes are not fused yet.
        held: inputs that stay alive whoever has read them.
        spare_bytes: by how much fusion may lift the peak.
    """

    def __init__(self, scheduler: Any, held: set[str], spare_bytes: int) -> None:
        nodes = scheduler.nodes
        self.numbers = {
            part.get_name(): number
            for number, node in enumerate(nodes)
            for part in node.get_nodes()
        }
        self.sources = [_sources(scheduler, node, self.numbers) for node in nodes]
        self.place: _Ints = np.arange(len(nodes))
        self.kernel: _Ints = np.arange(len(nodes))
        self.parts = {number: [number] for number in range(len(nodes))}
        self.workspace: _Ints = np.array([_workspace(n) for n in nodes], np.int64)
        storages = _storages(scheduler, self.numbers, held)
        self.sizes: _Ints = np.array([s.size_bytes for s in storages], np.int64)
        self.writer: _Ints = np.array([s.writer for s in storages], np.int64)
        self.held = np.array([s.held for s in storages], bool)
        self.stored = np.array([s.stored for s in storages], bool)
        self.readers: _Ints = np.array([r for s in storages for r in s.readers], int)
        counts = np.array([len(s.readers) for s in storages], np.int64)
        self.starts: _Ints = np.cumsum(counts) - counts
        self.owner: _Ints = np.repeat(np.arange(len(storages)), counts)
        self.overwrites = _Overwrites(_overwrites(scheduler, storages))
        self.profile = self._profile(self.place, self.kernel)
        self.in_place = self._in_place(self.place, self.kernel)
        peak = int(self.profile.max(initial=0))
        self.most_bytes = peak + max(spare_bytes, int(peak * TOLERANCE))
        self._births = self._born(self.place)
        self._fusions = 0
        self._refused: dict[tuple[int, ...], int] = {}  # kernel -> fusions until then
        self._ends: set[str] | None = None

    def allows(self, node1: Any, node2: Any) -> bool:
        """Return whether the memory suffices for one kernel of two."""
        members = self._members(node1, node2)
        if not members or not len(self.sizes):
            return True
        if self._refused.get(tuple(members)) == self._fusions:
            return False
        first, last = self.place[members].min(), self.place[members].max()
        span = slice(first, last + 1)
        inside = (self.place > first) & (self.place <= last)
        within = (self._births > first) & (self._births <= last)
        most = int((self.profile[span] + self.in_place[span]).max())
        most += int(self.sizes[within].sum())
        if most + int(self.workspace[inside].max(initial=0)) <= self.most_bytes:
            return True
        # Elsewhere nothing is alive for longer.
        after = self._profile(*self._fused(members))[span]
        allowed = int(after.max()) <= self.most_bytes
        if not allowed:
            self._refused[tuple(members)] = self._fusions
        return allowed

    def fuse(self, node1: Any, node2: Any) -> None:
        """Take note that two nodes are one kernel now."""
        members = self._members(node1, node2)
        if members and len(self.sizes):
            self.place, self.kernel = self._fused(members)
            self.parts.update(dict.fromkeys(members, members))
            self.profile = self._profile(self.place, self.kernel)
            self.in_place = self._in_place(self.place, self.kernel)
            self._births = self._born(self.place)
            self._fusions += 1

    def last_of_functions(self, scheduler: Any) -> set[str]:
        """Return the kernels after which a C++ function has to end.

        Args:
            scheduler: done with fusing.
        """
        if self._ends is None:
            self._ends = self._function_ends(scheduler.nodes)
        return self._ends

    def _function_ends(self, nodes: Sequence[Any]) -> set[str]:
        if not len(self.sizes):
            return set()
        order = self.place.copy()
        for place, node in enumerate(nodes):
            order[self._members(node)] = place
        profile = self._profile(order, self.kernel)
        new = np.bincount(
            self._born(order),
            np.where(self.writer < 0, 0, self._sizes(self.kernel)),
            len(profile),
        )
        new -= self._in_place(order, self.kernel)
        ends: set[str] = set()
        together, last = 0, None  # bytes, and the last kernel, of the function so far
        for place, node in enumerate(nodes):
            if node.is_extern():
                together, last = 0, None
                continue
            if last is not None and together + new[place] > self.most_bytes:
                ends.add(last)
                together, last = 0, None
            together = max(together + int(new[place]), int(profile[place]))
            if not isinstance(node, NopKernelSchedulerNode):
                last = node.get_name()
        return ends

    def _members(self, *nodes: Any) -> list[int]:
        """Return the nodes of the kernels that these are, or are parts of."""
        names = [part.get_name() for node in nodes for part in node.get_nodes()]
        found = [self.numbers[name] for name in names if name in self.numbers]
        return sorted({p for n in found for p in self.parts[int(self.kernel[n])]})

    def _fused(self, members: Sequence[int]) -> tuple[_Ints, _Ints]:
        """Return places and kernels with the members in one kernel."""
        place, kernel = self.place.copy(), self.kernel.copy()
        first = place[members].min()
        place[members], kernel[members] = first, members[0]
        waiting = list(members)
        while waiting:  # and what they need that would come later
            for source in self.sources[waiting.pop()]:
                if place[source] > first:
                    pulled = self.parts[int(self.kernel[source])]
                    place[pulled] = first
                    waiting.extend(pulled)
        return place, kernel

    def _born(self, place: _Ints) -> _Ints:
        return np.where(self.writer < 0, 0, place[self.writer])

    def _sizes(self, kernel: _Ints) -> _Ints:
        """Return the bytes of each storage, 0 for what stays inside of a kernel."""
        leaves = kernel[self.readers] != kernel[self.writer[self.owner]]
        inside = ~np.logical_or.reduceat(leaves, self.starts)
        return np.where(inside & ~self.stored, 0, self.sizes)

    def _profile(self, place: _Ints, kernel: _Ints) -> _Ints:
        """Return the bytes alive at each place."""
        length = len(place) + 1
        result = np.zeros(length, np.int64)
        np.maximum.at(result, place, self.workspace)
        if not len(self.sizes):
            return result
        born, sizes = self._born(place), self._sizes(kernel)
        dies = np.maximum(np.maximum.reduceat(place[self.readers], self.starts), born)
        dies[self.held] = length - 2
        change = np.bincount(born, sizes, length)
        change -= np.bincount(dies + 1, sizes, length)
        alive: _Ints = np.cumsum(change).astype(np.int64)
        return result + alive - self._in_place(place, kernel)

    def _in_place(self, place: _Ints, kernel: _Ints) -> _Ints:
        """Return the bytes written over others at each place."""
        over = self.overwrites
        result = np.zeros(len(place) + 1, np.int64)
        if not len(over.node):
            return result
        at, sizes = place[over.node], self._sizes(kernel)
        born = np.where(self.writer < 0, -1, place[self.writer])  # inputs: before all
        fits = (born[over.old] < at) & (sizes[over.old] == sizes[over.new])
        fits[over.of_other[place[over.other] >= at[over.of_other]]] = False
        fits[over.of_needed[place[over.needed] > at[over.of_needed]]] = False
        # A node has one result, which takes one place.
        nodes, first = np.unique(over.node[fits], return_index=True)
        np.add.at(result, place[nodes], sizes[over.new[fits][first]])
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class _Overwrite:
    """A node that may write its result over a storage.

    Attributes:
        node: the node.
        old, new: storages, of the same size.
        others: readers of the old one that must be done, in kernels before.
        needed: readers that the node needs and that read the same indices: they may be
            in its kernel.
    """

    node: int
    old: int
    new: int
    others: tuple[int, ...]
    needed: tuple[int, ...]


class _Overwrites:
    """The same as columns; `of_other[i]` is the row that `other[i]` belongs to."""

    def __init__(self, rows: Sequence[_Overwrite]) -> None:
        self.node = _column(row.node for row in rows)
        self.old = _column(row.old for row in rows)
        self.new = _column(row.new for row in rows)
        self.other = _column(n for row in rows for n in row.others)
        self.of_other = _column(i for i, row in enumerate(rows) for _ in row.others)
        self.needed = _column(n for row in rows for n in row.needed)
        self.of_needed = _column(i for i, row in enumerate(rows) for _ in row.needed)


def _column(numbers: Iterable[int]) -> _Ints:
    return np.fromiter(numbers, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Storage:
    """Memory that nodes of a scheduler share.

    Attributes:
        size_bytes: as the device's allocator counts.
        writer: the node that allocates it, -1 for an input of the graph.
        held: whether it stays alive to the end.
        name: of its buffer, or of the input.
        stored: whether it has memory even where its readers are in its writer's kernel.
        readers: nodes; the writer where there are none.
    """

    size_bytes: int
    name: str
    writer: int
    held: bool
    stored: bool
    readers: tuple[int, ...]


def _storages(
    scheduler: Any, numbers: Mapping[str, int], held: set[str]
) -> list[_Storage]:
    """Return what the nodes allocate, and the inputs that are freed."""
    outputs = {_storage_of(scheduler, name) for name in V.graph.get_output_names()}
    outputs |= held
    stored = set(outputs)
    readers: dict[str, set[int]] = {}
    writers: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for number, node in enumerate(scheduler.nodes):
        for dep in node.read_writes.reads:
            if getattr(dep, "is_fake", False):  # an order, no reading (not in 2.11)
                continue
            name = _storage_of(scheduler, dep.name)
            readers.setdefault(name, set()).add(number)
            if name in V.graph.graph_inputs and _is_freed(name):
                writers[name] = -1
                sizes[name] = _bytes_of(V.graph.graph_inputs[name])
                stored.add(name)
        for buffer in node.get_outputs():
            name = _storage_of(scheduler, buffer.get_name())
            writers.setdefault(name, _allocator(buffer, numbers, number))
            if name == buffer.get_name():
                sizes[name] = _bytes_of(buffer.node)
            else:  # a part of a concatenation, or a write in place
                stored.add(name)
    return [
        _Storage(
            size_bytes=size,
            name=name,
            writer=writers[name],
            held=name in outputs,
            stored=name in stored or name not in readers,
            readers=tuple(sorted(readers.get(name, {writers[name]}))),
        )
        for name, size in sizes.items()
        if size
    ]


def _overwrites(scheduler: Any, storages: Sequence[_Storage]) -> list[_Overwrite]:
    """Return what nodes may write over."""
    at = {storage.name: i for i, storage in enumerate(storages)}
    result = []
    for number, node in enumerate(scheduler.nodes):
        writes = [at.get(buffer.get_name()) for buffer in node.get_outputs()]
        if len(writes) != 1 or writes[0] is None:
            continue
        new, result_buffer = writes[0], node.get_outputs()[0].node
        for name in dict.fromkeys(dep.name for dep in node.read_writes.reads):
            old = at.get(name)
            buffer = _writable(scheduler, name)
            if (
                old is None
                or buffer is None
                or storages[old].held
                or storages[old].size_bytes != storages[new].size_bytes
                or buffer.node.get_dtype() != result_buffer.get_dtype()
            ):
                continue
            uses = [user for user in buffer.users if user.node is node]
            if len(uses) != 1 or not uses[0].can_inplace:
                continue
            mine = _indices(node, name)
            readers = [n for n in storages[old].readers if n != number]
            needed = tuple(
                n
                for n in readers
                if _indices(scheduler.nodes[n], name) <= mine
                and node.ancestors.issuperset(scheduler.nodes[n].get_operation_names())
            )
            others = tuple(n for n in readers if n not in needed)
            result.append(
                _Overwrite(node=number, old=old, new=new, others=others, needed=needed)
            )
    return result


def _writable(scheduler: Any, name: str) -> Any:
    """Return the buffer of a name if another may take its memory."""
    buffer = scheduler.name_to_donated_buffer.get(name)
    buffer = buffer or scheduler.name_to_buf.get(name)
    if buffer is None or isinstance(buffer.defining_op, NopKernelSchedulerNode):
        return None
    node = buffer.node
    if node is None or not isinstance(node.maybe_get_layout(), FixedLayout):
        return None
    if buffer.defining_op is not None and node.get_inputs_that_alias_output():
        return None
    return buffer


def _indices(node: Any, name: str) -> set[Any]:
    """Return where a node reads and writes a buffer."""
    return {dep for dep in node.read_writes.reads_and_writes() if dep.name == name}


def _sources(scheduler: Any, node: Any, numbers: Mapping[str, int]) -> list[int]:
    """Return the nodes that must have run before one."""
    buffers = scheduler.name_to_buf
    names = [dep.name for dep in node.unmet_dependencies if dep.name in buffers]
    writers = [buffers[name].defining_op_name() for name in names]
    return [numbers[name] for name in writers if name in numbers]


def _workspace(node: Any) -> int:
    """Return the bytes that a library call needs for itself."""
    if not node.is_extern() or isinstance(node.node, MultiOutput):
        return 0
    origins = getattr(node.node, "origins", ())
    return max((origin.meta.get(WORKSPACE, 0) for origin in origins), default=0)


def _is_freed(name: str) -> bool:
    """Return whether an input of the graph is freed after its last reader."""
    others = name.startswith(("primals_", "fwd_rng_state", "bwd_rng_state"))
    return not (others or V.graph.name)  # those of a subgraph are its caller's


def _allocator(buffer: Any, numbers: Mapping[str, int], number: int) -> int:
    """Return the node that allocates a buffer: for an item of a tuple the call."""
    if isinstance(buffer.node, MultiOutput):
        call = buffer.node.inputs[0]
        name: Callable[[], str] | None = getattr(call, "get_operation_name", None)
        return number if name is None else numbers.get(name(), number)
    return number


def _storage_of(scheduler: Any, name: str) -> str:
    """Return the buffer that owns the storage of a name."""
    name = scheduler.mutation_real_name.get(name, name)
    buffer = scheduler.name_to_buf.get(name)
    layout = getattr(getattr(buffer, "node", None), "layout", None)
    if isinstance(layout, NonOwningLayout):  # a part of a concatenation
        return _storage_of(scheduler, layout.view.get_name())
    return name


def _bytes_of(buffer: Any) -> int:
    """Return the bytes that a buffer or an input of the graph takes."""
    layout = buffer.maybe_get_layout()
    if not isinstance(layout, Layout):  # a tuple, a number, an object
        return 0
    size = hint_int(V.graph.sizevars.optimization_hint(layout.storage_size()))
    allocated: int = allocated_bytes(size * layout.dtype.itemsize, layout.device)
    return allocated
