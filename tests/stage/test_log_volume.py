"""A day without the service, in virtual time: the log stays small, and says what a person needs."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import anyio
import pytest
import structlog
from msgspec.structs import replace

from shipper.config import StateSettings
from shipper.state.store import Store
from shipper.telemetry.logs import configure_logs, take_left_out
from tests.fakes import answer
from tests.stage import test_pipeline_outage
from tests.stage.service_model import in_virtual_time
from tests.stage.test_pipeline_outage import RECORDS, Outage

DAY_S = 86_400.0


@pytest.fixture
def real_logs():
    before = structlog.get_config()
    take_left_out()
    configure_logs("info", "json", now=anyio.current_time)
    yield
    take_left_out()
    structlog.configure(**before)


@pytest.mark.usefixtures("real_logs")
def test_a_day_of_outage_is_some_thousand_lines_that_say_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(test_pipeline_outage, "BACK_AT", DAY_S)
    store = Store(tmp_path)
    outage = Outage(store, monkeypatch, answer(503), concurrency=8)
    # Looking seldom, so that the test takes seconds.
    monkeypatch.setattr("shipper.pipeline.observer.LOOK_INTERVAL_S", 10.0)
    outage.settings = replace(outage.settings, state=StateSettings(commit_interval_seconds=60))
    requests = 0

    async def main() -> None:
        nonlocal requests
        assert (await outage.begin().run()).accepted == RECORDS
        requests = len(outage.service.requests)

    in_virtual_time(main)
    store.close()
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    events = Counter(line["event"] for line in lines)
    assert requests > 17_000, "it was tried all day"
    assert events["self_report"] == pytest.approx(DAY_S / 30, rel=0.01)
    assert (events["delivery_paused"], events["delivery_resumed"]) == (1, 1)
    assert sum(events.values()) < events["self_report"] + 100, events
    assert {line.get("paused") for line in lines if line["event"] == "self_report"} == {"unavailable"}
