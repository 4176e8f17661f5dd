"""Bytes of values, checked against what torch's own allocator gives."""

from __future__ import annotations

import math

import pytest
import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.testing._internal.two_tensor import TwoTensor

from gcpass.sizes import (
    UNBACKED_SIZE_HINT,
    element_count,
    expression,
    hint_int,
    read_bytes,
    storage_bytes,
    symbolic_storage_bytes,
    tensors_in,
)
from gcpass.symbols import InexpressibleError, plain

DTYPES = sorted(
    {d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str
)


@pytest.mark.filterwarnings("ignore:B?Complex(Half|32)", "ignore:.*quantized")
@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_takes_what_torch_allocates(dtype):
    if dtype in (torch.quint8, torch.qint8, torch.qint32):
        val = torch._empty_affine_quantized([7], scale=1.0, zero_point=0, dtype=dtype)
    else:
        val = torch.empty(7, dtype=dtype)
    assert storage_bytes(val) == val.untyped_storage().nbytes() > 0


@pytest.mark.filterwarnings("ignore:.*deprecated")  # once a process: quantized dtypes
def test_known_sizes_by_hand():
    assert storage_bytes(torch.empty(3, 5)) == 60
    assert storage_bytes(torch.empty(3, 5, dtype=torch.complex128)) == 240
    assert storage_bytes(torch.empty(3, 5, dtype=torch.bool)) == 15
    assert storage_bytes(torch.empty(3, 5, dtype=torch.float8_e4m3fn)) == 15
    assert storage_bytes(torch.empty(3, 5, dtype=torch.quint4x2)) == 8  # 15 halves


@pytest.mark.parametrize(
    ("size", "stride"),
    [
        ((), ()),
        ((4, 6), (6, 1)),
        ((4, 6), (1, 4)),
        ((4, 6), (0, 1)),
        ((4, 6), (0, 0)),
        ((4, 6), (16, 2)),
        ((4, 0), (6, 1)),
        ((0,), (1,)),
        ((2, 3, 5), (3, 1, 6)),
    ],
)
def test_strided_storage_matches_empty_strided(size, stride):
    val = torch.empty_strided(size, stride)
    assert storage_bytes(val) == val.untyped_storage().nbytes()


def test_views_have_the_size_of_their_own_extent():
    base = torch.empty(100, 8)
    assert storage_bytes(base[:, :2]) == (99 * 8 + 2) * 4  # gaps are kept
    assert read_bytes(base[:, :2]) == 200 * 4  # gaps are not read
    assert storage_bytes(torch.empty(1, 8).expand(100, 8)) == 32
    assert read_bytes(torch.empty(1, 8).expand(100, 8)) == 32


@pytest.mark.parametrize(
    "val", [None, 3, 2.5, "cpu", torch.device("cpu"), torch.Generator(), object()]
)
def test_values_without_tensor_memory_take_nothing(val):
    assert storage_bytes(val) == 0
    assert read_bytes(val) == 0


def test_tuples_are_summed():
    val = (torch.empty(2), [torch.empty(3), None, 5], ())
    assert storage_bytes(val) == 20
    assert [t.shape[0] for t in tensors_in({"a": val})] == [2, 3]


def test_wrapper_subclass_is_the_sum_of_its_inner_tensors():
    two = TwoTensor(torch.empty(4), torch.empty(4))
    assert storage_bytes(two) == 16 + 16


def test_ragged_tensor_is_the_sum_of_values_and_offsets():
    ragged = torch.nested.nested_tensor(
        [torch.ones(2, 3), torch.ones(5, 3)], layout=torch.jagged
    )
    assert storage_bytes(ragged) >= 7 * 3 * 4 + 3 * 8
    assert hint_int(ragged.shape[1]) == 1


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors_are_the_sum_of_their_components():
    dense = torch.eye(4)
    assert storage_bytes(dense.to_sparse()) == 4 * 4 + 2 * 4 * 8
    assert storage_bytes(dense.to_sparse_csr()) == 4 * 4 + (5 + 4) * 8
    assert storage_bytes(dense.to_sparse_csc()) == 4 * 4 + (5 + 4) * 8


def _symbolic(shape):
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * len(shape))
    return env, mode.from_tensor(torch.empty(shape), symbolic_context=dynamic)


