"""The layout rules: one import name, imports that point down, no torch below."""

import ast
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import gcpass
from gcpass.toolchain import ENTRY_POINT, ENTRY_POINT_GROUP, SUPPORTED_TORCH

ROOT = Path(__file__).parents[1]
TORCH_FREE = [
    "gcpass",
    "gcpass.budget",
    "gcpass.cli",
    "gcpass.decisions",
    "gcpass.describe",
    "gcpass.errors",
    "gcpass.hardware",
    "gcpass.options",
    "gcpass.scopes",
    "gcpass.size_function",
    "gcpass.solvers",
    "gcpass.toolchain",
    "gcpass.units",
]


def imported_names(path: Path) -> set[str]:
    """Return every module that a file imports, at any depth of nesting."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(str(node.module))
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def python(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True
    )


@pytest.mark.parametrize("module", TORCH_FREE)
def test_import_loads_no_torch(module: str, tmp_path: Path) -> None:
    result = python(
        f"import sys, {module}; sys.exit('torch' in sys.modules)", cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr


def test_package_imports_without_pydantic_or_ortools_too(tmp_path: Path) -> None:
    code = (
        "import sys, gcpass; "
        "sys.exit(any(m in sys.modules for m in ('pydantic', 'ortools', 'numpy')))"
    )
    assert python(code, cwd=tmp_path).returncode == 0


def test_solvers_refuses_a_second_name() -> None:
    result = python("import solvers", cwd=ROOT)
    assert result.returncode == 1
    assert "import this package as gcpass.solvers" in result.stderr


def test_a_users_own_solvers_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "solvers").mkdir()
    (tmp_path / "solvers" / "__init__.py").write_text("mine = 1\n")
    result = python("import gcpass.solvers, solvers; print(solvers.mine)", cwd=tmp_path)
    assert result.stdout == "1\n", result.stderr


@pytest.mark.parametrize("path", sorted((ROOT / "solvers").glob("*.py")), ids=str)
def test_solvers_import_nothing_above_them(path: Path) -> None:
    above = {
        name
        for name in imported_names(path)
        if is_within(name, "torch")
        or (is_within(name, "gcpass") and not is_within(name, "gcpass.solvers"))
    }
    assert above - {"gcpass"} == set()


def test_check_shares_no_code_with_the_solvers() -> None:
    names = imported_names(ROOT / "solvers" / "check.py")
    shared = {n.split(".")[2] for n in names if n.startswith("gcpass.solvers.")}
    assert shared <= {"problem", "errors"}


def test_private_torch_is_imported_in_one_module() -> None:
    offenders = {
        path.name
        for path in (ROOT / "gcpass").glob("*.py")
        if any(name.startswith("torch._") for name in imported_names(path))
    }
    assert offenders <= {"torch_private.py"}


def test_every_public_name_resolves() -> None:
    assert set(gcpass.__all__) <= set(dir(gcpass))
    for name in gcpass.__all__:
        assert getattr(gcpass, name) is not None


def test_backend_is_the_module_and_can_be_called() -> None:
    assert gcpass.backend is sys.modules["gcpass.backend"]
    assert callable(gcpass.backend)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'bakend'"):
        gcpass.bakend  # noqa: B018


def test_version_of_a_checkout_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert gcpass.__version__ == "0+unknown"


def test_metadata_agrees_with_the_code() -> None:
    least, below = (".".join(map(str, version)) for version in SUPPORTED_TORCH)
    required = metadata.requires("gcpass") or []
    assert any(set(r[5:].split(",")) == {f">={least}", f"<{below}"} for r in required)
    (entry,) = metadata.entry_points(group=ENTRY_POINT_GROUP, name="gcpass")
    assert entry.value == ENTRY_POINT
    (script,) = metadata.entry_points(group="console_scripts", name="gcpass")
    assert script.value == "gcpass.cli:main"
