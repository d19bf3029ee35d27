"""The whole of a soak: what is started, what is looked at, and the account at the end."""

from __future__ import annotations

import csv
import http.client
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from shipper.sandbox.samples import sample_lines
from tests.bench.measure import ROOT, clean_environment
from tests.e2e.driver import Running, Shipper, Target
from tests.soak.flatness import CURVES, Judgement, judge_all
from tests.soak.looking import Look, Rates, look_at_metrics, look_at_process, look_at_state
from tests.soak.writing import BLOCK_LINES, Blocks, FileWriter, PipeWriter, Writer, Written, write_finished

PARTS: Final = ("run", "pipe")
AHEAD: Final = 300_000  # events: some 100 MB
GONE_FILES: Final = 11_000  # shipper remembers so many; if they are not there from the start, they are what grows
DRAIN_LIMIT_S: Final = 300
_SETTINGS: Final = {
    "delivery.read_timeout_seconds": 5,
    "delivery.retry_max_seconds": 2,
    "delivery.max_concurrency": 16,  # so that as many connections as there may be are open after the warm-up
    "log.format": "json",
}
_RUN_SETTINGS: Final = {"input.on_complete": "delete", "input.rotate_wait_seconds": 1}
_PIPE_SETTINGS: Final = {"spool.max_bytes": 64 << 20, "spool.segment_bytes": 8 << 20}


class Plan(NamedTuple):
    """
    Attributes:
        seconds: From when all is under way until the writers stop.
        cycle_s: The service is away once in each, and the dead letters are purged after each.
        look_s: Between two looks.
        gone_files: Inputs that `run` has to remember from the start.
        ahead: Events that may be written to files and have not arrived.
        parts: Some of `PARTS`.
    """

    seconds: float
    seed: int = 1
    cycle_s: float = 60.0
    look_s: float = 1.0
    gone_files: int = GONE_FILES
    ahead: int = AHEAD
    parts: Sequence[str] = PARTS


class Part:
    """
    One shipper with its writer.

    Attributes:
        before: What was written before the writer began.
        looks: Seconds since the start of the soak, and what was seen.
        log: Its stderr.
    """

    def __init__(self, name: str, running: Running, shipper: Shipper, writer: Writer, cycle_s: float) -> None:
        self.name = name
        self.running = running
        self.shipper = shipper
        self.writer = writer
        self.before = Written()
        self.looks: list[tuple[float, Look]] = []
        self._rates = Rates(cycle_s)
        self._purging: Running | None = None
        running.wait_for("admin_listening", limit_s=60)
        told = next(line for line in running.stderr.splitlines() if "admin_listening" in line)
        self.port = int(json.loads(told)["address"].rpartition(":")[2])
        (self.log,) = shipper.folder.glob("output/*.stderr")

    @property
    def written(self) -> Written:
        """All that it has to deliver."""
        return self.before + self.writer.written

    def wait_for_first(self, service: Service) -> None:
        """Wait until some of what is written has arrived."""
        before = self.before.accepted
        self.running.wait_until(lambda: service.arrived(self.name) > before, "it is under way", limit_s=DRAIN_LIMIT_S)

    def look(self, at: float) -> Look:
        """Look once, and hold what is seen to the promise."""
        look = look_at_process(self.running.pid) | look_at_state(self.shipper.state) | look_at_metrics(self.port)
        settled = look["accepted"] + look["dead_lettered"] + look["duplicates"]
        assert look["read"] == settled + look["pending"], f"{self.name}: the account does not balance: {look}"
        look["log_bytes"] = self.log.stat().st_size
        look["input_files"] = sum(1 for _ in _inputs(self.shipper).iterdir())
        self._rates.add(at, look)
        self.looks.append((at, look))
        return look

    def has_settled(self, records: int) -> bool:
        """Return whether so many are settled, and none is pending."""
        metrics = look_at_metrics(self.port)
        return (metrics["read"], metrics["pending"]) == (records, 0)

    def purge(self) -> None:
        """Have the dead letters deleted as an operator does, so that the database has nothing that may grow."""
        if self._purging is None or self._purging.has_ended:  # else the machine is busy, and the next cycle will do
            self.end_purge()
            self._purging = self.shipper.start("dead-letters", "purge", "--all", "--yes", check=False)

    def end_purge(self) -> None:
        """Wait for the purge, if there is one."""
        if self._purging is not None:
            result = self._purging.finish(limit_s=DRAIN_LIMIT_S)
            assert result.returncode == 0, result.stderr
            self._purging = None


