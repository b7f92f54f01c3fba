"""Two hosts on this machine: connected network namespaces rz1 and rz2, each with a name and an address."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from running import BIN

HOSTS = {"rz1": "10.93.0.1", "rz2": "10.93.0.2"}

ATTACKER = "rz3"
"""A third host, which can reach rz1 but takes part in no run."""

ENTER = """\
#!/bin/sh
# enter HOST COMMAND...: runs a command on a host
host=$1; shift
exec ip netns exec "$host" unshare --uts sh -c 'hostname "$0"; exec "$@"' "$host" "$@"
"""

AGENT = """\
#!/bin/sh
# agent [-x] HOST COMMAND: what mpirun takes for ssh
[ "$1" = -x ] && shift
host=$1; shift
exec {folder}/enter "$host" sh -c "$*"
"""


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator["Hosts"]:
    """Creates the hosts; needs root."""
    hosts = Hosts(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("enter", ENTER), ("agent", AGENT)):
        (folder / name).write_text(text.format(folder=folder) if name == "agent" else text)
        (folder / name).chmod(0o755)
    names = "127.0.0.1 localhost\n" + "".join(f"{ip} {host}\n" for host, ip in HOSTS.items())
    _remove()
    try:
        for host in HOSTS:
            ip("netns", "add", host)
            etc = Path("/etc/netns") / host
            etc.mkdir(parents=True, exist_ok=True)
            (etc / "hosts").write_text(names)
        ip("link", "add", "to-rz2", "netns", "rz1", "type", "veth", "peer", "name", "to-rz1", "netns", "rz2")
        for host, link in (("rz1", "to-rz2"), ("rz2", "to-rz1")):
            ip("-n", host, "addr", "add", f"{HOSTS[host]}/24", "dev", link)
            ip("-n", host, "link", "set", link, "up")
            ip("-n", host, "link", "set", "lo", "up")
        _connect_attacker()
        yield hosts
        for host in (*HOSTS, ATTACKER):
            hosts.kill_all(host)
    finally:
        _remove()


def _connect_attacker() -> None:
    ip("netns", "add", ATTACKER)
    ip("link", "add", "to-rz3", "netns", "rz1", "type", "veth", "peer", "name", "to-rz1", "netns", ATTACKER)
    for host, link, address in (("rz1", "to-rz3", "10.93.1.1"), (ATTACKER, "to-rz1", "10.93.1.3")):
        ip("-n", host, "addr", "add", f"{address}/24", "dev", link)
        ip("-n", host, "link", "set", link, "up")
    ip("-n", ATTACKER, "route", "add", "10.93.0.0/24", "via", "10.93.1.1")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _remove() -> None:
    for host in (*HOSTS, ATTACKER):
        subprocess.run(["ip", "netns", "delete", host], capture_output=True)


class Hosts:
    """Runs commands on the two hosts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.agent = str(folder / "agent")

    def command_on(self, host: str, *command: str) -> list[str]:
        """Returns the command line that runs a command on a host."""
        return [str(self.folder / "enter"), host, *command]

    def start(
        self, host: str, *command: str, folder: Path, log: Path, environment: dict[str, str] | None = None
    ) -> "subprocess.Popen[bytes]":
        """Starts a command on a host, in a separate session, with its output in a file."""
        variables = {**os.environ, **(environment or {}), "PATH": f"{BIN}:{os.environ['PATH']}"}
        with log.open("ab") as out:
            return subprocess.Popen(
                self.command_on(host, *command),
                cwd=folder,
                env=variables,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def kill_all(self, host: str) -> None:
        """Kills all processes on a host at once."""
        listing = subprocess.run(["ip", "netns", "pids", host], check=True, capture_output=True, text=True)
        for pid in listing.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def run_on_both(
        self,
        folder: Path,
        commands: dict[str, list[str]],
        environment: dict[str, str] | None = None,
    ) -> dict[str, tuple[int, str]]:
        """Runs a command on each host at the same time; returns each exit code and output."""
        logs = {host: folder / f"{host}.log" for host in commands}
        started = {
            host: self.start(host, *command, folder=folder, log=logs[host], environment=environment)
            for host, command in commands.items()
        }
        try:
            return {host: (process.wait(100), logs[host].read_text()) for host, process in started.items()}
        finally:
            for process in started.values():
                kill_group(process)


def kill_group(process: "subprocess.Popen[bytes]") -> None:
    """Kills the process group of a process that `Hosts.start` started, and waits for the process."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)
