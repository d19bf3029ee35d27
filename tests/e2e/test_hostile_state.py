"""A manipulated state directory: nothing outside of it is written or followed, and nothing blocks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import Service, Shipper
from tests.e2e.files import append

PRECIOUS = b"precious\n"


@pytest.fixture(scope="module")
def used_directory(_sandbox: Service, sample: Sample, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state directory that a shipper has used."""
    with Shipper(tmp_path_factory.mktemp("used") / "shipper", _sandbox.target) as shipper:
        assert shipper.pipe(*sample.lines[:20]).returncode == 0
        return shipper.state


@pytest.fixture(autouse=True)
def used_state(shipper: Shipper, used_directory: Path) -> None:
    """A used state directory for each shipper."""
    shutil.copytree(used_directory, shipper.state)


@pytest.fixture
def outside(shipper: Shipper) -> Path:
    """A file unrelated to shipper."""
    path = shipper.folder / "elsewhere" / "precious"
    path.parent.mkdir()
    path.write_bytes(PRECIOUS)
    return path


def test_a_link_in_place_of_a_state_file_is_not_followed(
    shipper: Shipper, service: Service, sample: Sample, outside: Path
):
    """One after the other; records refused because of a link are delivered once the link is removed."""
    file = shipper.folder / "events.ndjson"
    names = ["state.db-wal", "state.db-shm", "live.json", ".live.json", "ledger.key", ".ledger.key"]
    for number, name in enumerate(names):
        append(file, *sample.lines[20 + number * 10 : 30 + number * 10])
        place = shipper.state / name
        place.unlink(missing_ok=True)
        place.symlink_to(outside)
        result = shipper.backfill(file, check=False)
        assert outside.read_bytes() == PRECIOUS, name
        assert [path.name for path in outside.parent.iterdir()] == ["precious"], name
        if result.returncode:
            assert str(shipper.state) in result.stderr, "the error is not reported"
        place.unlink(missing_ok=True)
    assert shipper.backfill(file).returncode == 0
    service.assert_holds_exactly(sample.ids[20:80])
    assert shipper.read_state().accepted == 80, "not the twenty earlier events and each of these once"


def _link(place: Path) -> None:
    place.symlink_to(place.parent.parent / "elsewhere" / "precious")


@pytest.mark.parametrize("make", [_link, os.mkfifo, Path.mkdir], ids=["link", "fifo", "folder"])
@pytest.mark.parametrize("name", ["state.db", "state.db-wal", "state.db-shm", "state.db-journal", "lock"])
def test_a_special_file_in_place_of_a_state_file_is_reported_and_never_opened(
    name: str, make: Callable[[Path], None], shipper: Shipper, service: Service, sample: Sample, outside: Path
):
    """No command blocks on a pipe or follows a link, not even a read-only one."""
    place = shipper.state / name
    kept = place.read_bytes() if place.exists() else None
    place.unlink(missing_ok=True)
    make(place)
    before = place.lstat()
    result = shipper.pipe(sample.lines[30], check=False)
    looked = shipper.run("status", check=False)
    result.assert_ended(2 if name == "lock" else 1, f"{place} is a ")
    if name != "lock":
        assert f"{place} is a " in looked.stderr
    assert (place.lstat().st_ino, outside.read_bytes(), service.stored) == (before.st_ino, PRECIOUS, 0)
    place.rmdir() if place.is_dir() else place.unlink()
    if kept is not None:
        place.write_bytes(kept)
    assert shipper.pipe(sample.lines[30]).returncode == 0
    assert shipper.read_state().accepted == 21


def test_a_link_in_place_of_the_spool_is_not_followed(
    shipper: Shipper, service: Service, sample: Sample, outside: Path
):
    """Files there may be named like segments, and would be shipped and deleted."""
    foreign = outside.parent / "000000000001.ndjson"
    foreign.write_bytes(sample.lines[0])
    (shipper.state / "spool").rmdir()
    (shipper.state / "spool").symlink_to(outside.parent)
    result = shipper.pipe(sample.lines[1], check=False)
    assert foreign.read_bytes() == sample.lines[0]
    assert sorted(path.name for path in outside.parent.iterdir()) == [foreign.name, "precious"]
    result.assert_ended(2, str(shipper.state / "spool"), "link")
    assert service.stored == 0


def test_foreign_files_among_the_segments_are_left_alone(
    shipper: Shipper, service: Service, sample: Sample, outside: Path
):
    """A link, a folder and a pipe with names of segments, and a file with another name."""
    outside.write_bytes(sample.lines[5])
    spool = shipper.state / "spool"
    link, folder, fifo, foreign = (
        spool / name for name in [f"{n:012}.ndjson" for n in (77, 78, 79)] + ["notes.ndjson"]
    )
    link.symlink_to(outside)
    folder.mkdir()
    os.mkfifo(fifo)
    foreign.write_bytes(sample.lines[6])
    result = shipper.pipe(sample.lines[20])
    assert (result.returncode, result.counts()) == (0, (1, 1, 0, 0, 0)), result.stderr
    assert {link, folder, fifo, foreign} <= set(spool.iterdir())
    assert (outside.read_bytes(), foreign.read_bytes()) == (sample.lines[5], sample.lines[6])
    service.assert_holds_exactly(sample.ids[20:21])
    assert shipper.run("status").returncode == 0


@pytest.mark.parametrize("make", [_link, os.mkfifo, Path.mkdir], ids=["link", "fifo", "folder"])
def test_a_special_file_in_place_of_the_snapshot_is_not_followed_and_blocks_no_command(
    shipper: Shipper, sample: Sample, outside: Path, make: Callable[[Path], None]
):
    place = shipper.state / "live.json"
    place.unlink()
    make(place)
    result = shipper.run("status")
    assert result.returncode == 0
    assert "20 accepted" in result.stdout
    assert shipper.pipe(sample.lines[30]).returncode == 0
    assert outside.read_bytes() == PRECIOUS
