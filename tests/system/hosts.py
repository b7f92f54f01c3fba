"""Two hosts on this machine: connected network namespaces, each with a host name and an address.

Each process that creates hosts has namespaces of its own, so tests may use the same names, addresses and ports at once.
"""

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from running import BIN, LIMIT, write_program

HOSTS = {"rz1": "10.93.0.1", "rz2": "10.93.0.2"}

ATTACKER = "rz3"
"""A third host, which can reach rz1 but takes part in no run."""

NAMESPACES = {host: f"{host}-{os.getpid()}" for host in (*HOSTS, ATTACKER)}

ENTER = """\
# enter HOST COMMAND...: runs a command on a host
host=$1; shift
exec ip netns exec "$host-{pid}" unshare --uts sh -c 'hostname "$0"; exec "$@"' "$host" "$@"
"""

AGENT = """\
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
        write_program(folder / name, text.replace("{folder}", str(folder)).replace("{pid}", str(os.getpid())))
    names = "127.0.0.1 localhost\n" + "".join(f"{ip} {host}\n" for host, ip in HOSTS.items())
    _remove_namespaces_of_ended_processes()
    try:
        for host, namespace in NAMESPACES.items():
            subprocess.run(["ip", "netns", "add", namespace], check=True)
            etc = Path("/etc/netns") / namespace
            etc.mkdir(parents=True)
            (etc / "hosts").write_text(names)
            on(host, "ip", "link", "set", "lo", "up")
        _connect("rz1", HOSTS["rz1"], "rz2", HOSTS["rz2"])
        _connect("rz1", "10.93.1.1", ATTACKER, "10.93.1.3")
        on(ATTACKER, "ip", "route", "add", "10.93.0.0/24", "via", "10.93.1.1")
        yield hosts
        for host in NAMESPACES:
            hosts.kill_all(host)
    finally:
        for namespace in NAMESPACES.values():
            _remove(namespace)


def on(host: str, *command: str) -> str:
    """Runs a command in the network namespace of a host, and returns its output."""
    command = ("ip", "netns", "exec", NAMESPACES[host], *command)
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def _connect(first: str, first_address: str, second: str, second_address: str) -> None:
    links = (f"to-{second}", "netns", NAMESPACES[first]), (f"to-{first}", "netns", NAMESPACES[second])
    subprocess.run(["ip", "link", "add", *links[0], "type", "veth", "peer", "name", *links[1]], check=True)
    for host, address, (link, *_) in zip((first, second), (first_address, second_address), links, strict=True):
        on(host, "ip", "addr", "add", f"{address}/24", "dev", link)
        on(host, "ip", "link", "set", link, "up")


def _remove_namespaces_of_ended_processes() -> None:
    for folder in Path("/run/netns").glob("rz?-*"):
        if not Path(f"/proc/{folder.name.partition('-')[2]}").exists():
            _remove(folder.name)


def _remove(namespace: str) -> None:
    subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)
    shutil.rmtree(Path("/etc/netns") / namespace, ignore_errors=True)


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
        line = self.command_on(host, *command)
        with log.open("ab") as out:
            return subprocess.Popen(line, cwd=folder, env=variables, stdout=out, stderr=out, start_new_session=True)

    def kill_all(self, host: str) -> None:
        """Kills all processes on a host at once."""
        listing = subprocess.run(["ip", "netns", "pids", NAMESPACES[host]], check=True, capture_output=True, text=True)
        for pid in listing.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def run_on_both(
        self, folder: Path, commands: dict[str, list[str]], environment: dict[str, str] | None = None, code: int = 0
    ) -> list[str]:
        """Runs a command on each host at the same time, checks the exit codes, and returns what each prints."""
        logs = {host: folder / f"{host}.log" for host in commands}
        started = {
            host: self.start(host, *command, folder=folder, log=logs[host], environment=environment)
            for host, command in commands.items()
        }
        try:
            codes = [process.wait(LIMIT) for process in started.values()]
            printed = [log.read_text() for log in logs.values()]
            assert codes == [code] * len(codes), (codes, *printed)
            return printed
        finally:
            for process in started.values():
                kill_group(process)


def kill_group(process: "subprocess.Popen[bytes]") -> None:
    """Kills the process group of a process that `Hosts.start` started, and waits for the process."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(LIMIT)
