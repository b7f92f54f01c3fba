"""Lock on a run's directory, so that only one attempt at a time trains the run. Does not import torch.

runs/.NAME.lock           describes the owner, which trains the run; the modification time is its heartbeat
runs/.NAME.lock.TOKEN     describes the process that takes over from the owner with this token; later .NAME.lock

Both files are created as hard links, because a file server lets only one process create a link of the same name. The
lock is next to the run's directory, not in it, because `--resume never` renames the directory. Clocks of different
hosts are never compared: an owner on another host counts as dead when its heartbeat does not change for a minute. An
owner on this host counts as dead when no process has its process id and start time.
"""

import contextlib
import errno
import json
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from rankzero.checkpoints.atomic_files import make_folder, sync_folder, synced
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.process.system import process_state
from rankzero.distributed.timers import TIMERS
from rankzero.distributed.world import Peer
from rankzero.messages import RequestError, printable
from rankzero.runs.directory import cannot_write_error

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


@dataclass(frozen=True)
class Owner:
    """Rank zero's process, which trains a run; `since` is the UTC time at which it took the lock.

    `born` is its start time in clock ticks after boot, see proc(5), `boot` the boot id of the host's kernel, and `pids`
    the namespace of the process id; these are empty without /proc. `job` is the id given by the scheduler or torchrun,
    None without one, and `restarts` how often it had restarted the job.
    """

    token: str
    host: str
    pid: int
    born: str = ""
    boot: str = ""
    pids: str = ""
    since: str = ""
    job: str | None = None
    restarts: int = 0

    @classmethod
    def this(cls, launch: Launch) -> "Owner":
        """Returns the description of this process."""
        peer = Peer.this(launch)
        now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
        born = (process_state(peer.pid) or ("", ""))[1]
        process = peer.host, peer.pid, born, peer.boot, peer.pids
        return cls(secrets.token_hex(16), *process, now, launch.job_id, launch.restarts)

    def is_superseded_by(self, launch: Launch) -> bool:
        """Returns whether `launch` is a restart of the owner's job by the scheduler or torchrun."""
        same_job = launch.job_id is not None and launch.job_id == self.job
        return same_job and (launch.restarts > self.restarts or launch.elastic is not None)

    @property
    def process(self) -> str | None:
        """State of the owner's process if it is on this host, see proc(5); None if it has ended, as a zombie has."""
        process = process_state(self.pid)
        return None if process is None or process[1] != self.born or process[0] in ("Z", "X") else process[0]

    def is_on_host_of(self, peer: Peer) -> bool:
        """Returns whether the owner's process id is valid on the peer's host: same boot, same PID namespace."""
        return (self.boot, self.pids) == (peer.boot, peer.pids) and bool(peer.boot or self.host == peer.host)


