"""The command line: options, output and exit status, without logic of its own.

Exit status: 0 success, 1 failure, 2 usage error, 3 timeout, 4 server unreachable, 5 not allowed.
"""

from typing import Final

import click

from .commands import Program, ProgramCommands
from .output import open_standard_streams

_COMMANDS: Final = ProgramCommands(
    {
        "add": "client.add",
        "append": "client.append",
        "barrier": "client.barrier",
        "bench": "bench.bench",
        "check": "client.check",
        "clients": "who.clients",
        "compare-set": "client.compare_set",
        "completion": "client.completion",
        "delete": "client.delete",
        "doctor": "doctor.doctor_command",
        "get": "client.get",
        "http": "http.http_command",
        "info": "look.info",
        "keys": "look.keys",
        "latency": "look.latency",
        "monitor": "look.monitor",
        "num-keys": "client.num_keys",
        "ping": "client.ping",
        "queue": "client.queue",
        "record": "record.record_command",
        "relay": "relay.relay_command",
        "replay": "record.replay",
        "serve": "serve.serve",
        "set": "client.set_",
        "stat": "look.stat",
        "stores": "who.stores",
        "token": "token.token",
        "top": "top.top",
        "wait": "client.wait",
        "waiters": "who.waiters",
        "who": "who.who",
    }
)


@click.group(
    cls=Program, commands=_COMMANDS, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(None, "-V", "--version", package_name="tcpstore_async")
def main() -> None:
    """Key-value store for distributed jobs, compatible with PyTorch's TCPStore.

    'tcpstore serve' runs a server; 'relay' and 'record' sit between a job and its server. Most other commands connect
    to a running server, ours or PyTorch's, at the address given by --url or TCPSTORE_URL.

    \b
      tcpstore serve &
      tcpstore set greeting hello
      tcpstore get greeting
      tcpstore wait ready --timeout 60

    Exit status: 0 success, 1 failure (check: a key is missing; delete: a key did not exist), 2 usage error,
    3 timeout, 4 server unreachable, 5 not allowed (see 'tcpstore token'); 130 in a shell after Ctrl-C.
    """
    open_standard_streams()
