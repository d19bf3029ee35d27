"""Corrupt state directories: segments, the snapshot, the database."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from typing import Final

import msgspec

from shipper.cli.status.text import one_line, report
from shipper.config.settings import SpoolSettings
from shipper.model.errors import StateError
from shipper.model.framing import CsvRows
from shipper.model.records import Checkpoint, Marker, Rejection, Stream
from shipper.sources.segments import Segments, newest_segment_id, open_segment
from shipper.state.letters import EVERYTHING
from shipper.state.store import Store
from shipper.status.document import document
from shipper.status.live import LIVE_FILE, Live, Pause, read_live
from shipper.status.overview import Overview, read_overview
from shipper.status.snapshot import Snapshot
from tests.fuzz.engine import Target
from tests.fuzz.framings import records_of
from tests.fuzz.mutation import mutator

_AT: Final = 1_792_504_800.0
_RAW: Final = b'{"EventId":"a dead letter","ConsumerID":17}'


@contextmanager
def _folder() -> Iterator[Path]:
    """Yield a directory, in memory if possible."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as name:
        yield Path(name)


def check_segments(data: bytes) -> object:
    """
    Check that a spool segment with any bytes and any name is read to its end without losing a line.

    The input: a checkpoint, a name, and the bytes of the segment.
    """
    head, _, body = data.partition(b"\n")
    checkpoint = head[0] if head else 0
    name = os.fsdecode(head[1:].replace(b"/", b"_").replace(b"\0", b"_")) or "000000000007.ndjson"
    with _folder() as folder:
        try:
            (folder / name).write_bytes(body)
        except OSError:
            return "no name"
        known = Stream(stream_id=7, kind="spool", path="x", marker=Marker(checkpoint))
        assert newest_segment_id(folder) >= 0
        numbers = count(100)
        settings = SpoolSettings(segment_bytes=1000, fsync="never")
        segments = Segments(
            folder, settings, known=[known], next_stream_id=lambda: next(numbers), forget=lambda _: None
        )
        found: list[bytes] = []
        for segment in segments:
            with closing(open_segment(segment.path, segment.stream, max_record_bytes=1000)) as reader:
                while chunk := reader.read(is_final=True):
                    found += records_of(chunk.data, chunk.stream.framing, is_first=not chunk.start_offset)
            assert segment.stream.read_offset == len(body), "the segment is not read to its end"
            framing = segment.stream.framing
            start = segment.stream.checkpoint
            wanted = list(records_of(body[start:], framing, is_first=not start))
            assert isinstance(framing, CsvRows) or found == wanted, "a line is lost"
        is_done = bool(body) and checkpoint >= len(body) and not (folder / name).exists()
        return len(segments), is_done, min(len(found), 20), name[-8:]


def check_live(data: bytes) -> object:
    """Check that a snapshot is shown or ignored."""
    with _folder() as folder:
        (folder / LIVE_FILE).write_bytes(data)
        live = read_live(folder)
    if live is None:
        return "none"
    for process_id in (live.process_id, None, 0):
        seen = Snapshot(at=_AT, process_id=process_id, live=live, state=Overview(at=_AT, read=1))
        lines = [*report(seen, Path("/state")), one_line(seen)]
        assert all("\n" not in line and "\x1b" not in line for line in lines), "control characters are shown"
        lines_encoded = "\n".join(lines).encode("utf-8", "surrogatepass")
        assert lines_encoded
    return live.phase, live.outcome[:5], len(live.pauses), live.total_bytes is None, live.at > _AT


@cache
def _database() -> bytes:
    """Return a state store with content in all tables."""
    with _folder() as folder:
        with closing(Store(folder)) as store:
            stream = Stream(stream_id=1, kind="file", path="/logs/a", device=1, inode=2, size=500, mark=(100, 1.0))
            letters = [
                Rejection(start_offset=at, end_offset=at + 9, rule="ip", message="no", raw=_RAW)
                for at in range(0, 90, 10)
            ]
            ledger = {("2026-11-20T12", 7, "", "1"): 3}
            saved = Checkpoint(
                stream=stream,
                end_offset=100,
                tail=b"x",
                read=12,
                accepted=3,
                duplicates=0,
                rejections=letters,
                ledger=[ledger],
            )
            store.save([saved], now_s=1.0)
        return (folder / "state.db").read_bytes()


