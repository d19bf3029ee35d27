"""A state directory that somebody else has prepared: nothing outside of it is written, followed or waited for."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import Service, Shipper

PRECIOUS = b"precious\n"


@pytest.fixture
def file(shipper: Shipper, sample: Sample) -> Path:
    path = shipper.folder / "events.ndjson"
    path.write_bytes(b"".join(sample.lines[:20]))
    return path


@pytest.fixture
def outside(shipper: Shipper) -> Path:
    """A file that has nothing to do with shipper."""
    path = shipper.folder / "elsewhere" / "precious"
    path.parent.mkdir()
    path.write_bytes(PRECIOUS)
    return path


@pytest.mark.parametrize("name", ["lock", "state.db", "state.db-wal", "state.db-shm", "live.json", ".live.json"])
def test_a_link_in_the_place_of_a_file_of_the_state_leads_nowhere(
    shipper: Shipper, service: Service, sample: Sample, file: Path, outside: Path, name: str
):
    assert shipper.backfill(file).returncode == 0
    file.write_bytes(b"".join(sample.lines[20:40]))
    place = shipper.state / name
    place.unlink(missing_ok=True)
    place.symlink_to(outside)
    result = shipper.backfill(file, check=False)
    assert outside.read_bytes() == PRECIOUS
    assert sorted(path.name for path in outside.parent.iterdir()) == ["precious"]
    if result.returncode:
        assert str(shipper.state) in result.stderr, "nobody can tell what is wrong"
    place.unlink(missing_ok=True)
    assert shipper.backfill(file, check=False).returncode == 0
    assert service.holds(sample.ids[:40])


def test_a_link_in_the_place_of_the_database_to_a_database_is_not_followed(
    shipper: Shipper, service: Service, file: Path, outside: Path
):
    """It would be a shipper's, of another state directory."""
    assert shipper.backfill(file).returncode == 0
    other = outside.parent / "state.db"
    shutil.move(shipper.state / "state.db", other)
    before = other.read_bytes()
    (shipper.state / "state.db").symlink_to(other)
    result = shipper.backfill(file, check=False)
    assert (result.returncode, result.stdout) == (1, "")
    assert f"{shipper.state / 'state.db'}" in result.stderr
    assert "link" in result.stderr
    assert other.read_bytes() == before


def test_a_link_in_the_place_of_the_spool_is_not_followed(
    shipper: Shipper, service: Service, sample: Sample, outside: Path
):
    """What lies there may be named as segments are; it is somebody's, and would be shipped and deleted."""
    shipper.state.mkdir(mode=0o700)
    foreign = outside.parent / "000000000001.ndjson"
    foreign.write_bytes(sample.lines[0])
    (shipper.state / "spool").symlink_to(outside.parent)
    result = shipper.pipe(sample.lines[1], check=False)
    assert foreign.read_bytes() == sample.lines[0]
    assert sorted(path.name for path in outside.parent.iterdir()) == [foreign.name, "precious"]
    assert result.returncode == 2
    assert str(shipper.state / "spool") in result.stderr
    assert "link" in result.stderr
    assert service.stored == 0
    (shipper.state / "spool").unlink()
    assert shipper.pipe(sample.lines[1]).returncode == 0


def _link(place: Path, outside: Path) -> None:
    place.symlink_to(outside)


def _folder(place: Path, _: Path) -> None:
    place.mkdir()


def _fifo(place: Path, _: Path) -> None:
    os.mkfifo(place)


ODD = pytest.mark.parametrize("make", [_link, _folder, _fifo], ids=["link", "folder", "fifo"])


@ODD
def test_what_is_no_file_of_ours_among_the_segments_is_left_alone(
    shipper: Shipper, service: Service, sample: Sample, outside: Path, make: Callable[[Path, Path], None]
):
    outside.write_bytes(sample.lines[5])
    assert shipper.pipe(sample.lines[0]).returncode == 0
    odd = shipper.state / "spool" / "000000000077.ndjson"
    make(odd, outside)
    result = shipper.pipe(sample.lines[1], limit_s=10)
    assert (result.returncode, result.counts()) == (0, (1, 1, 0, 0, 0)), result.stderr
    assert os.path.lexists(odd)
    assert outside.read_bytes() == sample.lines[5]
    service.assert_holds_exactly(sample.ids[:2])
    assert shipper.run("status").returncode == 0


@ODD
def test_status_waits_for_nothing_that_stands_in_the_place_of_the_snapshot(
    shipper: Shipper, service: Service, file: Path, outside: Path, make: Callable[[Path, Path], None]
):
    assert shipper.backfill(file).returncode == 0
    place = shipper.state / "live.json"
    place.unlink()
    make(place, outside)
    result = shipper.run("status", limit_s=10)
    assert result.returncode == 0
    assert "20 accepted" in result.stdout
    again = shipper.backfill(file, limit_s=10)
    assert again.returncode == 0
    assert outside.read_bytes() == PRECIOUS


def test_a_database_whose_version_or_tables_were_never_ours_is_told_without_a_traceback(
    shipper: Shipper, service: Service, file: Path
):
    assert shipper.backfill(file).returncode == 0
    database = shipper.state / "state.db"
    good = database.read_bytes()
    for at in (60, 600):  # the version, and the text of a table
        database.write_bytes(good[:at] + b"\xff" + good[at + 1 :])
        for command in (["backfill", file], ["status"], ["dead-letters", "list"]):
            result = shipper.run(*command, check=False)
            assert result.returncode == 1, result.stderr
            assert str(database) in result.stderr
        database.write_bytes(good)
    assert shipper.backfill(file).returncode == 0
