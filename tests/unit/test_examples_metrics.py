"""The Prometheus rules and the Grafana dashboard in config/: their metrics exist, and promtool accepts them."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from shipper.delivery.sender import DeliveryCounts
from shipper.kafka import member_status
from shipper.model.group import GroupState
from shipper.model.records import Backlog, Totals
from shipper.pipeline import observer, pipeline
from shipper.status.admin.metrics import metrics_registry
from shipper.status.live import Live
from shipper.status.overview import Overview
from shipper.status.pauses import ADVICE
from tests.tools import assert_content, run, tool

CONFIG = Path(__file__).parents[2] / "config"
PROMETHEUS = CONFIG / "prometheus"
# With everything that is left out while it is not known.
LIVE = Live(
    version="0.1.0",
    process_id=1,
    command="run",
    phase="running",
    started_at=1.0,
    at=2.0,
    dead_letters={"country": 1},
    requests={"202": 1},
    retries={"timeout": 1},
    oldest_unsettled_seconds=1.0,
    last_accepted_at=1.0,
    token_expires_at=1.0,
    certificate_expires_at=1.0,
    group=GroupState(
        group="shipper",
        protocol="classic",
        rebalances={"assigned": 1},
        transactions={"committed": 1},
        broker_errors={"_TRANSPORT": 1},
    ),
)


def exported() -> dict[str, set[str]]:
    """Return the names of the exported samples with the names of their labels."""
    families = text_string_to_metric_families(generate_latest(metrics_registry(lambda: LIVE, Overview)).decode())
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


def test_the_page_about_operating_lists_every_metric():
    page = (CONFIG.parent / "docs/operating.md").read_text()
    samples = {re.sub("_(bucket|sum|count)$", "", name) for name in exported() if name.startswith("shipper_")}
    assert set(re.findall(r"`(shipper_[a-z_]+)", page)) == samples


def filled(name: str, *modules: ModuleType) -> set[str]:
    """The keyword arguments of the calls of a function in modules."""
    calls = [
        node
        for module in modules
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
    ]
    return {keyword.arg for call in calls for keyword in call.keywords if keyword.arg}


def test_every_number_of_the_snapshot_is_filled():
    by_name = filled("Live", pipeline) | filled("replace", observer) - {"handed_over"}
    assert set(Live.__struct_fields__) == by_name.union(Totals.__struct_fields__, Backlog.__struct_fields__)
    by_member = filled("GroupState", member_status)
    assert set(GroupState.__struct_fields__) == by_member | {"handed_over"}  # filled by the observer


def test_every_count_of_the_senders_gets_into_the_snapshot():
    read = {
        node.attr
        for node in ast.walk(ast.parse(inspect.getsource(observer)))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "counts"
    }
    assert {name for name in DeliveryCounts.__struct_fields__ if not name.startswith("_")} <= read


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    return group["rules"]


def dashboard() -> dict[str, Any]:
    return json.loads((CONFIG / "grafana/shipper.json").read_text())


def expressions_of_the_dashboard() -> list[str]:
    document = dashboard()
    return [
        *(target["expr"] for panel in document["panels"] for target in panel["targets"]),
        *(annotation["expr"] for annotation in document["annotations"]["list"]),
    ]


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:shipper|process)_[a-z0-9_]+", expression))


@pytest.mark.parametrize(
    "expressions",
    [[rule["expr"] for rule in rules()], expressions_of_the_dashboard()],
    ids=["alerts", "dashboard"],
)
def test_every_metric_in_a_query_is_exported(expressions: list[str]):
    asked = set().union(*map(names_in, expressions))
    assert len(asked) >= 10
    assert asked - exported().keys() == set()


def test_every_metric_is_on_the_dashboard_or_in_an_alert():
    shown = set().union(*map(names_in, [*expressions_of_the_dashboard(), *(rule["expr"] for rule in rules())]))
    shown |= names_in(str(dashboard()["templating"]))
    own = {name for name in exported() if name.startswith("shipper_")}
    # Of no interest to anybody but who looks for something in particular.
    others = (
        "batches_total commits_total streams streams_behind request_duration_seconds_count request_duration_seconds_sum"
    )
    assert own - shown <= {f"shipper_{name}" for name in others.split()}


def test_every_label_that_is_grouped_by_exists():
    labels = set().union(*exported().values()) | {"instance", "job"}
    for expression in [*expressions_of_the_dashboard(), *(rule["expr"] for rule in rules())]:
        for names in re.findall(r"\b(?:by|without) \((.*?)\)", expression):
            assert set(names.split(", ")) <= labels, expression


def test_the_alert_of_a_pause_has_advice_for_every_reason():
    (rule,) = [rule for rule in rules() if rule["alert"] == "ShipperPaused"]
    branches = re.findall(r'eq \$labels\.reason ((?:"\w+" ?)+)', rule["annotations"]["description"])
    reasons = [reason for branch in branches for reason in re.findall(r"\w+", branch)]
    assert sorted(reasons) == sorted(ADVICE)


def test_every_alert_has_a_test_in_which_it_fires():
    text = (PROMETHEUS / "alerts_test.yml").read_text()
    fired = set(re.findall(r'labels: \'\{alertname="(\w+)"', text))
    assert fired == {rule["alert"] for rule in rules()}


def test_every_alert_says_what_happened_and_what_to_do():
    for rule in rules():
        assert set(rule["annotations"]) == {"summary", "description"}
        assert rule["labels"]["severity"] in {"warning", "critical"}


def test_promtool_accepts_configuration_and_rules():
    assert_content(run(tool("promtool"), "check", "config", PROMETHEUS / "prometheus.yml"))
    assert_content(run(tool("promtool"), "check", "rules", "--lint-fatal", PROMETHEUS / "alerts.yml"))


def test_each_alert_fires_when_it_should_and_only_then():
    tests = (PROMETHEUS / name for name in ("alerts_test.yml", "alerts_days_test.yml"))
    assert_content(run(tool("promtool"), "test", "rules", *tests))


def test_the_tests_of_the_alerts_detect_every_alert_that_never_fires(tmp_path: Path):
    promtool = tool("promtool")
    document = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())
    for rule in document["groups"][0]["rules"]:
        rule["expr"] = "vector(0) > 1"
    (tmp_path / "alerts.yml").write_text(yaml.safe_dump(document))
    shutil.copy(PROMETHEUS / "alerts_test.yml", tmp_path)
    result = run(promtool, "test", "rules", tmp_path / "alerts_test.yml")
    assert result.returncode != 0
    assert set(re.findall(r'exp: .*?alertname="(\w+)"', result.stdout)) == {rule["alert"] for rule in rules()}


def test_promtool_parses_every_expression_of_the_dashboard(tmp_path: Path):
    promtool = tool("promtool")
    written = expressions_of_the_dashboard()
    expressions = [text.replace("$__rate_interval", "5m").replace("$instance", ".*") for text in written]
    assert not [expression for expression in expressions if "$" in expression]
    records = [{"record": f"panel:{number}", "expr": text} for number, text in enumerate(expressions)]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "dashboard", "rules": records}]}))
    assert_content(run(promtool, "check", "rules", tmp_path / "rules.yml"))


def test_the_panels_have_distinct_ids_and_do_not_overlap():
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) >= 12
    cells = [cell for panel in panels for cell in cells_of(panel["gridPos"])]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def cells_of(place: dict[str, int]) -> Iterator[tuple[int, int]]:
    return itertools.product(range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"]))


def test_everything_on_the_dashboard_comes_from_the_chosen_data_source():
    document = dashboard()
    assert document["templating"]["list"][0]["type"] == "datasource"
    text = json.dumps([document["panels"], document["templating"], document["annotations"]])
    assert set(re.findall(r'"uid": "(.*?)"', text)) == {"${datasource}"}
    for panel in document["panels"]:
        assert panel["title"]
        assert panel["description"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
