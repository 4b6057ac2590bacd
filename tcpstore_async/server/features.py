"""Attaches the features to a server's engine: MISSING, named stores, links.

Every server is assembled here, those in memory included. This module must not know what a feature does.
"""

from ..base.limits import LINK_GRACE
from ..links.link_registry import LinkRegistry
from ..observe.missing import answer_missing
from ..session.identity import THREADED, identity
from ..session.named_stores import NamedStores
from ..session.store import PORTION, Store


class Features:
    """The features that a server has to tell the time."""

    def __init__(self, named: NamedStores, links: LinkRegistry) -> None:
        self.named = named
        self.links = links


def attach_features(
    engine: Store, instance: str, backend: str, grace: float = LINK_GRACE, portion: int = PORTION
) -> Features:
    """Have an engine, from which nobody has been served yet, identify itself, and execute all commands.

    `grace` and `portion` are those of `LinkRegistry`.
    """
    engine.identify(identity(instance, backend))
    answer_missing(engine)
    links = LinkRegistry(engine, instance, grace, portion=portion, offered=backend != THREADED)
    return Features(NamedStores(engine, instance), links)
