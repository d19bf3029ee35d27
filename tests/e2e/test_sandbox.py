"""The sandbox as a user starts it: killed and restarted, several at once, fed with rubbish, on a bad day."""

from __future__ import annotations

import json
import re
import socket
import threading
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random
from select import select

import httpx
import pytest
from typer.testing import CliRunner

from shipper.cli.app import command_line
from shipper.model import wire
from shipper.model.errors import ShipperError
from tests.conftest import SEED
from tests.e2e.conftest import Sample
from tests.e2e.driver import Running, Service, Shipper, Target, changed

KILLS = 6
BATCH = 50
RUBBISH = 700
_PATIENCE_S = 0.2  # with a message that may lack its end; too little of it costs only that answer


class Sandbox(Service):
    """A sandbox in a process of its own."""

    def __init__(self, running: Running, target: Target) -> None:
        super().__init__(target)
        self.running = running

    @property
    def headers(self) -> dict[str, str]:
        return {
            "Content-Type": "application/json",
            "Cache-Control": "no-cache",
            "Authorization": f"Bearer {self.target.token}",
            "Ocp-Apim-Subscription-Key": self.target.subscription_key,
        }

    def client(self) -> httpx.Client:
        return httpx.Client(
            base_url=self.target.base_url, headers=self.headers, trust_env=False, verify=False, timeout=10
        )

    def post(self, lines: list[bytes]) -> httpx.Response:
        with self.client() as client:
            return client.post(wire.INTAKE_PATH, content=body(lines))

    def ask(self, path: str) -> dict:
        with self.client() as client:
            return client.get(f"/_sandbox/{path}").raise_for_status().json()


@contextmanager
def sandbox(shipper: Shipper, *flags: str | Path) -> Iterator[Sandbox]:
    config = shipper.folder / "sandbox.toml"
    config.unlink(missing_ok=True)
    running = shipper.start("sandbox", "--port", "0", "--write-config", config, *flags, configured=False, check=False)
    running.wait_until(config.exists, "the sandbox listens")
    with Sandbox(running, Target(**tomllib.loads(config.read_text())["intake"])) as service:
        yield service
    running.end()


def body(lines: list[bytes]) -> bytes:
    return wire.BODY_HEAD + b",".join(line.rstrip() for line in lines) + wire.BODY_TAIL


def test_verbose_logs_each_request_on_a_line_and_never_a_key_a_token_or_a_record(shipper: Shipper, sample: Sample):
    with sandbox(shipper, "-v") as service:
        good, bad = sample.lines[:2], changed(sample.lines[2], IP="none")
        assert service.post([*good, bad]).status_code == 202
        # A line is written behind its answer, and over another connection the next may be before it.
        service.running.wait_until(lambda: service.running.stderr.count('"request"') >= 1, "a line")
        with service.client() as client:
            client.post("/elsewhere?key=secret", content=b"x")
            client.headers["Authorization"] = "Bearer wrong"
            assert client.post(wire.INTAKE_PATH, content=b"x").status_code == 401
        assert service.ask("counts")["requests"] == 2
        service.running.wait_until(lambda: service.running.stderr.count('"request"') >= 3, "three lines")
        text = service.running.stderr
        lines = [json.loads(line) for line in text.splitlines()]
        wanted = [(wire.INTAKE_PATH, 202, 3, 1), ("/elsewhere", 404, None, None), (wire.INTAKE_PATH, 401, None, None)]
        assert [tuple(map(line.get, ("path", "status", "events", "rejected"))) for line in lines] == wanted, text
        for secret in ("secret", "wrong", service.target.token, service.target.subscription_key, sample.ids[0]):
            assert secret not in text


