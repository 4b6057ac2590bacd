from __future__ import annotations

import pytest

from tcpstore_async.base.limits import Limits
from tcpstore_async.keyspace.keyspace import Keyspace
from tcpstore_async.session.store import Store


@pytest.fixture
def store() -> Store:
    return Store(Limits())


@pytest.fixture
def keyspace(store: Store) -> Keyspace:
    return store.keyspace
