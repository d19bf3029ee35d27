"""External texts shown on a terminal by every command in every format: none is interpreted or forges a line."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import unicodedata
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import SHIPPER, Shipper, Target, changed, wait_until
from tests.e2e.fake_service import FakeService, Reply
from tests.e2e.surroundings import Terminal
from tests.e2e.warm_start import start
from tests.report_documents import brand, entry
from tests.report_service import ReportService, document, ok
from tests.reporter import OCTOBER, Reporter

HOSTILE = (
    *("\x1b[2J\x1b]0;title\x07", "\x9b2J\x9d0;title\x9c", "\u202eturned\u2066", "carriage\rreturn", "back\b\b\b\x7f"),
    *('x\n{"event":"forged"}', "next\x85line\u2028and\u2029", "\ufeff\u200b\u00ad\U000e0041", "\ufff9\ue000"),
    "\x1b[31m" + "long" * 500,
)
TEXT = "".join(HOSTILE)
NAME = TEXT.replace("/", "")[:60]
DRAWING = re.compile(r"\r?\x1b\[2K|\x1b\[1A|\x1b\[\?25[lh]")  # redraws earlier output
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def on_terminal(
    shipper: Shipper,
    *arguments: str | Path,
    env: Mapping[str, str] = {},
    stdin: bytes = b"",
    until: str = "",
    then: Callable[[str], None] = lambda _: None,
) -> str:
    """
    Run a command whose standard output and error are a terminal; return the terminal's output.

    Args:
        stdin: Bytes to pipe in.
        until: End the command with Ctrl-C once this text appears.
        then: Called before that with the output so far.
    """
    environment = {**shipper.environment(), "TERM": "dumb", "COLUMNS": "20000", **env}
    with Terminal() as terminal:
        process = start(
            [SHIPPER, *arguments],
            stdin=subprocess.PIPE,
            stdout=terminal.descriptor,
            stderr=terminal.descriptor,
            cwd=shipper.folder,
            env=environment,
        )
        try:
            if until:
                wait_until(lambda: until.encode() in terminal.shown or process.poll() is not None, until, limit_s=25)
                then(terminal.shown.decode(errors="replace"))
                process.send_signal(signal.SIGINT)
            with suppress(BrokenPipeError), process.stdin:
                process.stdin.write(stdin)
            process.wait(60)
        finally:
            process.kill()
            process.wait()
    assert process.returncode >= 0, (arguments, process.returncode)
    text = terminal.shown.decode(errors="surrogateescape").replace("\r\n", "\n")
    assert "Traceback" not in text, (arguments, text[-2000:])
    return text


def assert_harmless(text: str, command: object, *, is_folded: bool = False) -> None:
    """Assert that the output has no control sequences except shipper's colours, and no forged line."""
    assert "\x1b[31mlonglong" not in text, command
    bare = COLOURS.sub("", text)
    found = {each for each in bare if each != "\n" and unicodedata.category(each)[0] == "C"}
    found |= {each for each in bare if unicodedata.category(each) in {"Zl", "Zp"}}
    assert not found, (command, found, [line for line in bare.split("\n") if found & set(line)][:2])
    # A table wraps texts.
    assert is_folded or not any(line.startswith('{"event":"forged"}') for line in bare.split("\n")), command


def hostile_words(fake: FakeService, refusal: Mapping[str, object] = {"message": TEXT}) -> None:
    """Make the service refuse every second batch with a hostile message."""
    refused = json.dumps(refusal).encode()
    fake.default = lambda: Reply(422, refused) if len(fake.bodies) % 2 else Reply()


def hostile_lines(sample: Sample, at: int) -> bytes:
    """Return hostile lines: valid records, and ones that a rule or the service refuses."""
    lines = sample.lines[at : at + 9]
    odd = [changed(lines[0], AffiliateID=TEXT[:200]), changed(lines[1], **{TEXT: 1}), changed(lines[2], IP=TEXT)]
    return b"".join([*odd, *lines[3:], TEXT.encode(), b"\n"])


def write_hostile_files(shipper: Shipper, sample: Sample) -> None:
    """Write hostile lines into files with hostile names."""
    for at, name in ((0, NAME), (9, os.fsdecode(b"bytes\xff\xfe" + NAME.encode()[:20]))):
        shipper.write(f"logs/{name}", hostile_lines(sample, at))


@pytest.fixture
def shipped(shipper: Shipper, fake: FakeService, sample: Sample) -> Shipper:
    """A shipper that has shipped files with hostile names and fields to a service with hostile messages."""
    hostile_words(fake, {"rejected": [{"index": 0, "message": TEXT}]})
    write_hostile_files(shipper, sample)
    result = shipper.backfill("logs", settings={"batch.max_events": 2, "delivery.concurrency": 1})
    assert result.returncode == 3
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


def test_no_record_name_or_answer_can_control_the_terminal(shipped: Shipper):
    for command in COMMANDS:
        options = () if "--config" in command else ("--config", shipped.config)
        assert_harmless(on_terminal(shipped, *command, *options), command)


FORMS = ("console", "json")


