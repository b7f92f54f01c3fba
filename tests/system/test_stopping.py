"""Runs that are stopped or killed at any moment end in the same state as an uninterrupted run."""

import random
import signal
from pathlib import Path

import pytest

from rankzero.checkpoints.manifest import newest_valid
from system import test_exactly_once
from system.forks import fit_on_ranks, outputs, summary
from system.test_exactly_once import check_equals_uninterrupted, delete_records, drop_unsaved_records, recorded_samples

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGUSR2)

RANDOM = ("--model.dropout", "0.2", "--data.noise", "0.1", "--global_batch_size", "16")
SLOW_RUN = (
    *test_exactly_once.CLASSES,
    *RANDOM,
    "--model.pause",
    "0.005",
    "--trainer.val_check_interval",
    "0.25",
    "--data.count",
    "320",
)


def last_steps(folder: Path, world: int) -> set[int]:
    """Returns the set of the last steps that the ranks trained in their newest attempt."""
    steps = recorded_samples(folder)
    return {max((step for (_, step), ranks in steps.items() if rank in ranks), default=-1) for rank in range(world)}


def random_moment(generator: random.Random) -> tuple[float, str]:
    """Returns a delay in seconds, and the file that starts it: it counts from the first step or from the start."""
    return generator.uniform(0.0, 1.0), generator.choice(("", "noted-0.jsonl"))


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
    arguments = (*SLOW_RUN, "--epochs", f"{3 * stops + 12}", "--save_every", "100000", *settings)
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
        options = {"code": None, "signals": signals, "signals_after": start, "seconds": 1500}
        codes = fit_on_ranks(*arguments, "--run", "x", folder=user_folder, world=world, **options)
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
    arguments = (*SLOW_RUN, "--epochs", f"{3 * kills + 12}", "--save_every", "5steps")
    arguments += ("--start_timeout", "5")  # for a rank that is killed before the rendezvous
    fit_on_ranks(*arguments, "--run", "whole", folder=user_folder, world=2, seconds=1500)
    generator, killed, kills_in_training = random.Random(0), 0, 0
    expected, found = recorded_samples(user_folder), {}
    delete_records(user_folder)
    while True:
        delay, start = random_moment(generator)
        signals = [(delay, int(signal.SIGKILL), generator.randrange(2))] if killed < kills else []
        options = {"code": None, "signals": signals, "signals_after": start, "seconds": 1500}
        codes = fit_on_ranks(*arguments, "--run", "x", folder=user_folder, world=2, **options)
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
    arguments = (*SLOW_RUN, "--run", "x", "--epochs", "100000", "--time_limit")
    fit_on_ranks(*arguments, "24s", folder=user_folder, world=2, code=75)
    stopped = summary(user_folder, "x")
    assert stopped["status"] == "stopped" and stopped["steps"] > 0 and stopped["seconds"] < 24
    fit_on_ranks(*arguments, "5s", folder=user_folder, world=2, code=75)
    printed = outputs(user_folder)[0]
    assert printed.count("the time limit: stopping") == 1
    assert "the time limit is too short for a single step" in printed
    assert summary(user_folder, "x")["steps"] == stopped["steps"]


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_that_is_killed_in_a_slow_step_has_saved_the_step_before(user_folder, world):
    """As a queue does that kills a job a few seconds after SIGTERM."""
    arguments = (*test_exactly_once.CLASSES, *RANDOM, "--data.count", "112", "--epochs", "1", "--save_every", "100000")
    fit_on_ranks(*arguments, "--run", "whole", folder=user_folder, world=world)
    expected = recorded_samples(user_folder)
    delete_records(user_folder)
    kill = ("--trainer.callbacks", "recording.KillInStep", "--trainer.callbacks.step", "4")
    kill += ("--trainer.callbacks.seconds", "1.2", "--model.pause", "2.1")
    fit_on_ranks(*arguments, *kill, "--run", "x", folder=user_folder, world=world, code=-signal.SIGKILL)
    assert [path.name for path in (user_folder / "runs/x/checkpoints").iterdir()] == ["step-00000004"]
    drop_unsaved_records(user_folder, "x")
    fit_on_ranks(*arguments, "--run", "x", folder=user_folder, world=world)
    assert recorded_samples(user_folder) == expected
    check_equals_uninterrupted(user_folder, "x")
