"""Starts, inspects and ends scripts that run at once, as processes of this machine. Does not import torch."""

import os
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

from rankzero.distributed.process.system import process_state
from rankzero.jobs.record import Record, State
from rankzero.messages import RequestError

_children: dict[str, "subprocess.Popen[bytes]"] = {}
"""Process id -> a script that this process has started."""


def start(script: Path, log: Path) -> tuple[str, str]:
    """Starts a script in its own session, which appends to the log; returns id and start time of its process."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            ["bash", str(script)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    _children[str(process.pid)] = process
    found = process_state(process.pid)
    return str(process.pid), found[1] if found else ""


def state(record: Record) -> State:
    """Returns the state of a script's process; unknown on another machine."""
    if record.host != socket.gethostname():
        return State("UNKNOWN", None, f"(started on {record.host})")
    code = None
    if record.id in _children:  # `submit --follow` has started it
        code = _children[record.id].poll()
        runs = code is None
    else:
        found = process_state(int(record.id))
        runs = found is not None and found[1] == record.started and found[0] != "Z"
    if runs:
        return State("RUNNING", True, f"as process {record.id}")
    return State("ENDED", False, has_failed=None if code is None else code != 0)


def stop(record: Record) -> None:
    """Sends SIGTERM to the script, which passes it on.

    Raises:
        RequestError: The script was started on another machine.
    """
    if record.host != socket.gethostname():
        raise RequestError(f"to stop run {record.name}", f"it was started on {record.host}", f"ssh {record.host}")
    with suppress(ProcessLookupError):
        os.kill(int(record.id), signal.SIGTERM)
