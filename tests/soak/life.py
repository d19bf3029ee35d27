"""A soak: the shippers, their writers and the service, the samples, and the final check."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from tests.e2e.driver import Running, Shipper, Target
from tests.e2e.operated import Admin
from tests.processes import Server, cpu_seconds, memory_bytes, running_program
from tests.soak.flatness import CURVES, Judgement, Look, judge_all
from tests.soak.writing import Blocks, FileWriter, PipeWriter, Writer, Written, write_finished

PARTS: Final = ("run", "pipe")
AHEAD: Final = 300_000  # events: some 100 MB
GONE_FILES: Final = 11_000  # shipper remembers so many; if they did not exist from the start, their number would grow
DRAIN_LIMIT_S: Final = 300
MIB: Final = 1 << 20
_SETTINGS: Final = {
    "delivery.read_timeout_seconds": 5,
    "delivery.retry_max_seconds": 2,
    "delivery.max_concurrency": 16,  # so that all connections are open after the warm-up
    "log.format": "json",
}
_RUN_SETTINGS: Final = {"input.on_complete": "delete", "input.rotate_wait_seconds": 1}
_PIPE_SETTINGS: Final = {"spool.max_bytes": 64 << 20, "spool.segment_bytes": 8 << 20}
_METRICS: Final = {
    "read": "records_read",
    "accepted": "events_accepted",
    "dead_lettered": "dead_letters",
    "duplicates": "duplicates",
    "pending": "pending_records",
    "in_flight": "in_flight_requests",
    "streams": "streams",
    "retries": "retries",
    "paused": "paused",
}


class Plan(NamedTuple):
    """
    Attributes:
        seconds: Duration from the start of all parts until the writers stop.
        cycle_s: Each cycle has one outage and ends with a purge of the dead letters.
        look_s: Time between samples.
        gone_files: Deleted inputs that `run` must remember from the start.
        ahead: Maximum number of events written to files that have not arrived.
        parts: Some of `PARTS`.
    """

    seconds: float
    seed: int = 1
    cycle_s: float = 60.0
    look_s: float = 1.0
    gone_files: int = GONE_FILES
    ahead: int = AHEAD
    parts: Sequence[str] = PARTS


def look_at_process(pid: int) -> Look:
    return {
        "rss_mib": memory_bytes(pid) / MIB,
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": len(os.listdir(f"/proc/{pid}/task")),
        "cpu_s": cpu_seconds(pid),
    }


def look_at_state(directory: Path) -> Look:
    return {
        "database_mib": _size(directory / "state.db") / MIB,
        "wal_mib": _size(directory / "state.db-wal") / MIB,
        "shm_kib": _size(directory / "state.db-shm") / 1024,
        "live_bytes": _size(directory / "live.json"),
        "spool_mib": sum(map(_size, (directory / "spool").glob("*"))) / MIB,
    }


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


class Part:
    """
    One shipper with its writer.

    Attributes:
        before: What was written before the writer started.
        looks: The samples, with seconds since the start of the soak.
        log: The stderr of the shipper.
    """

    def __init__(self, name: str, running: Running, shipper: Shipper, writer: Writer, cycle_s: float) -> None:
        self.name = name
        self.running = running
        self.shipper = shipper
        self.writer = writer
        self.before = Written()
        self.looks: list[tuple[float, Look]] = []
        self.admin = Admin(running)
        self._cycle_s = cycle_s
        self._window: deque[tuple[float, Look]] = deque()
        self._purging: Running | None = None
        (self.log,) = shipper.folder.glob("output/*.stderr")

    @property
    def written(self) -> Written:
        """Everything written, including `before`."""
        return self.before + self.writer.written

    def look(self, at: float) -> Look:
        """Take a sample, and check that the totals add up."""
        totals = self.admin.totals()
        look = look_at_process(self.running.pid) | look_at_state(self.shipper.state)
        look |= {name: totals[metric] for name, metric in _METRICS.items()}
        look |= {"lag_mib": totals["lag_bytes"] / MIB, "dead_letter_mib": totals["dead_letter_bytes"] / MIB}
        settled = look["accepted"] + look["dead_lettered"] + look["duplicates"]
        assert look["read"] == settled + look["pending"], f"{self.name}: the totals do not add up: {look}"
        look["log_bytes"] = self.log.stat().st_size
        look["input_files"] = sum(1 for _ in _inputs(self.shipper).iterdir())
        self._add_rates(at, look)
        self.looks.append((at, look))
        return look

    def _add_rates(self, at: float, look: Look) -> None:
        """Add rates over a full cycle, so that each includes one outage; none during the first cycle."""
        self._window.append((at, look.copy()))
        while len(self._window) > 2 and self._window[1][0] <= at - self._cycle_s:
            self._window.popleft()
        then, before = self._window[0]
        passed_s, accepted = at - then, look["accepted"] - before["accepted"]
        if passed_s >= self._cycle_s and accepted:
            look["records_per_s"] = accepted / passed_s
            look["cpu_s_per_million"] = (look["cpu_s"] - before["cpu_s"]) / accepted * 1e6
            look["log_kib_per_minute"] = (look["log_bytes"] - before["log_bytes"]) / 1024 / passed_s * 60

    def has_settled(self, records: int) -> bool:
        totals = self.admin.totals()
        return (totals["records_read"], totals["pending_records"]) == (records, 0)

    def purge(self) -> None:
        """Purge the dead letters like an operator, so that the database does not grow."""
        if self._purging is None or self._purging.has_ended:  # otherwise the machine is busy; wait for the next cycle
            self.end_purge()
            self._purging = self.shipper.start("dead-letters", "purge", "--all", "--yes", check=False)

    def end_purge(self) -> None:
        if self._purging is not None:
            result = self._purging.finish(limit_s=DRAIN_LIMIT_S)
            assert result.returncode == 0, result.stderr
            self._purging = None


class Service(Server):
    @property
    def target(self) -> Target:
        return Target(f"http://127.0.0.1:{self.port}", "soak-subscription-key", "soak-token")

    def arrived(self, part: str) -> int:
        """Return the number of distinct events of a part that have arrived."""
        return self.ask("GET", "/counts")["events"].get(str(PARTS.index(part)), 0)


class Outcome(NamedTuple):
    """
    The outcome of a soak.

    Attributes:
        judgements, looks: By part.
        account: The final totals as text.
    """

    judgements: dict[str, list[Judgement]]
    account: list[str]
    looks: dict[str, list[tuple[float, Look]]]

    @property
    def growing(self) -> list[str]:
        """The names of the curves that grow."""
        return [f"{part}: {each.curve.title}" for part, all_ in self.judgements.items() for each in all_ if each.grows]

    @property
    def unjudged(self) -> list[str]:
        """The parts whose memory could not be judged."""
        return [part for part, all_ in self.judgements.items() if all(each.curve.name != "rss_mib" for each in all_)]


def soak(plan: Plan, folder: Path, report: Callable[[str], None]) -> Outcome:
    """
    Ship for a while, and judge what grows.

    Args:
        folder: An empty folder; needs some hundred MB.
        report: Called with a line per part and cycle.
    Raises:
        AssertionError: Records are lost, or another check failed.
    """
    with _service(plan) as service, ExitStack() as stack:
        parts = [_start(name, plan, folder / name, service, stack) for name in plan.parts]
        for part in parts:
            stack.callback(part.writer.ask_to_stop)
            part.writer.start()
        for part in parts:
            before = part.before.accepted
            part.running.wait_until(
                lambda: service.arrived(part.name) > before,  # noqa: B023
                "the first events have arrived",
                limit_s=DRAIN_LIMIT_S,
            )
        begin = time.monotonic()
        _watch(parts, plan, begin, report)
        seconds = time.monotonic() - begin
        service.ask("POST", "/quiet")
        account = [f"{_end(part, service)}; {part.log.stat().st_size:,} bytes of log" for part in parts]
        counts = service.ask("GET", "/counts")
    account.append(f"the service: {counts['repeats']:,} repeats; failures {json.dumps(counts['failures'])}")
    judgements = {part.name: judge_all(part.looks, 0.0, seconds) for part in parts}
    return Outcome(judgements, account, {part.name: part.looks for part in parts})


@contextmanager
def _service(plan: Plan) -> Iterator[Service]:
    flags = ["--seed", str(plan.seed), "--cycle-seconds", str(plan.cycle_s)]
    with running_program("tests.soak.service", *flags) as port:
        yield Service(int(port))


def _inputs(shipper: Shipper) -> Path:
    return shipper.folder / "inputs"


def _start(name: str, plan: Plan, folder: Path, service: Service, stack: ExitStack) -> Part:
    shipper = stack.enter_context(Shipper(folder, service.target))
    _inputs(shipper).mkdir()
    blocks = Blocks(PARTS.index(name), seed=plan.seed)
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


def _watch(parts: Sequence[Part], plan: Plan, begin: float, report: Callable[[str], None]) -> None:
    purges = 0
    while (now := time.monotonic() - begin) < plan.seconds:
        for part in parts:
            assert not part.running.has_ended, f"{part.name} has ended\n{part.running.stderr[-2000:]}"
            assert part.writer.is_alive(), f"{part.name}: the writer has ended"
            part.look(now)
        if now > (purges + 1) * plan.cycle_s:
            purges += 1
            for part in parts:
                part.purge()
                report(f"{now:6.0f} s  {part.name:4}  {_brief(part.looks[-1][1])}")
        time.sleep(max(0.0, begin + now + plan.look_s - time.monotonic()))


def _brief(look: Look) -> str:
    names = ("accepted", "rss_mib", "descriptors", "threads", "database_mib", "spool_mib", "lag_mib")
    return "  ".join(f"{name} {look[name]:,.0f}" for name in names)


def _end(part: Part, service: Service) -> str:
    """Stop a shipper after it has delivered the rest, and check that every record was settled as planned."""
    part.writer.stop(DRAIN_LIMIT_S)
    part.end_purge()
    written, running = part.written, part.running
    if part.name == "run":
        running.wait_until(lambda: part.has_settled(written.records), "everything is settled", limit_s=DRAIN_LIMIT_S)
        result = running.stop(limit_s=DRAIN_LIMIT_S)
        assert result.returncode == 0, result.stderr[-2000:]
    else:
        result = running.finish(limit_s=DRAIN_LIMIT_S)  # checks the summary
        assert result.returncode in {0, 3}, result.stderr[-2000:]
    state = part.shipper.read_state()
    found = Written(state.read, state.accepted, state.dead_lettered, state.duplicates)
    assert found == written, f"{part.name}: written {written}, but settled {found}"
    arrived = service.arrived(part.name)
    assert arrived == written.accepted, f"{part.name}: {written.accepted:,} events must arrive, but {arrived:,} have"
    words = ", ".join(f"{name} {value:,}" for name, value in found._asdict().items())
    rotations = f", rotations {part.writer.rotations:,}" if isinstance(part.writer, FileWriter) else ""
    return f"{part.name}: {words}, pending 0; all have arrived{rotations}"


def write_csv(looks: dict[str, list[tuple[float, Look]]], path: Path) -> None:
    """Write all samples, one per line."""
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
    for log in folder.glob("*/output/0.stderr"):
        shutil.copy(log, output / f"{log.parts[-3]}.log")