@pytest.mark.parametrize("log_format", FORMS)
def test_no_text_can_control_the_terminal_of_a_sidecar(
    log_format: str, shipper: Shipper, fake: FakeService, sample: Sample
):
    hostile_words(fake)
    write_hostile_files(shipper, sample)
    debug = ("--log-level", "debug", "--log-format", log_format)
    command = ("run", f"{shipper.folder}/logs/*", *debug, "--set", "batch.max_events=1", "--config", shipper.config)
    text = on_terminal(shipper, *command, until="record_rejected")
    assert_harmless(text, command)


@pytest.mark.parametrize("log_format", FORMS)
def test_no_text_can_control_the_terminal_of_a_pipe(
    log_format: str, shipper: Shipper, fake: FakeService, sample: Sample
):
    hostile_words(fake)
    debug = ("--log-level", "debug", "--log-format", log_format)
    for options in (debug, ("--summary", "json")):
        command = ("pipe", *options, "--set", "batch.max_events=1", "--config", shipper.config)
        text = on_terminal(shipper, *command, stdin=hostile_lines(sample, 0))
        assert "dead" in text, text
        assert_harmless(text, command)


def test_no_text_can_control_the_terminal_of_a_watched_status(shipped: Shipper):
    command = ("status", "--all", "--watch", "--interval", "0.1", "--config", shipped.config)
    drawn = on_terminal(shipped, *command, env={"TERM": "xterm", "LINES": "200"}, until="bytes")
    assert_harmless(DRAWING.sub("", drawn), command)
    assert_harmless(on_terminal(shipped, *command, "--json", until="bytes"), command)


def test_no_text_can_control_the_terminal_of_a_sandbox(shipper: Shipper):
    """From a request and from the command line."""

    def ask(seen: str) -> None:
        found = re.search(r"127\.0\.0\.1:(\d+)", seen)
        assert found, seen
        for request in (b"GET /%b HTTP/1.1\r\n", b"%b / HTTP/1.1\r\nHost: x\r\n", b"POST / HTTP/1.1\r\nX: %b\r\n"):
            address = "127.0.0.1", int(found[1])
            # The sandbox may disconnect early.
            with socket.create_connection(address, timeout=10) as connection, suppress(OSError):
                connection.sendall(request % TEXT.encode()[:200].replace(b"\n", b"") + b"\r\n")
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65_536):
                    pass

    command = ("sandbox", "--port", "0")
    assert_harmless(on_terminal(shipper, *command, until="127.0.0.1:", then=ask), command)
    for options in (("--port", TEXT), ("--host", TEXT), ("--config", "gone" + NAME), (f"--{TEXT}",), (TEXT,)):
        assert_harmless(on_terminal(shipper, "sandbox", *options), options)


def test_no_command_line_argument_can_control_the_terminal(shipper: Shipper):
    folder = shipper.folder / NAME
    folder.mkdir()
    for command in (
        *(("sample", "--count", "3"), ("sample", "--seed", TEXT), ("sample", "--count", TEXT), ("sample", TEXT)),
        *(("demo", "--events", TEXT), ("demo", TEXT), ("demo", "--events", "10"), (TEXT,), (f"--{TEXT}",)),
    ):
        assert_harmless(on_terminal(shipper, *command, env={"TMPDIR": str(folder)}), command)


def test_no_text_in_a_report_can_control_the_terminal(shipped: Shipper):
    brands = [brand(entry(name=TEXT, reporting_currency=TEXT), name=TEXT)]
    with ReportService() as origin:
        origin.rule = lambda asked: ok(document(asked, brands=brands, reporting_currency=TEXT, reporting_time=TEXT))
        env = Reporter(shipped, Target(origin.url, "the-key", "the-token")).environment
        days = ("1001", "2026-10-01", "2026-10-31")
        for command in (
            *(("report", *days, "--checks", "--format", form) for form in ("table", "csv", "ndjson", "json", "html")),
            *(("reconcile", *days, "--format", form) for form in ("table", "csv", "json", "html")),
        ):
            text = on_terminal(shipped, *command, "--config", shipped.config, env=env)
            assert len(text) > 100, (command, text)
            assert_harmless(text, command, is_folded="table" in command)
        assert origin.asked


def test_no_text_in_a_restated_report_can_control_the_terminal(shipper: Shipper):
    with ReportService() as origin:
        told = Reporter(shipper, Target(origin.url, "the-key", "the-token"))

        def restate(name: str) -> None:
            brands = [brand(entry(name=name, reporting_currency=name), name=name)]
            changes = {"brands": brands, "reporting_currency": name, "reporting_time": name}
            origin.rule = lambda asked: ok(
                document(asked, **changes)[:-1] + b"," + json.dumps({name: name})[1:].encode()
            )

        options = ("--config", shipper.config)
        for number, command in enumerate(
            (("watch", "--once"), ("watch", "--once"), ("fetch",), ("diff",), ("history",))
        ):
            restate(TEXT + str(number))
            words = ("report", *command, "1001", *OCTOBER, *options)
            text = on_terminal(shipper, *words, env=told.environment)
            assert "2026-10-01" in text
            assert "diff" not in command or "longlong" in text, text
            assert_harmless(text, words, is_folded=True)
        restate(TEXT + "last")
        words = ("report", "watch", "1001", *OCTOBER, "--interval", "1", *options)
        text = on_terminal(shipper, *words, env=told.environment, until="report diff")
        assert_harmless(text, words)
