"""The metrics: each from the counter it is named for, documented, and nothing in deploy/ that does not exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from web.stub import SERVER, named_store, stats

from tcpstore_async.diagnosis.rates import Look, read_look
from tcpstore_async.tools.web.looking import Rates
from tcpstore_async.tools.web.metrics import expose

ROOT = Path(__file__).parent.parent.parent.parent
DEPLOY = ROOT / "deploy"


def counters(**changed: object) -> Look:
    stores = {
        "oldest": changed.pop("oldest", [named_store("a")]),
        "others": {"stores": changed.pop("others", 0), "keys": 6},
    }
    lines = [{"server": SERVER}, {"stats": stats(**changed)}, stores, {"end": True}]  # type: ignore[arg-type]
    return read_look(map(msgspec.json.encode, lines))


def samples(found: Look | None) -> dict[str, float]:
    """By name and labels, as in the text."""
    text = expose(found, "")[1].decode()
    return {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if not line.startswith("#")
    }


def test_each_metric_has_its_value() -> None:
    assert samples(counters()) == {
        "tcpstore_up": 1,
        'tcpstore_build_info{build="stub",version="0.0"}': 1,
        "tcpstore_accepting": 1, "tcpstore_writes_held": 0,
        "tcpstore_start_time_seconds": 1_000_000,
        "tcpstore_resident_memory_bytes": 4096,
        "tcpstore_cpu_seconds_total": 12.5,
        'tcpstore_commands_total{command="SET"}': 10,
        'tcpstore_commands_total{command="GET"}': 20,
        'tcpstore_commands_total{command="WAIT"}': 0,
        "tcpstore_received_bytes_total": 300,
        "tcpstore_sent_bytes_total": 400,
        "tcpstore_connections": 9,
        "tcpstore_connections_limit": 100,
        "tcpstore_connections_accepted_total": 50,
        "tcpstore_connections_rejected_total": 6,
        'tcpstore_connections_closed_total{reason="protocol"}': 2,
        'tcpstore_connections_closed_total{reason="tls"}': 1,
        "tcpstore_sessions": 30,
        "tcpstore_sessions_unvalidated": 4,
        "tcpstore_sessions_waiting": 7,
        "tcpstore_unsent_bytes": 123,
        "tcpstore_links": 3,
        "tcpstore_link_sessions": 21,
        "tcpstore_single_links": 8,
        "tcpstore_links_suspended": 5,
        "tcpstore_keys": 77,
        "tcpstore_queues": 11,
        "tcpstore_awaited_keys": 13,
        "tcpstore_memory_budget_bytes": 1000,
        **{
            f'tcpstore_memory_bytes{{use="{use}"}}': 10 * (at + 1)
            for at, use in enumerate(("store", "waiters", "requests", "key_lists", "connections"))
        },
        "tcpstore_ranks_joined": 990,
        "tcpstore_ranks_expected": 1000,
        "tcpstore_accept_queue_length": 14,
        "tcpstore_accept_queue_limit": 4096,
        "tcpstore_named_stores": 1,
        'tcpstore_named_store_sessions{store="a"}': 3,
        'tcpstore_named_store_keys{store="a"}': 5,
        'tcpstore_named_store_memory_bytes{store="a"}': 700,
        'tcpstore_named_store_ranks_joined{store="a"}': 2,
        'tcpstore_named_store_ranks_expected{store="a"}': 8,
        **{
            f"tcpstore_{name}_seconds_{end}": value
            for name in ("loop_lag", "service", "turn")
            for end, value in {
                'bucket{le="0.001"}': 5, 'bucket{le="0.1"}': 8, 'bucket{le="+Inf"}': 10, "count": 10, "sum": 7.5,
            }.items()
        },
    }  # fmt: skip


def keys_of_stores(found: Look, names: bool = True) -> dict[str, float]:
    text = expose(found, "", names)[1].decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    return {sample.labels["store"]: sample.value for sample in families["tcpstore_named_store_keys"].samples}


def test_stores_without_a_label_are_summed() -> None:
    """Those that are young, or more than are listed, or all if whoever asks may not know names."""
    stores = [named_store("old"), named_store("young", age=59.0), named_store("(others)", keys=100)]
    found = counters(oldest=stores, others=7)
    assert keys_of_stores(found) == {"old": 5, "(others)": 5 + 100 + 6}
    assert samples(found)["tcpstore_named_stores"] == 10
    assert keys_of_stores(found, names=False) == {"(others)": 5 + 5 + 100 + 6}
    assert keys_of_stores(counters(oldest=[])) == {}


def test_labels_are_short_and_escaped() -> None:
    hostile = 'a"} 1\n\\' + "x" * 500
    found = counters(oldest=[named_store(hostile), named_store(hostile + "y")])
    assert keys_of_stores(found) == {hostile[:128]: 10}


def test_what_is_not_known_is_left_out() -> None:
    found = samples(counters(accept_queue=None, joins={"joined": 0, "expected": 0, "world_size": None}))
    assert not [name for name in found if "accept_queue" in name]
    assert found["tcpstore_ranks_expected"] == 0


def test_a_server_that_is_silent() -> None:
    assert samples(None) == {"tcpstore_up": 0}


def test_open_metrics() -> None:
    kind, text = expose(counters(), "application/openmetrics-text; version=1.0.0, text/plain;q=0.5")
    assert kind.startswith("application/openmetrics-text")
    assert text.endswith(b"# EOF\n")


def test_they_are_named_as_prometheus_wants() -> None:
    """In base units, with the prefix, and with no label of which peers choose the values but names of stores."""
    families = {family.name: family for family in text_string_to_metric_families(expose(counters(), "")[1].decode())}
    for name, family in families.items():
        assert re.fullmatch(r"tcpstore_[a-z_]+", name)
        assert family.documentation.endswith(".")
        assert not re.search(r"_(ms|milliseconds|kb|mb|percent)$", name)
        labels = {label for sample in family.samples for label in sample.labels}
        assert labels <= {"command", "reason", "use", "le", "version", "build", "store"}


REPLICATED = {
    "tcpstore_serving",
    "tcpstore_epoch",
    "tcpstore_commit_seconds",
    "tcpstore_log_bytes",
    "tcpstore_standby_lag_records",
}


def replicated(why_held: str = "", role: str = "server") -> Look:
    """A server that another one stands by."""
    found = counters()
    standby = {"address": "b:1", "version": "0.0", "records_behind": 3}
    found.server.update(role=role, epoch=7, commit_seconds=0.5, bytes_since_snapshot=9, standbys=[standby])
    found.server["why_held"] = why_held
    return found


def test_a_replicated_store() -> None:
    """One that cannot write does not serve, and its disk is not full."""
    found = samples(replicated())
    assert found["tcpstore_serving"] == 1
    assert found["tcpstore_epoch"] == 7
    assert found['tcpstore_standby_lag_records{server="b:1"}'] == 3
    assert exposed() >= REPLICATED
    for other in (replicated("etcd does not answer"), replicated("this server stands by", "standby")):
        assert samples(other)["tcpstore_serving"] == 0
        assert "tcpstore_writes_held" not in samples(other)
    reference = (ROOT / "docs" / "reference.md").read_text()
    assert all(f"`{name}" in reference for name in REPLICATED)


def exposed() -> set[str]:
    return {name.partition("{")[0] for found in (counters(), replicated()) for name in samples(found)}


@pytest.mark.parametrize("file", ["grafana.json", "prometheus-alerts.yaml"])
def test_what_is_deployed_uses_metrics_that_exist(file: str) -> None:
    text = (DEPLOY / file).read_text()
    used = set(re.findall(r"\btcpstore_\w+", text))
    assert len(used) >= 8
    assert used <= exposed()


def test_the_dashboard_shows_every_metric() -> None:
    board = json.loads((DEPLOY / "grafana.json").read_text())
    used = set(re.findall(r"\btcpstore_\w+", json.dumps(board)))
    left_out = {name for name in exposed() - used - REPLICATED if not name.endswith(("_sum", "_count"))}
    assert left_out == {
        "tcpstore_build_info",
        "tcpstore_accepting",
        "tcpstore_writes_held",
        "tcpstore_turn_seconds_bucket",
    }
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [(cell, panel["gridPos"]) for panel in panels for cell in [panel["gridPos"]]]
    taken = [
        (x, y) for _, at in places for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(set(taken)) == len(taken)
    assert max(x for x, _ in taken) < 24


def test_the_reference_has_every_metric() -> None:
    section = (ROOT / "docs" / "reference.md").read_text().partition("\n## Metrics\n")[2]
    rows = {
        name: kind
        for kind, table in re.findall(r"^\| (\w+) \| \|\n((?:\|.*\n)+)", section, re.MULTILINE)
        for name in re.findall(r"^\| `(tcpstore_\w+)(?:\{\w+(?:, \w+)*\})?` \|", table, re.MULTILINE)
    }
    families = {}
    for family in text_string_to_metric_families(expose(counters(), "")[1].decode()):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        families[name] = family.type
    assert rows == families


# What the page shows of them


def test_rates() -> None:
    rates = Rates()
    assert (rates.commands(), rates.lag()) == ([], 0.0)
    rates.add(counters(uptime=100.0).stats)
    rates.add(counters(uptime=101.0, commands={"SET": 60, "GET": 20, "WAIT": 0}).stats)
    lag = {"bounds": [0.001, 0.1], "counts": [6, 4, 2], "sum": 8.0}
    rates.add(counters(uptime=102.0, commands={"SET": 60, "GET": 27, "WAIT": 1}, lag=lag).stats)
    assert list(rates.each_second) == [50, 8]
    assert rates.commands() == [("SET", 25.0), ("GET", 3.5), ("WAIT", 0.5)]
    assert rates.lag() == 0.1


def test_rates_after_silence_and_a_restart() -> None:
    rates = Rates()
    rates.add(counters(uptime=100.0).stats)
    rates.add(counters(uptime=110.0, commands={"SET": 110, "GET": 20, "WAIT": 0}).stats)
    assert len(rates.each_second) == 10
    assert sum(rates.each_second) == 100
    rates.add(counters(uptime=1.0, commands={"SET": 3, "GET": 0, "WAIT": 0}).stats)
    assert sum(rates.each_second) == 100
    rates.add(counters(uptime=2.0, commands={"SET": 5, "GET": 0, "WAIT": 0}).stats)
    assert rates.each_second[-1] == 2
