"""The shape of the project: which room imports which, and what is public."""

from __future__ import annotations

import ast
import doctest
import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import zbuffer

PACKAGE = Path(zbuffer.__file__).parent
#: Rooms from the top of the house to its ground: imports go down only.
FLOORS = [
    {"adapters"},
    {"zbuffer"},
    {"many"},
    {"opening", "testing"},
    {"buffer"},
    {"source", "summary"},
    {"loading", "writing"},
    {"sampling", "reading"},
    {"storage"},
    {"format"},
    {"capacity", "forking", "schema"},
    {"errors"},
]


def floor_of(module: str) -> int:
    room = module.split(".")[1] if "." in module else module
    return next(i for i, rooms in enumerate(FLOORS) if room in rooms)


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def modules() -> list[tuple[str, Path]]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found.append((".".join(p for p in parts if p != "__init__"), path))
    return found


@pytest.mark.parametrize(("module", "path"), modules(), ids=lambda value: str(value))
def test_imports_go_one_way(module: str, path: Path) -> None:
    own_room = module.split(".")[1] if "." in module else module

    for imported in imports_of(path):
        if imported.split(".")[0] == "zbuffer" and imported != "zbuffer":
            room = imported.split(".")[1]
            assert room == own_room or floor_of(imported) > floor_of(module), imported


@pytest.mark.parametrize(
    ("room", "banned"),
    [
        ("sampling", {"os", "io", "threading", "time", "zarr", "blosc2", "torch", "pathlib"}),
        ("loading/prefetch.py", {"numpy", "torch"}),
        ("format", {"threading", "time", "pathlib", "os"}),
        ("schema.py", {"torch", "gymnasium", "zarr", "os"}),
    ],
)
def test_a_room_does_not_know_what_is_not_its_business(room: str, banned: set[str]) -> None:
    target = PACKAGE / room
    paths = [target] if target.is_file() else sorted(target.glob("*.py"))

    for path in paths:
        assert not {name.split(".")[0] for name in imports_of(path)} & banned, path


def test_all_is_exactly_the_public_names() -> None:
    public = {
        name
        for name, value in vars(zbuffer).items()
        if not name.startswith("_") and not isinstance(value, type(sys)) and name != "annotations"
    }

    assert set(zbuffer.__all__) == public
    assert sorted(zbuffer.__all__) == zbuffer.__all__


def test_importing_loads_no_heavy_package() -> None:
    heavy = ["torch", "zarr", "blosc2", "numcodecs", "gymnasium", "matplotlib", "asyncio"]
    code = f"import sys, zbuffer; print([m for m in {heavy} if m in sys.modules])"

    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert found.stdout.strip() == "[]"


def test_every_public_callable_is_documented() -> None:
    for name in zbuffer.__all__:
        assert getattr(zbuffer, name).__doc__, name


@pytest.mark.parametrize(
    "name", [m.name for m in pkgutil.walk_packages([str(PACKAGE)], "zbuffer.")]
)
def test_examples_in_docstrings_run(name: str) -> None:
    if name.endswith("_gather"):
        pytest.skip("the C extension has no docstring examples")
    for adapter, needed in (("gymnasium", "gymnasium"), ("dataloader", "torch")):
        if name == f"zbuffer.adapters.{adapter}":
            pytest.importorskip(needed)
    results = doctest.testmod(importlib.import_module(name))

    assert results.failed == 0
