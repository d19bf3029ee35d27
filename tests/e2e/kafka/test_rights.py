"""TLS, SCRAM and access control lists of the brokers: a missing right is named; once granted, the member resumes."""

from __future__ import annotations

import json
import time
from base64 import urlsafe_b64encode

import pytest
from confluent_kafka.admin import AclOperation, ResourceType

from tests.cases import each
from tests.e2e.conftest import Sample
from tests.e2e.driver import Result, Running, Service
from tests.e2e.kafka.broker import PASSWORD, USER, right, sums
from tests.e2e.kafka.conftest import Group
from tests.e2e.kafka.test_member import partitions, values
from tests.e2e.operated import Admin

RIGHTS = ["topic", "group", "letters", "ledger", "transactions"]
AT_THE_START = [*RIGHTS, "reading the ledger"]  # read at most once by a member, if it has no offset


def needed(group: Group, name: str) -> str:
    """Return the text for a right in a message."""
    return {
        "topic": f"user {USER} needs READ on the topic {group.topic}",
        "group": f"user {USER} needs READ on the group {group.name}",
        "letters": f"user {USER} needs WRITE on the topic {group.letters}",
        "ledger": f"user {USER} needs WRITE on the topic {group.ledger}",
        "reading the ledger": f"user {USER} needs READ on the topic {group.ledger}",
        "transactions": f"user {USER} needs WRITE on transactional ids from {group.name}-",
    }[name]


def pauses(running: Running) -> dict[str, str]:
    live = Admin(running).status()["live"]
    return {each["reason"]: each["message"] for each in live["pauses"]} if live else {}


def test_a_member_delivers_over_tls_with_a_password(secure: Group, service: Service, sample: Sample):
    secure.broker.produce(secure.topic, [*values(sample, 0, 500), b"bad"])
    checked = secure.shipper.run("check", "--online", check=False)
    assert checked.returncode == 0, checked.stdout
    running = secure.member()
    secure.finish(running)
    service.assert_holds_exactly(sample.ids[:500])
    assert PASSWORD not in running.stderr + checked.stdout


def test_status_needs_a_right_only_to_count_dead_letters(secure: Group):
    seen = secure.shipper.run("status", "--until", "2026-01-01", check=False)
    assert seen.returncode == 0, seen
    assert "is delivered, except dead letters, whose number is unknown\n" in seen.stdout
    assert f"user {USER} needs READ on the topic {secure.letters}" in seen.stdout
    read = right(ResourceType.TOPIC, secure.letters, AclOperation.READ)
    secure.broker.grant(read)
    assert "dead letters: 0 kept\n" in secure.shipper.run("status", check=False).stdout


def test_status_names_the_rights_that_it_needs(secure: Group):
    """At once; without a right, some requests only end after their time limit."""
    secure.shipper.shortened = secure.shipper.shortened | {"shipper.kafka.offsets._CALL_S": 60.0}
    needs = f"user {USER} needs DESCRIBE on the group {secure.name} and the topics {secure.topic}\n"
    for name in ("topic", "group"):
        secure.broker.revoke(secure.rights[name])
        refused = secure.shipper.run("status", check=False)
        assert (refused.returncode, needs in refused.stderr) == (2, True), refused
        secure.broker.grant(secure.rights[name])


def test_the_dead_letters_and_the_ledger_can_be_read_without_a_right_on_the_group(secure: Group):
    secure.broker.revoke(secure.rights["group"])
    secure.broker.grant(right(ResourceType.TOPIC, secure.letters, AclOperation.READ))
    assert secure.shipper.run("dead-letters", "list", check=False).stdout == "no dead letters\n"
    assert secure.shipper.run("ledger", check=False).returncode == 0


def test_the_reason_why_a_client_cannot_connect_is_named(secure: Group):
    # None waits for an answer. Until an answer was due, the client would try again and again.
    limits = ("offsets._CALL_S", "documents._READ_S", "view._CALL_S", "topics._CALL_S")
    secure.shipper.shortened = secure.shipper.shortened | {f"shipper.kafka.{name}": 600.0 for name in limits}
    text = secure.shipper.config.read_text()

    def ended(*words: str) -> Result:
        """Run a command in a process of its own, which ends the clients that try again."""
        return secure.shipper.start(*words, check=False).finish()

    def assert_named(key: str) -> None:
        for command in (["run"], ["status"], ["dead-letters", "list"], ["dead-letters", "purge", "--all", "--yes"]):
            refused = ended(*command)
            assert (refused.returncode, f"check {key}" in refused.stderr) == (2, True), (command, refused.stderr)
            assert "a-wrong-one" not in refused.stderr
            assert f"{secure.letters}: " not in refused.stderr, "no topic is the cause"
        checked = json.loads(ended("check", "--online", "--json").stdout)
        (failed,) = (item["what"] for item in checked["items"] if item["name"].startswith("kafka:"))
        assert f"check {key}" in failed

    # No later test makes it valid: the library aborts if a request that has timed out is answered after all.
    (secure.shipper.folder / "password").write_text("a-wrong-one")
    assert_named("input.kafka.username and input.kafka.password")
    secure.shipper.config.write_text(text.replace("SCRAM-SHA-512", "PLAIN"))
    assert_named("input.kafka.sasl_mechanism")
    (secure.shipper.folder / "password").write_text(PASSWORD)
    secure.shipper.config.write_text("\n".join(line for line in text.splitlines() if not line.startswith("ca_bundle")))
    assert_named("input.kafka.ca_bundle")
    refused = ended("run")
    assert "verify that input.kafka.ca_bundle is" in refused.stderr.splitlines()[-1], refused.stderr


