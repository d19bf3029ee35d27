"""
Long simulations of files, an outage and expiring tokens: `python -m tests.soak.lives [PART…]`.

    sources  followed files against a model, tens of thousands of steps
    outage   an outage of a minute at 20,000 events per second: memory stays flat, few requests are sent, nothing is
             lost, and full speed returns at once
    tokens   a minute with tokens that expire after five seconds: hardly any request is refused
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import get_state_machine_test

from tests.campaign import parser, seed_of, table
from tests.e2e.driver import Running, Service, Shipper, sandbox_process, wait_until
from tests.model.test_sources import CrowdedSources, Sources, SourcesWithLongLines
from tests.processes import memory_bytes
from tests.soak.writing import Blocks, RateWriter


class SourcesWithReusedInodes(Sources):
    reuses_inodes = True


EXAMPLES: Final = {Sources: 1000, SourcesWithReusedInodes: 500, SourcesWithLongLines: 500, CrowdedSources: 100}
STEPS: Final = 40
RATE: Final = 20_000
OUTAGE_S: Final = 60
TOKEN_LIFE_S: Final = 5
TOKENS_S: Final = 60
FULL_SPEED_S: Final = 10  # within which full speed must return
MIB: Final = 1 << 20
MUST_HAPPEN: Final = (
    *("found again in a copy", "found again in an archive", "read on in a copy", "read on in an archive"),
    *("truncation seen", "crash with unsaved settlements", "looked at a copy beside the original", "line too long"),
    *("reported as unreachable", "line owed", "line not owed", "copied again after a deleted copy"),
)


def sources(number: int) -> None:
    """Simulate random lives of files; a failure is shrunk to the shortest sequence of steps."""
    SourcesWithLongLines.reuses_inodes = True  # without copies, that is never ambiguous
    for machine, examples in EXAMPLES.items():
        how = settings(
            max_examples=examples,
            stateful_step_count=STEPS,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
            print_blob=False,
        )
        seed(number)(get_state_machine_test(machine, settings=how))()
    print(table(dict(sorted(Sources.happened.items()))))
    missing = [name for name in MUST_HAPPEN if not Sources.happened[name]]
    assert not missing, f"never happened: {missing}"


@contextmanager
def shipping(*flags: str) -> Iterator[tuple[Service, Shipper, RateWriter, Callable[..., Running]]]:
    """Yield a sandbox that discards events, a shipper, the writer of its input, and a function that starts both."""
    with (
        tempfile.TemporaryDirectory(prefix="shipper-lives-") as folder,
        sandbox_process(Path(folder), "--blackhole", *flags) as target,
        Service(target) as service,
        Shipper(Path(folder) / "shipper", target) as shipper,
    ):
        path = shipper.folder / "app.ndjson"
        path.touch()
        writer = RateWriter(Blocks().lines(), path, RATE)

        def start(**settings: object) -> Running:
            writer.start()
            return shipper.start("run", settings={"input.include": f'["{path}"]', **settings}, fresh=True)

        yield service, shipper, writer, start


def _accepted(service: Service) -> int:
    return service.counts()["events_received"]


def _finish(service: Service, writer: RateWriter, running: Running) -> int:
    """Stop the writer, wait until everything has arrived, stop shipper, and return the number of lines written."""
    written = writer.stop()
    wait_until(lambda: _accepted(service) == written, "everything has arrived", limit_s=300)
    result = running.stop()
    assert result.returncode == 0, result.stderr[-2000:]
    return written


def _peak_mib(running: Running, seconds: float) -> float:
    """Return the peak memory over a time, sampled twice per second."""
    peak, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        peak = max(peak, memory_bytes(running.pid))
        time.sleep(0.5)
    return peak / MIB


def outage(_: int) -> None:
    with shipping() as (service, _, writer, start):
        running = start()
        wait_until(lambda: _accepted(service) > 5 * RATE, "the first events have arrived")
        before = _peak_mib(running, 5)
        service.set_faults({"effect": "status", "status": 503})
        time.sleep(2)  # requests in flight
        held = _accepted(service)
        during = _peak_mib(running, OUTAGE_S)
        requests = len(service.requests(status=503))
        assert _accepted(service) == held
        service.set_faults()
        recovered_at, behind = time.monotonic(), writer.written - held
        wait_until(lambda: _accepted(service) > held + 2 * RATE, "delivery has resumed")
        back_s = time.monotonic() - recovered_at
        wait_until(lambda: writer.written - _accepted(service) < RATE, "the backlog is delivered", limit_s=300)
        caught_up_s = time.monotonic() - recovered_at
        written = _finish(service, writer, running)
    print(
        f"outage of {OUTAGE_S} s at {RATE:,}/s: {written:,} written and accepted; {requests} requests during it; "
        f"RSS {before:.0f} MiB before, {during:.0f} during; {behind:,} behind, 40,000 of them {back_s:.1f} s after the "
        f"service was back, all after {caught_up_s:.1f} s"
    )
    assert requests < OUTAGE_S
    assert during < before + 32, "shipper read on during the outage"
    assert back_s < FULL_SPEED_S


def tokens(_: int) -> None:
    with shipping("--token-lifetime-seconds", str(TOKEN_LIFE_S)) as (service, shipper, writer, start):
        access = service.access()
        names = ("token_url", "client_id", "client_secret", "scope")
        shipper.config.write_text(shipper.config.read_text().replace('token = { env = "INTAKE_TOKEN" }\n', ""))
        running = start(**{f"intake.oauth2.{name}": access[name] for name in names})
        time.sleep(TOKENS_S)
        written = _finish(service, writer, running)
        refused, asked = len(service.requests(status=401)), len(service.requests(operation="token"))
        assert shipper.read_state().dead_letters == ()
    print(
        f"tokens of {TOKEN_LIFE_S} s for {TOKENS_S} s: {written:,} written and accepted, {refused} requests refused, "
        f"{asked} tokens requested"
    )
    assert refused <= 2
    assert asked <= 2 * TOKENS_S / TOKEN_LIFE_S


PARTS: Final = {"sources": sources, "outage": outage, "tokens": tokens}


def main() -> None:
    options = parser("soak.lives", __doc__)
    options.add_argument("parts", nargs="*", metavar="PART", choices=[*PARTS, []], help="default: all")
    arguments = options.parse_args()
    number = seed_of(arguments)
    print(f"seed {number}", flush=True)
    for part in arguments.parts or PARTS:
        PARTS[part](number)


if __name__ == "__main__":
    main()
