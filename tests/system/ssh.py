"""An sshd on each of the two hosts, with keys that exist only for the tests."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from running import wait_until, write_program
from system.hosts import HOSTS, Hosts, kill_group

SERVER = """\
HostKey {folder}/host_key
PidFile none
AuthorizedKeysFile {folder}/user_key.pub
StrictModes no
PermitRootLogin yes
UsePAM no
"""

CLIENT = """\
exec /usr/bin/ssh -F none -i {folder}/user_key -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null \
    -o LogLevel=ERROR "$@"
"""


@contextmanager
def ssh_servers(hosts: Hosts, folder: Path) -> Iterator[str]:
    """Starts an sshd on each host, and yields a PATH whose `ssh` has the key for them."""
    folder.mkdir()
    for key in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
    (folder / "server").write_text(SERVER.format(folder=folder))
    write_program(folder / "ssh", CLIENT.format(folder=folder))
    Path("/run/sshd").mkdir(exist_ok=True)
    servers = [
        hosts.start(host, "/usr/sbin/sshd", "-D", "-e", "-f", str(folder / "server"), folder=folder, log=folder / host)
        for host in HOSTS
    ]
    try:
        for host in HOSTS:
            wait_until(lambda host=host: "listening" in (folder / host).read_text(), f"sshd on {host}")
        yield f"{folder}:{os.environ['PATH']}"
    finally:
        for server in servers:
            kill_group(server)
