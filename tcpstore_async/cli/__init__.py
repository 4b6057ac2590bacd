"""The command line: options, output and exit status, without logic of its own.

Exit status: 0 success, 1 failure, 2 usage error, 3 timeout, 4 server unreachable, 5 not allowed.
"""

from typing import Final

import click

from .commands import Program, ProgramCommands
from .output import open_standard_streams

_COMMANDS: Final = ProgramCommands(
    {
        "add": "cli.client:add",
        "append": "cli.client:append",
        "barrier": "cli.client:barrier",
        "bench": "tools.load.bench:bench",
        "check": "cli.client:check",
        "clients": "tools.look.who:clients",
        "compare-set": "cli.client:compare_set",
        "completion": "cli.client:completion",
        "delete": "cli.client:delete",
        "doctor": "tools.doctor.command:doctor_command",
        "get": "cli.client:get",
        "help": "cli.help:help_command",
        "http": "tools.web.command:http_command",
        "info": "tools.look.look:info",
        "journal": "tools.journal:journal",
        "keys": "tools.look.look:keys",
        "latency": "tools.look.look:latency",
        "monitor": "tools.look.look:monitor",
        "num-keys": "cli.client:num_keys",
        "ping": "cli.client:ping",
        "promote": "tools.look.who:promote",
        "queue": "cli.client:queue",
        "record": "tools.load.record:record_command",
        "relay": "cli.relay:relay_command",
        "replay": "tools.load.record:replay",
        "serve": "cli.serve:serve",
        "set": "cli.client:set_",
        "stacks": "tools.look.stacks:stacks",
        "stat": "tools.look.look:stat",
        "stop": "tools.look.who:stop",
        "stores": "tools.look.who:stores",
        "token": "cli.token:token",
        "top": "tools.look.top:top",
        "wait": "cli.client:wait",
        "waiters": "tools.look.who:waiters",
        "who": "tools.look.who:who",
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