def check_database(data: bytes) -> object:
    """
    Check that a corrupt database works, or is refused with its name and left unchanged.

    The input: lines `OFFSET:BYTES` overwrite bytes; `!SIZE` truncates the database.
    """
    image = bytearray(_database())
    for line in data.split(b"\n"):
        place, colon, piece = line.partition(b":")
        if line[:1] == b"!" and line[1:].isdigit():
            del image[int(line[1:8]) :]
        elif colon and place.isdigit():
            at = int(place[:8]) % (len(image) + 1)
            image[at : at + len(piece)] = piece
    with _folder() as folder:
        path = folder / "state.db"
        path.write_bytes(image)
        outcome: object = "works"
        try:
            _use(folder)
        except StateError as error:
            outcome = _check_error(error, path, len(image))
        shutil.rmtree(folder / "spool", ignore_errors=True)
    return outcome


def _check_error(error: StateError, path: Path, size: int) -> object:
    assert str(path) in str(error)
    if "left unchanged" in str(error):
        assert path.stat().st_size >= size, "the refused database was truncated"
    return type(error).__name__, type(error.__cause__).__name__, str(error.__cause__)[:30]


def _use(folder: Path) -> None:
    """Read and write like a start and `status`."""
    assert msgspec.json.encode(document(Snapshot(at=_AT, state=read_overview(folder, _AT))))
    with closing(Store(folder)) as store:
        totals = store.totals()
        assert all(isinstance(getattr(totals, name), int) for name in totals.__struct_fields__)
        streams = store.streams.load("file")
        letters = store.letters.newest(EVERYTHING, 10)
        assert len(letters) <= 10
        store.letters.count_by_rule()
        stream = streams[0] if streams else Stream(stream_id=9, kind="file", path="/logs/b")
        end = stream.checkpoint + 10
        done = Checkpoint(stream=stream, end_offset=end, tail=b"", read=1, accepted=1, duplicates=0, rejections=[])
        store.save([done], now_s=2.0)


_LIVE: Final = Live(
    version="1", process_id=7, command="run", destination="https://x.example.com", state_directory="/s",
    phase="running", started_at=_AT, at=_AT, outcome="finished",
    dead_letters={"ip": 1}, requests={"202": 4}, total_bytes=5,
    pauses=[Pause("forbidden", "HTTP 403: no", "have it checked", _AT, _AT + 20)], token_expires_at=_AT + 5,
    restart_needed=["a.b"], latency_p50_seconds=0.1, oldest_unsettled_seconds=3.0, reload_error="no",
)  # fmt: skip
_LINES: Final = b'{"a":1}\n\n{"b":2}\n{"c":3'

TARGETS: Final = (
    Target(
        "segments",
        check_segments,
        [
            *(
                bytes((at,)) + name + b"\n" + _LINES
                for at in (0, 8, 9, 200)
                for name in (b"", b"12.ndjson", b"000000000007.ndjson")
            ),
            b'\x00000000000007.2c.csv\na,b\n1,2\n"x\ny",3\n',
            b"\x00000000000009.3b.csv\na;b\n1;2\n",
            b"\x00notes.txt\nx",
            b"\x007.ff.csv\na,b\n1,2\n",
            b"\x007.c2a7.csv\na,b\n1,2\n",
            b"\x000001.ndjson\n" + b"y" * 3000 + b"\n{}\n",
        ],
        mutator(
            words=[
                *(b".ndjson", b".2c.csv", b".ff.csv", b".0a.csv", b".22.csv", b"\xd9\xa3", b"\n"),
                b"\0" * 20,
                b'"',
                b"\xff",
            ]
        ),
        share=2,
    ),
    Target(
        "snapshot",
        check_live,
        [
            msgspec.json.encode(_LIVE),
            b"",
            b"{}",
            b"null",
            msgspec.json.encode(Live(version="", process_id=0, command="", phase="stopped", started_at=0, at=0)),
        ],
        mutator(
            words=[b"1e300", b"-1", b"\\u001b[2J", b"\\n", b"\\ud800", b"null", b"[" * 300, b"NaN", b"9" * 30],
            values=["running", "stopped", "draining", "gave_up", "\x1b[2J\n", _AT, -_AT, 1e308],
            names=list(Live.__struct_fields__) + list(Pause.__struct_fields__),
        ),
        share=2,
    ),
    Target(
        "database",
        check_database,
        [
            *(b"!%d" % size for size in (0, 1, 15, 16, 100, 4095, 4096, 8192, 20000)),
            *(
                b"%d:%b" % (at, piece)
                for at in (0, 16, 18, 24, 28, 60, 68, 100, 4096, 4100, 8200)
                for piece in (b"\0\0", b"\xff" * 9)
            ),
            b"0:SQLite format 4",
            b"60:\0\0\0\5",
            b"60:\0\0\0\x09",
        ],
        mutator(
            words=[
                *(b"\n4096:", b"\n8192:\r", b"\n12288:", b"\n100:", b"!9000\n", b"\x0a", b"\x0d", b"\xff\xff"),
                *(b"\0\0\0\1", b"9"),
            ]
        ),
        share=0.15,
    ),
)
