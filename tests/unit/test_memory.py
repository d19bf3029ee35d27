"""Freed memory is returned to the system, even below memory still in use."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

MEASURE = """
import anyio, gc, os, threading
from shipper.system import memory

def resident_mib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

def hold():
    blocks = [bytes([1]) * 100_000 for _ in range(1000)]
    kept.append(blocks[-1])

memory.share_one_arena()
memory._TRIM_SECONDS = 0.01
kept = []
before = resident_mib()
thread = threading.Thread(target=hold)
thread.start()
thread.join()
hold()
held = resident_mib() - before

async def wait():
    async with anyio.create_task_group() as side:
        side.start_soon(memory.trim_heap_periodically)
        with anyio.move_on_after(30):
            while resident_mib() - before > 20:
                await anyio.sleep(0.01)
        side.cancel_scope.cancel()

anyio.run(wait)
print(held, resident_mib() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries behave differently")
def test_free_memory_below_used_memory_is_released():
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True, timeout=60)
    held, left = map(int, done.stdout.split())
    assert 50 < held < 150, "two threads share one arena, which keeps what is freed"
    assert left <= 20
