"""Compiles for CUDA in a process that has neither a GPU nor torch's CUDA build.

Tensors on "cuda" are fake: they have a layout and no data. Dynamo, AOTAutograd, gcpass
and Inductor run as they would on the device that is named, the generated wrappers run,
too, and only launches do nothing. What Inductor made is kept in `FakeCuda.graphs`.

Import this module before torch: a CPU build looks for its CUDA hooks while it is
loaded, so what stands in for them must be there by then. Much of what is replaced is
private, so this is for one release of torch and one of Triton (`VERSIONS`).
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import tempfile
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

VERSIONS = {"torch": "2.13.0", "triton": "3.7.1"}


def _load_stand_ins() -> None:
    """Build the C++ side, once for each source and torch, and load it."""
    for package, wanted in VERSIONS.items():
        found = importlib.metadata.version(package).partition("+")[0]
        if found != wanted:
            raise ImportError(f"{package} {found} is installed, this needs {wanted}")
    specification = importlib.util.find_spec("torch")
    assert specification is not None
    assert specification.origin is not None
    root = Path(specification.origin).parent
    source = Path(__file__).with_name("fake_cuda.cpp")
    key = hashlib.sha256(source.read_bytes() + str(root).encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"gcpass_fake_cuda_{key}.so"
    if not library.exists():
        partial = library.with_suffix(f".{os.getpid()}")
        subprocess.run(
            [
                *("g++", "-O1", "-std=c++20", "-shared", "-fPIC", str(source)),
                *(f"-I{root}/include", f"-L{root}/lib", f"-Wl,-rpath,{root}/lib"),
                *("-lc10", "-ltorch_cpu", "-o", str(partial)),
            ],
            check=True,
        )
        partial.replace(library)
    loaded = ctypes.CDLL(str(library))
    import torch  # noqa: F401

    if not loaded.gcpass_install_fake_cuda():
        raise ImportError("import tests.gpu.fake_cuda before torch")


_load_stand_ins()

import torch  # noqa: E402
import triton  # noqa: E402
from torch import nn  # noqa: E402
from torch._dynamo import device_interface  # noqa: E402
from torch._inductor import async_compile  # noqa: E402
from torch._inductor import config as inductor_config  # noqa: E402
from torch._inductor.fx_passes import joint_graph  # noqa: E402
from torch._inductor.graph import GraphLowering  # noqa: E402
from torch._inductor.runtime import hints, triton_helpers  # noqa: E402
from torch._subclasses import fake_tensor  # noqa: E402
from torch.utils import _triton as torch_triton  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

from tests.gpu.program import Graph, Kernel  # noqa: E402

CUDA = torch.device("cuda", 0)

# Data sheets and the CUDA programming guide's table of compute capabilities: name, SMs,
# memory, shared memory of an SM and of a block, L2.
_DEVICES = {
    80: ("NVIDIA A100-SXM4-80GB", 108, 80 << 30, 164 << 10, 163 << 10, 40 << 20),
    90: ("NVIDIA H200", 132, 141 << 30, 228 << 10, 227 << 10, 50 << 20),
}


@dataclass(slots=True, kw_only=True)
class FakeCuda:
    """What was compiled while `fake_cuda` was active."""

    mode: fake_tensor.FakeTensorMode
    graphs: list[Graph] = field(default_factory=list)

    def tensor(self, like: torch.Tensor) -> torch.Tensor:
        """Return a CUDA tensor without data, laid out like another one."""
        with self.mode:
            return torch.empty_strided(
                like.shape,
                like.stride(),
                dtype=like.dtype,
                device=CUDA,
                requires_grad=like.requires_grad,
            )

    def module(self, module: nn.Module) -> nn.Module:
        """Give a module parameters and buffers without data, shared ones shared."""
        new: dict[int, nn.Parameter] = {}
        for part in module.modules():
            for name, old in list(part._parameters.items()):
                if old is not None:
                    fake = nn.Parameter(self.tensor(old.detach()), old.requires_grad)
                    part._parameters[name] = new.setdefault(id(old), fake)
            for name, buffer in list(part._buffers.items()):
                if buffer is not None:
                    part._buffers[name] = self.tensor(buffer)
        return module


class Driver:
    """What Triton asks of a driver while it compiles; nothing can be launched."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        """Return what to compile for."""
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        """Return the only device."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Return the same as torch names it."""
        return CUDA

    def get_device_interface(self) -> Any:
        """Return where torch keeps its functions for the device."""
        return torch.cuda


class _Generator(torch.Generator):
    """Stands for the device's random state where a graph takes it as an input."""

    device = CUDA

    def clone_state(self) -> _Generator:
        return _Generator()

    def graphsafe_get_state(self) -> _Generator:
        return self

    def graphsafe_set_state(self, state: torch.Generator) -> _Generator:
        return self


