"""Reversible monkeypatches: `restore` puts back the same objects that were replaced."""

from typing import Any


class Monkeypatch:
    """Attributes of modules and classes, and entries of dicts, that are replaced until `restore`."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, Any, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._before)

    def replace(self, owner: Any, name: str, new: Any) -> None:
        """Replace an attribute, which must exist, or, if `owner` is a dict, an entry. Raises KeyError."""
        if isinstance(owner, dict):
            self._before.append((owner, name, owner.get(name)))
            owner[name] = new
        else:
            self._before.append((owner, name, vars(owner)[name]))  # `getattr` would return a bound method
            setattr(owner, name, new)

    def restore(self) -> None:
        """Put everything back."""
        while self._before:
            owner, name, old = self._before.pop()
            if isinstance(owner, dict) and old is None:
                del owner[name]
            elif isinstance(owner, dict):
                owner[name] = old
            else:
                setattr(owner, name, old)
