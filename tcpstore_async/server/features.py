"""Attach the features to a server's stores: MISSING, named stores, links.

Every server is assembled here, those in memory included. This module must not know what a feature does.
"""

from typing import NamedTuple

from ..base.limits import LINK_GRACE
from ..links.link_registry import LinkRegistry
from ..observe.missing import answer_missing
from ..session.identity import THREADED, identity
from ..session.named_stores import NamedStores
from ..session.store import PORTION, Store


class Features(NamedTuple):
    """The features that need the server's clock."""

    named: NamedStores
    links: LinkRegistry


def attach_features(
    root: Store, instance: str, backend: str, grace: float = LINK_GRACE, portion: int = PORTION
) -> Features:
    """Let the unnamed store of a new server identify that server and execute every command.

    Call it before the first peer is served. `grace` and `portion` are those of `LinkRegistry`.
    """
    root.identify(identity(instance, backend))
    answer_missing(root)
    links = LinkRegistry(root, instance, grace, portion=portion, offered=backend != THREADED)
    return Features(NamedStores(root, instance), links)
