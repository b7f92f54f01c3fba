"""A run that resumes reads its checkpoint once, however many processes it has."""

import re
import sys
from pathlib import Path

from rankzero.runs.checkpoints.manifest import STATE, checkpoints_in
from running import fit, require, run, script
from system.learned import TRAIN

READ = re.compile(rf"(?:read|pread64|mmap)\(.*?(checkpoints/step-\d+/{re.escape(STATE)})>.*= (\d+|0x[0-9a-f]+)$")


def test_the_processes_of_a_run_read_its_checkpoint_once(tmp_path):
    require("strace")
    arguments = (*TRAIN, "--model.hidden_sizes", "[1000]", "--run", "x", "--devices", "3")
    fit(*arguments[1:], folder=tmp_path)
    newest = checkpoints_in(tmp_path / "runs/x/checkpoints")[-1]
    calls = ("--seccomp-bpf", "-e", "trace=read,pread64,mmap", "-e", "signal=none")
    command = (sys.executable, script("fit"), *arguments[1:], "--epochs", "2")
    printed = run("strace", "-f", "-y", "-qq", "-o", "trace", *calls, *command, folder=tmp_path)
    assert "resuming from step-" in printed.out + printed.err
    assert bytes_read(tmp_path / "trace") == {f"checkpoints/{newest.name}/{STATE}": (newest / STATE).stat().st_size}


def bytes_read(trace: Path) -> dict[str, int]:
    """Returns the bytes of each checkpoint that all processes together have read."""
    read: dict[str, int] = {}
    for line in trace.read_text(errors="replace").splitlines():
        if match := READ.search(line):
            assert "mmap(" not in line, line
            read[match[1]] = read.get(match[1], 0) + int(match[2])
    return read
