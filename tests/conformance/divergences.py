"""Recorded vectors in which we answer otherwise than PyTorch, on purpose. All others are the same, byte for byte.

An answer is named by the peer that hears it and by which of its answers it is, from 1, the pong of its handshake
included. Each one is given twice: what PyTorch's libuv server answered (it must be what the vector holds), and ours.
`row` is the row of `docs/quirks.md` that says why.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mended:
    row: str
    answers: dict[str, tuple[str, str]]
    """Name of the answer: PyTorch's and ours, as hex, `silent` or `closed`."""


MENDED = {
    "validate_split_1_4": Mended(
        "split-validate",
        {
            "a.2": ("closed", "silent"),
            "a.3": ("closed", "04030201"),  # the pong
        },
    ),
    "validate_byte_by_byte": Mended(
        "split-validate",
        {
            "a.1": ("closed", "silent"),
            "a.2": ("closed", "04030201"),
        },
    ),
    "validate_wrong_magic": Mended("bad-start", {"a.1": ("silent", "closed")}),
    "validate_wrong_magic_pipelined": Mended("bad-start", {"a.1": ("silent", "closed")}),
    "no_validate_http": Mended("bad-start", {"a.1": ("silent", "closed")}),
    "no_validate_ping": Mended(
        "bad-start",
        {
            "a.1": ("silent", "closed"),
            "a.2": ("0403020107000000", "closed"),
        },
    ),
    "no_validate_set": Mended(
        "bad-start",
        {
            "a.1": ("silent", "closed"),
            "a.2": ("0100000000000000", "closed"),
            "a.3": ("0100000000000000", "closed"),
            "probe.2": ("0100000000000000", "0000000000000000"),  # number of keys: nothing was stored
        },
    ),
    "mset_partial": Mended(
        "whole-multi-set",
        {
            "b.2": ("010000000000000002000000000000002f61", "0000000000000000"),  # the keys while half of it is there
        },
    ),
    "wait_twice_1": Mended(
        "second-wait",
        {
            "a.3": ("00", "silent"),  # only the key of the first WAIT has appeared
            "a.4": ("silent", "00"),
        },
    ),
    "cas_fail_missing_wakes": Mended("failed-compare-set", {"a.2": ("00", "silent")}),
    "queue_rewait_starvation": Mended(
        "queue-order",
        {
            "a.4": ("00", "silent"),  # the second item belongs to b, who came before a waited again
            "b.3": ("silent", "00"),
        },
    ),
    "queue_stale_entry_false_wake": Mended(
        "push-counts-once",
        {
            "a.4": ("00", "silent"),  # a push must not end a wait for another key
            "a.5": ("silent", "00"),  # and that key must end it
        },
    ),
    "queue_stale_entry_steals": Mended(
        "push-counts-once",
        {
            "a.4": ("00", "silent"),
            "b.2": ("silent", "00"),
        },
    ),
}
