"""Roofline, randomness per call, kinds of nodes, registration of costs."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch._inductor.inductor_prims  # registers prims.inductor_*

from gcpass.cost import (
    UNKNOWN_FLOPS_PER_BYTE,
    Kind,
    cost_registry_fingerprint,
    draws_random,
    has_cost,
    is_discrete,
    node_cost,
    op_kind,
    register_cost,
    roofline_seconds,
    unregister_cost,
)
from gcpass.hardware import find_device, known_devices, this_cpu
from tests.nodes import node_of, nodes_of

aten, prims = torch.ops.aten, torch.ops.prims
H100 = find_device("H100")
X = torch.empty(4, 6)
Q = torch.empty(2, 3, 8, 4)


@pytest.fixture(scope="module")
def slow():
    """Return an operator of another library, without a formula."""
    lib = torch.library.Library("gcpass_cost_test", "FRAGMENT")
    lib.define("slow(Tensor a) -> Tensor")
    lib.define("noisy(Tensor a) -> Tensor", tags=torch.Tag.nondeterministic_seeded)
    for name in ("slow", "noisy"):
        lib.impl(name, lambda a: a.clone(), "CompositeExplicitAutograd")
        lib.impl(name, torch.empty_like, "Meta")
    yield torch.ops.gcpass_cost_test.slow
    lib._destroy()


# --- roofline -------------------------------------------------------------------------


def test_roofline_takes_the_larger_of_compute_and_traffic():
    launch = H100.launch_seconds
    compute_bound = roofline_seconds(989_500_000_000_000, 1, "bfloat16", H100)
    assert compute_bound == pytest.approx(1 + launch)
    traffic_bound = roofline_seconds(1, 3_350_000_000_000, "bfloat16", H100)
    assert traffic_bound == pytest.approx(1 + launch)
    assert roofline_seconds(0, 0, "float32", H100) == launch
    half = roofline_seconds(10**15, 0, "float32", H100, compute_efficiency=0.5)
    assert half - launch == pytest.approx(2 * 10**15 / 67e12)


def test_products_are_priced_at_the_rate_of_their_inputs():
    big = torch.empty(4096, 4096, dtype=torch.bfloat16)
    bf16 = node_cost(node_of(aten.mm, big, big), H100)
    assert bf16.flops == 2 * 4096**3
    assert bf16.bytes_moved == 2 * 2 * 4096**2  # one input, read once, and the output
    waves = 4  # of 132 tiles of 256 x 128, of which there are 512
    expected = waves * 2 * 256 * 128 * 4096 / (0.7 * 989.5e12 / 132)
    expected += H100.launch_seconds
    assert bf16.seconds == pytest.approx(expected)
    fp32_node = node_of(aten.mm, big.float(), big.float())
    fp32 = node_cost(fp32_node, H100)
    tf32 = node_cost(fp32_node, H100, tf32=True)
    assert bf16.seconds < tf32.seconds < fp32.seconds


def test_pointwise_work_is_bound_by_the_bytes_that_the_caller_says():
    node = node_of(torch.sin, torch.empty(1 << 20))
    alone = node_cost(node, H100)
    assert alone.bytes_moved == 2 * 4 * 2**20
    halved = node_cost(node, H100, bytes_moved=4 * 2**20)
    fused = node_cost(node, H100, bytes_moved=0)
    assert alone.seconds > halved.seconds > fused.seconds > 0
    assert fused.seconds < H100.launch_seconds  # no launch of its own
    assert alone.flops == halved.flops == fused.flops


def test_views_and_size_arithmetic_are_free():
    cost = node_cost(node_of(lambda a: a.t(), X), H100)
    assert (cost.flops, cost.bytes_moved, cost.seconds, cost.known) == (0, 0, 0, True)


def test_a_gather_reads_the_rows_that_it_returns():
    table, rows = torch.empty(1000, 8), torch.zeros(3, dtype=torch.int64)
    cost = node_cost(node_of(aten.embedding, table, rows), H100)
    assert cost.bytes_moved == 2 * (3 * 8 * 4) + 3 * 8


def test_unknown_operators_are_expensive(slow):
    node = node_of(slow, X)
    cost = node_cost(node, H100)
    assert not cost.known
    assert cost.flops == UNKNOWN_FLOPS_PER_BYTE * cost.bytes_moved == 1000 * 2 * 96
    for name in (*known_devices(), "cpu"):
        device = find_device(name)
        big = node_of(slow, torch.empty(1 << 22))
        dear, cheap = (
            node_cost(n, device).seconds
            for n in (big, node_of(torch.sin, torch.empty(1 << 22)))
        )
        assert dear > 2 * cheap, name
        assert UNKNOWN_FLOPS_PER_BYTE > max(
            rate / device.bandwidth_bytes_per_s for _, rate in device.peaks
        )
    assert node_cost(node, H100, bytes_moved=0).flops == cost.flops


def test_costs_are_the_same_in_every_process():
    node = node_of(aten.mm, X, torch.empty(6, 5))
    assert node_cost(node, this_cpu()) == node_cost(node, this_cpu())


# --- registration ---------------------------------------------------------------------


def test_registering_a_cost_makes_it_known(slow):
    node = node_of(slow, X)
    assert not has_cost(node)
    before = cost_registry_fingerprint()
    register_cost(slow, lambda a, out: 7 * a.numel())
    try:
        assert has_cost(node)
        assert node_cost(node, H100).known
        assert node_cost(node, H100).flops == 7 * 24
        assert cost_registry_fingerprint() != before
    finally:
        unregister_cost(slow)
    assert not has_cost(node)
    assert cost_registry_fingerprint() == before


@pytest.mark.parametrize("name", ["gcpass_cost_test::slow", "gcpass_cost_test.slow"])
def test_names_are_accepted_for_operators(slow, name):
    register_cost(name, lambda a, out: 1)
    try:
        assert has_cost(node_of(slow, X))
    finally:
        unregister_cost(slow)
    assert not has_cost(node_of(slow, X))


def test_what_custom_op_returns_is_accepted():
    @torch.library.custom_op("gcpass_cost_test2::twice", mutates_args=())
    def twice(a: torch.Tensor) -> torch.Tensor:
        return a * 2

    twice.register_fake(torch.empty_like)
    register_cost(twice, lambda a, out: a.numel())
    try:
        assert node_cost(node_of(twice, X), H100).flops == 24
    finally:
        unregister_cost(twice)


def test_something_else_is_refused():
    with pytest.raises(TypeError, match="operator or its name"):
        register_cost(torch.sin, lambda a, out: 1)


def test_fingerprint_tells_formulas_apart_and_ignores_order(slow):
    def scaled(factor):
        return lambda a, out: factor * a.numel()

    prints = []
    for formula in (scaled(2), scaled(3), scaled(2)):
        register_cost(slow, formula)
        prints.append(cost_registry_fingerprint())
    unregister_cost(slow)
    assert prints[0] == prints[2] != prints[1]


def test_fingerprint_is_the_same_in_every_process():
    code = (
        "from gcpass.cost import register_cost, cost_registry_fingerprint as f\n"
        "for n in 'ba': register_cost('lib::' + n, lambda x, out: 3 * x.numel())\n"
        "print(f())"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            check=True,
            capture_output=True,
            env={"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(runs) == 1


# --- randomness -----------------------------------------------------------------------

ATTEND = aten._scaled_dot_product_flash_attention_for_cpu


@pytest.mark.parametrize(
    ("function", "args", "random"),
    [
        (lambda q: ATTEND(q, q, q, 0.0, True), (Q,), False),
        (lambda q: ATTEND(q, q, q), (Q,), False),
        (lambda q: ATTEND(q, q, q, dropout_p=0.1), (Q,), True),
        (
            lambda q: aten._scaled_dot_product_efficient_attention(
                q, q, q, None, False, 0.1
            )[0],
            (Q.to("meta"),),
            True,
        ),
        (lambda x: aten.native_dropout(x, 0.5, True), (X,), True),
        (lambda x: aten.native_dropout(x, 0.0, True), (X,), False),
        (lambda x: aten.native_dropout(x, 0.5, False), (X,), False),
        (lambda x: aten.native_dropout(x, 0.5, None), (X,), True),
        (lambda x: aten.bernoulli.p(x, 0.0), (X,), True),
        (lambda x: torch.rand_like(x), (X,), True),
        (lambda x: torch.randperm(6), (X,), True),
        (lambda x: aten.multinomial(x, 2), (X.abs(),), True),
        (lambda x: aten.sin(x), (X,), False),
        (lambda x: aten.empty_like(x), (X,), False),
    ],
)
def test_randomness_is_decided_per_call(function, args, random):
    assert draws_random(node_of(function, *args)) is random


def test_inductor_draws_count_even_from_a_given_seed():
    def draw(x):
        seeds = prims.inductor_seeds(2, x.device)
        seed = prims.inductor_lookup_seed(seeds, 0)
        return prims.inductor_random([4, 6], seed, "rand") > 0.5

    drawn = [draws_random(n) for n in nodes_of(draw, X)]
    assert drawn == [True, True, True, False]


def test_tagged_custom_operators_draw(slow):
    assert draws_random(node_of(torch.ops.gcpass_cost_test.noisy, X))
    assert not draws_random(node_of(slow, X))


def test_draws_inside_of_a_body_count():
    def branch(p, a):
        return torch.cond(p, torch.rand_like, torch.sin, (a,))

    nodes = nodes_of(branch, torch.tensor(True), X)
    assert [draws_random(n) for n in nodes if "cond" in str(n.target)] == [True]


# --- discreteness ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "discrete"),
    [
        (lambda x: x.topk(2), True),
        (lambda x: x.sort(), True),
        (lambda x: x.argmax(1), True),
        (lambda x: aten.max.dim(x, 1), True),
        (lambda x: aten.max.default(x), False),
        (lambda x: aten.amax(x, [1]), False),
        (lambda x: aten.maximum(x, x), False),
        (lambda x: aten.bucketize(x, x[0]), True),
        (lambda x: prims.convert_element_type(x, torch.int64), True),
        (lambda x: aten._to_copy(x, dtype=torch.int32), True),
        (lambda x: aten._to_copy(x, dtype=torch.bfloat16), False),
        (lambda x: aten._to_copy(x, dtype=torch.bool), False),
        (lambda x: aten.gt(x, 0.5), False),
        (lambda x: aten.eq(x, aten.amax(x, [1], True)), True),
        (lambda x: aten.ge(x, x[0]), True),
        (lambda x: prims.le(x, x), True),
        (lambda x: aten.ge(aten._to_copy(x > 0, dtype=torch.int64), x), False),
        (lambda x: aten.round(x), False),
        (lambda x: aten.mm(x, x.t()), False),
    ],
)
def test_discrete_results(function, discrete):
    assert any(is_discrete(n) for n in nodes_of(function, X)) is discrete


# --- kinds ----------------------------------------------------------------------------

I64 = torch.zeros(3, dtype=torch.int64)
COMPLEX = X.cfloat()


@pytest.mark.parametrize(
    ("function", "args", "kind"),
    [
        (lambda x: x.view(24), (X,), Kind.VIEW),
        (lambda x: x.permute(1, 0), (X,), Kind.VIEW),
        (lambda x: x[1], (X,), Kind.VIEW),
        (lambda x: x[:, 1:], (X,), Kind.VIEW),
        (lambda x: x.expand(2, 4, 6), (X,), Kind.VIEW),
        (lambda x: x.unsqueeze(0), (X,), Kind.VIEW),
        (lambda x: aten.split(x, 2), (X,), Kind.VIEW),
        (lambda x: aten._unsafe_view(x, [24]), (X,), Kind.VIEW),
        (lambda x: aten.alias(x), (X,), Kind.VIEW),
        (lambda x: aten.detach(x), (X,), Kind.VIEW),
        (lambda x: prims.broadcast_in_dim(x, [2, 4, 6], [1, 2]), (X,), Kind.VIEW),
        (lambda x: torch.view_as_real(x), (COMPLEX,), Kind.VIEW),
        (lambda x: x + 1, (X,), Kind.POINTWISE),
        (lambda x: x.tanh(), (X,), Kind.POINTWISE),
        (lambda x: torch.where(x > 0, x, x), (X,), Kind.POINTWISE),
        (lambda x: x.clone(), (X,), Kind.POINTWISE),
        (lambda x: aten.full([2], 1.0), (X,), Kind.POINTWISE),
        (lambda x: aten.constant_pad_nd(x, [1, 1]), (X,), Kind.POINTWISE),
        (lambda x: prims.convert_element_type(x, torch.half), (X,), Kind.POINTWISE),
        (aten.embedding, (X, I64), Kind.POINTWISE),
        (lambda x, i: aten.index.Tensor(x, [i]), (X, I64), Kind.POINTWISE),
        (lambda x: x.sum(), (X,), Kind.REDUCTION),
        (lambda x: x.mean(0), (X,), Kind.REDUCTION),
        (lambda x: torch.var_mean(x), (X,), Kind.REDUCTION),
        (lambda x: x.argmax(), (X,), Kind.REDUCTION),
        (lambda x: x.cumsum(0), (X,), Kind.EXTERN),  # a kernel on a GPU only
        (lambda x: aten._softmax(x, 1, False), (X,), Kind.REDUCTION),
        (lambda x: prims.sum(x, [0]), (X,), Kind.REDUCTION),
        (lambda x: aten.mm(x, x.t()), (X,), Kind.VIEW),  # the first call is the t()
        (lambda x: torch.cat([x, x]), (X,), Kind.EXTERN),
        (lambda x: x.sort(), (X,), Kind.EXTERN),
        (lambda x: torch.rand_like(x), (X,), Kind.EXTERN),
        (lambda x, i: x.index_add(0, i, x[:3]), (X, I64), Kind.VIEW),
        (lambda q: ATTEND(q, q, q), (Q,), Kind.EXTERN),
        (lambda x: torch.fft.rfft(x), (X,), Kind.EXTERN),
        (lambda x: x * x, (COMPLEX,), Kind.EXTERN),  # no code for complex numbers
        (lambda x: x.abs(), (COMPLEX,), Kind.EXTERN),
    ],
)
def test_kinds(function, args, kind):
    assert op_kind(node_of(function, *args)) is kind


def test_kinds_of_products_scatters_items_and_inputs(slow):
    nodes = nodes_of(lambda x: aten.mm(x, x.t()), X)
    assert [op_kind(n) for n in nodes] == [Kind.VIEW, Kind.EXTERN]
    nodes = nodes_of(lambda x, i: aten.index_put(x, [i], x[:3]), X, I64)
    assert op_kind(nodes[-1]) is Kind.EXTERN
    nodes = nodes_of(lambda x: aten.var_mean.correction(x, [0])[0], X)
    kinds = [op_kind(n) for n in nodes]
    assert kinds == [Kind.REDUCTION, Kind.VIEW, Kind.VIEW]
    assert op_kind(node_of(slow, X)) is Kind.EXTERN
    graph = node_of(lambda x: x + 1, X).graph
    kinds = [op_kind(n) for n in graph.nodes]
    assert kinds == [Kind.NONE, Kind.POINTWISE, Kind.NONE]


def test_arithmetic_on_sizes_is_no_code():
    nodes = nodes_of(lambda x: x.new_zeros(x.shape[0] * 2), X, mode="symbolic")
    assert [op_kind(n) for n in nodes] == [Kind.NONE, Kind.NONE, Kind.POINTWISE]
    assert all(has_cost(n) for n in nodes)
