"""Build the load generator, and set up a network namespace for it."""

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Final

SOURCE: Final = Path(__file__).with_name("loadgen.c")

NAMESPACE: Final = (
    "ip link set lo up; cd /proc/sys/net; echo 65535 > core/somaxconn; echo '1024 65535' > ipv4/ip_local_port_range; "
    'echo 65535 > ipv4/tcp_max_syn_backlog; cd - >/dev/null; exec "$@"'
)
"""For `unshare -n bash -c`: a loopback device, with a backlog and a range of ports large enough for whole jobs."""


def build() -> Path:
    """Compile the load generator unless this version exists; return its path."""
    generator = Path(tempfile.gettempdir()) / f"tcpstore-loadgen-{os.getuid()}-{SOURCE.stat().st_mtime_ns}"
    if not generator.exists():
        made = generator.with_suffix(f".{os.getpid()}")
        subprocess.run([os.environ.get("CC", "cc"), "-O2", "-w", "-o", made, SOURCE], check=True, timeout=120)
        made.rename(generator)
    return generator
