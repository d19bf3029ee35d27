"""Prometheus metrics of a shipper; every name has a bounded number of series."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from shipper.codec.rules import MESSAGES
from shipper.delivery.sender import BUCKETS, REFUSALS
from shipper.model.errors import ShipperError
from shipper.model.group import GroupState
from shipper.status.live import Live
from shipper.status.overview import Overview
from shipper.status.pauses import ADVICE

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_gauge: Final = GaugeMetricFamily
_counter: Final = CounterMetricFamily


def metrics_registry(live: Callable[[], Live | None], state: Callable[[], Overview]) -> CollectorRegistry:
    """Return the registry of all metrics of the latest snapshot and the state."""
    registry = CollectorRegistry()
    registry.register(_Shipper(live, state))
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


class _Shipper(Collector):
    def __init__(self, live: Callable[[], Live | None], state: Callable[[], Overview]) -> None:
        self._live = live
        self._state = state

    def describe(self) -> list[Metric]:
        return []  # otherwise, registering would collect before the first snapshot

    def collect(self) -> Iterator[Metric]:
        if (live := self._live()) is not None:
            yield from _process_metrics(live)
        with suppress(ShipperError):  # the pipeline reports an unreadable state
            yield from _state_metrics(self._state())


def _state_metrics(state: Overview) -> Iterator[Metric]:
    yield _gauge("shipper_streams", "Inputs known", len(state.streams))
    yield _gauge("shipper_streams_behind", "Inputs that are not settled to their end", len(state.behind))
    yield _gauge(
        "shipper_dead_letter_bytes", "Size of stored dead letters, as counted for the quota", state.dead_letter_bytes
    )


def _process_metrics(live: Live) -> Iterator[Metric]:
    """Yield the metrics of a snapshot; counts of known reasons start at 0, so that the first increase is visible."""
    yield _labelled(GaugeMetricFamily, "shipper_build_info", "Version", "version", {live.version: 1})
    yield _gauge("shipper_start_time_seconds", "When the shipper started, since the epoch", live.started_at)
    handed_over = live.group.handed_over if live.group is not None else 0
    yield _counter("shipper_records_read", "Records read", live.read + handed_over)
    yield _counter("shipper_events_accepted", "Events that the service accepted", live.accepted)
    refused = dict.fromkeys((*MESSAGES, *REFUSALS), 0) | live.dead_letters
    yield _labelled(CounterMetricFamily, "shipper_dead_letters", "Dead letters, by rule", "reason", refused)
    yield _counter("shipper_duplicates", "Records skipped as duplicates", live.duplicates)
    yield _gauge("shipper_pending_records", "Records read and not settled", live.pending)
    yield _counter("shipper_batches", "Batches settled", live.batches)
    yield _labelled(CounterMetricFamily, "shipper_requests", "Requests, by status of the answer", "code", live.requests)
    yield _durations(live)
    yield _labelled(CounterMetricFamily, "shipper_retries", "Repeated attempts, by cause", "cause", live.retries)
    yield _gauge("shipper_in_flight_requests", "Requests in flight", live.in_flight)
    yield _gauge("shipper_concurrency_limit", "Limit of requests in flight", live.concurrency_limit)
    yield _gauge("shipper_lag_bytes", "Bytes known to exist and not settled, of all inputs", live.lag_bytes)
    oldest_s = live.oldest_unsettled_seconds or 0.0
    yield _gauge("shipper_oldest_unsettled_seconds", "Age of the oldest record read and not settled", oldest_s)
    yield _gauge("shipper_spool_bytes", "Bytes of standard input on disk", live.spool_bytes)
    yield _gauge("shipper_inputs_unreadable", "Files that match but cannot be read", live.unreadable_count)
    yield _gauge("shipper_patterns_unmatched", "Patterns of input.include that no file matches", len(live.unmatched))
    yield _counter("shipper_unreachable_bytes", "Bytes of inputs gone before they were read", live.unreachable_bytes)
    yield _counter("shipper_commits", "Transactions of the state store", live.commits)
    paused = dict.fromkeys(ADVICE, 0) | {pause.reason: 1 for pause in live.pauses}
    yield _labelled(GaugeMetricFamily, "shipper_paused", "1 while delivery pauses for a reason", "reason", paused)
    for name, text, at in (
        ("last_accepted", "When the service last accepted something", live.last_accepted_at),
        ("token_expiry", "When the access token expires", live.token_expires_at),
        ("certificate_expiry", "When the service's certificate expires", live.certificate_expires_at),
    ):
        if at is not None:
            yield _gauge(f"shipper_{name}_timestamp_seconds", f"{text}, since the epoch", at)
    if live.group is not None:
        yield from _group_metrics(live.group)


def _group_metrics(group: GroupState) -> Iterator[Metric]:
    """Yield the metrics of a consumer group member; `/status` has those of single partitions."""
    yield _gauge("shipper_lag_records", "Records not settled, of owned partitions", group.lag_records)
    yield _gauge("shipper_lag_seconds", "Age of the oldest message read and not settled", group.lag_seconds)
    states = Counter({"reading": 0, "paused": 0, "stopped": 0})
    states.update(partition.state for partition in group.partitions)
    yield _labelled(GaugeMetricFamily, "shipper_partitions", "Owned partitions", "state", states)
    moved = group.rebalances
    yield _labelled(CounterMetricFamily, "shipper_rebalances", "Partitions assigned, revoked or lost", "kind", moved)
    yield _counter("shipper_handed_over_records", "Records left to the next owner", group.handed_over)
    yield _counter("shipper_tombstones_skipped", "Messages without a value, skipped", group.tombstones_skipped)
    lost = group.unreachable_records
    yield _counter("shipper_unreachable_records", "Messages gone before they were read, and passed over", lost)
    ended = group.transactions
    yield _labelled(CounterMetricFamily, "shipper_transactions", "Kafka transactions", "outcome", ended)
    yield _counter("shipper_transaction_seconds", "Time in committed transactions", group.transaction_seconds)
    errors = group.broker_errors
    yield _labelled(CounterMetricFamily, "shipper_broker_errors", "Errors from the brokers", "code", errors)


def _labelled(
    family: type[GaugeMetricFamily | CounterMetricFamily], name: str, text: str, label: str, values: dict[str, int]
) -> Metric:
    metric = family(name, text, labels=[label])
    for value, count in sorted(values.items()):
        metric.add_metric([value], count)
    return metric


def _durations(live: Live) -> Metric:
    buckets, total = [], 0
    for end, count in zip([*map(str, BUCKETS), "+Inf"], live.latency_counts or [0] * (len(BUCKETS) + 1), strict=True):
        total += count
        buckets.append((end, total))
    metric = HistogramMetricFamily(
        "shipper_request_duration_seconds", "Time from sending a request to the complete answer"
    )
    metric.add_metric([], buckets, live.latency_total_seconds)
    return metric