def test_a_password_that_is_changed_in_the_brokers_and_then_in_its_file_is_used_without_a_restart(
    secure: Group, service: Service, sample: Sample
):
    shortened = {
        "shipper.kafka.member._PASSWORD_INTERVAL_S": 0.5,
        "shipper.kafka.member_status._LOGIN_RETRY_S": 3.0,
        "shipper.kafka.client.TRANSACTION_S": 3.0,
    }
    secure.shipper.shortened = secure.shipper.shortened | shortened
    text = secure.shipper.config.read_text() + "client = { 'reconnect.backoff.max.ms' = 1000 }\n"
    secure.shipper.config.write_text(text)
    file = secure.shipper.folder / "password"
    secure.broker.produce(secure.topic, values(sample, 0, 10))
    running = secure.member()
    running.wait_until(secure.is_settled, "the group is at the end")
    try:
        secure.broker.set_password("another-one")
        secure.broker.stop()  # ends the connections that the old password has opened
        secure.broker.start()
        secure.broker.produce(secure.topic, [*values(sample, 10, 20), b"bad"])
        running.wait_until(lambda: "broker_forbidden" in pauses(running), "the old password is refused")
        file.write_text("another-one")
        running.wait_until(secure.is_settled, "the group is at the end, with the new password")
        running.wait_until(lambda: Admin(running).get("/readyz").status_code == 200, "it is ready again")
    finally:
        secure.broker.set_password(PASSWORD)
    secure.finish(running)
    service.assert_holds_exactly(sample.ids[:20])
    assert "another-one" not in running.stderr


def token(life_s: float) -> str:
    """Make an unsigned token, which the broker accepts here."""
    now = time.time()
    parts = {"alg": "none"}, {"sub": USER, "iat": now, "exp": now + life_s}
    return ".".join([*(urlsafe_b64encode(json.dumps(each).encode()).decode().rstrip("=") for each in parts), ""])


@pytest.mark.long
def test_a_new_token_is_fetched_once_the_old_one_expires(secure: Group, service: Service, sample: Sample):
    file = secure.shipper.folder / "password"
    head, _, tail = secure.security.partition("sasl_mechanism")
    secure.security = f"{head}sasl_mechanism = 'OAUTHBEARER'\ntoken = {{ file = '{file}' }}"
    assert tail
    secure.write()
    file.write_text(token(-60))
    refused = secure.shipper.run("run", check=False)
    assert (refused.returncode, "input.kafka.token" in refused.stderr) == (2, True), refused.stderr
    file.write_text(token(20))
    secure.broker.produce(secure.topic, values(sample, 0, 100))
    running = secure.member()
    secure.finish(running)
    service.assert_holds_exactly(sample.ids[:100])
    assert file.read_text() not in running.stderr


@pytest.mark.long
@each("name", AT_THE_START)
def test_a_right_missing_at_startup_is_named(name: str, secure: Group):
    secure.broker.revoke(secure.rights[name])
    try:
        checked = secure.shipper.run("check", "--online", check=False)
        assert (checked.returncode, needed(secure, name) in checked.stdout) == (4, True), checked.stdout
        if name != "group":  # requested when it is joined
            refused = secure.shipper.run("run", check=False)
            assert (refused.returncode, needed(secure, name) in refused.stderr) == (2, True), refused.stderr
    finally:
        secure.broker.grant(secure.rights[name])


def test_a_right_that_is_granted_again_is_noticed_without_a_record(secure: Group, service: Service, sample: Sample):
    shortened = {"shipper.kafka.member._TOPIC_INTERVAL_S": 0.5}
    secure.shipper.shortened = secure.shipper.shortened | shortened
    secure.broker.produce(secure.topic, values(sample, 0, 10))
    running = secure.member()
    running.wait_until(secure.is_settled, "the group is at the end")
    secure.broker.revoke(secure.rights["topic"])
    try:
        message = needed(secure, "topic")
        running.wait_until(lambda: message in pauses(running).get("broker_forbidden", ""), f"{message} is reported")
        time.sleep(1)
        assert pauses(running), "two queries later it is still reported"
    finally:
        secure.broker.grant(secure.rights["topic"])
    running.wait_until(lambda: Admin(running).get("/readyz").status_code == 200, "it is ready again", limit_s=20)
    secure.broker.produce(secure.topic, values(sample, 10, 20))
    secure.finish(running)
    service.assert_holds_exactly(sample.ids[:20])


@pytest.mark.long
def test_a_revoked_right_pauses_the_member_until_it_is_granted_again(secure: Group, service: Service, sample: Sample):
    running = secure.member()
    running.wait_until(lambda: len(partitions(running)) == 2, "it has both partitions")
    for number, name in enumerate(RIGHTS):
        secure.broker.revoke(secure.rights[name])
        secure.broker.produce(secure.topic, [*values(sample, 100 * number, 100 * (number + 1)), b"bad %d" % number])
        message = needed(secure, name)
        running.wait_until(
            lambda message=message: message in pauses(running).get("broker_forbidden", ""), f"{message} is reported"
        )
        assert Admin(running).get("/readyz").status_code == 503
        secure.broker.grant(secure.rights[name])
        running.wait_until(secure.is_settled, f"the group is at the end, with the right {name} again", limit_s=120)
        running.wait_until(lambda: not pauses(running), "nothing is reported any more")
    assert running.stop().returncode == 0, running.stderr
    service.assert_holds_exactly(sample.ids[: 100 * len(RIGHTS)])
    counts = sums(secure.broker.table(secure.ledger))
    assert (counts["read"], counts["accepted"], counts["dead_lettered"]) == (505, 500, 5)
    assert len(secure.broker.table(secure.letters)) == 5
    assert PASSWORD not in running.stderr
