"""`shipper check` as a process: as text, as JSON, on a terminal, and while another shipper holds the state."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
from email.message import Message

import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import SHIPPER, Service, Shipper
from tests.e2e.fake_service import FakeService
from tests.e2e.files import where_permissions_hold
from tests.e2e.surroundings import Terminal

WRONG = "c0ffee.wrong.secret"
_ROW = re.compile(r"(ok|note|fail) +([a-z._:-]+)  +(\S.*)")
EMPTY_BATCH = b'{"EventType":"Acquisition","events":[]}'


def rows_of(text: str) -> list[re.Match[str]]:
    """Split the lines of the text output into columns; the last column is aligned."""
    rows = [found for line in text.splitlines() if (found := _ROW.fullmatch(line))]
    assert len(rows) == len(text.splitlines()) > 0, text
    assert len({row.start(3) for row in rows}) == 1, text
    return rows


def test_text_and_json_agree_and_nothing_is_written(shipper: Shipper, service: Service):
    second = "intake.subscription_key_secondary"
    result = shipper.run("check", "--online", settings={f"{second}.env": "INTAKE_KEY"})
    assert (result.returncode, result.stderr) == (0, "")
    assert not [secret for secret in service.target[1:] if secret in result.stdout]
    names = [row[2] for row in rows_of(result.stdout)]
    names.remove(second)
    assert names == [item["name"] for item in json.loads(shipper.run("check", "--online", "--json").stdout)["items"]]
    assert service.counts()["events_received"] == 0
    assert not shipper.state.exists()


def test_output_on_a_terminal_has_colours_and_aligned_columns(shipper: Shipper):
    environment = {**shipper.environment(), "TERM": "xterm-256color", "INTAKE_TOKEN": WRONG}
    with Terminal() as terminal:
        command = [SHIPPER, "check", "--online", "--config", shipper.config]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=terminal.descriptor, env=environment, cwd=shipper.folder
        )
    assert done.returncode == 4
    assert re.search(rb"\x1b\[[0-9;]*32mok", terminal.shown)
    assert re.search(rb"\x1b\[[0-9;]*31mfail\x1b\[0m  intake:token", terminal.shown)
    assert rows_of(terminal.text)


@pytest.mark.parametrize(
    "settings",
    [{}, {"delivery.compression": "gzip", "delivery.traceparent": "false"}],
    ids=["", "gzip, no trace"],
)
def test_the_request_of_check_equals_those_of_a_run(
    shipper: Shipper, fake: FakeService, sample: Sample, settings: dict[str, object]
):
    shipper.write("events.ndjson", sample.lines[0])
    assert shipper.backfill("events.ndjson", settings=settings).returncode == 0
    assert shipper.run("check", "--online", settings=settings).returncode == 0
    shipped, asked = (_constant(headers) for headers in fake.headers)
    assert asked == shipped
    body = fake.bodies[1]
    assert (gzip.decompress(body) if settings.get("delivery.compression") else body) == EMPTY_BATCH


def _constant(headers: Message) -> list[tuple[str, str]]:
    """Return the headers in order, without those that differ between requests."""
    return [(name, "" if name in {"traceparent", "Content-Length"} else value) for name, value in headers.items()]


def test_the_process_that_holds_the_state_directory_is_named(shipper: Shipper):
    holder = shipper.open_pipe()
    holder.wait_until((shipper.state / "state.db").exists, "it holds the state directory")
    told = shipper.run("check", "--online", "--json")
    assert (told.returncode, told.stderr) == (0, "")
    items = json.loads(told.stdout)["items"]
    (what,) = (item["what"] for item in items if (item["name"], item["result"]) == ("state.directory", "note"))
    assert f"process {holder.pid} uses it" in what
    assert not holder.has_ended
    assert holder.end_input().returncode == 0
    assert re.search(r"^ok    state\.directory ", shipper.run("check").stdout, re.MULTILINE)


def test_missing_file_permissions_are_reported(shipper: Shipper):
    prefix = where_permissions_hold()
    shipper.state.mkdir(mode=0o500)
    closed = shipper.folder / "closed.ndjson"
    closed.touch(mode=0o000)
    settings = {"input.include": f'["{closed}"]'}
    result = shipper.run("check", settings=settings, prefix=prefix, check=False)
    failed = [row for row in rows_of(result.stdout) if row[1] == "fail"]
    assert (result.returncode, [row[2] for row in failed]) == (2, ["state.directory", "input.include"])
    assert "mode 0500" in failed[0][3]
    assert str(closed) in failed[1][3]
    below = {"state.directory": shipper.state / "deeper" / "still"}
    result = shipper.run("check", settings=below, prefix=prefix, check=False)
    (failed,) = (row for row in rows_of(result.stdout) if row[1] == "fail")
    assert failed[2] == "state.directory"
    assert f"cannot be created in {shipper.state}" in failed[3]