def test_every_batch_that_was_answered_survives_a_kill(shipper: Shipper, sample: Sample):
    rng = Random(SEED)
    store = shipper.folder / "events.db"
    batches = [range(start, start + BATCH) for start in range(0, len(sample.lines), BATCH)]
    waiting, sent, answered = iter(batches), list[range](), list[range]()
    lock = threading.Lock()

    def produce(service: Sandbox) -> None:
        with service.client() as client, suppress(httpx.TransportError):
            while True:
                with lock:
                    batch = next(waiting)
                    sent.append(batch)
                content = body(sample.lines[batch.start : batch.stop])
                if client.post(wire.INTAKE_PATH, content=content).status_code == 202:
                    answered.append(batch)

    def check(service: Sandbox) -> None:
        stored = service.event_ids()
        assert set(ids(answered)) <= set(stored), "a batch that was answered is gone"
        assert set(stored) <= set(ids(sent)), "an event was invented"
        assert len(stored) % BATCH == 0, "a part of a batch is there"
        assert len(stored) == len(set(stored)) == service.stored

    def ids(wanted: list[range]) -> list[str]:
        return [sample.ids[index] for batch in wanted for index in batch]

    for _ in range(KILLS):
        with sandbox(shipper, "--store", store) as service:
            check(service)
            producers = [threading.Thread(target=produce, args=(service,)) for _ in range(3)]
            enough = len(answered) + rng.randint(1, 20)
            for producer in producers:
                producer.start()
            service.running.wait_until(partial(lambda enough: len(answered) >= enough, enough), "batches arrive")
            service.running.kill()
            for producer in producers:
                producer.join(10)  # each ends because its connection broke, in the middle of its work
    with sandbox(shipper, "--store", store) as service:
        check(service)
        assert len(answered) >= KILLS
        assert service.post(sample.lines[:BATCH]).json() == {"accepted": 0, "duplicates": BATCH, "rejected": []}
        assert service.event(sample.ids[0])["times_received"] == 2


def test_two_sandboxes_with_different_flags_do_not_disturb_each_other(shipper: Shipper, sample: Sample):
    bad = sample.lines[0].replace(b'"IP":"', b'"IP":"999.')
    flags = ["--rejection", "whole", "--account-id", "7", "--subscription-key", "another-key", "--figures", "seeded"]
    with sandbox(shipper) as one, sandbox(shipper, *flags) as other:
        assert one.post([*sample.lines[:2], bad]).json()["accepted"] == 2
        assert other.post([*sample.lines[:2], bad]).status_code == 400
        assert other.post(sample.lines[:5]).json()["accepted"] == 5
        assert (one.stored, other.stored) == (2, 5)
        with one.client() as client:
            answer = client.post(other.target.base_url + wire.INTAKE_PATH, content=body(sample.lines[:1]))
            assert answer.status_code == 401
            assert client.get("/dpm/v1/dar/7/2026-01-01/2026-01-31").status_code == 404
        with other.client() as client:
            report = client.get("/dpm/v1/dar/7/2026-01-01/2026-01-31").json()
            assert report["source"]["affilaiteAccountId"] == 7
            assert report["brands"]
        for service in (one, other):
            assert service.running.stop().returncode == 0


def test_a_client_on_a_bad_day_loses_nothing(shipper: Shipper, sample: Sample):
    file = shipper.folder / "events.ndjson"
    file.write_bytes(b"".join(sample.lines[:5000]))
    quick = {"batch.max_events": 50, "delivery.retry_initial_seconds": 0.01, "delivery.retry_max_seconds": 0.05}
    with sandbox(shipper, "--seed", str(SEED), "--fault", "chance probability=0.2") as service:
        shipper.target = service.target
        result = shipper.backfill(file, settings=quick, limit_s=120)
        assert (result.returncode, result.counts()) == (0, (5000, 5000, 0, 0, 0))
        service.assert_holds_exactly(sample.ids[:5000])
        assert service.counts()["duplicates"] > 0, "no answer was lost"
        (rule,) = service.ask("faults")["fault"]
        assert rule["applied"] > 10
        faults = {entry["fault"] for entry in service.ask("requests?limit=10000")["requests"]}
        assert len(faults) > 3, faults


def test_faults_of_a_script_befall_the_requests_that_it_names(shipper: Shipper, sample: Sample):
    script = shipper.folder / "faults.toml"
    script.write_text(
        '[[fault]]\neffect = "status"\nstatus = 503\nrequests = "5-9"\n\n'
        '[[fault]]\neffect = "reset"\nevery = 7\nwhen = "after"\n'
    )
    with sandbox(shipper, "--faults", script) as service, service.client() as client:
        said: list[int] = []
        for number in range(1, 15):
            try:
                content = body(sample.lines[number : number + 1])
                said.append(client.post(wire.INTAKE_PATH, content=content).status_code)
            except httpx.ReadError:
                said.append(0)
        assert said == [202] * 4 + [503] * 5 + [202] * 4 + [0]  # the 7th fits both rules; the first one counts
        service.assert_holds_exactly(sample.ids[index] for index in (1, 2, 3, 4, 10, 11, 12, 13, 14))


# Rubbish


