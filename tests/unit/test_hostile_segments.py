"""Spooled rows with any permitted delimiter survive a crash."""

from __future__ import annotations

from itertools import count
from pathlib import Path

from shipper.config.settings import SpoolSettings, load_settings
from shipper.model.errors import ConfigError
from shipper.sources.segments import Segments, form_of


def _segments(directory: Path) -> Segments:
    settings = SpoolSettings(segment_bytes=1000, fsync="never")
    return Segments(directory, settings, known=[], next_stream_id=count(1).__next__, forget=lambda _: None)


def test_every_delimiter_is_refused_by_its_key_or_survives_a_crash(tmp_path: Path):
    kept: list[str] = []
    refusals: set[str] = set()
    for number in [*range(0x101), 0x2028, 0x20AC, 0x1F600]:
        delimiter = chr(number)
        try:
            settings = load_settings(config_path=None, environ={}, flags={"input.csv_delimiter": delimiter})
        except ConfigError as error:
            refusals.add(error.key)
            continue
        directory = tmp_path / str(number)
        segments = _segments(directory)
        segments.header, segments.delimiter = f"IP{delimiter}BTag\n".encode(), settings.input.csv_delimiter
        segments.append(f"1{delimiter}2\n".encode())
        segments.close()
        (found,) = _segments(directory)
        form = form_of(found.path)
        assert (form.format, form.csv_delimiter) == ("csv", delimiter)
        kept.append(delimiter)
    assert refusals == {"input.csv_delimiter"}
    assert {",", ";", "\t", "|", " ", "#"} <= set(kept)


def test_a_file_with_a_foreign_name_is_no_segment(tmp_path: Path):
    for name in ("1.ff.csv", "1.c2a7.csv", "1.2.csv", "\u0661.ndjson", "1\u0662.ndjson", "1.ndjson.bak", "1.2C.csv"):
        (tmp_path / name).write_bytes(b"a,b\n1,2\n")
    assert len(_segments(tmp_path)) == 0
    assert len(list(tmp_path.iterdir())) == 7
