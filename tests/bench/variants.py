"""The sample events in other forms: sloppy values, a CSV export with columns of its own, archives, many files."""

from __future__ import annotations

import csv
import gzip
import io
import json
import shutil
from collections.abc import Callable
from itertools import count, islice
from pathlib import Path
from typing import Any

from .blackhole import POISON

POISON_ONE_IN = 10_000
MAPPING = """
[records.mapping]
EventId = "player_uuid"
Timestamp = "registered_at"
BTag = { template = "{media_id}_{click_id}" }
ConsumerID = "player_id"
ConsumerCountry = { from = "country", values = { "United Kingdom" = "GB" } }
ConsumerStatus = { from = "verified", values = { "1" = "Verified", "0" = "Unverified" } }
AffiliateID = { const = "" }
"""


def sloppy(line: bytes) -> bytes:
    """Every record needs normalising, in five fields."""
    event = json.loads(line)
    event["EventId"] = event["EventId"].upper()
    event["Timestamp"] = event["Timestamp"].replace("Z", ".250+00:00")
    event["ConsumerID"] = str(event["ConsumerID"])
    event["ConsumerCountry"] = event["ConsumerCountry"].lower()
    event["AffiliateID"] = None
    return json.dumps(event, separators=(",", ":")).encode() + b"\n"


def poisoner() -> Callable[[bytes], bytes]:
    """One record in 10,000 has a user of the name that the picky server refuses."""
    numbers = count()

    def poison(line: bytes) -> bytes:
        if next(numbers) % POISON_ONE_IN != POISON_ONE_IN // 2:
            return line
        return json.dumps({**json.loads(line), "Username": POISON.decode()}, separators=(",", ":")).encode() + b"\n"

    return poison


def csv_header() -> bytes:
    """The columns that `csv_row` writes."""
    return (
        b"player_uuid,registered_at,IP,media_id,click_id,player_id,country,ConsumerCurrencyID,Username,BrandID,"
        b"CustomerCurrencyID,verified,ConsumerState\n"
    )


def csv_row(line: bytes) -> bytes:
    """A row of an export."""
    row = io.StringIO()
    event = json.loads(line)
    media_id, click_id = event["BTag"].split("_")
    country = "United Kingdom" if event["ConsumerCountry"] == "GB" else event["ConsumerCountry"]
    values = (
        event["EventId"], event["Timestamp"], event["IP"], media_id, click_id, event["ConsumerID"], country,
        event["ConsumerCurrencyID"], event["Username"], event["BrandID"], event["CustomerCurrencyID"],
        int(event["ConsumerStatus"] == "Verified"), event["ConsumerState"],
    )  # fmt: skip
    csv.writer(row, lineterminator="\n").writerow(values)
    return row.getvalue().encode()


def variant(sample: Path, suffix: str, convert: Callable[[bytes], bytes], header: bytes = b"") -> Path:
    """Convert the sample line by line into a file beside it, unless that is there."""
    path = sample.with_suffix(suffix)
    if not path.exists():
        partial = path.with_suffix(".partial")
        with sample.open("rb") as lines, partial.open("wb") as out:
            out.write(header)
            out.writelines(map(convert, lines))
        partial.replace(path)
    return path


def archive(sample: Path, compression: str) -> Path:
    """Compress the sample, gzip or zstd, into a file beside it, unless that is there."""
    path = sample.with_suffix(f".{compression}")
    if not path.exists():
        partial = path.with_suffix(".partial")
        with sample.open("rb") as plain, gzip.open(partial, "wb", 6) if compression == "gz" else _zstd(partial) as out:
            shutil.copyfileobj(plain, out, 1 << 20)
        partial.replace(path)
    return path


def _zstd(path: Path) -> Any:
    from backports import zstd

    return zstd.open(path, "wb")


def many_files(sample: Path, lines_each: int = 500) -> Path:
    """Split the sample into files of so many lines, in a folder beside it, unless that is there."""
    folder = sample.with_suffix(".many")
    if not folder.exists():
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        with sample.open("rb") as lines:
            number = 0
            while part := list(islice(lines, lines_each)):
                (partial / f"{number:06d}.ndjson").write_bytes(b"".join(part))
                number += 1
        partial.replace(folder)
    return folder
