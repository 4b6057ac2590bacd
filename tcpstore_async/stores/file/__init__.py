"""FileStore: the record format, the locking and the store."""

from .store import FileStore as FileStore
