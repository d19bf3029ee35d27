"""`python -m tests.siege --seed N --duration S`: exit code 0 = all of it held; 1 = what did not is said."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any, Final

from tests.e2e.driver import Running, Shipper, Target
from tests.e2e.operated import Admin
from tests.siege import answers, checking
from tests.siege.canaries import KEY, SECRET
from tests.siege.feeds import ALL, Feed
from tests.siege.visitors import CLIENTS, Visitors, running
from tests.soak.looking import look_at_metrics
from tests.torture.books import READ_TIMEOUT_S, Books, Process
from tests.torture.campaign import hold, read_options
from tests.torture.lanes import ask_for_tokens
from tests.torture.service import Service

DRAIN_S: Final = 240.0
SETTLED_S: Final = 60.0
LIMIT_S: Final = 900.0  # beyond the duration, for all of it
LOOK_S: Final = 0.2
HANGUP_S: Final = 7.0
ENOUGH_S: Final = 600.0  # for everything that is planned to have happened
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
    "records.mistake_limit": 0,  # the operator expects such lines, and wants the good ones between them
    "log.level": "debug",
    "log.format": "json",
}


def main() -> None:
    options = read_options("siege", __doc__, duration=1800, rate=25)
    hold(
        "siege",
        options,
        lambda folder: Siege(folder, options.seed, options.duration, options.rate).hold(),
        limit_s=LIMIT_S,
    )


class Siege:
    """
    One run of it.

    Args:
        duration: Seconds for which all is hostile.
        rate: Good records a second.
    """

    def __init__(self, folder: Path, seed: int, duration: float, rate: float) -> None:
        self._folder = folder
        self._inputs = folder / "inputs"
        self._inputs.mkdir()
        self._rng = Random(f"{seed} siege")
        self._duration = duration
        self._books = Books(seed, len(ALL))
        self._books.processes[KEY] = Process(KEY, 1)
        self._feeds: list[Feed] = []
        for number, (kind, share) in enumerate(ALL.items()):
            self._books.records[number] = kind.kind_of_records(seed, number)
            feed = kind(self._inputs, number, self._books, Random(f"{seed} {kind.name}"), rate=rate * share)
            self._feeds.append(feed)
        self._done: Counter[str] = Counter()
        self._wrong: list[str] = []
        self._stack = ExitStack()

    def hold(self) -> list[str]:
        """Do it all; returns what is wrong."""
        with self._stack:
            self._service = self._stack.enter_context(Service(self._books))
            self._dealers = answers.besiege(self._service, self._rng)
            self._shipper = self._stack.enter_context(
                Shipper(self._folder / "shipper", Target(self._service.base_url, KEY, SECRET))
            )
            ask_for_tokens(self._shipper, self._service)
            for feed in self._feeds:
                feed.begin()
            self._running = self._start()
            self._port = int(Admin(self._running).address.rpartition(":")[2])
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
        """Let all that means harm loose, then let it end, and see what came of it."""
        no_more, is_over = threading.Event(), threading.Event()
        visitors = Visitors(self._port, self._rng, is_over)
        self._seen = visitors.seen
        feeding = {feed.name: _feeding(feed, no_more) for feed in self._feeds}
        with running({**visitors.loops(), "operator": lambda: self._operate(is_over)}, is_over, self._wrong.append):
            with running(feeding, no_more, self._wrong.append):
                self._watch(lambda: False, self._duration)
            answers.relieve(self._service)
            self._watch(lambda: not any(feed.backlog for feed in self._feeds), DRAIN_S)
        self._watch(self._is_settled, SETTLED_S)
        self._command(*COMMANDS)
        result = self._running.stop(limit_s=60)
        if result.returncode != 0:
            self._wrong.append(f"it ended with exit code {result.returncode}\n{result.stderr[-3000:]}")

    def _is_settled(self) -> bool:
        """Return whether the shipper says so; what the state says is for when it has ended."""
        seen = look_at_metrics(self._port)
        good, bad = checking.written(self._feeds)
        return seen["accepted"] == good and seen["dead_lettered"] >= bad and not seen["pending"]

    def _watch(self, is_enough: Callable[[], bool], limit_s: float) -> None:
        """Wait, for so long at most; not when the process has ended, or something else is wrong already."""
        until = time.monotonic() + limit_s
        while time.monotonic() < until and not is_enough():
            if self._running.has_ended:
                code = self._running.process.returncode
                raise AssertionError(f"it ended with exit code {code}\n{self._running.stderr[-3000:]}")
            if self._wrong:
                return
            _ = self._running.peak_bytes
            time.sleep(LOOK_S)

    def _operate(self, is_over: threading.Event) -> None:
        """Do what operators do meanwhile: revoke tokens, have the settings read again, look, and purge."""
        commands_at = time.monotonic() + COMMANDS_S / 2
        number = 0
        while not is_over.wait(HANGUP_S):
            self._service.tokens.revoke()
            self._running.process.send_signal(signal.SIGHUP)
            self._done["settings read again"] += 1
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
        """Have another process aborted that holds records and secrets: it leaves no core."""
        if Path("/proc/sys/kernel/core_pattern").read_text().strip() != "core":
            print("left out: a core of an aborted process, as cores go to another place here")
            return
        self._running.end()  # if it has not ended by itself
        another = self._start()
        another.wait_for("inputs_found", limit_s=60)
        another.process.send_signal(signal.SIGABRT)
        another.process.wait(60)

    def _judge(self) -> list[str]:
        state, happened = self._shipper.read_state(), self._happened()
        for where, counts in happened.items():
            print(f"\n{where}\n{checking.table(counts)}")
        print(f"\nin all\n{checking.table(self._summary(state))}", flush=True)
        wrong = [*checking.losses(self._feeds), *checking.starved(self._feeds), *self._books.wrong]
        wrong += [*checking.accounts(self._feeds, state), *checking.memory(self._running.peak_bytes)]
        wrong += [*checking.health(self._seen), *checking.pages(self._seen)]
        if self._duration >= ENOUGH_S:
            wrong += checking.unseen(happened)
        self._abort()
        wrong += checking.cores([self._shipper.folder, self._shipper.state, Path.cwd()])
        for path in sorted(self._shipper.folder.glob("output/*")):
            wrong += checking.shown(path.name, path.read_bytes())
        return wrong

    def _happened(self) -> dict[str, Counter[str]]:
        happened: dict[str, Counter[str]] = {name: dealer.dealt for name, dealer in self._dealers.items()}
        happened["clients"] = Counter(dict.fromkeys(CLIENTS, 0))
        happened["clients"].update(self._seen.clients)
        happened["pages"] = self._seen.pages
        for feed in self._feeds:
            happened[f"bait in {feed.name}"] = feed.baits
            happened[f"of {feed.name}"] = feed.noted
        happened["the operator"] = self._done
        return happened

    def _summary(self, state: Any) -> dict[str, object]:
        feeds, repeats = self._feeds, self._books.repeats.values()
        return {
            "good records": sum(feed.owed for feed in feeds),
            "of which the service has": len(self._books.first),
            "repeats": sum(map(len, repeats)),
            "records read": state.read,
            "dead letters": state.dead_lettered,
            "duplicates, which were not sent": state.duplicates,
            "bait in the inputs of good records": sum(feed.bait_records for feed in feeds),
            "requests": sum(self._books.requests.values()),
            "hostile answers": sum(dealer.dealt.total() for dealer in self._dealers.values()),
            "hostile connections to the admin address": self._seen.clients.total(),
            "probes": self._seen.probes,
            "of which not 200": len(self._seen.unhealthy),
            "seconds, the slowest probe": f"{self._seen.slowest_s:.2f}",
            "seconds, the longest without a good record": f"{max(feed.starved_s for feed in feeds):.1f}",
            "MiB of memory at most": f"{self._running.peak_bytes / (1 << 20):.1f}",
        }


def _feeding(feed: Feed, is_over: threading.Event) -> Callable[[], None]:
    def loop() -> None:
        while not is_over.is_set():
            feed.turn()
        feed.finish()

    return loop


if __name__ == "__main__":
    main()
