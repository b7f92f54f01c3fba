"""One of several ranks comes to a standstill: all ranks end, and the message names the rank, its phase and its line."""

import re
import shutil
import socket
from pathlib import Path

import pytest

from system.forks import fit_on_ranks, outputs, summary

HANGING = Path(__file__).parent.parent / "scripts" / "hanging.py"
HOST = socket.gethostname()
PHASE = "(?:data wait|forward|backward|optimizer|hook)"
LINE = r"\(hanging\.py:\d+ in stand_still\)"
REDUCES = "rank %d in backward, waiting in all_reduce of 9 values"
DIFFERENT = "the ranks wait for one another in different collectives:"


@pytest.fixture
def run_hanging(tmp_path):
    """Returns a function that runs the script on two ranks, and returns the exit codes and what was printed."""
    shutil.copy(HANGING, tmp_path)

    def start(*arguments: str, **options: bool) -> tuple[list[int], str]:
        script = str(tmp_path / HANGING.name)
        codes = fit_on_ranks(*arguments, folder=tmp_path, world=2, code=None, script=script, **options)
        return codes, "\n".join(outputs(tmp_path, 2))

    return start


HANGS = {
    "loop in a step": (["loop"], rf"rank 1 on {HOST} has been in forward for \d+ s at step 200 {LINE}; {REDUCES % 0}"),
    "data set": (
        ["data"],
        rf"rank 1 on {HOST} has been in data wait for \d+ s at step \d+ \(hanging\.py:\d+ in __getitem__\); "
        + REDUCES % 0,
    ),
    "data set in a loader process": (
        ["data", "--workers", "1"],
        rf"rank 1 on {HOST} has been in data wait for \d+ s at step \d+ "
        rf"\(loader process \d+: hanging\.py:\d+ in __getitem__\); {REDUCES % 0}",
    ),
    "different collectives": (
        ["different collectives"],
        f"{DIFFERENT} rank 0 in forward, waiting in all_reduce of 3 values {LINE}; "
        f"rank 1 in forward, waiting in barrier {LINE}",
    ),
    "collective on one rank in the last step": (
        ["all_reduce in the last step", "--epochs", "1", "--rank", "0"],
        rf"{DIFFERENT} {REDUCES % 0}; rank 1 in hook, waiting in all_gather of \d+ values",
    ),
}


@pytest.mark.parametrize("name", HANGS)
def test_a_hang_is_explained_once_and_ends_all_ranks_with_1(run_hanging, tmp_path, name):
    arguments, message = HANGS[name]
    codes, printed = run_hanging("--step", "200", "--hang", *arguments)
    assert codes == [1, 1]
    assert len(re.findall(f"rankzero: {message}; stopping all ranks", printed)) == 1, printed
    assert summary(tmp_path, "hanging")["status"] == "failed"
    for rank in range(2):
        log = (tmp_path / f"runs/hanging/logs/rank-{rank:03d}.log").read_text()
        assert "thread 'MainThread':" in log and "hanging.py" in log
    if "loader process" in name:
        assert re.search(r"loader process \d+:\n(.*\n)*.*in __getitem__", log)


@pytest.mark.parametrize(("rank", "exit_codes"), [(0, [-9, 1]), (1, [1, -9])])
def test_a_rank_whose_interpreter_is_blocked_is_named(run_hanging, rank, exit_codes):
    """Without a launcher, nothing ends the blocked process; here, the test kills it."""
    codes, printed = run_hanging("--hang", "blocked interpreter", "--step", "400", "--rank", f"{rank}", kills_rest=True)
    assert codes == exit_codes
    blocked = rf"has not reported for \d+ s, since {PHASE} at step \d+: its Python interpreter is blocked or suspended"
    assert len(re.findall(rf"rank {rank} on {HOST} {blocked}.*; stopping all ranks", printed)) == 1, printed


def test_a_suspended_rank_is_named_with_its_last_phase(run_hanging):
    codes, printed = run_hanging("--hang", "SIGSTOP", "--step", "400")
    assert codes == [1, -9]
    assert f"rank 1 on {HOST} was suspended (SIGSTOP) for 8 s; killing it" in printed
    assert re.search(rf"rank 1 on {HOST} was lost .*, last seen in {PHASE} at step \d+; stopping all ranks", printed)
    assert "has not reported for" not in printed


def test_a_dead_loader_process_is_named_with_rank_and_phase(run_hanging):
    codes, printed = run_hanging("--hang", "worker dies", "--workers", "1", "--step", "100000")
    assert codes == [1, 1]
    assert re.search(r"DataLoader worker \(pid.*\) (is killed by signal|exited unexpectedly)", printed)
    assert re.search(rf"rankzero: rank 1 on {HOST} failed with the error above, in [a-z ]+ at step \d+\n", printed)


def test_with_hang_action_report_a_hang_is_printed_and_the_run_continues(run_hanging):
    codes, printed = run_hanging("--hang", "pause", "--step", "200", "--hang_action", "report", "--epochs", "1")
    assert codes == [0, 0]
    assert len(re.findall(rf"rank 1 on {HOST} has been in forward .*; the run continues", printed)) == 1


def test_a_slow_rank_is_named_in_output_summary_and_tensorboard(run_hanging, tmp_path):
    codes, printed = run_hanging("--hang", "slow", "--seconds", "0.02", "--epochs", "2")
    assert codes == [0, 0]
    message = rf"rank 1 on {HOST} is slow: [\d.]+ ms from the start of a step to its first gradient"
    assert len(re.findall(f"rankzero: {message}", printed)) == 1
    assert re.search(f"slow +│ {message}", printed)
    assert re.search(message, (tmp_path / "runs/hanging/summary.json").read_text())
    events = b"".join(file.read_bytes() for file in (tmp_path / "runs/hanging/tensorboard").iterdir())
    assert b"slow_ranks" in events
