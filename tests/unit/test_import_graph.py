"""The layering of the package: which units may import which others."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import shipper
from tests.cases import each
from tests.tools.size import circles, import_graph, imported

ROOT = Path(shipper.__file__).parent

# From the ground up; a module imports from its own unit and from lower layers, never from a neighbour or from above.
LAYERS = [
    {"model"},
    {"system"},
    {"config"},
    {"codec"},
    {"sources", "delivery", "state", "sandbox"},
    {"report", "kafka"},
    {"status"},
    {"pipeline", "check"},
    {"cli", "library"},
]
OPEN_TO_ALL = {"__init__"}
NO_IO = {"anyio", "asyncio", "httpx", "sqlite3", "socket", "time", "random", "os", "threading", "subprocess"}
PURE = {"model", "codec"}


def unit_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[0].removesuffix(".py")


@cache
def imports_of(path: Path) -> frozenset[str]:
    return frozenset(imported(path, for_types=True))


def own_units(path: Path) -> set[str]:
    """Return the units of the package that a module imports."""
    units = set()
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] == "shipper" and len(parts) > 1:
            known = (ROOT / parts[1]).is_dir() or (ROOT / f"{parts[1]}.py").exists()
            units.add(parts[1] if known else "__init__")
    return units


MODULES = sorted(ROOT.rglob("*.py"))
LEVEL = {unit: level for level, units in enumerate(LAYERS) for unit in units}


def test_every_unit_has_a_layer():
    units = {unit_of(path) for path in MODULES} - OPEN_TO_ALL - {"__main__"}
    assert units == set(LEVEL)


def test_the_diagram_of_the_package_shows_the_layers():
    diagram = shipper.__doc__.partition("do not import each other:\n\n")[2]
    lines = re.findall(r"^    (\w+(?:, \w+)*)  ", diagram, re.MULTILINE)
    assert [set(line.split(", ")) for line in reversed(lines)] == LAYERS


@each("path", MODULES)
def test_imports_only_go_down(path: Path):
    unit = unit_of(path)
    if unit in OPEN_TO_ALL | {"__main__"}:
        return
    for other in own_units(path) - OPEN_TO_ALL - {unit}:
        assert LEVEL[other] < LEVEL[unit], f"{unit} must not import {other}"


def test_there_are_no_import_cycles():
    assert not circles(import_graph(ROOT.parent))


@each("path", [path for path in MODULES if unit_of(path) in PURE])
def test_the_core_is_pure(path: Path):
    assert not {name.split(".")[0] for name in imports_of(path)} & NO_IO


def test_the_http_library_is_used_in_one_place():
    users = {str(path.relative_to(ROOT)) for path in MODULES if {"httpx", "httpcore"} & imports_of(path)}
    assert users == {"delivery/forms.py"}


def test_only_the_command_line_reads_the_wall_clock():
    users = {unit_of(path) for path in MODULES if "time" in imports_of(path)}
    assert users <= {"cli", "library"}
