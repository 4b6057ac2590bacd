"""The store in a file: its format, the locking, the store."""

from .store import FileStore as FileStore
