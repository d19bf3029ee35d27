"""One sandbox and one sample file for all tests; each test has a shipper with its own state directory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest

from shipper.sandbox.options import SandboxOptions
from shipper.sandbox.samples import sample_lines
from shipper.sandbox.server import sandbox_in_thread
from tests.conftest import SEED
from tests.e2e.browser import Browser
from tests.e2e.driver import Service, Shipper, Target
from tests.e2e.fake_service import FakeService
from tests.e2e.files import Tail
from tests.e2e.surroundings import Lockstep
from tests.e2e.warm_start import warm_starts

SAMPLE_EVENTS = 50_000


@dataclass(frozen=True, repr=False)
class Sample:
    """
    Attributes:
        lines: Lines with their newlines.
        ids: Their EventIds, in order.
    """

    lines: list[bytes]
    ids: list[str]


@pytest.fixture(scope="session", autouse=True)
def _warm_starts() -> Iterator[None]:
    with warm_starts():
        yield


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    folder = tmp_path_factory.getbasetemp()
    path = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "sample.ndjson"
    if not path.exists():  # else another process of this run has made it, in a second or two
        own = tmp_path_factory.mktemp("sample") / "events.ndjson"
        own.write_bytes(b"".join(sample_lines(SAMPLE_EVENTS, seed=SEED, end=datetime.now(UTC))))
        with suppress(FileExistsError):
            path.hardlink_to(own)
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == SAMPLE_EVENTS
    assert {line[:12] for line in lines} == {b'{"EventId":"'}
    return Sample(lines, [line[12:48].decode() for line in lines])


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture(scope="session")
def _sandbox() -> Iterator[Service]:
    options = SandboxOptions(port=0, max_body_bytes=64 << 20)  # for records longer than a read
    with sandbox_in_thread(options, clock=time.time) as (access, _), Service(Target(*access)) as service:
        yield service


@pytest.fixture
def service(_sandbox: Service) -> Service:
    """The empty sandbox."""
    _sandbox.reset()
    return _sandbox


@pytest.fixture
def shipper(service: Service, tmp_path: Path) -> Iterator[Shipper]:
    """A shipper that ships to the sandbox."""
    with Shipper(tmp_path / "shipper", service.target) as shipper:
        yield shipper


@pytest.fixture
def fake(shipper: Shipper) -> Iterator[FakeService]:
    """A service that misbehaves on demand; the shipper ships to it."""
    with FakeService() as fake:
        shipper.target = fake.target
        yield fake


@pytest.fixture
def lockstep(shipper: Shipper) -> Iterator[Lockstep]:
    """A service for which the shipper saves each batch by itself; the shipper ships to it."""
    with Lockstep(shipper) as lockstep:
        shipper.target = lockstep.target
        yield lockstep


@pytest.fixture
def file(shipper: Shipper, sample: Sample) -> Path:
    """A file of 300 records."""
    path = shipper.folder / "events.ndjson"
    path.write_bytes(b"".join(sample.lines[:300]))
    return path


@pytest.fixture
def tail(shipper: Shipper, service: Service, sample: Sample) -> Tail:
    return Tail(shipper, service, sample)