def test_symbolic_sizes_use_hints_and_add_no_guard():
    env, x = _symbolic((6, 10))
    assert isinstance(x.shape[0], torch.SymInt)
    assert storage_bytes(x) == 240
    assert storage_bytes(x.t()) == 240
    assert read_bytes(x[:, 1:]) == 6 * 9 * 4
    guards = len(env.guards)
    assert element_count(x) == 60
    assert hint_int(x.shape[0] * x.shape[1] + 1) == 61
    assert storage_bytes(x.shape[0]) == 0
    assert len(env.guards) == guards == 0


def test_unbacked_sizes_use_the_documented_fallback():
    env = ShapeEnv()
    unbacked = env.create_unbacked_symint()
    assert hint_int(unbacked) == UNBACKED_SIZE_HINT
    with FakeTensorMode(shape_env=env):
        assert storage_bytes(torch.empty(unbacked, 2)) == UNBACKED_SIZE_HINT * 8


def test_sizes_as_functions_of_symbols_add_no_guard():
    env, x = _symbolic((6, 10))
    a, b = (expression(size) for size in x.shape)
    assert symbolic_storage_bytes(x) == symbolic_storage_bytes(x.t()) == 4 * a * b
    part = x[:, :3]  # torch notes that there are 3
    guards = len(env.guards)
    assert symbolic_storage_bytes(part) == 4 * a * b - 4 * b + 12
    assert symbolic_storage_bytes((x, [x.expand(5, *x.shape)], 7)) == 8 * a * b
    with x.fake_mode:
        mask = torch.empty(x.shape, dtype=torch.bool)
    assert symbolic_storage_bytes(mask) == a * b
    assert symbolic_storage_bytes(torch.empty(6, 10)) == 240
    assert symbolic_storage_bytes(x.shape[0]) == symbolic_storage_bytes(None) == 0
    assert len(env.guards) == guards


def test_symbolic_sizes_on_cuda_are_rounded():
    _, x = _symbolic((6, 10))
    with x.fake_mode:
        on_cuda = torch.empty(x.shape[0], 3, device="cuda")
    size = symbolic_storage_bytes(on_cuda)
    (symbol,) = size.free_symbols
    assert size == 512 * sympy.ceiling(3 * symbol / 128)
    for rows in (6, 42, 43, 1000):
        assert size.subs(symbol, rows) == -(-12 * rows // 512) * 512


def test_a_size_that_may_be_0_is_0_where_a_dimension_is():
    env = ShapeEnv()
    count = env.create_unbacked_symint()
    torch._check(count >= 0)
    with FakeTensorMode(shape_env=env):
        dense = torch.empty(count, 2)
        gaps = torch.empty_strided((count, 2), (8, 1))
    (u0,) = symbolic_storage_bytes(dense).free_symbols
    assert symbolic_storage_bytes(dense) == 8 * u0
    sizes = [symbolic_storage_bytes(gaps).subs(u0, rows) for rows in (0, 1, 3)]
    assert sizes == [0, 8, 72]


def test_a_ragged_size_is_that_of_its_parts():
    env, rows = _symbolic((7, 3))
    with rows.fake_mode:
        offsets = torch.empty(4, dtype=torch.int64)
        ragged = torch.nested.nested_tensor_from_jagged(rows, offsets)
    size = symbolic_storage_bytes(ragged)
    at = {expression(n): hint_int(n) for n in rows.shape}
    assert size.subs(at) == storage_bytes(ragged)
    assert len(env.guards) == 0


def test_torchs_functions_are_sympys():
    _, x = _symbolic((6, 10))
    n, m = x.shape
    for size in (
        n // 2,
        (n * m) // 3,
        n % 4,
        torch.sym_max(n, m),
        n * (m // 2) - 1,
        math.floor(n * 1.5),
        math.ceil(m / 4),
    ):
        written = expression(size)
        assert written.subs({expression(n): 6, expression(m): 10}) == hint_int(size)
        assert sympy.sympify(str(written)).subs({str(n): 6, str(m): 10}) == (
            hint_int(size)
        )
    with pytest.raises(InexpressibleError, match="gamma"):
        plain(sympy.gamma(expression(n)))


@pytest.mark.parametrize(
    ("elements", "size_bytes"), [(0, 0), (1, 512), (128, 512), (129, 1024)]
)
def test_the_cuda_allocator_hands_out_blocks(elements: int, size_bytes: int) -> None:
    with FakeTensorMode():
        on_cuda = torch.empty(elements, device="cuda")
        on_cpu = torch.empty(elements)
    assert storage_bytes(on_cuda) == size_bytes
    assert storage_bytes(on_cpu) == 4 * elements