def _valid(rng: Random, service: Sandbox, sample: Sample) -> tuple[str, str, dict[str, str], bytes]:
    path = rng.choice([wire.INTAKE_PATH, wire.INTAKE_PATH, "/dpm/v1/dar/1001/2026-01-01/2026-01-31"])
    if path != wire.INTAKE_PATH:
        return "GET", path, service.headers, b""
    return "POST", path, service.headers, body(rng.sample(sample.lines[:100], 3))


def _message(method: str, path: str, headers: dict[str, str], content: bytes) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: sandbox", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    lines += [f"Content-Length: {len(content)}"] if content else []
    return "\r\n".join([*lines, "", ""]).encode("utf-8", "surrogateescape") + content


def _mutated(rng: Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 5)):
        at = rng.randrange(len(changed))
        match rng.randrange(4):
            case 0:
                changed[at] = rng.randrange(256)
            case 1:
                del changed[at : at + rng.randint(1, 50)]
            case 2:
                changed[at:at] = rng.randbytes(rng.randint(1, 20))
            case _:
                changed[at:at] = changed[at : at + rng.randint(1, 200)]
        changed = changed or bytearray(b"?")
    return bytes(changed)


def _bad_content(rng: Random, service: Sandbox, sample: Sample) -> bytes:
    method, path, headers, content = _valid(rng, service, sample)
    return _message(method, path, headers, _mutated(rng, content or b"{}"))


def _bad_message(rng: Random, service: Sandbox, sample: Sample) -> bytes:
    return _mutated(rng, _message(*_valid(rng, service, sample)))


def _bad_json(rng: Random, service: Sandbox, sample: Sample) -> bytes:
    scalars = [None, True, -1, 0, 1e308, 2**70, "", "\u0000", "\udc80", "x" * 1000, "NaN"]

    def value(depth: int) -> object:
        match rng.randrange(4) if depth else 3:
            case 0:
                return [value(depth - 1) for _ in range(rng.randrange(4))]
            case 1:
                return {rng.choice(["EventType", "events", "EventId", "IP"]): value(depth - 1) for _ in range(3)}
            case 2:
                return {**json.loads(rng.choice(sample.lines[:100])), rng.choice(["IP", "BTag"]): value(0)}
            case _:
                return rng.choice(scalars)

    document = rng.choice([value(4), {"EventType": "Acquisition", "events": value(3)}])
    content = rng.choice([json.dumps(document).encode("utf-8", "surrogatepass"), b"[" * rng.randint(1, 100_000)])
    return _message("POST", wire.INTAKE_PATH, service.headers, content)


def _bad_header(rng: Random, service: Sandbox, sample: Sample) -> bytes:
    method, path, headers, content = _valid(rng, service, sample)
    odd = ["", "\x7f", "Bearer ", "Bearer a.b.c", "é", "gzip", "0", "-1", "9" * 30, "x" * 5000, "chunked", "\udcff"]
    more = ["Content-Encoding", "Content-Length", "Transfer-Encoding", "Expect", "Upgrade", "Accept-Encoding"]
    headers = {**headers, rng.choice([*headers, *more]): rng.choice(odd)}
    return _message(method, path, headers, content)


