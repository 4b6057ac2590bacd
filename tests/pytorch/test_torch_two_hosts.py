"""What an observer between two hosts sees of a job whose ranks use relays: everything, unless the links use TLS."""

from __future__ import annotations

import os
import shutil
import sys

import pytest

import networks
from pytorch.two_hosts import Observed, has_option, run

RANKS = int(os.environ.get("TCPSTORE_TEST_RANKS", "6"))
"""64 in the issue's words, which take minutes: python tests/pytorch/two_hosts.py --ranks 64 --tls --tokens."""

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(autouse=True)
def _permitted() -> None:
    if reason := networks.why_not():
        pytest.skip(reason)


def check_job(observed: Observed) -> None:
    """All ranks have trained to the same weights, and all that passed was recorded."""
    assert len(observed.weights) == RANKS
    assert all(one == observed.weights[0] for one in observed.weights)
    assert len(set(observed.weights[0])) == 3
    assert observed.lost == 0
    assert sum(map(len, observed.streams)) > 1000
    assert "Traceback" not in observed.logs


def missing(tls: bool, tokens: bool) -> bool:
    """Whether this build lacks one of them."""
    return (tls and not has_option("serve", "--tls-cert")) or (tokens and not has_option("serve", "--token-keys"))


@pytest.mark.parametrize("tokens", [False, True])
def test_without_tls_every_key_and_value_can_be_read_and_the_token(tokens: bool) -> None:
    """The control: the recording would show them."""
    if missing(False, tokens):
        pytest.skip("this build has no tokens")
    observed = run(RANKS, tls=False, tokens=tokens)
    check_job(observed)
    assert observed.marks
    assert len(observed.secrets) == tokens
    assert observed.marks | observed.secrets <= observed.seen


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("openssl") is None, reason="openssl makes the certificate")
@pytest.mark.parametrize("tokens", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_with_tls_no_key_no_value_and_no_token_can_be_read(tokens: bool) -> None:
    if missing(True, tokens):
        pytest.skip("this build has no TLS, or no tokens")
    observed = run(RANKS, tls=True, tokens=tokens)
    check_job(observed)
    assert len(observed.secrets) == tokens
    assert observed.marks | observed.secrets <= observed.hidden
    assert not observed.seen
    assert len(observed.streams) == 2
    for stream in observed.streams:
        assert stream.startswith(b"\x16\x03"), "a connection does not begin with a TLS handshake"