class Service:
    """The service, seen from here."""

    def __init__(self, port: int) -> None:
        self.target = Target(f"http://127.0.0.1:{port}", "soak-subscription-key", "soak-token")
        self._port = port

    def ask(self, method: str, path: str) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        try:
            connection.request(method, path)
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()

    def arrived(self, part: str) -> int:
        """How many different events of a part have arrived."""
        return self.ask("GET", "/counts")["events"].get(str(PARTS.index(part)), 0)


class Outcome(NamedTuple):
    """
    What came of a soak.

    Attributes:
        judgements: By part.
        account: Lines for people.
    """

    judgements: dict[str, list[Judgement]]
    account: list[str]
    looks: dict[str, list[tuple[float, Look]]]

    @property
    def growing(self) -> list[str]:
        """The curves that are not flat."""
        return [f"{part}: {each.curve.title}" for part, all_ in self.judgements.items() for each in all_ if each.grows]

    @property
    def unjudged(self) -> list[str]:
        """The parts of which not even the memory could be judged."""
        return [part for part, all_ in self.judgements.items() if all(each.curve.name != "rss_mib" for each in all_)]


def soak(plan: Plan, folder: Path, tell: Callable[[str], None]) -> Outcome:
    """
    Ship for a while, and see what grows.

    Args:
        folder: Empty; holds some hundred MB meanwhile.
        tell: Called with a line about once a cycle.
    Raises:
        AssertionError: Something is lost or wrong.
    """
    with _service(plan) as service, ExitStack() as stack:
        parts = [_started(name, plan, folder / name, service, stack) for name in plan.parts]
        for part in parts:
            stack.callback(part.writer.ask_to_stop)
            part.writer.start()
        for part in parts:
            part.wait_for_first(service)
        begin = time.monotonic()
        _watch(parts, plan, begin, tell)
        seconds = time.monotonic() - begin
        service.ask("POST", "/quiet")
        account = [f"{_ended(part, service)}; {part.log.stat().st_size:,} bytes of log" for part in parts]
        counts = service.ask("GET", "/counts")
    account.append(f"the service: {counts['repeats']:,} repeats; failures {json.dumps(counts['failures'])}")
    judgements = {part.name: judge_all(part.looks, 0.0, seconds) for part in parts}
    return Outcome(judgements, account, {part.name: part.looks for part in parts})


@contextmanager
def _service(plan: Plan) -> Iterator[Service]:
    flags = ["--seed", str(plan.seed), "--cycle-seconds", str(plan.cycle_s)]
    command = [sys.executable, "-m", "tests.soak.service", *flags]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, env=clean_environment()) as process:
        try:
            assert process.stdout is not None
            yield Service(int(process.stdout.readline()))
        finally:
            process.terminate()


def _inputs(shipper: Shipper) -> Path:
    return shipper.folder / "inputs"