class RunLock:
    """Lock that rank zero takes on a run.

    Args:
        launch: How this process was started.
        notify: Called with a line for the user: before a wait, or if the file system has no hard links.
        received_signal: Called during a wait; returns the name of the signal that ends the wait, or None.
    """

    def __init__(
        self,
        launch: Launch,
        notify: Callable[[str], None] = lambda line: None,
        received_signal: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.launch, self.notify, self.received_signal = launch, notify, received_signal
        self._owner: Owner | None = None
        self._heartbeat_thread: threading.Thread | None = None
        self._may_remove_folder = False
        self._released = threading.Event()

    def acquire(self, run: Path) -> None:
        """Takes the lock of a run's directory, which need not exist. May wait for `TIMERS.lock_stale`.

        Raises:
            RequestError: Another process is training the run, or the folder of the runs is not writable.
        """
        self._run, self._path = run, lock_path(run)
        folder = self._path.parent
        self._may_remove_folder = not folder.exists() or [path.name for path in folder.glob("*")] == [run.name]
        claimant = Owner.this(self.launch)
        try:
            make_folder(folder)
            with self._temporary_file(claimant) as file:
                while not self._try_to_acquire(file, claimant):
                    time.sleep(TIMERS.poll)
                self._keep_alive(file, claimant)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise cannot_write_error(folder, error) from None
            line = "this file system has no hard links, so nothing prevents a second process from training run"
            self.notify(f"{line} {run.name}")
            return
        self._clean()

    def release(self) -> None:
        """Releases the lock; does nothing if this process does not hold it."""
        if self._owner is None or self._heartbeat_thread is None:
            return
        owner, self._owner = self._owner, None
        self._released.set()
        self._heartbeat_thread.join()
        claim = _successor_path(self._path, owner)  # while this file exists, no other process changes the lock
        with contextlib.suppress(OSError), self._temporary_file(replace(owner, token=secrets.token_hex(16))) as file:
            os.link(file, claim)
            if _read(self._path) == owner:
                self._path.unlink()
            claim.unlink()
        if self._may_remove_folder:
            with contextlib.suppress(OSError):
                self._path.parent.rmdir()  # created for this run, which left no files

    def _try_to_acquire(self, file: Path, claimant: Owner) -> bool:
        """Tries to become the owner; returns False if the lock changed meanwhile.

        Raises:
            RequestError: The owner is alive.
        """
        owner, path = current_owner(self._path)
        if owner is None:
            return self._link(file, self._path, claimant)
        if not owner.is_superseded_by(self.launch) and not self._is_dead(owner, path):
            return False
        claim = _successor_path(self._path, owner)
        if not self._link(file, claim, claimant):
            return False
        if current_owner(self._path)[0] != claimant:  # another process claimed the lock first
            claim.unlink(missing_ok=True)
            return False
        claim.rename(self._path)
        sync_folder(self._path.parent)
        return True

    def _is_dead(self, owner: Owner, path: Path) -> bool:
        """Returns True if an owner is dead, or False if the lock changed. May wait for `TIMERS.lock_stale`.

        Raises:
            RequestError: The owner is alive.
        """
        if owner.is_on_host_of(Peer.this(self.launch)):
            if owner.process is None:
                return True
            if owner.born:
                raise self._refusal(owner)
            # Without /proc, another process may have reused the process id: wait for a heartbeat.
        first_heartbeat, deadline = last_heartbeat(path), time.monotonic() + TIMERS.lock_stale
        line = f"run {self._run.name} belongs to process {owner.pid} on {owner.host} since {owner.since}; "
        self.notify(printable(f"{line}waiting {TIMERS.lock_stale:g} s for its heartbeat"))
        while time.monotonic() < deadline:
            time.sleep(TIMERS.slow_poll)
            if current_owner(self._path)[0] != owner:
                return False
            if last_heartbeat(path) != first_heartbeat:
                raise self._refusal(owner)
            if reason := self.received_signal():
                raise self._refusal(owner, f"; {reason} ended the wait for its heartbeat")
        return True

    def _refusal(self, owner: Owner, detail: str = "") -> RequestError:
        is_on_this_host = owner.is_on_host_of(Peer.this(self.launch))
        if is_on_this_host and owner.process == "T" and not detail:
            detail = f"; it is suspended (SIGSTOP); kill -CONT {owner.pid} resumes it"
        name, process = self._run.name, f"process {owner.pid} on {owner.host}"
        found = f"{process} has been training run {name} since {owner.since}{detail}"
        kill = f"kill {owner.pid}" if is_on_this_host else f"kill {owner.pid} on {owner.host}"
        return RequestError(f"to train run {name}", found, f"--name ANOTHER-NAME, or first stop that process: {kill}")

    @contextlib.contextmanager
    def _temporary_file(self, owner: Owner) -> Iterator[Path]:
        """Yields a temporary file that describes the owner, to be hard-linked to the lock's path."""
        file = self._path.with_name(f"{self._path.name}-{owner.token}")
        try:
            with synced(file) as content:
                content.write((json.dumps(asdict(owner)) + "\n").encode())
            yield file
        finally:
            file.unlink(missing_ok=True)

    @staticmethod
    def _link(file: Path, path: Path, claimant: Owner) -> bool:
        try:
            os.link(file, path)
        except FileExistsError:  # NFS repeats a request whose reply was lost: the first try may have linked it
            return _read(path) == claimant
        return True

    def _keep_alive(self, file: Path, claimant: Owner) -> None:
        descriptor = os.open(file, os.O_RDONLY)  # this file, even if another one is linked to the path later

        def beat() -> None:
            with os.fdopen(descriptor):
                while not self._released.wait(TIMERS.lock_heartbeat):
                    with contextlib.suppress(OSError):
                        os.utime(descriptor)

        self._owner = claimant
        self._released.clear()
        self._heartbeat_thread = threading.Thread(target=beat, name="run-lock", daemon=True)
        self._heartbeat_thread.start()

    def _clean(self) -> None:
        """Removes the files of processes that were killed while they acquired this lock."""
        with contextlib.suppress(OSError):
            for path in self._path.parent.iterdir():
                if not re.fullmatch(re.escape(self._path.name) + "[.-][0-9a-f]{32}", path.name) or not self._owner:
                    continue
                separator, token = path.name[-33], path.name[-32:]
                writer, this_peer = _read(path), Peer.this(self.launch)
                was_killed = writer and writer.is_on_host_of(this_peer) and process_state(writer.pid) is None
                if token != self._owner.token if separator == "." else was_killed:
                    path.unlink(missing_ok=True)


def current_owner(path: Path) -> tuple[Owner | None, Path]:
    """Returns the owner, or the process that is taking over from it, and the file that describes it."""
    file, owner = path, _read(path)
    while owner is not None and (successor := _read(_successor_path(path, owner))) is not None:
        file, owner = _successor_path(path, owner), successor
    return owner, file


def _successor_path(path: Path, owner: Owner) -> Path:
    return path.with_name(f"{path.name}.{owner.token}")


def lock_path(run: Path) -> Path:
    """Returns the path of a run's lock, which is the same for every path to the run's directory."""
    real = run.resolve()
    folder = real.parent if os.access(real.parent, os.W_OK | os.X_OK) or not real.parent.exists() else run.parent
    return folder / f".{real.name}.lock"


def _read(path: Path) -> Owner | None:
    """Reads the owner from a file; returns None if the file cannot be read, and an unknown owner if it is damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    try:
        owner = Owner(**json.loads(content))
        if re.fullmatch("[0-9a-f]{32}", owner.token) and isinstance(owner.pid, int) and owner.pid > 0:
            return owner
    except (TypeError, ValueError, RecursionError):
        pass
    return Owner(token="0" * 32, host="an unknown host", pid=0, since="an unknown time")  # assume a living owner


def last_heartbeat(path: Path) -> int | None:
    """Returns the heartbeat: the modification time in ns. Opening the file bypasses the attribute cache of NFS."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return None
