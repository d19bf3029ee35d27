"""The sandbox as a process: killed and restarted, several at once, malformed requests."""

from __future__ import annotations

import json
import re
import socket
import threading
import tomllib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random
from select import select

import httpx

from shipper.model import wire
from tests.conftest import SEED
from tests.e2e.conftest import Sample
from tests.e2e.driver import Running, Service, Shipper, Target, changed
from tests.fuzz.mutation import mutator

KILLS = 6
BATCH = 50
RUBBISH = 300
mutate = mutator(words=[b"\r\n", b"\r\n\r\n", b": ", b"HTTP/1.1"])
_PATIENCE_S = 0.2  # timeout for possibly incomplete requests; if too short, only that answer is missed


class Sandbox(Service):
    """A sandbox in its own process."""

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


def test_verbose_logs_a_line_for_each_request_without_keys_tokens_or_records(shipper: Shipper, sample: Sample):
    with sandbox(shipper, "-v") as service:
        good, bad = sample.lines[:2], changed(sample.lines[2], IP="none")
        assert service.post([*good, bad]).status_code == 202
        # A line is logged after its answer, so lines of different connections may be reordered.
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


def test_every_acknowledged_batch_survives_a_kill(shipper: Shipper, sample: Sample):
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
        assert set(ids(answered)) <= set(stored), "an acknowledged batch was lost"
        assert set(stored) <= set(ids(sent)), "an event was invented"
        assert len(stored) % BATCH == 0, "a batch is stored partially"
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
                producer.join(10)  # each ends because its connection broke
    with sandbox(shipper, "--store", store) as service:
        check(service)
        assert len(answered) >= KILLS
        first = answered[0]
        assert service.post(sample.lines[first.start : first.stop]).json() == {
            "accepted": 0,
            "duplicates": BATCH,
            "rejected": [],
        }
        assert service.event(sample.ids[first.start])["times_received"] == 2


# Malformed requests; `tests/fuzz/requests.py` tests more of them, behind the HTTP library


def _message(rng: Random, service: Sandbox, sample: Sample) -> bytes:
    """Return a valid request, sometimes with an odd header."""
    method, path, content = rng.choice(
        [
            ("GET", "/dpm/v1/dar/1001/2026-01-01/2026-01-31", b""),
            ("GET", "/dpm/v1/nowhere", b""),
            ("POST", wire.INTAKE_PATH, body(rng.sample(sample.lines[:100], 3))),
        ]
    )
    headers = {"Host": "sandbox", "Connection": "close", **service.headers}
    if content:
        headers["Content-Length"] = str(len(content))
    if rng.random() < 0.3:
        odd = ["", "\x7f", "Bearer ", "Bearer a.b.c", "é", "gzip", "0", "-1", "9" * 30, "x" * 5000, "chunked", "\udcff"]
        more = ["Content-Encoding", "Transfer-Encoding", "Expect", "Upgrade", "Accept-Encoding"]
        headers[rng.choice([*headers, *more])] = rng.choice(odd)
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode("utf-8", "surrogateescape") + content


def _exchange(service: Sandbox, data: bytes) -> bytes:
    """Send data and return the beginning of the answer; if none arrives, signal the end of the request."""
    url = httpx.URL(service.target.base_url)
    with socket.create_connection((url.host, url.port), timeout=10) as connection, suppress(OSError):
        connection.sendall(data)
        if not select([connection], [], [], _PATIENCE_S)[0]:
            connection.shutdown(socket.SHUT_WR)
        return connection.recv(1 << 16)
    return b""


def test_malformed_requests_cause_no_server_error_and_no_traceback(shipper: Shipper, sample: Sample):
    rng = Random(SEED)
    statuses: Counter[int] = Counter()
    with sandbox(shipper) as service:
        for number in range(RUBBISH):
            data = _message(rng, service, sample) if number % 7 else rng.randbytes(rng.randint(1, 2000))
            data = mutate(rng, data, [data]) if number % 4 else data
            found = re.match(rb"HTTP/1\.1 ([0-9]{3})", _exchange(service, data))
            status = int(found[1]) if found else 0
            statuses[status] += 1
            assert status < 500, data
        service.reset()
        answer = service.post(sample.lines[-10:])
        assert (answer.status_code, answer.json()["accepted"]) == (202, 10)
        assert service.running.stop().returncode == 0
        assert service.running.stderr == ""
    assert {200, 202, 400, 401, 404} <= statuses.keys(), statuses
    assert statuses.total() - statuses[0] > RUBBISH // 2, statuses
