import re

import pytest

from rankzero.distributed.timers import TIMERS, Progress, Timers
from running import REPOSITORY

SOURCES = "".join(file.read_text() for file in (REPOSITORY / "project" / "rankzero").rglob("*.py"))


def test_waits_of_which_one_must_exceed_the_other_are_in_order():
    order = [
        (TIMERS.poll, TIMERS.slow_poll, "cheap looks may be frequent"),
        (TIMERS.first_answer / 3 + TIMERS.attempt, TIMERS.first_answer, "all ranks try rank zero's host in time"),
        (TIMERS.make_room, TIMERS.identify, "unidentified connections are closed sooner if there are too many"),
        (TIMERS.heartbeat, TIMERS.unreachable, "a connection in use is not idle"),
        (TIMERS.unreachable, TIMERS.send, "the kernel notices a lost machine first"),
        (TIMERS.refuse, TIMERS.late_answer, "a refusal arrives before the other ranks give up"),
        (TIMERS.refuse + TIMERS.exit_of_reporter, TIMERS.exit_of_others, "rank zero reports a refusal and exits first"),
        (TIMERS.exit_of_others + TIMERS.leave, TIMERS.grace, "local processes that are refused exit by themselves"),
        (TIMERS.heartbeat + TIMERS.worker, TIMERS.suspended, "a rank that reads stacks does not seem suspended"),
        (2 * TIMERS.slow_poll, TIMERS.suspended, "the watchdog notices that it was suspended too"),
        (TIMERS.heartbeat, TIMERS.longest_report_interval, "large runs report less often"),
        (TIMERS.suspended + TIMERS.slow_poll + TIMERS.heartbeat, TIMERS.silence, "a suspended rank is named as such"),
        (TIMERS.exit_after_lost_contact + TIMERS.leave, TIMERS.teardown, "a rank that lost contact exits by itself"),
        (TIMERS.teardown + TIMERS.record, TIMERS.grace, "local processes record a failure before they are killed"),
        (3 * TIMERS.lock_heartbeat, TIMERS.lock_stale, "the owner of a lock may miss two heartbeats"),
        (TIMERS.message, TIMERS.network_check, "a check ends after its first message that fails"),
    ]
    assert [reason for shorter, longer, reason in order if not shorter < longer] == []


@pytest.mark.parametrize("name", [name for name, value in vars(Timers).items() if isinstance(value, float)])
def test_every_duration_is_used_and_described(name):
    assert f"TIMERS.{name}" in SOURCES
    assert re.search(rf'^    {name} = [\d.]+\n    """[^"]+[.]"""$', SOURCES, re.MULTILINE)


def test_progress_is_printed_at_intervals(monkeypatch, capsys):
    waiting = Progress(20)
    waiting.print_if_due(lambda: pytest.fail("it is too early"))
    monkeypatch.setattr(TIMERS, "progress", -1)
    waiting.print_if_due(lambda: "missing rank 1")
    monkeypatch.setattr(TIMERS, "progress", 10)
    waiting.print_if_due(lambda: pytest.fail("it is too early again"))
    assert capsys.readouterr().err.startswith("rankzero: waiting since 0 s: missing rank 1; giving up in ")
