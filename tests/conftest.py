"""What all tests share: the seed of everything random, told in the report's header."""

from __future__ import annotations

import gc
import os
import signal
from contextlib import suppress
from importlib import import_module
from random import Random, SystemRandom

import pytest
from hypothesis import settings

from shipper.system.native import ENGINE

# Their assertions, too, tell what they saw.
pytest.register_assert_rewrite(
    *("tests.e2e.driver", "tests.e2e.files", "tests.e2e.lives_of_files", "tests.e2e.rotation_cases"),
    *("tests.in_process", "tests.reporter"),
)

settings.register_profile("shipper", deadline=None)  # a busy machine is no fault of what is tested
settings.load_profile("shipper")

SEED = int(os.environ.get("SHIPPER_TEST_SEED") or SystemRandom().randrange(10**9))
os.environ["SHIPPER_TEST_SEED"] = str(SEED)  # for the processes that share out the tests


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    # What is started in the background of a shell ignores SIGINT, and so would each command that a test starts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Before hypothesis reads its option, so that one number repeats the whole run.
    if getattr(config.option, "hypothesis_seed", "absent") is None:
        config.option.hypothesis_seed = str(SEED)


def pytest_sessionstart(session: pytest.Session) -> None:
    """
    Import all tests, of several processes each beginning with another one.

    What one of them has compiled is there for the others; in the same order, each would compile everything, which
    takes longer than a tenth of the tests.
    """
    root = session.config.rootpath
    if "PYTEST_XDIST_WORKER" not in os.environ or session.config.args != ["tests"]:
        return
    names = sorted(str(path.relative_to(root))[:-3].replace(os.sep, ".") for path in root.glob("tests/**/test_*.py"))
    start = len(names) * int(os.environ["PYTEST_XDIST_WORKER"][2:]) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    for name in names[start:] + names[:start]:
        if not name.startswith("tests.bench."):
            with suppress(Exception, pytest.skip.Exception):  # collecting it will tell
                import_module(name)


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """
    Let those that take longest begin first, so that at the end no process waits for another one's.

    Those with a browser come together, so that few processes start one.
    """
    items.sort(key=lambda item: (item.get_closest_marker("early") is None, "browser" not in item.fixturenames))


def pytest_collection_finish() -> None:
    """Leave what is imported and collected to itself: to look for garbage in it is a sixth of the time of all tests."""
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)


def pytest_report_header() -> list[str]:
    return [
        f"shipper is {ENGINE} (SHIPPER_NATIVE=0 makes it pure)",
        f"random seed: {SEED} (SHIPPER_TEST_SEED={SEED} repeats it, for hypothesis too)",
    ]


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> Random:
    """A source of chance of the test's own: which other tests run does not matter."""
    print(f"SHIPPER_TEST_SEED={SEED}")
    return Random(f"{SEED} {request.node.nodeid}")
