"""Run directories as training writes them, for tests of the report."""

import json
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rankzero.checkpoints.write import write_directory
from rankzero.runs.directory import RunDirectory
from rankzero.show.tensorboard_logger import DurableTensorBoardLogger

ENVIRONMENT = {
    "command": ["python", "launch/fit.py", "--epochs", "9", "--devices", "2"], "is_script": False,
    "folder": "/home/user/work", "commit": "0123456789abcdef0123456789abcdef01234567",
    "launcher": "local", "launcher_evidence": "--devices 2", "hosts": {"node-1": 1, "node-2": 1},
    "device": "NVIDIA H100 80GB HBM3", "backend": "nccl", "threads": 8, "python": "3.11.9", "torch": "2.10.0",
    "cuda": "12.8", "lightning": "2.6.6", "rankzero": "0.2.0", "platform": "Linux-6.1",
}  # fmt: skip

SUMMARY = {
    "run": "x", "status": "finished", "reason": None, "epochs": 3, "steps": 300, "samples": 4311,
    "world_size": 2, "nodes": 2, "devices": 1, "launcher": "local", "accelerator": "cuda", "backend": "nccl",
    "metrics": {"val/loss": 0.25, "val/accuracy": 0.9167}, "samples_per_second": 19459.4, "seconds": 7325.5,
    "ledger": [f"epoch {epoch}: 1,437 of 1,437 samples, each once" for epoch in (1, 2, 3)], "slow_ranks": [],
    "attempts": 1, "another_attempt": False, "checkpoint": "checkpoints/step-00000300",
    "best": "checkpoints/step-00000200", "max_epochs": 3, "max_steps": -1,
    "can_validate": True,
}  # fmt: skip

PARTS_MS = {
    "data_wait": 1.5, "forward": 12.0, "backward": 24.0, "exposed_communication": 6.0, "optimizer": 3.0, "other": 0.5
}  # fmt: skip


def write_curves(run, first_step=0, last_step=300, every=10, attempt=1):
    """Logs what one attempt with two ranks logs."""
    logger = DurableTensorBoardLogger(run)
    if attempt > 1:
        logger.purge_from(first_step)
    for step in range(first_step + every - 1, last_step, every):
        done = (step + 1) / 300
        logger.log_metrics(
            {
                "train/loss": 2.3 * 0.01**done + 0.02 * (step % 7),
                "train/samples_per_second": 19000.0 + 300 * (step % 5),
                "weights/gradient_norm": 1 + 0.1 * (step % 3),
                "workload/device_memory_gib": 41.5,
                **{f"wall_time/{name}_ms": value + 0.1 * (step % 4) for name, value in PARTS_MS.items()},
                **{f"world/first_gradient_ms/rank_{rank:03d}": 14.0 + 5 * rank for rank in (0, 1)},
                "x_axis/epoch": 3 * done,
                "x_axis/samples": 4311.0 * done,
                "x_axis/attempt": float(attempt),
            },
            step,
        )
        logger.log_metrics({"train/lr": 0.05 * (1 - done)}, step + 1 - every)
    for step in range(99, last_step, 100):
        if step >= first_step:
            done = (step + 1) / 300
            logger.log_metrics({"val/loss": 2.2 * 0.1**done, "val/accuracy": 1 - 0.7 * 0.1**done}, step)
    logger.finalize("success")


def make_run(path: Path, attempt_steps: tuple[int, ...] = (0,), environment=ENVIRONMENT, **changes) -> tuple:
    """Creates the files of a run with one attempt for each of these first steps; returns directory and summary."""
    run = RunDirectory(path)
    last_steps = [step + 40 for step in attempt_steps[1:]] + [SUMMARY["steps"]]
    for first_step, last_step in zip(attempt_steps, last_steps, strict=True):
        job = "815.pbs" if run.attempt else None
        run.begin_attempt("model:\n  class_path: MLP\nseed_everything: 7\n", job, first_step)
        if environment:
            run.write_environment(environment)
        summary = {**SUMMARY, "run": run.name, "attempts": run.attempt, "status": "stopped", "reason": "SIGTERM"}
        run.write_summary({**summary, "steps": last_step, "seconds": 65.4})
        write_curves(run, first_step, last_step, attempt=run.attempt)
    for step in (100, 200, 300):
        metrics = {"val/loss": 50 / step, "val/accuracy": 0.9}
        content = {"epoch": step // 100, "global_step": step, "rankzero": {"metrics": metrics}}
        write_directory(content, run.checkpoints / f"step-{step:08d}")
    summary = {**SUMMARY, "run": run.name, "attempts": run.attempt, **changes}
    run.write_summary(summary)
    return run, summary


def read_json(run: RunDirectory, name: str):
    return json.loads((run.path / name).read_text())


def scalars_of(folder: Path) -> dict[str, dict[int, float]]:
    """Returns tag -> step -> value of a run's curves; fails if a step has two points, or comes after a later one."""
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    points = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    for tag, values in points.items():
        steps = [step for step, _ in values]
        assert steps == sorted(set(steps)), f"{tag}: {steps}"
    return {tag: dict(values) for tag, values in points.items()}
