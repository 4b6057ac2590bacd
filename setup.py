"""Compiles the hot path with mypyc, where that is possible, and makes README.md the page on PyPI.

Everything else is in pyproject.toml.

TCPSTORE_PURE=1 leaves compiling out; TCPSTORE_PURE=0 makes it an error if it is not possible. Otherwise, without a C
compiler or when anything else goes wrong, the package is installed as plain Python and does the same, only slower. An
editable install is never compiled: the result would hide what is edited.
"""

import os
import re
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

COMPILED = [
    "tcpstore_async/auth/access.py",
    "tcpstore_async/keyspace/accounts.py",
    "tcpstore_async/base/addresses.py",
    "tcpstore_async/base/coercion.py",
    "tcpstore_async/base/clock.py",
    "tcpstore_async/base/keys.py",
    "tcpstore_async/observe/similar_keys.py",
    "tcpstore_async/wire/values.py",
    "tcpstore_async/keyspace/steps.py",
    "tcpstore_async/base/limits.py",
    "tcpstore_async/keyspace/waiter_types.py",
    "tcpstore_async/keyspace/registrations.py",
    "tcpstore_async/keyspace/waiters.py",
    "tcpstore_async/keyspace/shared_requests.py",
    "tcpstore_async/keyspace/agents.py",
    "tcpstore_async/keyspace/joins.py",
    "tcpstore_async/keyspace/rounds.py",
    "tcpstore_async/keyspace/queues.py",
    "tcpstore_async/keyspace/leases.py",
    "tcpstore_async/keyspace/keyspace.py",
    "tcpstore_async/wire/codecs.py",
    "tcpstore_async/wire/commands.py",
    "tcpstore_async/wire/link.py",
    "tcpstore_async/session/budget.py",
    "tcpstore_async/session/client.py",
    "tcpstore_async/session/observer.py",
    "tcpstore_async/session/slots.py",
    "tcpstore_async/session/peer.py",
    "tcpstore_async/session/table.py",
    "tcpstore_async/session/auth.py",
    "tcpstore_async/session/store.py",
    "tcpstore_async/session/owner.py",
    "tcpstore_async/session/session.py",
    "tcpstore_async/session/transport.py",
    "tcpstore_async/session/guard.py",
    "tcpstore_async/observe/history.py",
    "tcpstore_async/observe/inspection.py",
    "tcpstore_async/session/key_list_cache.py",
    "tcpstore_async/links/frames.py",
    "tcpstore_async/links/resume.py",
    "tcpstore_async/links/work.py",
    "tcpstore_async/links/link_client.py",
    "tcpstore_async/links/link_registry.py",
    "tcpstore_async/links/link_server.py",
    "tcpstore_async/links/carrier.py",
    "tcpstore_async/links/credit.py",
    "tcpstore_async/links/linked_session.py",
    "tcpstore_async/log/encoding.py",
    "tcpstore_async/log/events.py",
    "tcpstore_async/log/records.py",
    "tcpstore_async/log/replay.py",
    "tcpstore_async/log/snapshot.py",
    "tcpstore_async/observe/missing.py",
    "tcpstore_async/observe/monitor.py",
    "tcpstore_async/session/named_stores.py",
    "tcpstore_async/session/server.py",
    "tcpstore_async/links/single_client.py",
    "tcpstore_async/links/single_link.py",
    "tcpstore_async/observe/statistics.py",
    "tcpstore_async/session/tls.py",
    "tcpstore_async/session/unsent.py",
    "tcpstore_async/client/requests.py",
    "tcpstore_async/client/sync_connection.py",
    "tcpstore_async/client/wait_queue.py",
    "tcpstore_async/client/pool.py",
    "tcpstore_async/client/sync_client.py",
    "tcpstore_async/server/accepting.py",
    "tcpstore_async/server/base.py",
    "tcpstore_async/server/due.py",
    "tcpstore_async/server/persistence.py",
    "tcpstore_async/server/turn.py",
    "tcpstore_async/server/uv.py",
    "tcpstore_async/server/poller.py",
    "tcpstore_async/server/service_times.py",
    "tcpstore_async/server/tls.py",
    "tcpstore_async/relay/core.py",
    "tcpstore_async/tools/load/generator.py",
]
"""The tests read this list without running anything here."""

PURE = os.environ.get("TCPSTORE_PURE", "")
BUILDING = not {"bdist_wheel", "build", "build_ext", "install"}.isdisjoint(sys.argv)


def give_up(reason: object) -> None:
    if PURE == "0":
        sys.exit(f"cannot compile tcpstore_async: {reason}")
    print(f"warning: tcpstore_async is installed as plain Python: {reason}", file=sys.stderr)


def extensions() -> list[Any]:
    if PURE == "1" or not BUILDING:
        return []
    compiler = os.environ.get("CC") or sysconfig.get_config_var("CC")
    if compiler and not shutil.which(shlex.split(compiler)[0]):
        give_up(f"there is no C compiler {compiler!r}")
        return []
    try:
        from mypyc.build import mypycify

        found = list(mypycify(COMPILED, opt_level="3", debug_level="0", group_name="tcpstore_async"))
        for one in found:  # else a call within the module is one that another library could replace: a tenth slower
            one.extra_compile_args = [*one.extra_compile_args, "-fvisibility=hidden"]
        return found
    except (Exception, SystemExit) as error:
        give_up(f"mypyc failed: {error}")
        return []


class BuildAllOrNothing(build_ext):  # type: ignore[misc]
    """Half of the modules compiled would not import."""

    def run(self) -> None:
        try:
            super().run()
        except Exception as error:
            give_up(error)
            for path in map(Path, self.get_outputs()):
                path.unlink(missing_ok=True)
            self.extensions.clear()


class TagWhatWasBuilt(bdist_wheel):  # type: ignore[misc]
    """A wheel for every Python if nothing was compiled, which is known after `build` only."""

    def run_command(self, command: str) -> None:
        super().run_command(command)
        self.root_is_pure = not self.distribution.has_ext_modules()


def long_description() -> str:
    """Return README.md for PyPI, where relative links lead nowhere: they go to the version's tag on GitHub."""
    here = Path(__file__).parent
    version = (here / "tcpstore_async" / "base" / "version.py").read_text("utf-8")
    found = re.search(r'^VERSION.* = "(.+)"$', version, re.MULTILINE)
    assert found
    repository, tag = "tcpstore-async/tcpstore_async", f"v{found[1]}"

    def absolute(link: "re.Match[str]") -> str:
        page, image = (
            f"https://github.com/{repository}/blob/{tag}/",
            f"https://raw.githubusercontent.com/{repository}/{tag}/",
        )
        return f"{link[1]}{image if link[1].startswith('!') else page}{link[2]}"

    return re.sub(r"(!?\[[^][]*\]\()(?![a-z]+:|#)([^)]+)", absolute, (here / "README.md").read_text("utf-8"))


setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildAllOrNothing, "bdist_wheel": TagWhatWasBuilt},
    long_description=long_description(),
    long_description_content_type="text/markdown",
)
