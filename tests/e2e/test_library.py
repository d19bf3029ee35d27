"""An application process that embeds the shipper: it is killed, blocked, or replaced by another one."""

from __future__ import annotations

import inspect
import json
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from random import Random

import pytest

import shipper as shipper_package
from shipper import Shipper as EmbeddedShipper
from tests.e2e.conftest import Sample
from tests.e2e.driver import Running, Service, Shipper
from tests.e2e.fake_service import HANG, FakeService

# Sends the lines of a file, and prints each one taken after `send` has returned.
APPLICATION = """
import os, sys
from pathlib import Path

import anyio
import msgspec

from shipper import Shipper, load_settings

path, way, loop = sys.argv[1:]
lines = Path(path).read_bytes().splitlines()


def tell(taken):
    os.write(1, b"".join(msgspec.json.decode(line).get("EventId", "none").encode() + b"\\n" for line in taken))


async def main():
    async with Shipper(load_settings(config_path=None, environ=os.environ)) as shipper:

        async def send(some):
            for line in some:
                await shipper.send(line)
                tell([line])

        if way == "one by one":
            await send(lines)
        elif way == "many tasks":
            async with anyio.create_task_group() as group:
                for first in range(100):
                    group.start_soon(send, lines[first::100])
        else:
            for start in range(0, len(lines), 100):
                await shipper.send_many(lines[start : start + 100])
                tell(lines[start : start + 100])
    print(msgspec.json.encode(shipper.summary).decode())


anyio.run(main, backend=loop)
"""

# Slow enough to be killed with records in the spool, with many segments and commits.
SLOW = {
    "BATCH__MAX_EVENTS": "20",
    "DELIVERY__CONCURRENCY": "1",
    "STATE__COMMIT_INTERVAL_SECONDS": "0.02",
    "SPOOL__SEGMENT_BYTES": "50000",
    "BATCH__LINGER_SECONDS": "0.1",
}
WAYS = [("one by one", "asyncio"), ("many tasks", "trio"), ("many tasks", "asyncio"), ("send_many", "trio")]

Embed = Callable[..., Running]


@pytest.fixture
def embed(shipper: Shipper) -> Iterator[Embed]:
    """Start an application with the shipper's settings and state."""
    started: list[Running] = []
    folder = shipper.folder / "application"
    folder.mkdir()

    def embed(
        lines: list[bytes],
        way: str = "send_many",
        loop: str = "asyncio",
        *,
        code: str = APPLICATION,
        settings: Mapping[str, str] | None = None,
    ) -> Running:
        number = len(started)
        script, data = folder / f"{number}.py", folder / f"{number}.ndjson"
        script.write_text(code)
        data.write_bytes(b"".join(lines))
        environment = {
            **shipper.environment(),
            "SHIPPER_CONFIG": str(shipper.config),
            **{f"SHIPPER__{key}": value for key, value in (settings or {}).items()},
        }
        command: list[str | Path] = [sys.executable, script, data, way, loop]
        started.append(Running(command, shipper.state, folder, cwd=shipper.folder, env=environment))
        return started[-1]

    yield embed
    for running in started:
        running.end()


def taken(running: Running) -> list[str]:
    """Return the EventIds whose `send` has returned; the last line may be torn."""
    return running._stdout.read_text().split("\n")[:-1]


