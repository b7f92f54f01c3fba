"""How long one process waits for another; a test states which wait must exceed which.

Users set two more time limits: `--start_timeout` and `--hang_timeout`.
"""

import math
import time
from collections.abc import Callable

from rankzero.messages import print_error


class Timers:
    """Durations in seconds. Code reads them when it uses them, so that tests can change them."""

    poll = 0.05
    """Pause between two looks at something that another process changes."""
    progress = 10.0
    """A rank that waits for others prints after this long what it waits for, again and again."""
    slow_poll = 1.0
    """Pause between two looks that cost more, and the length of one call that waits for another rank."""

    # Connections
    attempt = 3.0
    """An address has this long to accept a connection before the next address is tried."""
    first_answer = 5.0
    """Rank zero has this long to answer a new connection; at a wrong address, it waits as long to refuse all ranks."""
    identify = 5.0
    """A new connection to rank zero, or to the leader of a node, has this long to identify itself."""
    make_room = 0.2
    """A server with too many unidentified connections keeps each of them at least this long."""
    unreachable = 15.0
    """The kernel waits this long for another machine to acknowledge data before it closes the connection."""
    leave = 5.0
    """A process that exits waits this long for the other ranks to read its last messages and to leave."""

    # Start
    leader = 5.0
    """A rank looks for the leader of its node this long before it connects to rank zero itself."""
    key = 10.0
    """Rank zero, which has a key, waits this long for ranks that have it before it admits others in their place."""
    refuse = 2.0
    """Rank zero, or the leader of a node, waits this long for late ranks to send them a refusal."""
    late_answer = 30.0
    """The other ranks wait this much longer than rank zero for its answer."""
    stop_grace = 10.0
    """After a stop request, a rank waits this long for missing ranks, so that all ranks stop together."""
    shared_file = 10.0
    """A network file system has this long to show a file that another machine has just written."""
    send = 30.0
    """Rank zero, or the leader of a node, has this long to accept a message of a rank."""

    # Monitoring
    heartbeat = 2.0
    """Pause between two reports of a rank to the leader of its node, and between two checks for a hang."""
    longest_report_interval = 60.0
    """Rank zero requests reports at least this often, also in very large runs."""
    suspended = 8.0
    """The watchdog lets a rank be suspended this long; a process without heartbeats for as long was suspended too."""
    silence = 14.0
    """A connected rank has this long to send a report before it counts as blocked; longer in large runs."""
    worker = 2.0
    """A loader process has this long to write its stacks, or to exit."""

    # Failure and exit
    same_error = 10.0
    """A rank of a script that has raised an error waits this long for the other ranks to raise the same error."""
    cause = 4.0
    """A rank that failed or lost contact waits this long for rank zero to name the cause and the reporting rank."""
    notice = 2.0
    """After the loss of another rank, the main thread of a rank has this long to begin to exit."""
    teardown = 10.0
    """A rank that failed by itself has this long to exit, as has a main thread that has noticed the failure."""
    record = 12.0
    """A rank has this long to record a failure or a hang, including a save in progress."""
    exit_of_reporter = 0.3
    """A rank that has reported why nothing was started delays its exit this long, until the launcher prints that."""
    exit_after_lost_contact = 1.0
    """A rank that lost contact delays its exit this long, so that the launcher names the rank that failed first."""
    exit_of_others = 2.5
    """Other ranks delay their exit this long; torchrun and mpirun terminate all ranks once one exits."""
    grace = 25.0
    """Local processes have this long to exit by themselves after one of them has failed."""
    same_press = 1.0
    """One Ctrl-C may arrive twice within this time: from the terminal, and forwarded by the parent process."""

    # Runs, jobs and the preflight
    lock_heartbeat = 10.0
    """Pause between two heartbeats of the owner of a run's lock."""
    lock_stale = 60.0
    """The owner of a lock has this long to send a heartbeat, if its process cannot be inspected."""
    scheduler = 10.0
    """A scheduler's program has this long; without its controller, squeue takes half a minute (Slurm 22.05)."""
    scheduler_pause = 3.0
    """Pause between two queries of a scheduler; after a rerun, qstat may omit `stime` once (OpenPBS 23.06)."""
    mirror = 600.0
    """The end of an attempt waits this long for the last copy to its mirror."""
    mirror_error = 60.0
    """Longest pause before a failed copy to a mirror is repeated; the end of an attempt repeats it this long."""
    optional = 2.0
    """git, or the scheduler of a run in a list, has this long; the output does without a later answer."""
    message = 60.0
    """A message or collective of the preflight has this long."""
    network_check = 180.0
    """The other ranks have this long to finish a check of the network, after one rank has finished it."""


TIMERS = Timers()
"""The durations of this process."""


class Progress:
    """Reports at intervals which processes or ranks a process is waiting for."""

    def __init__(self, timeout: float) -> None:
        self.started = self.printed_at = time.monotonic()
        self.timeout = timeout

    def print_if_due(self, describe: Callable[[], str]) -> None:
        """Prints a line if `TIMERS.progress` has passed since the last one; `describe` returns its text, or none."""
        now = time.monotonic()
        if now - self.printed_at > TIMERS.progress and (text := describe()):
            self.printed_at = now
            remaining = self.started + self.timeout - now
            limit = f"; giving up in {remaining:.0f} s" if remaining < math.inf else ""
            print_error(f"waiting since {now - self.started:.0f} s: {text}{limit}")
