"""The lock on a run's directory: at any time one start trains a run. Imports no torch.

runs/.NAME.lock           says who trains the run; its modification time is the sign of life
runs/.NAME.lock.TOKEN     says who takes over from the owner with that token, until it is renamed to .NAME.lock

Every file comes to be by a hard link, which a file server creates for one process only. The lock is beside the run's
directory, because `--resume never` renames that. Clocks of different hosts are not compared: an owner on another host
has died when its sign of life does not change for a minute. On this host its process id and time of birth count.
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

from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.process.process_state import process_state
from rankzero.distributed.rendezvous.peers import Peer
from rankzero.messages import RequestError, printable
from rankzero.runs.checkpoints.atomic_files import make_folder, sync_folder, synced
from rankzero.runs.directory import cannot_write

BEAT_SECONDS = 10.0
"""Between two signs of life."""

STALE_SECONDS = 60.0
"""An owner on another host that gives no sign of life for so long has died."""

LOOK_SECONDS = 1.0

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


@dataclass(frozen=True)
class Owner:
    """The process that trains a run.

    Args:
        token: Different for every start.
        host: The host of rank zero.
        pid: The process id of rank zero.
        born: When that process was born, in the kernel's words.
        boot: The id of the kernel's start.
        pids: The namespace that the process id counts in.
        since: When the lock was taken.
        job: What the scheduler or torchrun calls the job.
        restarts: How often it had started the job again.
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
        """This process."""
        me = Peer.this(launch)
        now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
        born = (process_state(me.pid) or ("", ""))[1]
        return cls(secrets.token_hex(16), me.host, me.pid, born, me.boot, me.pids, now, launch.job_id, launch.restarts)

    def is_superseded_by(self, launch: Launch) -> bool:
        """Whether the scheduler, or torchrun, has started the owner's job again, and this is the new start."""
        same_job = launch.job_id is not None and launch.job_id == self.job
        return same_job and (launch.restarts > self.restarts or launch.elastic is not None)


