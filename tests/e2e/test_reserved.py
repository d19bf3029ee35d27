"""Files with preallocated space: NULs from the writer's position to the end, filled in place."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import QUICK, Service, Shipper
from tests.e2e.files import Tail

MEGABYTE = 1_000_000


def sparse(path: Path, size: int) -> None:
    os.truncate(path, size)


def allocated(path: Path, size: int) -> None:
    with path.open("r+b") as out:
        os.posix_fallocate(out.fileno(), 0, size)


def zeros(path: Path, size: int) -> None:
    with path.open("ab") as out:
        out.write(bytes(size - path.stat().st_size))


def fill(path: Path, data: bytes, at: int) -> int:
    """Write into the preallocated space; return the next offset."""
    with path.open("r+b") as out:
        out.seek(at)
        out.write(data)
    return at + len(data)


@pytest.mark.parametrize(("size", "reserve"), [(1, allocated), (9, zeros), (40, sparse)])
def test_records_written_into_preallocated_space_are_read(tail: Tail, size: int, reserve: Callable[[Path, int], None]):
    """Complete lines, a torn one, and lines written while no shipper runs."""
    lines = tail.sample.lines
    tail.append(0, 3)
    reserve(tail.file, size * MEGABYTE)
    tail.start()
    tail.wait(3)
    at = fill(tail.file, b"".join(lines[3:10]) + lines[10][:100], sum(map(len, lines[:3])))
    tail.wait(10)
    at = fill(tail.file, lines[10][100:] + b"".join(lines[11:2000]), at)
    tail.wait(2000)
    tail.stop(2000)

    at = fill(tail.file, b"".join(lines[2000:2010]), at)
    tail.start()
    tail.wait(2010)
    tail.file.rename(tail.file.with_name("app.ndjson.1"))
    at = fill(tail.file.with_name("app.ndjson.1"), b"".join(lines[2010:2020]), at)
    tail.append(2020, 2030)
    tail.wait(2030)
    os.truncate(tail.file.with_name("app.ndjson.1"), at)  # as its writer does at the end
    tail.stop(2030)


def test_a_file_of_only_preallocated_space_is_read_once_it_is_filled(tail: Tail):
    tail.file.touch()
    sparse(tail.file, 5 * MEGABYTE)
    running = tail.start()
    running.wait_for("source_opened")
    fill(tail.file, b"".join(tail.sample.lines[:5]), 0)
    tail.wait(5)
    tail.stop(5)


def test_a_hole_before_lines_is_skipped_though_preallocated_space_follows_them(tail: Tail):
    """Caused by a crash of the file system, or a writer that continues at its old offset after a truncation."""
    lines = tail.sample.lines
    tail.append(0, 3)
    sparse(tail.file, 4 * MEGABYTE)
    tail.append(3, 6)
    end = tail.file.stat().st_size
    sparse(tail.file, 9 * MEGABYTE)
    tail.start()
    tail.wait(6)
    fill(tail.file, b"".join(lines[6:9]), end)
    tail.wait(9)
    fill(tail.file, b"".join(lines[9:12]), 8 * MEGABYTE)  # it skips preallocated space
    tail.wait(12)
    tail.stop(12)


def test_starting_at_the_end_of_a_file_means_before_its_preallocated_space(tail: Tail):
    at = tail.append(0, 3).stat().st_size
    sparse(tail.file, 3 * MEGABYTE)
    running = tail.start(input__start="end")
    running.wait_for("source_opened")
    fill(tail.file, b"".join(tail.sample.lines[3:6]), at)
    tail.wait(range(3, 6))
    tail.stop(range(3, 6))


@pytest.mark.parametrize("ending", [b"", b"\n"])
def test_a_backfill_ends_at_preallocated_space_and_the_next_reads_what_fills_it(
    shipper: Shipper, service: Service, sample: Sample, ending: bytes
):
    path = shipper.folder / "a.ndjson"
    path.write_bytes(b"".join(sample.lines[:10]).rstrip() + ending)
    end = path.stat().st_size
    sparse(path, 3 * MEGABYTE)
    first = shipper.backfill(path)
    assert (first.returncode, first.counts()) == (0, (10, 10, 0, 0, 0))
    assert [checkpoint for *_, checkpoint in shipper.read_state().checkpoints] == [end]
    assert shipper.backfill(path).counts() == (0, 0, 0, 0, 0)
    assert status_of(shipper, path)["lag_bytes"] == 0
    fill(path, b"".join(sample.lines[10:20]), end)
    assert status_of(shipper, path)["lag_bytes"] > 0
    second = shipper.backfill(path)
    assert (second.returncode, second.counts()) == (0, (10, 10, 0, 0, 0))
    service.assert_holds_exactly(sample.ids[:20])


def status_of(shipper: Shipper, path: Path) -> dict[str, Any]:
    """Return the output of `shipper status` about an input."""
    status = json.loads(shipper.run("status", "--json", settings={"input.include": json.dumps([str(path)])}).stdout)
    (stream,) = status["state"]["streams"]
    return stream


def test_a_settled_file_with_preallocated_space_is_deleted(shipper: Shipper, service: Service, sample: Sample):
    path = shipper.folder / "a.ndjson"
    path.write_bytes(b"".join(sample.lines[:10]))
    sparse(path, 3 * MEGABYTE)
    result = shipper.backfill(path, settings={"input.on_complete": "delete", **QUICK})
    assert (result.returncode, result.counts()) == (0, (10, 10, 0, 0, 0))
    assert not path.exists()
