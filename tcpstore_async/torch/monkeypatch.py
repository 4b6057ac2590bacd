"""What was put in whose place.

Knows: names of modules and keys of tables. Must not know: what stands there.
Invariant: `restore` puts back the same objects.
"""

from typing import Any


class Monkeypatch:
    """Attributes of modules and classes, and entries of dicts that are others for a while."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, Any, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._before)

    def replace(self, owner: Any, name: str, new: Any) -> None:
        """Put `new` in the place of what is there."""
        if isinstance(owner, dict):
            self._before.append((owner, name, owner[name]))
            owner[name] = new
        else:
            self._before.append((owner, name, vars(owner)[name]))  # of a class, not what it makes of a function
            setattr(owner, name, new)

    def restore(self) -> None:
        """Put everything back."""
        while self._before:
            owner, name, old = self._before.pop()
            if isinstance(owner, dict):
                owner[name] = old
            else:
                setattr(owner, name, old)
