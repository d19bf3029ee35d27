"""Texts from outside, shown on a terminal by every command in every form: none is obeyed, and none makes up a line."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import threading
import unicodedata
from pathlib import Path

import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import SHIPPER, Shipper, Target, changed
from tests.e2e.fake_service import FakeService, Reply
from tests.report_documents import brand, entry
from tests.report_service import ReportService, document, ok

HOSTILE = (
    *("\x1b[2J\x1b]0;title\x07", "\x9b2J\x9d0;title\x9c", "\u202eturned\u2066", "carriage\rreturn", "back\b\b\b\x7f"),
    *('x\n{"event":"forged"}', "next\x85line\u2028and\u2029", "\ufeff\u200b\u00ad\U000e0041", "\ufff9\ue000"),
    "\x1b[31m" + "long" * 500,
)
TEXT = "".join(HOSTILE)
NAME = TEXT.replace("/", "")[:60]
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def on_terminal(shipper: Shipper, *arguments: str | Path, env: dict[str, str]) -> str:
    """Run a command whose standard output and error are a terminal; returns what reaches it."""
    screen, terminal = pty.openpty()
    seen = bytearray()

    def watch() -> None:
        while True:
            try:
                seen.extend(os.read(screen, 65_536))
            except OSError:  # nobody has the terminal open any more
                return

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        command = [SHIPPER, *arguments]
        environment = {**shipper.environment(), "TERM": "dumb", "COLUMNS": "20000", **env}
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=terminal,
            stderr=terminal,
            cwd=shipper.folder,
            env=environment,
            timeout=60,
        )
    finally:
        os.close(terminal)
        watching.join(10)
        os.close(screen)
    assert done.returncode >= 0
    text = seen.decode(errors="surrogateescape").replace("\r\n", "\n")
    assert "Traceback" not in text, (arguments, text[-2000:])
    return text


def assert_harmless(text: str, command: object, *, is_folded: bool = False) -> None:
    """No more than colours, of which none is of a text, and no line that a text has made up."""
    assert "\x1b[31mlonglong" not in text, command
    bare = COLOURS.sub("", text)
    found = {each for each in bare if each != "\n" and unicodedata.category(each)[0] == "C"}
    found |= {each for each in bare if unicodedata.category(each) in {"Zl", "Zp"}}
    assert not found, (command, found, [line for line in bare.split("\n") if found & set(line)][:2])
    # A table folds texts to its width.
    assert is_folded or not any(line.startswith('{"event":"forged"}') for line in bare.split("\n")), command


@pytest.fixture
def shipped(shipper: Shipper, fake: FakeService, sample: Sample) -> Shipper:
    """It has shipped files of hostile names, with hostile fields, and the service's words were hostile, too."""
    folder = shipper.folder / "logs"
    folder.mkdir()
    refused = json.dumps({"rejected": [{"index": 0, "message": TEXT}]}).encode()
    fake.default = lambda: Reply(422, refused) if len(fake.bodies) % 2 else Reply()
    shipper.target = fake.target
    for index, name in enumerate((NAME, os.fsdecode(b"bytes\xff\xfe" + NAME.encode()[:20]))):
        lines = sample.lines[index * 9 : index * 9 + 9]
        odd = [changed(lines[0], AffiliateID=TEXT[:200]), changed(lines[1], **{TEXT: 1}), changed(lines[2], IP=TEXT)]
        (folder / name).write_bytes(b"".join([*odd, *lines[3:], TEXT.encode() + b"\n"]))
    result = shipper.backfill(folder, settings={"batch.max_events": 2, "delivery.concurrency": 1})
    assert result.returncode == 3
    assert result.summary
    assert result.summary["accepted"] >= 2
    assert result.summary["dead_lettered"] >= 4
    return shipper


COMMANDS: tuple[tuple[str, ...], ...] = (
    *(("status", "--all"), ("status", "--all", "--json"), ("status", "--until", "now"), ("status", "--until", TEXT)),
    *(
        ("dead-letters", "list"),
        ("dead-letters", "list", "--format", "json"),
        ("dead-letters", "show", "1", "2", "3", "4"),
    ),
    *(("dead-letters", "replay", "--dry-run"), ("dead-letters", "purge", "--reason", TEXT)),
    *(("validate", "logs"), ("validate", "logs", "--format", "json"), ("check",), ("check", "--format", "json")),
    *(("ledger", "--format", form) for form in ("table", "json", "ndjson", "csv")),
    *(("backfill", "logs", "--log-level", "debug", "--log-format", form, "--dry-run") for form in ("console", "json")),
    *(
        ("backfill", "gone" + NAME),
        ("validate", "gone" + NAME),
        ("config", "show"),
        ("backfill", "logs", "--rate", TEXT),
    ),
    *(
        ("status", "--set", f"{key}={TEXT}")
        for key in ("batch.max_events", "log.level", "intake.base_url", "input.include")
    ),
    *(("status", "--set", f"{TEXT}=1"), ("status", "--config", "gone" + NAME)),
)


def test_no_text_of_a_record_a_name_or_an_answer_is_obeyed_by_a_terminal(shipped: Shipper):
    for command in COMMANDS:
        options = () if "--config" in command else ("--config", shipped.config)
        assert_harmless(on_terminal(shipped, *command, *options, env={}), command)


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_no_text_is_obeyed_by_a_terminal_that_shows_the_logs(
    log_format: str, shipper: Shipper, fake: FakeService, sample: Sample
):
    folder = shipper.folder / "logs"
    folder.mkdir()
    fake.default = lambda: Reply(422, json.dumps({"message": TEXT}).encode()) if len(fake.bodies) % 2 else Reply()
    shipper.target = fake.target
    for index, name in enumerate((NAME, os.fsdecode(b"bytes\xff\xfe" + NAME.encode()[:20]))):
        (folder / name).write_bytes(b"{}\n" + sample.lines[index])
    debug = ("--log-level", "debug", "--log-format", log_format)
    result = shipper.backfill(folder, *debug)
    assert "record_rejected" in result.stderr
    assert_harmless(result.stderr, log_format)


def test_no_text_of_a_report_is_obeyed_by_a_terminal(shipped: Shipper):
    brands = [brand(entry(name=TEXT, reporting_currency=TEXT), name=TEXT)]
    with ReportService() as origin:
        origin.rule = lambda asked: ok(document(asked, brands=brands, reporting_currency=TEXT, reporting_time=TEXT))
        target = Target(origin.url, "the-key", "the-token")
        with shipped.config.open("a") as file:
            file.write(
                f'[report]\nbase_url = "{target.base_url}"\n'
                'subscription_key = { env = "REPORT_KEY" }\ntoken = { env = "REPORT_TOKEN" }\n'
            )
        env = {"REPORT_KEY": target.subscription_key, "REPORT_TOKEN": target.token}
        days = ("1001", "2026-10-01", "2026-10-31")
        for command in (
            *(("report", *days, "--checks", "--format", form) for form in ("table", "csv", "ndjson", "json", "html")),
            *(("reconcile", *days, "--format", form) for form in ("table", "csv", "json", "html")),
            ("report", "versions", *days),
        ):
            text = on_terminal(shipped, *command, "--config", shipped.config, env=env)
            assert len(text) > 100, (command, text)
            assert_harmless(text, command, is_folded="table" in command)
        assert origin.asked