def _bad_path(rng: Random, service: Sandbox, sample: Sample) -> bytes:
    parts = ["dpm", "dim", "v1", "dar", "1001", "2026-01-01", "9999-12-31", "0001-01-01", "%ff", "%00", "..", "", "٣"]
    parts += ["_sandbox", "events", "counts", "faults", "clock", "requests?limit=x", "events?day=0", "keys", "rotate"]
    path = "/" + "/".join(rng.choices(parts, k=rng.randint(1, 7)))
    if rng.random() < 0.3:
        path = "/dpm/v1/dar/1001/" + "/".join(rng.choices(parts, k=2))
    method = rng.choice(["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "CONNECT", "BREW"])
    return _message(method, path, service.headers, rng.choice([b"", b"{}", b"\xff"]))


def _bad_control(rng: Random, service: Sandbox, sample: Sample) -> bytes:
    operations = ["PUT faults", "PUT clock", "POST restatements", "POST keys/rotate", "GET events?after=9"]
    method, path = rng.choice(operations).split()
    content = rng.choice([b"{", b"[]", b"\xff", b'{"offset_seconds":1e99}', b'{"fault":[{"effect":"x"}]}', b"a=1"])
    return _message(method, f"/_sandbox/{path}", {}, content)


RUBBISH_KINDS: list[Callable[[Random, Sandbox, Sample], bytes]] = [
    _bad_content,
    _bad_message,
    _bad_json,
    _bad_header,
    _bad_path,
    _bad_control,
    lambda rng, service, sample: rng.randbytes(rng.randint(1, 2000)),
]


def _exchange(service: Sandbox, data: bytes) -> bytes:
    """Send, and return the beginning of the answer; to what waits for more, say that no more comes."""
    url = httpx.URL(service.target.base_url)
    with socket.create_connection((url.host, url.port), timeout=10) as connection, suppress(OSError):
        connection.sendall(data)
        if not select([connection], [], [], _PATIENCE_S)[0]:
            connection.shutdown(socket.SHUT_WR)
        return connection.recv(1 << 16)
    return b""


@pytest.mark.parametrize("profile", ["document", "strict"])
def test_rubbish_gets_no_server_error_and_leaves_no_traceback(shipper: Shipper, sample: Sample, profile: str):
    rng = Random(SEED)
    statuses: dict[int, int] = {}
    with sandbox(shipper, "--profile", profile) as service:
        for number in range(RUBBISH // 2):
            data = RUBBISH_KINDS[number % len(RUBBISH_KINDS)](rng, service, sample)
            found = re.match(rb"HTTP/1\.1 ([0-9]{3})", _exchange(service, data))
            status = int(found[1]) if found else 0
            statuses[status] = statuses.get(status, 0) + 1
            assert status < 500, data
        service.reset()
        answer = service.post(sample.lines[-10:])
        assert (answer.status_code, answer.json()["accepted"]) == (202, 10)
        assert service.running.stop().returncode == 0
        assert service.running.stderr == ""
    assert {200, 202, 400, 401, 404} <= statuses.keys(), statuses
    assert sum(statuses.values()) - statuses.get(0, 0) > RUBBISH // 4, statuses


# What cannot be started


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--faults", "absent.toml"], r"absent\.toml: cannot be read: No such file"),
        (["--faults", "broken.toml"], r"broken\.toml: cannot be understood: .*`\$\.fault\[0\]`"),
        (["--fault", "explode"], "--fault 'explode': .*effects are chance, delay"),
        (["--rate-limit", "10"], "--rate-limit: '10' is not CALLS/SECONDS"),
        (["--quota", "0/60"], "--quota: '0/60' is not CALLS/SECONDS"),
        (["--latency-seconds", "nan"], "latency_seconds: must be a finite number"),
        (["--secondary-key", "sandbox-subscription-key"], "secondary_key: must differ"),
        (["--blackhole", "--store", "x.db"], "blackhole: keeps nothing"),
        (["--host", "192.0.2.1"], "is not a loopback address"),
        (["--store", "."], r"cannot open the store"),
        (["--store", "broken.toml"], "is not a sandbox store"),
        (["--profile", "lenient"], "'lenient' is not one of 'document', 'strict'"),
        (["--max-body-bytes", "0"], "0 is not in the range x>=1"),
        (["--chaos", "2"], "2.* is not in the range"),
    ],
)
def test_a_bad_flag_is_one_clear_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], message: str
):
    monkeypatch.chdir(tmp_path)
    Path("broken.toml").write_text('[[fault]]\neffect = "reset"\nevry = 7\n')
    never_listens = ["--write-config", "absent/sandbox.toml"]
    result = CliRunner().invoke(command_line(), ["sandbox", "--port", "0", *never_listens, *flags])
    assert result.stdout == ""
    said = str(result.exception) if isinstance(result.exception, ShipperError) else result.stderr
    assert re.search(message, " ".join(said.split())), said


def test_a_port_or_a_store_that_another_sandbox_has_is_refused_as_a_bad_flag_is(shipper: Shipper):
    store = shipper.folder / "events.db"
    with sandbox(shipper, "--store", store) as service:
        port = str(httpx.URL(service.target.base_url).port)
        taken = shipper.run("sandbox", "--port", port, configured=False, check=False)
        assert (taken.returncode, taken.stdout) == (2, "")
        assert f"127.0.0.1:{port} is in use by another program" in taken.stderr
        shared = shipper.run("sandbox", "--port", "0", "--store", store, configured=False, check=False)
        assert (shared.returncode, shared.stdout) == (2, "")
        assert "is in use by another sandbox" in shared.stderr
        usage = shipper.run("sandbox", "--profile", "lenient", configured=False, check=False)
        assert (usage.returncode, usage.stdout) == (2, "")
        assert "'lenient' is not one of" in usage.stderr
        assert service.running.stop().returncode == 0
