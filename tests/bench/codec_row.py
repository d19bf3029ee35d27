"""
Row `codec`: validation and encoding alone, no network, no state; `python -m tests.bench.codec_row FILE`.

Start-up, imports and the reading of the file are not counted; only the time within the codec is.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

CHUNK_BYTES = 1 << 20


def open_codec() -> Callable[[bytes], int]:
    """
    Make the codec with the default settings; the only function here that knows its interface.

    Returns:
        A function from one chunk (whole lines) to the number of events that the codec accepted.
    """
    from shipper.codec import Codec, accept_events, latest_timestamp
    from shipper.config.settings import RecordsSettings
    from shipper.model.records import Chunk, Stream

    codec = Codec(RecordsSettings(), max_record_bytes=262_144)
    stream = Stream(stream_id=1, kind="file", path="sample")
    latest = latest_timestamp(time.time(), 300)

    def accept(data: bytes) -> int:
        chunk = Chunk(stream=stream, start_offset=0, end_offset=len(data), data=data)
        offset = accepted = 0
        while offset < len(data):
            piece = codec.encode(chunk, offset, room_events=1000, room_bytes=999_000, latest=latest)
            assert piece is not None
            offset = piece.span.end_offset
            accept_events(codec.window, piece.span, range(piece.span.fresh))
            accepted += piece.events - piece.waits
        return accepted

    return accept


def main() -> None:
    """Run the file through the codec, chunk by chunk as the pipeline does, and print count and seconds."""
    accept = open_codec()
    accepted = 0
    seconds = cpu_seconds = 0.0
    with Path(sys.argv[1]).open("rb") as file:
        while chunk := file.read(CHUNK_BYTES) + file.readline():
            begin, cpu_begin = time.perf_counter(), time.process_time()
            accepted += accept(chunk)
            cpu_seconds += time.process_time() - cpu_begin
            seconds += time.perf_counter() - begin
    print(json.dumps({"accepted": accepted, "seconds": seconds, "cpu_seconds": cpu_seconds}))


if __name__ == "__main__":
    main()
