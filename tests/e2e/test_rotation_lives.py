"""Files that are rotated, replaced and alike, many in one life: nothing is lost, nothing is read twice."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from tests.e2e.conftest import Sample
from tests.e2e.files import COMPRESSIONS, compress, open_files, take_inode, warnings_of
from tests.e2e.lives_of_files import HELD, NAME, RESTART, RUNNING, Files, Life, Steps, each
from tests.e2e.rotation_cases import (
    CASES,
    LONG,
    LONG_LINES,
    SHORT_LINE,
    compressed_slowly,
    growing_and_moving,
    late_lines,
)


def _cases_of(case: Callable[..., Steps]) -> list[str]:
    return [name for name in CASES if name.split()[0] == case.__name__]


@pytest.fixture(scope="module")
def life(sample: Sample, tmp_path_factory: pytest.TempPathFactory) -> Life:
    # So long that nothing is closed meanwhile only because it is late, or because a case waits in vain.
    return Life(CASES).live(tmp_path_factory.mktemp("life") / "shipper", sample, input__rotate_wait_seconds=600)


@pytest.mark.parametrize("case", CASES)
def test_whatever_becomes_of_a_file_each_of_its_lines_is_sent_once(life: Life, case: str):
    times = life.times_received(case)
    assert times == dict.fromkeys(times, 1), {key: count for key, count in times.items() if count != 1}


def test_whatever_becomes_of_files_no_record_is_read_twice_and_none_is_invented(life: Life):
    state, short_lines = life.state, len(_cases_of(growing_and_moving))
    assert state.duplicates == 0, f"{state.duplicates} records were read twice"
    assert (state.read, state.accepted, state.dead_lettered) == (life.events + short_lines, life.events, short_lines)


@pytest.mark.parametrize("case", _cases_of(late_lines))
def test_a_renamed_file_that_is_waited_for_is_open_once(life: Life, case: str):
    files = life.cases[case]
    assert files.open_files.count(str(files.folder / "app.ndjson.1")) == 1


@pytest.mark.parametrize("case", _cases_of(compressed_slowly))
def test_a_compressed_file_that_is_still_being_written_is_no_error(life: Life, case: str):
    assert life.cases[case].warned_of <= {"source_replaced"}, "it may have been given the inode of another file"


@pytest.mark.parametrize("case", _cases_of(growing_and_moving))
def test_a_file_smaller_than_its_fingerprint_stays_the_same_stream_while_it_grows_and_moves(life: Life, case: str):
    assert len(life.checkpoints(case)) == 1
    letters = [letter for letter in life.state.dead_letters if life.cases[case].folder in Path(letter.path).parents]
    assert [letter.raw + b"\n" for letter in letters] == [SHORT_LINE]


def test_the_checkpoint_in_a_compressed_file_is_in_bytes_of_its_content(life: Life):
    (checkpoint,) = life.checkpoints(LONG)
    assert checkpoint == sum(map(len, life.cases[LONG].lines[:LONG_LINES]))


# Files that are soon let go of


def hard_links(files: Files) -> Steps:
    files.append(0, 20)
    os.link(files.file, files.folder / "app.ndjson.a")
    yield RUNNING
    os.link(files.file, files.folder / "app.ndjson.b")
    files.append(20, 40, "app.ndjson.b")
    yield RUNNING
    files.file.unlink()
    files.append(40, 60, "app.ndjson.a")
    yield RESTART
    (files.folder / "app.ndjson.a").unlink()
    files.append(60, 80, "app.ndjson.b")
    yield RUNNING
    files.warned_of = {line["event"] for line in warnings_of(files.tail.running, files.file)}


def given_the_inode_of_one_that_was_let_go(files: Files) -> Steps:
    """It is read from its start."""
    old = files.append(0, 10)
    inode = old.stat().st_ino
    yield RUNNING
    with old.open():  # so that nobody else is given it
        old.unlink()
        wait_until_closed(files, old)
    take_inode(files.folder / "app.ndjson.new", inode)
    files.append(10, 40, "app.ndjson.new")
    yield RUNNING


def replaced_by_a_folder_and_back(files: Files) -> Steps:
    files.append(0, 10)
    yield HELD
    files.append(10, 20)
    files.file.unlink()
    files.file.mkdir()
    yield RUNNING
    wait_until_closed(files, files.file)
    files.file.rmdir()
    files.append(20, 30)


def rotated_and_compressed_twice(files: Files, suffix: str) -> Steps:
    """Unread lines were in it when it was compressed; and long after it had been read and closed."""
    files.include = ["app.log*"]
    file = files.append(0, 60, "app.log")
    yield HELD
    files.append(60, 100, file)
    compress(file.rename(files.folder / "app.log.1"), suffix)
    files.append(100, 120, file)
    yield RUNNING
    away = file.rename(files.folder / "outside-the-glob")
    files.append(120, 130, file)
    yield RUNNING
    wait_until_closed(files, away)
    compress(away, suffix, files.folder / f"app.log.2.{suffix}")
    for end in (131, 132):  # a look that found the second line in a new file began after that
        files.append(end - 1, end, f"app.log.other-{end}")
        yield RUNNING


def wait_until_closed(files: Files, path: Path) -> None:
    """Wait until the process has let go of a file that it has read, be it deleted by now or not."""
    running, names = files.tail.running, {str(path), f"{path} (deleted)"}
    running.wait_until(lambda: names.isdisjoint(open_files(running)), f"{path} is closed")


LET_GO = {
    **each(hard_links, ()),
    **each(given_the_inode_of_one_that_was_let_go, ()),
    **each(replaced_by_a_folder_and_back, ()),
    **each(rotated_and_compressed_twice, *product(COMPRESSIONS)),
}


@pytest.fixture(scope="module")
def short_life(sample: Sample, tmp_path_factory: pytest.TempPathFactory) -> Life:
    return Life(LET_GO).live(tmp_path_factory.mktemp("short") / "shipper", sample, input__rotate_wait_seconds=0.1)


@pytest.mark.parametrize("case", LET_GO)
def test_whatever_becomes_of_a_file_that_is_soon_let_go_each_of_its_lines_is_sent_once(short_life: Life, case: str):
    times = short_life.times_received(case)
    assert times == dict.fromkeys(times, 1), {key: count for key, count in times.items() if count != 1}
    # An archive is read again, and nothing of it sent, if its original's name and inode are a new file's by then.
    assert short_life.events == short_life.state.read - short_life.state.duplicates
    assert short_life.state.dead_letters == ()


def test_hard_links_are_one_stream(short_life: Life):
    (case,) = each(hard_links, ())
    assert len(short_life.checkpoints(case)) == 1
    assert not short_life.cases[case].warned_of


# Alike ------------------------------------------------------------------------------------------------------------


def equal_heads_and_equal_ends(files: Files, when: str) -> Steps:
    """A batch of test events at the head of each, more than a fingerprint; the rest is its own. One of them goes."""
    head = b"".join(files.lines[:5])
    for number in range(1, 5):
        path = files.folder / f"app.ndjson.{number}"
        path.write_bytes(head)
        files.append(number * 10, number * 10 + 10, path)
    files.wanted.update(range(5))
    yield when
    (files.folder / "app.ndjson.1").unlink()
    for number in range(5, 8):
        path = files.folder / f"new.{number}"
        path.write_bytes(head)
        files.append(number * 20, number * 20 + 20, path)  # longer than the one that has gone
        path.rename(files.folder / f"app.ndjson.{number}")


def a_new_one_that_begins_like_the_rotated_one(files: Files, when: str) -> Steps:
    """Every file begins with the same record, and of the old one no more had been read."""
    files.include = [NAME]
    files.append(0, 1)
    yield when
    files.append(1, 30)
    files.file.rename(files.folder / "app.ndjson.1")
    files.append(0, 1)
    files.append(30, 60)


def copied_and_left(files: Files) -> Steps:
    """Somebody took the file as the beginning of another one: what it has besides must arrive."""
    files.append(0, 60)
    yield RUNNING
    shutil.copy(files.file, files.folder / "app.ndjson.more")
    files.append(60, 80, "app.ndjson.more")
    files.append(80, 100)
    yield RUNNING


def truncated_beginning_as_it_did(files: Files, when: str) -> Steps:
    """The first lines are more than a fingerprint; only what stands before the old offset, which it outgrew, tells."""
    files.append(0, 20)
    yield when
    shutil.copy(files.file, files.folder / "copy")
    files.file.write_bytes(b"".join(files.lines[:5] + files.lines[20:60]))  # in place
    files.wanted.update(range(60))


ALIKE = {
    **each(copied_and_left, ()),
    **each(truncated_beginning_as_it_did, (HELD,), (RESTART,)),
    **each(equal_heads_and_equal_ends, (HELD,), (RESTART,)),
    **each(a_new_one_that_begins_like_the_rotated_one, (HELD,), (RESTART,)),
}


@pytest.fixture(scope="module")
def life_of_alike(sample: Sample, tmp_path_factory: pytest.TempPathFactory) -> Life:
    return Life(ALIKE).live(tmp_path_factory.mktemp("alike") / "shipper", sample, input__rotate_wait_seconds=0.1)


@pytest.mark.parametrize("case", ALIKE)
def test_files_that_are_alike_lose_nothing_of_what_each_has_of_its_own(life_of_alike: Life, case: str):
    """What they have in common may be sent again."""
    assert 0 not in life_of_alike.times_received(case).values()
    assert life_of_alike.state.dead_letters == ()
    assert life_of_alike.events > 0
