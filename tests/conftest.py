"""Shared by all tests: the seed of all random choices, shown in the report's header."""

from __future__ import annotations

import gc
import os
import signal
from contextlib import suppress
from importlib import import_module
from itertools import islice
from random import Random, SystemRandom

import pytest
from hypothesis import settings

from shipper.system.native import ENGINE

# Show the values of failed assertions in these helpers, too.
pytest.register_assert_rewrite("tests.e2e.driver", "tests.e2e.files", "tests.in_process")
gc.disable()  # until all is collected: imports and collected items are hardly garbage

pytest_plugins = ["tests.certificates", "tests.reporter"]

settings.register_profile("shipper", deadline=None)  # a busy machine must fail no test
settings.load_profile("shipper")

SEED = int(os.environ.get("SHIPPER_TEST_SEED") or SystemRandom().randrange(10**9))
os.environ["SHIPPER_TEST_SEED"] = str(SEED)  # for the xdist workers


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    # A background job of a shell ignores SIGINT, and every command that a test starts would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Set before hypothesis reads its option, so that one seed repeats the whole run.
    if getattr(config.option, "hypothesis_seed", "absent") is None:
        config.option.hypothesis_seed = str(SEED)


def pytest_sessionstart(session: pytest.Session) -> None:
    """
    Import all tests, starting at a different module in each worker.

    The workers share compiled modules. If they imported in the same order, each would compile everything, which takes
    longer than a tenth of the tests.
    """
    root = session.config.rootpath
    if "PYTEST_XDIST_WORKER" not in os.environ or session.config.args != ["tests"]:
        return
    names = sorted(str(path.relative_to(root))[:-3].replace(os.sep, ".") for path in root.glob("tests/**/test_*.py"))
    start = len(names) * int(os.environ["PYTEST_XDIST_WORKER"][2:]) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    for name in names[start:] + names[:start]:
        if not name.startswith("tests.bench."):
            with suppress(Exception, pytest.skip.Exception):  # reported when the module is collected
                import_module(name)


@pytest.hookimpl(trylast=True)  # after the selection, as the shares depend on the number of tests
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """
    Let each worker start with tests that take long or share an expensive fixture: slow ones, a browser, a broker.

    So no worker waits for another at the end, and few workers start a browser or a broker: an idle worker takes over
    tests from the end of another's share. The tests with a broker are two such groups, as they mostly wait.
    """
    with_broker = sorted({item.path for item in items if "_broker" in item.fixturenames})

    def group_of(item: pytest.Function) -> int:
        if item.get_closest_marker("early"):
            return 0
        if "_broker" in item.fixturenames:
            return 1 if item.path in with_broker[: len(with_broker) // 2] else 2
        return 3 if "browser" in item.fixturenames else 4

    groups: list[list[pytest.Function]] = [[] for _ in range(5)]
    for item in items:
        groups[group_of(item)].append(item)
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    left, rest = len(items), iter(groups.pop())
    items.clear()
    for worker in range(workers):
        share = left // (workers - worker)  # as pytest-xdist divides them
        left -= share
        begin = [item for group in groups[worker::workers] for item in group]
        items += [*begin, *islice(rest, max(0, share - len(begin)))]
    items += rest


def pytest_collection_finish() -> None:
    """Exclude imported and collected objects from garbage collection, which would take a sixth of the test time."""
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)
    gc.enable()


def pytest_report_header() -> list[str]:
    return [
        f"shipper is {ENGINE} (SHIPPER_NATIVE=0 makes it pure)",
        f"random seed: {SEED} (SHIPPER_TEST_SEED={SEED} repeats it, for hypothesis too)",
    ]


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> Random:
    """A random generator seeded for this test, independent of the other tests."""
    print(f"SHIPPER_TEST_SEED={SEED}")
    return Random(f"{SEED} {request.node.nodeid}")
