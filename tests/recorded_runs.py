"""Writes run directories as training does, without training."""

import json
import os
import signal
import time
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import datetime, timezone

import yaml

from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.process.system import process_state
from rankzero.runs.lock import Owner, RunLock
from rankzero.runs.metrics_file import Row, append_rows

METRICS = {"train/loss": 0.5, "val/accuracy": 0.9, "val/loss": 0.3}


def write_run(path, status="finished", attempts=1, age=0.0, metrics=None, config=None, **summary):
    """Writes the files of a run whose newest attempt began `age` seconds ago; without a status, it has no summary."""
    path.mkdir(parents=True)
    moment = time.time() - age
    started = datetime.fromtimestamp(moment, timezone.utc).isoformat(timespec="seconds")
    attempt = {"started": started, "host": "node1", "job": None, "step": 0}
    entries = [{"number": number, **attempt} for number in range(1, attempts + 1)]
    (path / "run.json").write_text(json.dumps({"id": "0" * 32, "created": started, "attempts": entries}))
    os.utime(path / "run.json", (moment, moment))
    if config is not None:
        (path / "config.yaml").write_text(yaml.safe_dump(config))
    if status is not None:
        content = {
            "run": path.name, "status": status, "epochs": 3, "steps": 69, "samples": 4311, "world_size": 1,
            "metrics": METRICS if metrics is None else metrics, "samples_per_second": 1500.0, "seconds": 12.5,
            "attempts": attempts, "another_attempt": False, "max_epochs": 3, **summary,
        }  # fmt: skip
        (path / "summary.json").write_text(json.dumps(content))
    return path


def write_lock(run, **changes):
    """Writes the lock of a run as its owner does, with `changes` of the owner, and returns the file."""
    file = run.parent / f".{run.name}.lock"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(asdict(replace(Owner.this(Launch()), **changes))))
    return file


def suspend(pid):
    os.kill(pid, signal.SIGSTOP)
    while process_state(pid)[0] != "T":
        time.sleep(0.01)


@contextmanager
def locked(run, **settings):
    """Holds the lock of a run, as a process does that trains it; `settings` are those of the lock."""
    lock = RunLock(Launch(), **settings)
    lock.acquire(run)
    try:
        yield
    finally:
        lock.release()


def write_curves(run, curves, seconds_per_step=1.0, start=1e9):
    """Writes the metrics of a run with curves (tag -> step -> value); step 0 is at `start`; a step has 32 samples."""

    def row(step):
        values = {tag: values[step] for tag, values in curves.items() if step in values}
        return Row(step, start + step * seconds_per_step, values, (step + 1) / 100, 32 * (step + 1))

    append_rows(run, map(row, sorted({step for values in curves.values() for step in values})), durably=False)
