"""What gcpass needs from the machine: found, or an error that names the package."""

import sysconfig
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from gcpass import toolchain
from gcpass.errors import (
    GcpassError,
    MissingCompilerError,
    SolverError,
    UnsupportedTorchError,
)


def make_command(folder: Path, name: str) -> str:
    path = folder / name
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")


@pytest.mark.usefixtures("linux")
def test_compiler_on_the_path(tmp_path: Path) -> None:
    gxx = make_command(tmp_path, "g++")
    assert toolchain.require_cpp_compiler(environ={"PATH": str(tmp_path)}) == gxx


@pytest.mark.usefixtures("linux")
def test_cxx_wins_over_the_default(tmp_path: Path) -> None:
    make_command(tmp_path, "g++")
    clang = make_command(tmp_path, "clang++")
    environ = {"PATH": str(tmp_path), "CXX": "clang++"}
    assert toolchain.require_cpp_compiler(environ=environ) == clang
    environ["CXX"] = "icpx"
    with pytest.raises(MissingCompilerError, match="looked for icpx"):
        toolchain.require_cpp_compiler(environ=environ)


@pytest.mark.usefixtures("linux")
def test_missing_compiler_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(MissingCompilerError) as caught:
        toolchain.require_cpp_compiler()
    assert caught.value.searched == ("g++",)
    assert "no C++ compiler found" in str(caught.value)
    assert "apt-get install g++" in str(caught.value)
    assert "dnf install gcc-c++" in str(caught.value)
    assert "xcode-select --install" in str(caught.value)


@pytest.mark.usefixtures("linux")
def test_configured_search_is_taken_in_order(tmp_path: Path) -> None:
    make_command(tmp_path, "g++")
    clang = make_command(tmp_path, "clang++")
    environ = {"PATH": str(tmp_path)}
    search = (None, "missing", "clang++", "g++")
    assert toolchain.require_cpp_compiler(search, environ) == clang
    environ["TORCH_INDUCTOR_INSTALL_GXX"] = "1"
    assert "Inductor" in toolchain.require_cpp_compiler(search, environ)


@pytest.mark.parametrize(
    ("platform", "command"), [("darwin", "clang++"), ("win32", "cl")]
)
def test_default_compiler_of_a_platform(
    platform: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(name: str, path: str | None = None) -> str:
        return f"found {name}"

    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setattr("shutil.which", find)
    assert toolchain.require_cpp_compiler(environ={}) == f"found {command}"


def test_missing_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def include(name: str) -> str:
        return str(tmp_path)

    monkeypatch.setattr(sysconfig, "get_path", include)
    with pytest.raises(MissingCompilerError, match="python3-dev"):
        toolchain.require_python_headers()
    (tmp_path / "Python.h").touch()
    assert toolchain.require_python_headers() == str(tmp_path / "Python.h")


def fixed_version(version: str) -> Callable[[str], str]:
    return lambda name: version


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.14.1.dev20260101"])
def test_supported_torch(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", fixed_version(version))
    assert toolchain.require_torch() == version


@pytest.mark.parametrize("version", ["1.13.1", "2.10.0", "2.15.0", "3.0.0"])
def test_unsupported_torch(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", fixed_version(version))
    with pytest.raises(UnsupportedTorchError, match=f"found {version}") as caught:
        toolchain.require_torch()
    assert "torch>=2.11,<2.15" in str(caught.value)


def test_missing_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(UnsupportedTorchError, match="not installed"):
        toolchain.require_torch()


@pytest.mark.parametrize("failure", [ImportError("gone"), OSError("no libortools")])
def test_broken_ortools(failure: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise failure

    monkeypatch.setattr(toolchain, "import_module", fail)
    with pytest.raises(SolverError, match=f"{failure}.*pip install"):
        toolchain.require_ortools()


@pytest.mark.parametrize(
    ("values", "says"), [([], "does not know"), (["other:f"], "is other:f and should")]
)
def test_entry_point_missing_or_taken(
    values: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def entries(group: str, name: str) -> list[metadata.EntryPoint]:
        return [metadata.EntryPoint(name, value, group) for value in values]

    monkeypatch.setattr(metadata, "entry_points", entries)
    with pytest.raises(GcpassError, match=says):
        toolchain.require_entry_point()
