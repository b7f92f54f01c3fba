"""Runs that are stopped or killed at any moment end in the same state as an uninterrupted run."""

import json
import random
import signal
from pathlib import Path

import pytest

from rankzero.runs.checkpoints.manifest import newest_valid
from system.forks import fit_on_ranks, outputs
from system.test_exactly_once import (
    CLASSES,
    are_equal,
    drop_unsaved_records,
    learned_state,
    recorded_samples,
    scalars,
    summary,
)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGUSR2)

SLOW_RUN = (
    "--model.pause",
    "0.005",
    "--model.dropout",
    "0.2",
    "--data.noise",
    "0.1",
    "--trainer.val_check_interval",
    "0.25",
)


def check_equals_uninterrupted(folder: Path, run: str) -> None:
    """Checks that a run of many attempts equals the uninterrupted run."""
    found, expected = summary(folder, run), summary(folder, "whole")
    assert all(found[name] == expected[name] for name in ("status", "metrics", "ledger", "steps", "epochs", "samples"))
    assert are_equal(learned_state(folder / "runs" / run), learned_state(folder / "runs/whole"))
    assert scalars(folder / "runs" / run) == scalars(folder / "runs/whole")


def last_steps(folder: Path, world: int) -> set[int]:
    """Returns the set of the last steps that the ranks trained in their newest attempt."""
    return {max((step for _, step in recorded_steps(folder, rank)), default=-1) for rank in range(world)}


def delete_records(folder: Path) -> None:
    """Deletes what the user classes have recorded."""
    for file in folder.glob("noted-*"):
        file.unlink()


def random_moment(generator: random.Random) -> tuple[float, str]:
    """Returns a delay in seconds, and the file that starts it: it counts from the first step or from the start."""
    return generator.uniform(0.0, 1.0), generator.choice(("", "noted-0.jsonl"))


def recorded_steps(folder: Path, rank: int) -> list[tuple[int, int]]:
    lines = [json.loads(line) for line in (folder / f"noted-{rank}.jsonl").read_text().splitlines()]
    return [(epoch, step) for kind, epoch, step, _ in lines if kind == "train"]


@pytest.mark.parametrize(
    ("world", "stops", "settings"),
    [
        (1, 1, ("--data.workers", "2")),
        (2, 3, ()),
        pytest.param(2, 200, (), marks=pytest.mark.soak),
        pytest.param(2, 50, ("--data.workers", "1"), marks=pytest.mark.soak),
        pytest.param(3, 50, ("--trainer.strategy", "ddp_find_unused_parameters_true"), marks=pytest.mark.soak),
    ],
)
def test_a_signal_to_any_rank_stops_all_ranks_after_the_same_step(user_folder, world, stops, settings):
    """Sends a random stop signal to random ranks, once or several times."""
    arguments = (*CLASSES, *SLOW_RUN, "--data.count", "320", "--epochs", f"{3 * stops + 12}", *settings)
    arguments += ("--global_batch_size", "16", "--save_every", "100000")
    fit_on_ranks(*arguments, "--run", "whole", folder=user_folder, world=world, seconds=1500)
    expected, generator, stopped = recorded_samples(user_folder), random.Random(world), 0
    found, stops_in_training = {}, 0
    delete_records(user_folder)
    while True:
        ranks_to_signal = [rank for rank in range(world) if generator.random() < 0.5] or [generator.randrange(world)]
        delay, start = random_moment(generator)
        signum = generator.choice(STOP_SIGNALS[:2] if stopped % 2 else STOP_SIGNALS)
        repetitions = range(1 if signum == signal.SIGINT else generator.choice((1, 1, 3)))
        signals = [(delay + 0.05 * number, int(signum), rank) for rank in ranks_to_signal for number in repetitions]
        signals = signals if stopped < stops else []
        codes = fit_on_ranks(
            *(*arguments, "--run", "x"),
            folder=user_folder,
            world=world,
            code=None,
            signals=signals,
            signals_after=start,
            seconds=1500,
        )
        for step, ranks in recorded_samples(user_folder).items():
            assert step not in found, "a step was taken twice"
            found[step] = ranks
        if user_folder.joinpath("noted-0.jsonl").exists():
            assert len(last_steps(user_folder, world)) == 1
            stops_in_training += 1
        delete_records(user_folder)
        if codes == [0] * world:
            break
        assert codes == [75] * world, outputs(user_folder, world)
        newest, refused = newest_valid(user_folder / "runs/x/checkpoints")
        assert newest and not refused and summary(user_folder, "x")["status"] == "stopped"
        assert summary(user_folder, "x")["steps"] == int(newest.name.removeprefix("step-"))
        stopped += 1
    assert stopped == stops, f"the run was done after {stopped} stops"
    assert stops_in_training >= stops // 5
    assert found == expected
    check_equals_uninterrupted(user_folder, "x")


