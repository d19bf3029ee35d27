"""
Measure the size of the code: `python -m tests.tools.size [--way] [CHECKOUT]`.

    files, lines  of Python
    top level     packages and modules at the top level of the package
    layers        length of the longest import chain between them
    cycles        imports between modules that are part of a cycle
    record path   modules that are called for each batch of a backfill; only with --way, which takes some seconds
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

BATCHES = 50
# Runs in the measured process: counts the function calls of all threads by module.
COUNT_CALLS = """
import atexit, collections, json, os, sys, threading
calls = collections.Counter()
def note(frame, event, _):
    if event == "call":
        calls[frame.f_globals.get("__name__", "")] += 1
def save():
    sys.setprofile(None)
    with open(os.environ["CALLS"], "w") as out:
        json.dump(calls, out)
atexit.register(save)
threading.setprofile(note)
sys.setprofile(note)
"""
# Runs in the checkout, and uses its benchmark.
SHIP = """
import os, subprocess, sys
from pathlib import Path
from tests.bench import rows
from tests.bench.measure import running_server
count, folder = int(sys.argv[1]), Path(sys.argv[2])
with running_server((), 0.0) as server:
    command = rows.command("backfill", rows.Bench(rows.sample_file(count), server.urls, count), folder)
    counted = {**os.environ, "PYTHONPATH": f"{folder}:{Path.cwd()}", "CALLS": str(folder / "calls")}
    sys.exit(subprocess.run([sys.executable, *command], env=counted).returncode)
"""

Graph = Mapping[str, frozenset[str]]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.size", description="Measure the size of the code.")
    parser.add_argument("checkout", nargs="?", type=Path, default=Path(), help="default: the current folder")
    parser.add_argument("--way", action="store_true", help="also count the modules in the record path")
    options = parser.parse_args()
    root: Path = options.checkout.resolve()
    for part in ("shipper", "tests"):
        texts = [path.read_text() for path in sorted((root / part).rglob("*.py"))]
        print(f"{part:18} {len(texts):>7,} files {sum(text.count(chr(10)) for text in texts):>8,} lines")
    modules = import_graph(root)
    rooms = {room_of(module) for module in modules} - {"shipper"}
    floors = between_rooms(modules)
    print(f"{'top level':18} {len(rooms):>7,}")
    print(f"{'layers':18} {max(height(room, floors, ()) for room in rooms):>7,}")
    back = circles(modules)
    print(f"{'cycles':18} {len(back):>7,} {' '.join(back)}")
    print(f"{'README':18} {(root / 'README.md').stat().st_size:>7,} bytes")
    if options.way:
        way = on_the_way(root)
        print(f"{'record path':18} {len(way):>7,} {' '.join(way)}")


def import_graph(root: Path) -> Graph:
    """Return the modules that each module imports at run time, not those imported only for types."""
    paths = {module_name(path.relative_to(root)): path for path in sorted((root / "shipper").rglob("*.py"))}
    return {name: frozenset(imported(path, for_types=False)) & paths.keys() - {name} for name, path in paths.items()}


def module_name(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def imported(path: Path, *, for_types: bool) -> Iterator[str]:
    """Yield the dotted names of all imports, including those within functions; `for_types`: also those for types."""
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        if not for_types and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        waiting += ast.iter_child_nodes(node)


def room_of(module: str) -> str:
    return ".".join(module.split(".")[1:2]) or "shipper"


def between_rooms(modules: Graph) -> Graph:
    rooms: dict[str, set[str]] = {room_of(module): set() for module in modules}
    for module, others in modules.items():
        rooms[room_of(module)] |= {room_of(other) for other in others} - {room_of(module), "shipper"}
    return {room: frozenset(others) for room, others in rooms.items()}


def height(room: str, rooms: Graph, below: tuple[str, ...]) -> int:
    return 1 + max((height(each, rooms, (*below, room)) for each in rooms[room] if each not in below), default=0)


def circles(modules: Graph) -> list[str]:
    """Return the imports that are part of a cycle."""
    reached = {module: reachable(module, modules) for module in modules}
    return sorted(f"{one}->{each}" for one, others in modules.items() for each in others if one in reached[each])


def reachable(start: str, modules: Graph) -> set[str]:
    found, waiting = {start}, [start]
    while waiting:
        new = modules[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def on_the_way(root: Path) -> list[str]:
    """Return the modules that are called for each batch: those called more often for more batches."""
    few, many = calls(root, BATCHES), calls(root, 3 * BATCHES)
    return sorted(name for name in many if name.startswith("shipper.") and many[name] - few.get(name, 0) > BATCHES)


def calls(root: Path, batches: int) -> dict[str, int]:
    """Ship batches to a server on loopback, and return the number of function calls by module."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        (folder / "sitecustomize.py").write_text(COUNT_CALLS)
        subprocess.run(
            [sys.executable, "-c", SHIP, str(1000 * batches), folder],
            cwd=root,
            env={"PYTHONPATH": str(root), "PATH": os.environ["PATH"]},
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return json.loads((folder / "calls").read_text())


if __name__ == "__main__":
    main()
