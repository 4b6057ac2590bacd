"""Both servers withstand whatever a peer or the system does."""

import pytest

from tcpstore_async.server.backends import BACKENDS


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    which: str = request.param
    return which
