"""Followed files, with the real clock: when all files are searched for."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import anyio
import pytest

from shipper.model.records import Chunk
from shipper.sources.tail import FollowedFiles
from tests.unit.follower_bench import Bench


async def test_files_beyond_the_open_ones_are_read_without_searching_for_all_files_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    bench = Bench(tmp_path)
    expected = [b"%04d\n" % number for number in range(40)]
    for data in expected:
        bench.write(f"{int(data):04}.log", data)
    follower = bench.create("*.log", max_open=3)
    searches = Mock(wraps=follower.find)
    monkeypatch.setattr(follower, "find", searches)
    files = FollowedFiles(follower, poll_interval_s=3600)
    tx, rx = anyio.create_memory_object_stream[Chunk](100)
    read: list[bytes] = []
    async with anyio.create_task_group() as tasks, tx, rx:
        tasks.start_soon(files.run, tx)
        while len(read) < len(expected):
            read.append((await rx.receive()).data)
        tasks.cancel_scope.cancel()
    assert (sorted(read), searches.call_count) == (expected, 1)