@pytest.mark.parametrize("kills", [2, pytest.param(100, marks=pytest.mark.soak)], ids=["sample", "campaign"])
def test_a_run_killed_on_any_rank_at_any_moment_equals_an_uninterrupted_run(user_folder, kills):
    arguments = (*CLASSES, *SLOW_RUN, "--data.count", "320", "--epochs", f"{3 * kills + 12}")
    arguments += ("--global_batch_size", "16")
    arguments += ("--start_timeout", "5")  # for a rank that is killed before the rendezvous
    fit_on_ranks(*arguments, "--run", "whole", "--save_every", "5steps", folder=user_folder, world=2, seconds=1500)
    generator, killed, kills_in_training = random.Random(0), 0, 0
    expected, found = recorded_samples(user_folder), {}
    delete_records(user_folder)
    while True:
        delay, start = random_moment(generator)
        signals = [(delay, int(signal.SIGKILL), generator.randrange(2))] if killed < kills else []
        codes = fit_on_ranks(
            *(*arguments, "--save_every", "5steps", "--run", "x"),
            folder=user_folder,
            world=2,
            code=None,
            signals=signals,
            signals_after=start,
            seconds=1500,
        )
        kills_in_training += user_folder.joinpath("noted-0.jsonl").exists()
        drop_unsaved_records(user_folder, "x")
        found.update(recorded_samples(user_folder))
        delete_records(user_folder)
        if codes == [0, 0]:
            break
        assert -signal.SIGKILL in codes and set(codes) <= {-signal.SIGKILL, 1, 2}, outputs(user_folder, 2)
        killed += 1
    assert killed == kills, f"the run was done after {killed} kills"
    assert kills_in_training >= kills // 5
    assert found == expected
    check_equals_uninterrupted(user_folder, "x")


def test_a_run_stops_before_its_time_limit_and_starts_no_step_that_does_not_fit(user_folder):
    """The margin is 10 s, and 5 s are assumed for a save that has not been measured."""
    arguments = (*CLASSES, *SLOW_RUN, "--data.count", "320", "--global_batch_size", "16", "--run", "x")
    fit_on_ranks(*arguments, "--epochs", "100000", "--time_limit", "24s", folder=user_folder, world=2, code=75)
    stopped = summary(user_folder, "x")
    assert stopped["status"] == "stopped" and stopped["steps"] > 0 and stopped["seconds"] < 24
    fit_on_ranks(*arguments, "--epochs", "100000", "--time_limit", "5s", folder=user_folder, world=2, code=75)
    printed = outputs(user_folder)[0]
    assert printed.count("the time limit: stopping") == 1
    assert "the time limit is too short for a single step" in printed
    assert summary(user_folder, "x")["steps"] == stopped["steps"]


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_that_is_killed_in_a_slow_step_has_saved_the_step_before(user_folder, world):
    """As a queue does that kills a job a few seconds after SIGTERM."""
    arguments = (*CLASSES, "--model.dropout", "0.2", "--model.pause", "2.1", "--data.noise", "0.1")
    arguments += ("--data.count", "112", "--epochs", "1", "--global_batch_size", "16", "--save_every", "100000")
    fit_on_ranks(*arguments, "--run", "whole", folder=user_folder, world=world)
    expected = recorded_samples(user_folder)
    delete_records(user_folder)
    kill = ("--trainer.callbacks", "recording.KillInStep", "--trainer.callbacks.step", "4")
    kill += ("--trainer.callbacks.seconds", "1.2")
    fit_on_ranks(*arguments, *kill, "--run", "x", folder=user_folder, world=world, code=-signal.SIGKILL)
    assert [path.name for path in (user_folder / "runs/x/checkpoints").iterdir()] == ["step-00000004"]
    drop_unsaved_records(user_folder, "x")
    fit_on_ranks(*arguments, "--run", "x", folder=user_folder, world=world)
    assert recorded_samples(user_folder) == expected
    check_equals_uninterrupted(user_folder, "x")