def _started(name: str, plan: Plan, folder: Path, service: Service, stack: ExitStack) -> Part:
    shipper = stack.enter_context(Shipper(folder, service.target))
    _inputs(shipper).mkdir()
    lines = sample_lines(BLOCK_LINES, seed=plan.seed, end=datetime.now(UTC))
    blocks = Blocks(lines, PARTS.index(name))
    if name == "pipe":
        options = ["--listen", "127.0.0.1:0", "--summary", "json"]
        settings = _SETTINGS | _PIPE_SETTINGS
        running = shipper.start(name, *options, settings=settings, stdin=subprocess.PIPE, fresh=True)
        return Part(name, running, shipper, PipeWriter(blocks, running.stdin), plan.cycle_s)
    old, before = write_finished(_inputs(shipper), blocks, plan.gone_files)
    include = {"input.include": f'["{_inputs(shipper)}/*.ndjson"]'}
    running = shipper.start(name, settings=_SETTINGS | _RUN_SETTINGS | include, fresh=True)

    def arrived() -> int:
        return service.arrived(name) - before.accepted

    writer = FileWriter(blocks, _inputs(shipper), arrived=arrived, ahead=plan.ahead)
    part = Part(name, running, shipper, writer, plan.cycle_s)
    part.before = before
    running.wait_until(lambda: arrived() == 0, "the old files have arrived", limit_s=DRAIN_LIMIT_S)
    for path in old:
        path.unlink()
    return part


def _watch(parts: Sequence[Part], plan: Plan, begin: float, tell: Callable[[str], None]) -> None:
    purges = 0
    while (now := time.monotonic() - begin) < plan.seconds:
        for part in parts:
            assert not part.running.has_ended, f"{part.name} has ended\n{part.running.stderr[-2000:]}"
            assert part.writer.is_alive(), f"{part.name}: nothing is written any more"
            part.look(now)
        if now > (purges + 1) * plan.cycle_s:
            purges += 1
            for part in parts:
                part.purge()
                tell(f"{now:6.0f} s  {part.name:4}  {_brief(part.looks[-1][1])}")
        time.sleep(max(0.0, begin + now + plan.look_s - time.monotonic()))


def _brief(look: Look) -> str:
    names = ("accepted", "rss_mib", "descriptors", "threads", "database_mib", "spool_mib", "lag_mib")
    return "  ".join(f"{name} {look[name]:,.0f}" for name in names)


def _ended(part: Part, service: Service) -> str:
    """Have a shipper deliver the rest and end; all that was written has become what it had to."""
    part.writer.stop(DRAIN_LIMIT_S)
    part.end_purge()
    written, running = part.written, part.running
    if part.name == "run":
        running.wait_until(lambda: part.has_settled(written.records), "all is settled", limit_s=DRAIN_LIMIT_S)
        result = running.stop(limit_s=DRAIN_LIMIT_S)
        assert result.returncode == 0, result.stderr[-2000:]
    else:
        result = running.finish(limit_s=DRAIN_LIMIT_S)  # which holds the summary to the promise
        assert result.returncode in {0, 3}, result.stderr[-2000:]
    state = part.shipper.read_state()
    found = Written(state.read, state.accepted, state.dead_lettered, state.duplicates)
    assert found == written, f"{part.name}: written {written}, but found {found}"
    arrived = service.arrived(part.name)
    assert arrived == written.accepted, f"{part.name}: {written.accepted:,} had to arrive, {arrived:,} did"
    words = ", ".join(f"{name} {value:,}" for name, value in found._asdict().items())
    rotations = f", rotations {part.writer.rotations:,}" if isinstance(part.writer, FileWriter) else ""
    return f"{part.name}: {words}, pending 0; all arrived{rotations}"


def write_csv(looks: dict[str, list[tuple[float, Look]]], path: Path) -> None:
    """Write all that was seen, one line a look."""
    names = [curve.name for curve in CURVES]
    more = sorted({name for seen in looks.values() for _, look in seen for name in look} - set(names))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["seconds", "part", *names, *more], restval="")
        writer.writeheader()
        for part, seen in looks.items():
            for at, look in seen:
                rounded = {name: round(value, 4) for name, value in look.items()}
                writer.writerow({"seconds": round(at, 2), "part": part, **rounded})


def keep_logs(folder: Path, output: Path) -> None:
    """Copy what the shippers wrote to stderr."""
    for log in folder.glob("*/output/0.stderr"):
        shutil.copy(log, output / f"{log.parts[-3]}.log")
