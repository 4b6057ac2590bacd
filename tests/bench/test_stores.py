"""What `bench/stores.py` measures comes to an end, and leaves nothing in the store."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import processes, stores


@pytest.mark.parametrize("observed", [False, True])
def test_what_is_measured_leaves_no_store(observed: bool) -> None:
    served = stores.Served(observed)
    for _ in range(3):
        served.store(served.pair())
        served.two_joins(served.pair())
    assert served.named.created == 3
    assert not served.named.stores
    assert not served.named.ending


def test_what_is_measured_is_not_what_the_working_directory_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the checkout, `python -m` would start the sources instead of the compiled build."""
    package = tmp_path / "tcpstore_async"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("print('{\"port\": 0}', flush=True)")
    monkeypatch.chdir(tmp_path)
    with processes.started("serve") as (port, _):
        assert port


def test_all_parts_report(capsys: pytest.CaptureFixture[str]) -> None:
    stores.in_memory(1, 2)
    stores.over_sockets(1, 1)
    stores.server_process(1, 2)
    out = capsys.readouterr().out
    assert out.count("ratio") == 3
    assert "start to ready: p50 " in out
