"""Placeholder."""

import msgspec


class Deposed(Exception):
    pass


class Trimmed(Exception):
    pass


class Holder(msgspec.Struct):
    address: str
    version: str
    replay: int
    id: str = ""


class Standby(msgspec.Struct):
    address: str
    version: str
    replay: int
    id: str
    number: int


class EtcdLog:
    pass