class _ConstantsOnCpu(TorchDispatchMode):
    """Inductor computes constants of one element with real tensors on the device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        named = dict(kwargs or {})
        if torch.device(named.get("device") or "cpu").type == "cuda":
            named["device"] = torch.device("cpu")
        if func is torch.ops.prims.device_put.default:
            return args[0]
        return func(*args, **named)


class _Nothing:
    """Stands for the guards of a device."""

    def __init__(self, *arguments: Any, **named: Any) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...


@contextmanager
def fake_cuda(capability: int = 90) -> Iterator[FakeCuda]:
    """Compile for a GPU that is not there.

    Args:
        capability: 80 stands for an A100, 90 for an H200.
    """
    mode = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
    session = FakeCuda(mode=mode)
    driver = triton.runtime.driver
    with ExitStack() as stack:
        for owner, name, value in _replacements(capability, session):
            stack.enter_context(mock.patch.object(owner, name, value, create=True))
        properties = {"cuda": [_properties(capability)]}
        known = device_interface.caching_worker_device_properties
        stack.enter_context(mock.patch.dict(known, properties))
        # A thread for each device would be started with the first backward.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.callback(setattr, driver, "_active", driver._active)
        driver.set_active(Driver(capability))
        stack.enter_context(
            inductor_config.patch(
                {
                    "compile_threads": 1,
                    "force_disable_caches": True,
                    "fx_graph_cache": False,
                    "shape_padding": False,  # it times products on the device
                    "assume_aligned_inputs": True,  # else asks for their addresses
                }
            )
        )
        stack.callback(_forget)
        _forget()
        yield session


def _properties(capability: int) -> Any:
    name, multiprocessors, memory, shared, shared_of_block, cache = _DEVICES[capability]
    return types.SimpleNamespace(
        name=name,
        major=capability // 10,
        minor=capability % 10,
        multi_processor_count=multiprocessors,
        total_memory=memory,
        warp_size=32,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=shared_of_block,
        shared_memory_per_multiprocessor=shared,
        L2_cache_size=cache,
        gcnArchName="",
    )


def _replacements(capability: int, session: FakeCuda) -> Iterator[tuple[Any, str, Any]]:
    """Yield (owner, name, what stands there meanwhile)."""
    properties = _properties(capability)
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "is_current_stream_capturing": False,
        "_is_in_bad_fork": False,
        "_lazy_init": None,
        "synchronize": None,
        "set_device": None,
        "device_count": 1,
        "current_device": 0,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        "memory_allocated": 0,
        "mem_get_info": (properties.total_memory, properties.total_memory),
        "get_device_properties": properties,
        "get_device_capability": divmod(capability, 10),
        "get_device_name": properties.name,
        "get_arch_list": [f"sm_{capability}"],
        "is_bf16_supported": True,
        "is_tf32_supported": True,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": None,
    }
    for name, answer in answers.items():
        yield torch.cuda, name, _always(answer)
    yield torch.cuda, "default_generators", (_Generator(),)
    yield torch.cuda, "device", _Nothing
    yield torch.cuda, "_DeviceGuard", _Nothing
    interface = device_interface.CudaInterface
    for name, answer in {
        **{n: answers[n] for n in answers if hasattr(interface, n)},
        "exchange_device": 0,
        "maybe_exchange_device": 0,
        "get_raw_stream": 0,
    }.items():
        yield interface, name, staticmethod(_always(answer))
    # Fake tensors would start the device, and lack the settings for its absence.
    yield fake_tensor, "init_gpu_context", _always(None)
    yield fake_tensor.FakeTensorMode, "avoid_device_init", property(lambda self: True)
    # What generated wrappers import.
    guards = torch._C._dynamo.guards
    yield torch._C, "_cuda_getCurrentRawStream", _always(0)
    yield guards, "_empty_strided_cuda", _empty
    yield guards, "_reinterpret_tensor", _reinterpret
    yield guards, "copy_if_misaligned", lambda tensor: tensor
    folder = joint_graph.UniformValueConstantFolder
    yield folder, "__init__", _on_cpu(folder.__init__)
    yield folder, "run", _on_cpu(folder.run)
    yield triton_helpers, "set_driver_to_gpu", _always(None)
    yield from _recorders(session)


def _recorders(session: FakeCuda) -> Iterator[tuple[Any, str, Any]]:
    """Yield what notes the graphs that Inductor compiles, but not what is only read.

    gcpass has programs generated to read their peak, and gives them up before they are
    compiled; those never get as far as to their kernels.
    """

    def save_source(source: str) -> None:
        lowering = torch._inductor.virtualized.V.graph
        placeholders = lowering.module.graph.find_nodes(op="placeholder")
        session.graphs.append(
            Graph(
                is_backward=lowering.is_backward,
                inputs=[n.name for n in placeholders],
                source=source,
            )
        )

    def keep(self: Any, name: str, source: str, device_str: str = "cuda") -> Kernel:
        kernel = Kernel(name, source)
        session.graphs[-1].kernels.append(kernel)
        return kernel

    yield GraphLowering, "save_output_code", staticmethod(save_source)
    yield async_compile.AsyncCompile, "triton", keep


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *arguments, **named: answer


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        with _ConstantsOnCpu():
            return function(*arguments, **named)

    return call


def _empty(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=CUDA)


def _reinterpret(tensor: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> Any:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


def _forget() -> None:
    """Forget what torch noted about the machine's devices."""
    noted = [v for v in vars(torch_triton).values() if hasattr(v, "cache_clear")]
    noted.append(hints.DeviceProperties.create.__func__)
    for function in noted:
        function.cache_clear()
    torch._dynamo.reset()