class RunLock:
    """Holds a run for this process, which is rank zero.

    Args:
        launch: How this process was started.
        notice: Called with a line for a person, before a wait.
        interrupted: Called during a wait; returns the name of the signal that ends the wait, or None.
    """

    def __init__(
        self,
        launch: Launch,
        notice: Callable[[str], None] = lambda line: None,
        interrupted: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.launch, self.notice, self.interrupted = launch, notice, interrupted
        self._owner: Owner | None = None
        self._beats: threading.Thread | None = None
        self._alone = False
        self._released = threading.Event()

    def acquire(self, run: Path) -> None:
        """Takes the lock of a run's directory, which need not exist.

        Raises:
            RequestError: Another start is training the run, or the folder of the runs cannot be written.
        """
        self._run, self._place = run, _place_of(run)
        folder = self._place.parent
        self._alone = not folder.exists() or [path.name for path in folder.glob("*")] == [run.name]
        me = Owner.this(self.launch)
        try:
            make_folder(folder)
            with self._written(me) as file:
                while not self._take(file, me):
                    time.sleep(0.01)
                self._keep_alive(file, me)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise cannot_write(folder, error) from None
            self.notice(f"this file system knows no hard links, so nothing keeps run {run.name} from a second start")
            return
        self._clean()

    def release(self) -> None:
        """Releases the lock; does nothing if this process does not hold it."""
        if self._owner is None or self._beats is None:
            return
        owner, self._owner = self._owner, None
        self._released.set()
        self._beats.join()
        mark = self._successor(owner)  # while it exists, no other start changes the lock of this owner
        with contextlib.suppress(OSError), self._written(replace(owner, token=secrets.token_hex(16))) as file:
            os.link(file, mark)
            if _read(self._place) == owner:
                self._place.unlink()
            mark.unlink()
        if self._alone:
            with contextlib.suppress(OSError):
                self._place.parent.rmdir()  # made for this run, of which nothing came

    def _take(self, file: Path, me: Owner) -> bool:
        """Tries to become the owner; returns False where something changed meanwhile.

        Raises:
            RequestError: The owner lives.
        """
        owner, place = self._current()
        if owner is None:
            return self._link(file, self._place, me)
        if not owner.is_superseded_by(self.launch):
            lives = self._lives(owner, place)
            if lives is None:
                return False
            if lives:
                raise self._refusal(owner)
        claim = self._successor(owner)
        if not self._link(file, claim, me):
            return False
        if self._current()[0] != me:  # another start claimed the lock first
            claim.unlink(missing_ok=True)
            return False
        claim.rename(self._place)
        sync_folder(self._place.parent)
        return True

    def _current(self) -> tuple[Owner | None, Path]:
        """The owner, or the process that is taking over from it."""
        place, owner = self._place, _read(self._place)
        while owner is not None and (follower := _read(self._successor(owner))) is not None:
            place, owner = self._successor(owner), follower
        return owner, place

    def _lives(self, owner: Owner, place: Path) -> bool | None:
        """Whether an owner lives; None where it has given the lock up meanwhile. May take a minute."""
        if self._is_on_this_host(owner):
            process = process_state(owner.pid)
            if process is None or process[1] != owner.born or process[0] in ("Z", "X"):
                return False
            if owner.born:
                return True
            # Without /proc another process may have the same number by now: wait for a sign of life.
        first, deadline = _sign_of_life(place), time.monotonic() + STALE_SECONDS
        line = f"run {self._run.name} belongs to process {owner.pid} on {owner.host} since {owner.since}; "
        self.notice(printable(f"{line}waiting {STALE_SECONDS:g} s for a sign of life"))
        while time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
            if self._current()[0] != owner:
                return None
            if _sign_of_life(place) != first:
                return True
            if reason := self.interrupted():
                raise self._refusal(owner, f"; {reason} ended the wait for a sign of life")
        return False

    def _refusal(self, owner: Owner, more: str = "") -> RequestError:
        here = self._is_on_this_host(owner)
        process = process_state(owner.pid) if here else None
        if process and process[0] == "T" and not more:
            more = f"; it is stopped (SIGSTOP); kill -CONT {owner.pid} resumes it"
        return RequestError(
            f"to train run {self._run.name}",
            f"process {owner.pid} on {owner.host} has been training it since {owner.since}{more}",
            f"--name ANOTHER-NAME, or stop that process first: kill {owner.pid}" + f" on {owner.host}" * (not here),
        )

    def _is_on_this_host(self, owner: Owner) -> bool:
        """Whether the owner's process id counts here: the same kernel, and the same namespace of processes."""
        me = Peer.this(self.launch)
        return (owner.boot, owner.pids) == (me.boot, me.pids) and bool(me.boot or owner.host == me.host)

    def _successor(self, owner: Owner) -> Path:
        return self._place.with_name(f"{self._place.name}.{owner.token}")

    @contextlib.contextmanager
    def _written(self, owner: Owner) -> Iterator[Path]:
        """A file with the owner in it, under a name of its own, to be linked to where it counts."""
        file = self._place.with_name(f"{self._place.name}-{owner.token}")
        try:
            with synced(file) as content:
                content.write((json.dumps(asdict(owner)) + "\n").encode())
            yield file
        finally:
            file.unlink(missing_ok=True)

    @staticmethod
    def _link(file: Path, place: Path, me: Owner) -> bool:
        try:
            os.link(file, place)
        except FileExistsError:
            return _read(place) == me  # NFS repeats a request whose answer was lost
        return True

    def _keep_alive(self, file: Path, me: Owner) -> None:
        descriptor = os.open(file, os.O_RDONLY)  # the lock itself, whatever is linked at its place later

        def beat() -> None:
            with os.fdopen(descriptor):
                while not self._released.wait(BEAT_SECONDS):
                    with contextlib.suppress(OSError):
                        os.utime(descriptor)

        self._owner = me
        self._released.clear()
        self._beats = threading.Thread(target=beat, name="run-lock", daemon=True)
        self._beats.start()

    def _clean(self) -> None:
        """Removes files of starts that were killed while acquiring this lock."""
        with contextlib.suppress(OSError):
            for path in self._place.parent.iterdir():
                if not re.fullmatch(re.escape(self._place.name) + "[.-][0-9a-f]{32}", path.name) or not self._owner:
                    continue
                kind, token = path.name[-33], path.name[-32:]
                writer = _read(path)
                killed = writer and self._is_on_this_host(writer) and process_state(writer.pid) is None
                if token != self._owner.token if kind == "." else killed:
                    path.unlink(missing_ok=True)


def _place_of(run: Path) -> Path:
    """Where the lock of a run's directory is: one place, however the directory is named."""
    real = run.resolve()
    folder = real.parent if os.access(real.parent, os.W_OK | os.X_OK) or not real.parent.exists() else run.parent
    return folder / f".{real.name}.lock"


def _read(place: Path) -> Owner | None:
    """Reads the owner from a file; None if there is no file."""
    try:
        text = place.read_bytes()
    except OSError:
        return None
    try:
        owner = Owner(**json.loads(text))
        if re.fullmatch("[0-9a-f]{32}", owner.token) and isinstance(owner.pid, int) and owner.pid > 0:
            return owner
    except (TypeError, ValueError):
        pass
    return Owner(token="0" * 32, host="an unknown host", pid=0, since="an unknown time")  # damaged: it may live


def _sign_of_life(place: Path) -> int | None:
    """Changes while the owner lives. Opening the file has NFS ask the server."""
    try:
        with place.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return None
