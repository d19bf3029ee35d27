"""The sample files, created on first use and kept: events of a profile, and their other forms."""

from __future__ import annotations

import csv
import gzip
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, Final

from shipper.sandbox.samples import SampleProfile
from tests.bench.blackhole import POISON
from tests.bench.measure import RowError, lines_of
from tests.processes import ROOT, SHIPPER, clean_environment

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

POISON_ONE_IN: Final = 10_000
LINES_EACH: Final = 500  # in each of many files
MAPPING: Final = """
[records.mapping]
EventId = "player_uuid"
Timestamp = "registered_at"
BTag = { template = "{media_id}_{click_id}" }
ConsumerID = "player_id"
ConsumerCountry = { from = "country", values = { "United Kingdom" = "GB" } }
ConsumerStatus = { from = "verified", values = { "1" = "Verified", "0" = "Unverified" } }
AffiliateID = { const = "" }
"""
CSV_HEADER: Final = (
    b"player_uuid,registered_at,IP,media_id,click_id,player_id,country,ConsumerCurrencyID,Username,BrandID,"
    b"CustomerCurrencyID,verified,ConsumerState\n"
)


def _make(path: Path, write: Callable[[Path], object]) -> Path:
    """Create a file or folder elsewhere and move it to its path, unless it exists."""
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        partial = path.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        write(partial)
        partial.replace(path)
    return path


def sample_file(events: int, profile: SampleProfile = "operator") -> Path:
    """
    Return the sample events of a profile.

    Raises:
        RowError: `shipper sample` failed, or the file has another number of lines.
    """
    if not SHIPPER.exists():
        raise RowError(f"{SHIPPER} is missing; `make setup` installs it")

    def write(path: Path) -> None:
        command = [SHIPPER, "sample", "--profile", profile, "--count", str(events), "--seed", "1"]
        with path.open("wb") as file:
            done = subprocess.run(command, stdout=file, stderr=subprocess.PIPE, env=clean_environment())
        if done.returncode:
            last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise RowError(f"`shipper sample` ended with exit code {done.returncode}: {last}")

    path = _make(ROOT / ".bench" / f"{profile}-{events}.ndjson", write)
    lines = lines_of(path)
    if lines != events:
        raise RowError(f"{path} has {lines:,} lines instead of {events:,}; delete it to create it again")
    return path


def form_of(sample: Path, form: str) -> Path:
    """
    Return the events of a sample in another form.

    Args:
        form: `sloppy`: all need normalising; `picky`: one in 10,000 is POISON; `csv`: an export with other columns,
            see MAPPING; `many`: a folder of files of 500 events; `gz` and `zst`: an archive.
    """
    path = sample.with_suffix(f".{form}")
    match form:
        case "sloppy":
            return _make(path, lambda out: _convert(sample, out, _sloppy))
        case "picky":
            return _make(path, lambda out: _convert(sample, out, _poisoned))
        case "csv":
            return _make(path, lambda out: _convert(sample, out, _csv_row, CSV_HEADER))
        case "many":
            return _make(path, lambda folder: _split(sample, folder))
        case _:
            return _make(path, lambda out: _compress(sample, out, form))


def _convert(sample: Path, path: Path, convert: Callable[[int, bytes], bytes], header: bytes = b"") -> None:
    with sample.open("rb") as lines, path.open("wb") as out:
        out.write(header)
        out.writelines(convert(number, line) for number, line in enumerate(lines))


def _encode(event: dict[str, Any]) -> bytes:
    return json.dumps(event, separators=(",", ":")).encode() + b"\n"


def _poisoned(number: int, line: bytes) -> bytes:
    if number % POISON_ONE_IN != POISON_ONE_IN // 2:
        return line
    return _encode({**json.loads(line), "Username": POISON.decode()})


def _sloppy(_: int, line: bytes) -> bytes:
    event = json.loads(line)
    return _encode(
        event
        | {
            "EventId": event["EventId"].upper(),
            "Timestamp": event["Timestamp"].replace("Z", ".250+00:00"),
            "ConsumerID": str(event["ConsumerID"]),
            "ConsumerCountry": event["ConsumerCountry"].lower(),
            "AffiliateID": None,
        }
    )


def _csv_row(_: int, line: bytes) -> bytes:
    event = json.loads(line)
    media_id, click_id = event["BTag"].split("_")
    country = "United Kingdom" if event["ConsumerCountry"] == "GB" else event["ConsumerCountry"]
    values = (
        event["EventId"], event["Timestamp"], event["IP"], media_id, click_id, event["ConsumerID"], country,
        event["ConsumerCurrencyID"], event["Username"], event["BrandID"], event["CustomerCurrencyID"],
        int(event["ConsumerStatus"] == "Verified"), event["ConsumerState"],
    )  # fmt: skip
    row = io.StringIO()
    csv.writer(row, lineterminator="\n").writerow(values)
    return row.getvalue().encode()


def _split(sample: Path, folder: Path) -> None:
    folder.mkdir()
    with sample.open("rb") as lines:
        number = 0
        while part := list(islice(lines, LINES_EACH)):
            (folder / f"{number:06d}.ndjson").write_bytes(b"".join(part))
            number += 1


def _compress(sample: Path, path: Path, compression: str) -> None:
    with sample.open("rb") as plain, gzip.open(path, "wb", 6) if compression == "gz" else zstd.open(path, "wb") as out:
        shutil.copyfileobj(plain, out, 1 << 20)
