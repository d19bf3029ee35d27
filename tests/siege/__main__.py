"""`python -m tests.siege --seed N --duration S`: exits with 0 if all checks pass, 1 if not."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random
from typing import Final

from tests import campaign
from tests.e2e.driver import Running, Shipper, State, Target
from tests.e2e.operated import Admin
from tests.siege import answers, checking
from tests.siege.canaries import KEY, SECRET
from tests.siege.feeds import ALL, Feed
from tests.siege.visitors import CLIENTS, Visitors
from tests.torture.checking import losses, unseen
from tests.torture.journal import READ_TIMEOUT_S, Journal, Process
from tests.torture.lanes import ask_for_tokens
from tests.torture.service import Service

DRAIN_S: Final = 240.0
SETTLED_S: Final = 60.0
LIMIT_S: Final = 900.0  # for everything beyond the duration
LOOK_S: Final = 0.2
HANGUP_S: Final = 7.0
ENOUGH_S: Final = 600.0  # minimum duration in which everything planned must happen
COMMANDS_S: Final = 20.0
COMMANDS: Final = (
    ("status", "--all"),
    ("status", "--json"),
    ("dead-letters", "list", "--limit", "500"),
    ("dead-letters", "list", "--limit", "500", "--format", "json"),
    ("config", "show"),
    ("check",),
    ("dead-letters", "purge", "--all", "--yes"),
)
SETTINGS: Final[dict[str, object]] = {
    "delivery.read_timeout_seconds": READ_TIMEOUT_S,
    "delivery.retry_initial_seconds": 0.02,
    "delivery.retry_max_seconds": 0.5,
    "records.mistake_limit": 0,  # many invalid lines are expected between good ones
    "log.level": "debug",
    "log.format": "json",
}


class Siege:
    """
    One run of the siege.

    Args:
        duration: Seconds with hostile input, answers and clients.
        rate: Good records per second.
    """

    def __init__(self, folder: Path, seed: int, duration: float, rate: float) -> None:
        self._folder = folder
        (folder / "inputs").mkdir()
        self._rng = Random(f"{seed} siege")
        self._duration = duration
        self._journal = Journal(kind.kind_of_records(seed, number) for number, kind in enumerate(ALL))
        self._journal.processes[KEY] = Process(KEY, 1)
        self._feeds: list[Feed] = [
            kind(folder / "inputs", number, self._journal, Random(f"{seed} {kind.name}"), rate=rate * share)
            for number, (kind, share) in enumerate(ALL.items())
        ]
        self._done: Counter[str] = Counter()
        self._wrong: list[str] = []

    def run(self) -> list[str]:
        """Run the siege, and return the problems found."""
        with ExitStack() as stack:
            self._service = stack.enter_context(Service(self._journal))
            self._hostilities = answers.besiege(self._service, self._rng)
            target = Target(self._service.base_url, KEY, SECRET)
            self._shipper = stack.enter_context(Shipper(self._folder / "shipper", target))
            ask_for_tokens(self._shipper, self._service)
            for feed in self._feeds:
                feed.begin()
            self._running = self._start()
            self._admin = Admin(self._running)
            try:
                self._besiege()
            except AssertionError as error:
                self._wrong.append(str(error)[-5000:])
            return [*self._wrong, *self._judge()]

    def _start(self) -> Running:
        patterns = json.dumps([str(feed.folder / feed.pattern) for feed in self._feeds])
        prefix = ["prlimit", "--core=unlimited:unlimited", "--"] if os.geteuid() == 0 else []
        return self._shipper.start("run", settings={**SETTINGS, "input.include": patterns}, prefix=prefix)

    def _besiege(self) -> None:
        """Run feeds, visitors and operator for the duration; then wait until everything is settled."""
        no_more, is_over = threading.Event(), threading.Event()
        visitors = Visitors(int(self._admin.address.rpartition(":")[2]), self._rng, is_over)
        self._seen = visitors.seen
        feeding = {feed.name: partial(feed.run, no_more) for feed in self._feeds}
        loops = {**visitors.loops(), "operator": lambda: self._operate(is_over)}
        with campaign.threads(loops, is_over, self._wrong):
            with campaign.threads(feeding, no_more, self._wrong):
                self._watch(lambda: False, self._duration)
            answers.relieve(self._service)
            self._watch(lambda: not any(feed.backlog for feed in self._feeds), DRAIN_S)
        self._watch(self._is_settled, SETTLED_S)
        self._command(*COMMANDS)
        result = self._running.stop(limit_s=60)
        if result.returncode != 0:
            self._wrong.append(f"shipper ended with exit code {result.returncode}\n{result.stderr[-3000:]}")

    def _is_settled(self) -> bool:
        """Return whether the metrics say that all records are settled."""
        totals = self._admin.totals()
        good, bad = checking.written(self._feeds)
        is_all = totals["events_accepted"] == good and totals["dead_letters"] >= bad
        return is_all and not totals["pending_records"]

    def _watch(self, is_enough: Callable[[], bool], limit_s: float) -> None:
        """Wait until a condition holds, the time is up or a problem was found; raise if the process ends."""
        until = time.monotonic() + limit_s
        while time.monotonic() < until and not is_enough():
            if self._running.has_ended:
                code = self._running.process.returncode
                raise AssertionError(f"shipper ended with exit code {code}\n{self._running.stderr[-3000:]}")
            if self._wrong:
                return
            _ = self._running.peak_bytes
            time.sleep(LOOK_S)

    def _operate(self, is_over: threading.Event) -> None:
        """Act as an operator: revoke tokens, reload the settings, run commands, and purge dead letters."""
        commands_at = time.monotonic() + COMMANDS_S / 2
        number = 0
        while not is_over.wait(HANGUP_S):
            self._service.tokens.revoke()
            self._running.process.send_signal(signal.SIGHUP)
            self._done["settings reloaded"] += 1
            if time.monotonic() > commands_at:
                commands_at = time.monotonic() + COMMANDS_S
                self._command(COMMANDS[number % len(COMMANDS)], COMMANDS[-1])
                number += 1

    def _command(self, *commands: tuple[str, ...]) -> None:
        for command in commands:
            result = self._shipper.run(*command, check=False, limit_s=120)
            self._done[f"shipper {' '.join(command[:2])}"] += 1
            self._wrong += checking.shown(f"shipper {' '.join(command)}", (result.stdout + result.stderr).encode())

    def _abort(self) -> None:
        """Abort another process that holds records and secrets, to check that it leaves no core."""
        if Path("/proc/sys/kernel/core_pattern").read_text().strip() != "core":
            print("skipped: the core of an aborted process, because core_pattern is not `core`")
            return
        self._running.end()  # if still running
        another = self._start()
        another.wait_for("inputs_found", limit_s=60)
        another.process.send_signal(signal.SIGABRT)
        another.process.wait(60)

    def _judge(self) -> list[str]:
        state, happened = self._shipper.read_state(), self._happened()
        for where, counts in {**happened, "total": self._summary(state)}.items():
            print(f"\n{where}\n{campaign.table(counts)}", flush=True)
        wrong = [*losses(self._feeds), *checking.starved(self._feeds), *self._journal.wrong]
        wrong += [*checking.accounts(self._feeds, state), *checking.memory(self._running.peak_bytes)]
        wrong += [*checking.health(self._seen), *checking.pages(self._seen)]
        if self._duration >= ENOUGH_S:
            wrong += unseen(happened)
        self._abort()
        wrong += checking.cores([self._shipper.folder, self._shipper.state, Path.cwd()])
        for path in sorted(self._shipper.folder.glob("output/*")):
            wrong += checking.shown(path.name, path.read_bytes())
        return wrong

    def _happened(self) -> dict[str, Counter[str]]:
        happened: dict[str, Counter[str]] = {name: each.sent for name, each in self._hostilities.items()}
        happened["clients"] = Counter({**dict.fromkeys(CLIENTS, 0), **self._seen.clients})
        happened["pages"] = self._seen.pages
        for feed in self._feeds:
            happened |= {f"hostile records in {feed.name}": feed.hostile_counts, f"files of {feed.name}": feed.counts}
        happened["operator"] = self._done
        return happened

    def _summary(self, state: State) -> dict[str, object]:
        return {
            "good records": sum(feed.owed for feed in self._feeds),
            "good records accepted": len(self._journal.first),
            "repeats": sum(map(len, self._journal.repeats.values())),
            "records read": state.read,
            "dead letters": state.dead_lettered,
            "duplicates, not sent": state.duplicates,
            "hostile records among good ones": sum(feed.hostile_records for feed in self._feeds),
            "requests": sum(self._journal.requests.values()),
            "hostile answers": sum(each.sent.total() for each in self._hostilities.values()),
            "hostile connections to the admin address": self._seen.clients.total(),
            "probes": self._seen.probes,
            "probes without a 200": len(self._seen.unhealthy),
            "seconds of the slowest probe": f"{self._seen.slowest_s:.2f}",
            "most seconds without a good record": f"{max(feed.starved_s for feed in self._feeds):.1f}",
            "MiB of memory at the peak": f"{self._running.peak_bytes / (1 << 20):.1f}",
        }


def main() -> None:
    def check(folder: Path, seed: int, duration: float, rate: float) -> list[str]:
        return Siege(folder, seed, duration, rate).run()

    campaign.run("siege", __doc__, check, duration=1800, rate=25, limit_s=LIMIT_S)


if __name__ == "__main__":
    main()
