"""Hostile records and files, full of canaries. None of them may reach the service."""

from __future__ import annotations

import csv
import gzip
import io
import json
import lzma
import os
import sys
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Final

from tests.e2e.files import COMPRESSIONS
from tests.e2e.test_hostile_texts import TEXT
from tests.fuzz import archives, framings, slow
from tests.fuzz.mutation import mutator
from tests.torture.records import Records

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

LONG: Final = 200_000
BOMB: Final = 96 << 20
_SOURCE: Final = Records(7, 0xFFFF)
FIELDS: Final = tuple(_SOURCE.make(0).event)
_MUTATE: Final = mutator(words=framings.WORDS, values=["192.0.2.77", 10**29, "\x1b[2J", TEXT], names=FIELDS)
_MUTATE_ARCHIVE: Final = mutator(words=archives.SEEDS[1:9])
_NO_ID: Final = "brisk_otter-is-no-uuid"


def document(rng: Random) -> dict[str, Any]:
    """Make a record that is valid except for its EventId."""
    return {**_SOURCE.make(rng.randrange(1 << 30)).event, "EventId": _NO_ID}


def _whole(document: Any) -> bytes:
    return json.dumps(document).encode()


def _repeated(piece: bytes, length: int = LONG) -> bytes:
    return (piece * (length // len(piece) + 1))[:length]


def _digits(rng: Random) -> bytes:
    return rng.choice([b"9" * 5_000, b"-1" + b"0" * 400, b"1e999999999", b"0." + b"0" * 9_000 + b"1", b"1E+400"])


def _with_raw(rng: Random, field: str, raw: bytes) -> bytes:
    return _whole({**document(rng), field: 0xC0FFEE}).replace(b"12648430", raw)


def _mutated(rng: Random) -> bytes:
    """Mutate a record; newlines become spaces, and an empty result becomes a space."""
    return b"x" + _MUTATE(rng, _whole(document(rng)), [framings.TEXTS[0]]).replace(b"\n", b" ")


# JSON values, usable both as lines and as elements of an array.
VALUES: Final[dict[str, Callable[[Random], bytes]]] = {
    "a long text": lambda rng: _whole({**document(rng), rng.choice(FIELDS): "x" * LONG}),
    "beyond the limit": lambda rng: _whole({"Username": "brisk_otter" * rng.randrange(30_000, 90_000)}),
    "quotes without end": lambda rng: b'{"Username":"%b"}' % _repeated(b'\\"'),
    "brackets in texts": lambda rng: b'{"Username":"%b"}' % _repeated(rng.choice([b"]},{", b"[[", b"}]}\\\\"]), 90_000),
    "deep": lambda rng: b'{"a":' * 9_000 + b"1" + b"}" * 9_000,
    "deep arrays": lambda rng: b"[" * LONG + b"]" * LONG,
    "huge number": lambda rng: _with_raw(rng, rng.choice(FIELDS), _digits(rng)),
    "names of fields": lambda rng: _whole({**document(rng), f"{TEXT}brisk_otter{rng.random()}": "192.0.2.9"}),
    "hostile text": lambda rng: _whole({**document(rng), rng.choice(FIELDS): TEXT}),
    "canaries in each field": lambda rng: _whole({**document(rng), rng.choice(FIELDS): "brisk_otter 192.0.2.66"}),
    "very many fields": lambda rng: _whole({**document(rng), **{f"brisk_otter{n}": n for n in range(9_000)}}),
    "one name again and again": lambda rng: b'{%b"a":1}' % _repeated(b'"Username":"brisk_otter",', 90_001 - 1),
    "from the future": lambda rng: _whole({**document(rng), "Timestamp": "2999-01-01T00:00:00Z"}),
    "halves of characters": lambda rng: _whole({**document(rng), "Username": "brisk_otter\ud800"}),
    "scalar": lambda rng: rng.choice([b"17", b"null", b'"brisk_otter"', b"true", b"[1]", b"-0.0"]),
}

LINES: Final[dict[str, Callable[[Random], bytes]]] = {
    **VALUES,
    "deep without end": lambda rng: rng.choice([b"[", b'{"a":', b'{"a":[']) * 40_000,
    "quadratic cost": lambda rng: b"x" + _repeated(rng.choice(slow.PIECES).replace(b"\n", b" ")),
    "NULs": lambda rng: b"\0" * rng.choice([1, 5_000]) + _whole(document(rng)) + b"\0" * 500,
    "not UTF-8": lambda rng: _whole(document(rng)).replace(b"brand", b"\xff\xc3\x28").replace(b"Verified", b"\xed\xa0"),
    "mark of the byte order": lambda rng: b"\xef\xbb\xbf" + _whole(document(rng)),
    "stray quotes": lambda rng: b'"' * rng.randrange(1, 9) + _whole(document(rng)) + b'"',
    "two records": lambda rng: _whole(document(rng)) * 2,
    "cut off": lambda rng: _whole(document(rng))[: rng.randrange(40, 150)],
    "carriage returns": lambda rng: b"\r".join([_whole(document(rng))] * 2),
    "other data": lambda rng: b"x" + rng.randbytes(3_000).replace(b"\n", b"x"),
    "mutated": _mutated,
}


def _row(values: list[str], *, delimiter: str = ",") -> bytes:
    out = io.StringIO()
    csv.writer(out, lineterminator="", delimiter=delimiter).writerow(values)
    return out.getvalue().encode("utf-8", "surrogatepass")


def _changed_row(rng: Random, value: str) -> bytes:
    values = {**document(rng), "Username": "brisk_otter", rng.choice(FIELDS): value}.values()
    return _row([str(each) for each in values])


# Each is one row, whatever follows: an unclosed quote would swallow the following rows.
ROWS: Final[dict[str, Callable[[Random], bytes]]] = {
    "a long value": lambda rng: _changed_row(rng, "x" * LONG),
    "beyond the limit": lambda rng: _changed_row(rng, "brisk_otter" * 40_000),
    "quotes in quotes": lambda rng: _changed_row(rng, '"' * 50_000),
    "hostile text": lambda rng: _changed_row(rng, TEXT.replace("\n", " ").replace("\r", " ")),
    "huge number": lambda rng: _changed_row(rng, _digits(rng).decode()),
    "formula": lambda rng: _changed_row(rng, '=cmd|" /C calc"!A0 brisk_otter'),
    "too many values": lambda rng: b"brisk_otter," * rng.choice([14, 20_000]),
    "too few values": lambda rng: b"192.0.2.3,brisk_otter",
    "quote within a value": lambda rng: b'a"brisk_otter,' * 12 + b'b"c',
    "text behind a quote": lambda rng: b'"brisk_otter"x,' * 6 + b'"y"z',
    "NULs": lambda rng: b"\0" * 900 + b",".join([b"brisk_otter\0"] * 13),
    "not UTF-8": lambda rng: b",".join([b"\xff\xfe192.0.2.8"] * 13),
    "mark of the byte order": lambda rng: b"\xef\xbb\xbf" + _changed_row(rng, "x"),
    "a record of another format": lambda rng: b"x" + _whole(document(rng)).replace(b'"', b"'"),
}


# Files ------------------------------------------------------------------------------------------------------------

_BOMB_PIECES: Final = (bytes(64), b"\n", b"x", b'{"a":', b'"', b"brisk_otter,\n", b"[")


@cache
def _bomb_of(piece: bytes, compression: str) -> bytes:
    is_cheap = len(piece) == 1 or not piece[0]  # to read; the others become many dead letters or a deeply nested one
    return COMPRESSIONS[compression](_repeated(piece, BOMB if is_cheap else LONG))


def _bomb(rng: Random) -> bytes:
    return _bomb_of(rng.choice(_BOMB_PIECES), rng.choice([*COMPRESSIONS])) * rng.choice([1, 1, 1, 4])


def with_window(data: bytes, compression: str, bits: int) -> bytes:
    """Compress with a window of `bits` if the format has windows; up to 26 bits are allowed."""
    if compression == "zst":
        level, window = zstd.CompressionParameter.compression_level, zstd.CompressionParameter.window_log
        return zstd.compress(data, options={level: 1, window: min(bits, 31)})
    if compression == "xz":
        return _with_dictionary(lzma.compress(data, preset=0), 2 * bits - 24)
    return COMPRESSIONS[compression](data)


def _with_dictionary(archive: bytes, code: int) -> bytes:
    """Change the dictionary size in the header of the only block of an xz file."""
    end = 12 + archive[12] * 4
    head = archive[12:end].replace(b"\x21\x01" + archive[16:17], b"\x21\x01" + bytes((code,)), 1)
    return archive[:12] + head + zlib.crc32(head).to_bytes(4, "little") + archive[end + 4 :]


@cache
def _wide(compression: str, bits: int, line: bytes) -> bytes:
    """Compress data that fills any window: one line, or many blank lines that are read in small steps."""
    return with_window(_repeated(line, 140 << 20), compression, bits)


FILES: Final[dict[str, Callable[[Random], bytes]]] = {
    "bomb": _bomb,
    "bomb in a bomb": lambda rng: gzip.compress(gzip.compress(bytes(BOMB))),
    "wide window": lambda rng: _wide(
        rng.choice(["zst", "xz"]), rng.choice([26, 26, 27, 32]), rng.choice([b"x", b" " * 1023 + b"\n"])
    ),
    "broken archive": lambda rng: _MUTATE_ARCHIVE(rng, rng.choice(archives.SEEDS), archives.SEEDS),
    "very many members": lambda rng: gzip.compress(b"") * 20_000,
    "quote without end": lambda rng: ",".join(FIELDS).encode() + b'\n"' + _repeated(b'brisk_otter,"x\n', 3 * LONG),
    "stray quotes": lambda rng: ",".join(FIELDS).encode() + b"\n" + _repeated(b'a","\n', LONG),
    "very many columns": lambda rng: _row(["IP", "BTag", *(f"brisk_otter{n}" for n in range(9_000))]) + b"\n1,2\n" * 99,
    "header without end": lambda rng: b"EventId,IP," + _repeated(b"x,", 3 * LONG),
    "a column twice": lambda rng: b"EventId,IP,IP\nbrisk_otter,192.0.2.1,192.0.2.1\n" * 20,
    "array without end": lambda rng: b'{"EventType":"Acquisition","events":[' + _repeated(rng.choice(slow.PIECES)),
    "deep array": lambda rng: b"[" * 2 * LONG,
    "line without end": lambda rng: _repeated(b"brisk_otter", 5 << 20),
    "lines of nothing": lambda rng: b"\r\n" * LONG,
    "one mistake": lambda rng: b'{"IP":"192.0.2.1"}\n' * 5_000,
    "all from the future": lambda rng: b"".join(VALUES["from the future"](rng) + b"\n" for _ in range(200)),
    "mutated": lambda rng: _MUTATE(rng, rng.choice(framings.TEXTS), framings.TEXTS) * rng.randrange(1, 50),
    "other data": lambda rng: rng.randbytes(LONG),
}


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _holes(path: Path) -> None:
    with path.open("wb") as out:
        out.truncate(768 << 20)
        out.seek(256 << 20)
        out.write(b"brisk_otter\n")


def _reserved(path: Path) -> None:
    path.write_bytes(_whole({"Username": "brisk_otter"}) + b"\n" + bytes(3 << 20))


# Directory entries that are not ordinary files.
THINGS: Final[dict[str, Callable[[Path], None]]] = {
    "pipe": _pipe,
    "folder": lambda path: path.mkdir(),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to nowhere": lambda path: path.symlink_to("nowhere"),
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "link upwards": lambda path: path.symlink_to("..", target_is_directory=True),
    "holes": _holes,
    "reserved room": _reserved,
}
