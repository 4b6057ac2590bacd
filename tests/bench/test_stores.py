"""What `bench/stores.py` measures comes to an end, and leaves nothing in the engine."""

from __future__ import annotations

import pytest

from bench import stores


@pytest.mark.parametrize("observed", [False, True])
def test_what_is_measured_leaves_no_store(observed: bool) -> None:
    engines = stores.Engines(observed)
    for _ in range(3):
        engines.store(engines.pair())
        engines.two_joins(engines.pair())
    assert engines.named.created == 3
    assert not engines.named.stores
    assert not engines.named.ending


def test_all_parts_report(capsys: pytest.CaptureFixture[str]) -> None:
    stores.memory(1, 2)
    stores.sockets(1, 1)
    assert capsys.readouterr().out.count("ratio") == 3
