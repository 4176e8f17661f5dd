"""Collectives, data parallel wrappers and sharded parameters, in a group of one.

Every rank would have to repeat a collective at the same moment, so it runs once, at
every budget.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import gcpass
from gcpass import store
from tests.nets import Mlp
from tests.training import (
    EXACT,
    Budget,
    CallCounter,
    compiled,
    gradients,
    relative,
    start_over,
)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class Gathering(nn.Module):
    """Frozen weights are gathered where they are used; the loss is a mean over ranks.

    To gather one again from its part, which is there anyway, would save memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList(torch.randn(64, 64) / 8 for _ in range(4))
        self.layers.requires_grad_(False)
        self.start = nn.Parameter(torch.randn(64))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.start
        for weight in self.layers:
            whole = collectives.all_gather_tensor_autograd(weight, 0, dist.group.WORLD)
            x = torch.tanh(x @ whole).exp()
        loss = x.square().mean()
        return collectives.all_reduce(loss.detach(), "avg", dist.group.WORLD) * 0 + loss


@pytest.mark.parametrize("budget", [None, 0.5, "min"], ids=str)
@pytest.mark.filterwarnings("ignore:.*all_gather_tensor_autograd:FutureWarning")
def test_c19_collectives_run_once(mesh: DeviceMesh, budget: Budget) -> None:
    net, x = Gathering(), torch.randn(8, 64)
    function = compiled(net, budget)
    loss = function(x)  # not under the counter: Dynamo would leave it to eager
    gather = torch.ops._c10d_functional.all_gather_into_tensor.default
    with CallCounter(gather) as backward:
        loss.backward()
    assert backward.calls == 0
    assert store.plans()
    got = gradients(net)
    net.zero_grad()
    net(x).backward()
    assert relative(got, gradients(net)) < EXACT


@pytest.mark.parametrize("optimize", [True, False], ids=["split", "whole"])
def test_c19_distributed_data_parallel(mesh: DeviceMesh, optimize: bool) -> None:
    # Its optimizer cuts the model into regions of a bucket each, here of one layer.
    with torch._dynamo.config.patch(optimize_ddp=optimize):
        model, x = Mlp(width=512, depth=3), torch.randn(64, 512)
        wrapped = DistributedDataParallel(model, bucket_cap_mb=1)
        budget = 4_500_000  # of which three gradients take 3.1 MB
        function = compiled(wrapped, budget)
        eager = copy.deepcopy(model)
        for _ in range(3):
            wrapped.zero_grad()
            eager.zero_grad()
            function(x).backward()
            eager(x).backward()
            assert relative(gradients(model), gradients(eager)) < EXACT
        regions = len(store.plans())
        assert regions > 1 if optimize else regions == 1
        assert all(p.step_peak_bytes <= budget for p in store.plans())
        assert gcpass.measure(lambda: function(x).backward()) <= budget


def test_c19_fully_sharded_blocks(mesh: DeviceMesh) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(torch.tanh(self.up(x)).exp())

    model = nn.Sequential(*[Layer() for _ in range(3)])
    eager, x = copy.deepcopy(model), torch.randn(64, 16)
    made = gcpass.backend(memory_budget=0.9, codegen="eager", on_infeasible="min")
    for layer in model:
        layer.compile(backend=made)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for _ in range(2):
        model.zero_grad()
        eager.zero_grad()
        model(x).square().mean().backward()
        eager(x).square().mean().backward()
        for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            assert isinstance(mine.grad, DTensor)
            assert theirs.grad is not None
            assert relative(mine.grad.full_tensor(), theirs.grad) < EXACT
    assert store.plans()


def test_c19_tensor_parallel(mesh: DeviceMesh) -> None:
    class Feed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(torch.tanh(self.up(x)).exp()).square().mean()

    eager, x = Feed(), torch.randn(64, 16)
    eager(x).backward()
    for budget in (None, "min"):
        start_over()
        model = copy.deepcopy(eager)
        model.zero_grad()
        parallelize_module(
            model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
        compiled(model, budget)(x).backward()
        for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            assert isinstance(mine.grad, DTensor)
            assert theirs.grad is not None
            assert relative(mine.grad.full_tensor(), theirs.grad) < EXACT
        assert store.plans()


def test_c19_distributed_tensors_as_inputs(mesh: DeviceMesh) -> None:
    def loss(x: Any, w: Any) -> Any:
        h = torch.tanh(x @ w).exp()
        h = h.redistribute(mesh, [Replicate()])
        return (h @ w).square().sum().to_local()

    x, w = torch.randn(8, 16), torch.randn(16, 16)
    results = []
    for run in (loss, compiled(loss, 0.6), compiled(loss, "min")):
        torch._dynamo.reset()
        mine = distribute_tensor(x, mesh, [Shard(0)])
        weight = distribute_tensor(w, mesh, [Replicate()]).requires_grad_()
        value = run(mine, weight)
        value.backward()
        results.append(weight.grad.full_tensor())
    for got in results[1:]:
        assert relative(got, results[0]) < EXACT
    assert len(store.plans()) == 2