def test_records_taken_before_a_kill_are_delivered_after_the_next_start(
    shipper: Shipper, service: Service, sample: Sample, embed: Embed, rng: Random
):
    promised: set[str] = set()
    waited = 0
    for kill, (way, loop) in enumerate(WAYS):
        lines = sample.lines[kill * 10_000 : (kill + 1) * 10_000]
        running = embed(lines, way, loop, settings=SLOW)
        goal = rng.randint(1, 1500)
        running.wait_until(lambda running=running, goal=goal: len(taken(running)) >= goal, f"{goal} sent")
        running.kill()
        promised |= set(taken(running))
        waited += not service.holds(promised)
    assert waited, "none was killed with records in its spool"
    last = shipper.pipe()
    assert last.counts()[4] == 0
    ids, held = sample.ids, set(service.event_ids())
    lost = [WAYS[ids.index(each) // 10_000] for each in promised - held]
    assert not lost, f"{len(lost)} lost, such as {lost[:3]}"
    state = shipper.read_state()
    whole = {line.removesuffix(b"\n") for line in sample.lines}
    assert not whole & {letter.raw for letter in state.dead_letters}
    assert len(state.dead_letters) <= len(WAYS), "more dead letters than torn lines"
    assert not list(Path(shipper.state, "spool").iterdir())


def test_undelivered_records_are_delivered_by_the_next_process_on_the_state_directory(
    shipper: Shipper, service: Service, fake: FakeService, sample: Sample, embed: Embed
):
    fake.default = HANG
    first = embed(sample.lines[:500], settings={**SLOW, "DELIVERY__DRAIN_TIMEOUT_SECONDS": "0.1"}).finish()
    assert (first.returncode, first.counts()) == (0, (500, 0, 0, 0, 500))
    fake.release()
    shipper.target = service.target
    left = shipper.state.rename(shipper.folder / "left")
    file = shipper.write("events.ndjson", sample.lines[500])
    for follower in ("application", "pipe", "backfill", "run"):
        service.reset()
        shutil.rmtree(shipper.state, ignore_errors=True)
        shutil.copytree(left, shipper.state)
        if follower == "application":
            counts = embed([sample.lines[500]]).finish().counts()
        elif follower == "pipe":
            counts = shipper.pipe(sample.lines[500]).counts()
        elif follower == "backfill":
            counts = shipper.backfill(file).counts()
        else:
            running = shipper.start("run", settings={"input.include": f'["{file}"]'})
            running.wait_until(lambda: service.stored == 501, "all is delivered")
            assert running.stop().returncode == 0
            state = shipper.read_state()
            counts = (state.read, state.accepted, state.dead_lettered, state.duplicates, 0)
        assert counts == (501, 501, 0, 0, 0), follower
        service.assert_holds_exactly(sample.ids[:501])


def test_the_documented_example_runs_and_logs_nothing_to_stdout(service: Service, embed: Embed):
    document = inspect.getdoc(EmbeddedShipper) or ""
    start, end = document.index("    import os"), document.index("anyio.run(main)\n") + len("anyio.run(main)\n")
    result = embed([], code=textwrap.dedent(document[start:end])).finish()
    assert result.returncode == 0
    (printed,) = result.stdout.splitlines()
    assert printed.startswith("Summary(read=1, accepted=1, dead_lettered=0, duplicates=0, pending=0")
    assert service.stored == 1
    assert all("event" in json.loads(each) for each in result.stderr.splitlines())


def imported_by(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True, check=True, timeout=30
    )
    return {each.rpartition("|")[2].strip() for each in done.stderr.splitlines()}


def test_importing_the_package_loads_few_modules():
    """Every command imports it at startup, even those that send nothing."""
    imported = imported_by("import shipper; print(shipper.__version__)")
    assert "shipper" in imported
    own = {name for name in imported if name.startswith("shipper.")}
    assert own == {"shipper.model", "shipper.model.version"}
    assert not imported & {"anyio", "httpx", "msgspec", "structlog", "asyncio"}


def test_shipping_does_not_load_libraries_of_token_endpoints_and_reports():
    imported = imported_by("from shipper import Shipper")
    assert "shipper.delivery.sender" in imported
    assert not imported & {"httpx", "httpcore", "h11", "tenacity"}


def test_the_public_names_can_be_imported_from_the_package():
    names: dict[str, object] = {}
    exec("from shipper import *", names)
    assert names["Shipper"] is EmbeddedShipper
    assert "load_settings" in names
    with pytest.raises(AttributeError, match="module 'shipper' has no attribute 'nothing'"):
        _ = shipper_package.nothing
