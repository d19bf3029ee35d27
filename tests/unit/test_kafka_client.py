"""What the Kafka client raises."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError, KafkaException

from shipper.kafka.client import error_of, flush


class FailingProducer:
    def __init__(self, cause: Exception | None) -> None:
        self._cause = cause

    def flush(self, _: float) -> int:
        raise SystemError("flush returned a result with an exception set") from self._cause


def test_a_failure_of_the_client_is_a_fatal_error_also_if_its_reason_is_lost():
    fenced = KafkaException(KafkaError(KafkaError._FENCED, fatal=True))
    for cause, code in [(fenced, KafkaError._FENCED), (None, KafkaError._FATAL)]:
        with pytest.raises(KafkaException) as raised:
            flush(FailingProducer(cause), 1.0)  # type: ignore[arg-type]
        assert (error_of(raised.value).code(), error_of(raised.value).fatal()) == (code, True)
