"""Rounds without a keyspace: what they count."""

from __future__ import annotations

from tcpstore_async.keyspace.rounds import (
    CLOSED,
    PARTICIPANT,
    REDUNDANT,
    STRANGER,
    WAITING,
    Agent,
    Rounds,
)


def formed(rounds: Rounds, *names: bytes) -> list[Agent]:
    """Form a round of these agents; return them."""
    agents = [rounds.add(name) for name in names]
    for agent in agents:
        rounds.join(agent, len(names), len(names), -1)
    assert rounds.formed
    return agents


def test_who_comes_too_late_for_a_full_round_is_told_that_it_is_redundant_when_the_rounds_are_closed() -> None:
    rounds = Rounds()
    agents = formed(rounds, b"a", b"b")
    late = rounds.add(b"c")
    assert rounds.join(late, 2, 2, -1) is None
    rounds.close()
    assert rounds.join(late, 2, 2, -1) == (0, CLOSED, 1)
    rounds.remove(agents[0])
    assert rounds.join(late, 2, 2, -1) == (0, CLOSED, 0)


def test_whoever_has_waited_for_long_enough_leaves_unless_it_has_a_rank_or_is_redundant() -> None:
    rounds = Rounds()
    early = rounds.add(b"early")
    assert rounds.join(early, 2, 2, -1) is None
    rounds.leave(early)  # it gathers
    assert rounds.standing(early) == STRANGER
    assert b"early" not in rounds.agents
    agents = formed(rounds, b"a", b"b")
    late = rounds.add(b"late")
    assert rounds.join(late, 2, 2, -1) is None
    for agent, standing in ((agents[0], PARTICIPANT), (late, REDUNDANT)):
        rounds.leave(agent)
        assert rounds.standing(agent) == standing
        assert rounds.agents[agent.name] is agent
    rounds.remove(agents[0])
    assert rounds.standing(late) == WAITING
    rounds.leave(late)
    assert rounds.standing(late) == STRANGER
    assert list(rounds.agents) == [b"b"]
