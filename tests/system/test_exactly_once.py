"""Every sample is used exactly once, at any world size and after any crash, by classes without code for Rankzero."""

import json
import math
import shutil
from itertools import chain, product
from pathlib import Path

import pytest
import torch
from reported import scalars_of

from running import weights
from stock import differences
from system.forks import fit_on_ranks, outputs, summary

CLASSES = ("--model", "recording.Net", "--data", "recording.Data", "--trainer.num_sanity_val_steps", "0")


def recorded_samples(folder: Path, stage: str = "train") -> dict[tuple[int, int], dict[int, list[int]]]:
    """Returns (epoch, step) -> rank -> the samples that the rank received."""
    steps: dict[tuple[int, int], dict[int, list[int]]] = {}
    for file in sorted(folder.glob("noted-*.jsonl")):
        rank = int(file.stem.removeprefix("noted-"))
        for line in file.read_text().splitlines():
            kind, epoch, step, samples = json.loads(line)
            if kind == stage:
                steps.setdefault((epoch, step), {}).setdefault(rank, []).extend(samples)
    return steps


def sizes_for(count: int, world: int) -> list[int]:
    """Returns global batch sizes with and without a remainder, smaller than the world, and as large as the data."""
    return sorted({size for size in (world - 1, world, 24, 97, count) if 0 < size <= count and count / size < 150})


COUNTS, WORLDS = (1, 7, 640, 1437, 10_007), (1, 2, 3, 4)
SAMPLE = {(1, 4), (7, 1), (7, 3), (640, 2), (1437, 4)}
"""The cases of every test run; `make soak` runs all."""


@pytest.mark.parametrize(
    ("count", "world"),
    [pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.soak) for case in product(COUNTS, WORLDS)],
)
def test_each_epoch_reads_every_sample_once(user_folder, count, world):
    for size in sizes_for(count, world):
        arguments = (*CLASSES, "--data.count", str(count), "--global_batch_size", str(size), "--epochs", "2")
        fit_on_ranks(*arguments, "--data.held_out", "1", "--run", f"{size}", folder=user_folder, world=world)
        steps = recorded_samples(user_folder)
        for epoch in (0, 1):
            step_samples = [[*chain(*ranks.values())] for (of_epoch, _), ranks in steps.items() if of_epoch == epoch]
            assert sorted(chain(*step_samples)) == list(range(count))
            expected_sizes = [size] * (count // size) + [count % size] * (count % size > 0)
            assert sorted(map(len, step_samples)) == sorted(expected_sizes)
        written = summary(user_folder, f"{size}")
        assert written["steps"] == 2 * math.ceil(count / size)
        assert written["ledger"] == [f"epoch {epoch}: {count:,} of {count:,} samples, each once" for epoch in (1, 2)]
        delete_records(user_folder)


@pytest.mark.parametrize("model", ["recording.Net", "recording.Weighted"])
def test_uneven_shares_learn_the_same_weights_as_one_process(user_folder, model):
    """Covers a global batch that no world size divides, a last batch that leaves ranks empty, and micro-batches."""
    arguments = (*CLASSES, "--data.count", "203", "--global_batch_size", "25", "--epochs", "2", "--data.noise", "0.1")
    arguments = ("--model", model, *arguments[2:])
    fit_on_ranks(*arguments, "--run", "one", folder=user_folder)
    expected, metrics = weights(user_folder / "runs/one"), summary(user_folder, "one")["metrics"]
    cases = [(1, ("--max_device_batch_size", "4")), (2, ("--trainer.accumulate_grad_batches", "3"))]
    cases += [(3, ("--data.workers", "1")), (4, ()), (4, ("--max_device_batch_size", "2"))]
    for number, (world, settings) in enumerate(cases):
        fit_on_ranks(*arguments, *settings, "--run", f"{number}", folder=user_folder, world=world)
        assert not differences(expected, weights(user_folder / f"runs/{number}"), 1e-6), settings
        found_metrics = summary(user_folder, f"{number}")["metrics"]
        expected_metrics = {name: metrics[name] for name in metrics if name not in ("loss_step", "synced_step")}
        assert {name: found_metrics[name] for name in expected_metrics} == pytest.approx(expected_metrics, rel=1e-5)


def test_an_epoch_resumed_at_world_sizes_1_2_3_2_1_uses_every_sample_once(user_folder):
    arguments = (*CLASSES, "--data.count", "637", "--global_batch_size", "16", "--epochs", "1", "--data.noise", "0.1")
    arguments += ("--save_every", "3steps")
    fit_on_ranks(*arguments, "--run", "one", folder=user_folder)
    expected_samples = {step: sorted(ranks[0]) for step, ranks in recorded_samples(user_folder).items()}
    delete_records(user_folder)
    for world, step in ((1, 8), (2, 16), (3, 24), (2, 33)):
        codes = fit_on_ranks(*arguments, "--run", "x", *kill_at(step), folder=user_folder, world=world, code=None)
        assert codes[0] == -9
        drop_unsaved_records(user_folder, "x")
    fit_on_ranks(*arguments, "--run", "x", folder=user_folder)
    samples = {step: sorted(chain(*ranks.values())) for step, ranks in recorded_samples(user_folder).items()}
    assert samples == expected_samples
    uninterrupted, resumed = (summary(user_folder, run) for run in ("one", "x"))
    assert resumed["attempts"] == 5 and resumed["ledger"] == ["epoch 1: 637 of 637 samples, each once"]
    assert not differences(weights(user_folder / "runs/one"), weights(user_folder / "runs/x"), 1e-5)
    assert resumed["metrics"] == pytest.approx(uninterrupted["metrics"], abs=1e-5)


KILL_WHEN_MIRRORED = """
import os, signal, time
from pathlib import Path
from lightning.pytorch import Callback

class KillWhenMirrored(Callback):
    def on_train_batch_end(self, trainer, *arguments):
        if trainer.global_rank == 0 and trainer.global_step == 20:
            while not list(Path("mirror/x/checkpoints").glob("step-0000001*/manifest.json")):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_resumes_from_its_mirror_on_an_empty_disk_and_uses_every_sample_once(user_folder):
    arguments = (*CLASSES, "--data.count", "637", "--global_batch_size", "16", "--epochs", "1", "--data.noise", "0.1")
    arguments += ("--save_every", "3steps")
    fit_on_ranks(*arguments, "--run", "whole", folder=user_folder, world=2)
    expected_samples = recorded_samples(user_folder)
    delete_records(user_folder)
    shutil.move(user_folder / "runs", user_folder / "before")
    (user_folder / "killing.py").write_text(KILL_WHEN_MIRRORED)
    arguments += ("--run", "x", "--mirror", f"file://{user_folder}/mirror")
    kill = ("--trainer.callbacks", "killing.KillWhenMirrored")
    assert fit_on_ranks(*arguments, *kill, folder=user_folder, world=2, code=None)[0] == -9
    drop_unsaved_records(user_folder, "../mirror/x")
    shutil.rmtree(user_folder / "runs")
    fit_on_ranks(*arguments, folder=user_folder, world=2)
    assert "downloading step-0000001" in outputs(user_folder)[0]
    assert recorded_samples(user_folder) == expected_samples
    assert sorted(chain(*(chain(*ranks.values()) for ranks in expected_samples.values()))) == list(range(637))
    shutil.move(user_folder / "before/whole", user_folder / "runs/whole")
    check_equals_uninterrupted(user_folder, "x")


def delete_records(folder: Path) -> None:
    """Deletes what the user classes have recorded."""
    for file in folder.glob("noted-*"):
        file.unlink()


def kill_at(step: int, rank: int = 0) -> tuple[str, ...]:
    """Returns flags that kill a rank after a step."""
    callback = ("--trainer.callbacks", "recording.Fault", "--trainer.callbacks.where=batch SIGKILL")
    return *callback, "--trainer.callbacks.step", f"{step}", "--trainer.callbacks.rank", f"{rank}"


def kill_and_resume(folder: Path, *arguments: str, step: int, world: int = 1) -> None:
    """Trains a new run `killed`, kills its last rank after a step, and resumes the run to its end."""
    arguments = (*arguments, "--run", "killed")
    shutil.rmtree(folder / "runs/killed", ignore_errors=True)
    delete_records(folder)
    assert -9 in fit_on_ranks(*arguments, *kill_at(step, world - 1), folder=folder, world=world, code=None)
    drop_unsaved_records(folder, "killed")
    fit_on_ranks(*arguments, folder=folder, world=world)


def drop_unsaved_records(folder: Path, run: str) -> None:
    """Deletes the records of steps after the newest checkpoint, which the next attempt repeats."""
    saved = sorted((folder / "runs" / run / "checkpoints").glob("step-*/manifest.json"))
    step = int(saved[-1].parent.name.removeprefix("step-")) if saved else 0
    for file in folder.glob("noted-*.jsonl"):
        lines = [line for line in file.read_text().splitlines() if json.loads(line)[2] < step]
        file.write_text("".join(f"{line}\n" for line in lines))


MEASURED = ("train/samples_per_second", "wall_time/", "workload/", "world/", "x_axis/")
"""Prefixes of the series that differ between two runs."""


def scalars(run: Path) -> dict[str, dict[int, float]]:
    """Returns the scalars that TensorBoard shows, except speed, times and memory."""
    return {tag: values for tag, values in scalars_of(run).items() if not tag.startswith(MEASURED)}


def learned_state(run: Path) -> dict:
    """Returns the states of model, optimizers, schedules, ranks and sample ledger from the newest checkpoint."""
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    state = torch.load(newest / "state.pt", weights_only=True)
    return {name: state[name] for name in ("state_dict", "optimizer_states", "lr_schedulers", "rank_states", "ledger")}


def check_equals_uninterrupted(folder: Path, run: str) -> None:
    """Checks that a run of several attempts equals the uninterrupted run `whole` bit for bit, also in TensorBoard."""
    found, expected = summary(folder, run), summary(folder, "whole")
    assert all(found[name] == expected[name] for name in ("status", "metrics", "ledger", "steps", "epochs", "samples"))
    assert not differences(learned_state(folder / "runs/whole"), learned_state(folder / "runs" / run))
    assert scalars(folder / "runs" / run) == scalars(folder / "runs/whole")


RANDOM = ("--model.dropout", "0.2", "--data.noise", "0.1", "--global_batch_size", "16", "--epochs", "2")
OFTEN = ("--trainer.val_check_interval", "0.25", "--trainer.log_every_n_steps", "3")


STREAM = ("--trainer.val_check_interval", "9", "--trainer.check_val_every_n_epoch", "null")
"""A stream has no length of which a quarter could be computed."""


@pytest.mark.parametrize(
    ("world", "every", "steps", "settings"),
    [
        (1, "1steps", (1, 11, 40), ()),
        (1, "7steps", (33, 80), ("--max_device_batch_size", "6")),
        (1, "3steps", (20,), ("--data.workers", "2")),
        (2, "1steps", (10,), ()),
        (2, "7steps", (38,), ("--data.count", "633", "--max_device_batch_size", "3")),
        (1, "3steps", (13, 25), ("--data", "recording.StreamData", *STREAM)),
        (2, "3steps", (16, 31), ("--data", "recording.StreamData", *STREAM, "--data.workers", "2")),
        (2, "3steps", (13, 25), ("--data", "recording.StatefulData", *STREAM, "--data.noise", "0")),
        pytest.param(1, "1steps", range(1, 41), (), marks=pytest.mark.soak),
        pytest.param(2, "1steps", range(1, 41), (), marks=pytest.mark.soak),
    ],
)
def test_a_run_killed_and_resumed_equals_an_uninterrupted_run(user_folder, world, every, steps, settings):
    """Compares weights bit for bit, optimizer, schedule, generators, metrics and TensorBoard; an epoch has 40 steps."""
    arguments = (*CLASSES, *RANDOM, *OFTEN, "--save_every", every, *settings)
    fit_on_ranks(*arguments, "--run", "whole", folder=user_folder, world=world)
    expected = recorded_samples(user_folder)
    for step in steps:
        kill_and_resume(user_folder, *arguments, step=step, world=world)
        assert recorded_samples(user_folder) == expected
        check_equals_uninterrupted(user_folder, "killed")


@pytest.mark.parametrize(
    ("name", "held_out", "worlds"), [("Scored", 1001, (2, 3, 4)), ("Brief", 3, (2, 4))], ids=["1,001 samples", "3"]
)
def test_validation_metrics_are_exact_at_any_world_size(user_folder, name, held_out, worlds):
    """Covers sums, maxima, torchmetrics that keep all samples, and values that only some batches log.

    Neither 2, 3 nor 4 ranks divide 1,001 samples, and 3 samples leave one of 4 ranks without a sample.
    """
    arguments = ("--model", f"recording.{name}", "--data", "recording.Data", "--data.count", "16", "--epochs", "1")
    arguments += ("--data.held_out", f"{held_out}", "--data.size", "12", "--global_batch_size", "8")
    found = {}
    for world in (1, *worlds):
        fit_on_ranks(*arguments, "--run", f"{world}", folder=user_folder, world=world)
        ranks_by_step = recorded_samples(user_folder, "val").values()
        assert sorted(chain(*chain(*(ranks.values() for ranks in ranks_by_step)))) == list(range(held_out))
        delete_records(user_folder)
        found[world] = summary(user_folder, f"{world}")["metrics"]
    names = ("val_loss", "val_error", "area", "error", "square", "samples", "largest", "stepped_epoch")
    expected = {name: found[1][name] for name in names}
    for world in worlds:
        assert {name: found[world][name] for name in names} == pytest.approx(expected, abs=1e-6)
    assert found[1]["samples"] == held_out and {"early", "late"} <= set(found[4])
    assert "self.log('late') in on_validation_epoch_end differs between ranks" in outputs(user_folder)[0]


def test_manual_optimization_gets_a_sample_on_every_rank(user_folder):
    arguments = ("--model", "recording.Alone", "--data", "recording.Data", "--data.count", "33", "--epochs", "1")
    fit_on_ranks(*arguments, "--global_batch_size", "8", "--run", "one", folder=user_folder)
    fit_on_ranks(*arguments, "--global_batch_size", "8", "--run", "four", folder=user_folder, world=4)
    assert "each process needs a sample for manual optimization" in outputs(user_folder)[0]
    assert not differences(weights(user_folder / "runs/one"), weights(user_folder / "runs/four"), 1e-6)


def test_several_training_loaders_resume_independently(user_folder):
    arguments = ("--model", "recording.OfPairs", "--data", "recording.Pair", "--epochs", "2", "--save_every", "1steps")
    fit_on_ranks(*arguments, "--run", "whole", folder=user_folder)
    expected = recorded_samples(user_folder)
    for step in (5, 29):
        kill_and_resume(user_folder, *arguments, step=step)
        assert recorded_samples(user_folder) == expected
        states = (learned_state(user_folder / "runs" / run) for run in ("whole", "killed"))
        assert not differences(*states)


def test_all_gather_in_a_step_is_refused_if_a_rank_has_no_sample(user_folder):
    """A rank without samples skips the step, so the other ranks would wait for it in the collective forever."""
    file, line = user_folder / "recording.py", "        self.train_error(outputs, targets)\n"
    file.write_text(file.read_text().replace(line, f"        self.all_gather(loss)\n{line}"))
    arguments = (*CLASSES, "--data.count", "17", "--global_batch_size", "16", "--epochs", "1")
    fit_on_ranks(*arguments, folder=user_folder, world=2, code=1)
    assert "all_gather in a step in which a rank has no sample" in outputs(user_folder)[0]


def test_a_stream_beside_a_sharded_loader_is_not_sharded(user_folder):
    """A rank without samples of the sharded loader still validates its samples of the stream."""
    arguments = ("--model", "recording.OfStreams", "--data", "recording.Stream", "--epochs", "2")
    fit_on_ranks(*arguments, folder=user_folder, world=2)
    for stage in ("train", "val 1"):
        for ranks in recorded_samples(user_folder, stage).values():
            assert {sample // 10 for sample in ranks[0]} == {0} and {sample // 10 for sample in ranks[1]} == {1}
    trained = [ranks[1] for (epoch, _), ranks in recorded_samples(user_folder).items() if epoch == 1]
    assert sorted(chain(*trained)) == list(range(10, 20))
    assert all(ranks == {0: [0]} for ranks in recorded_samples(user_folder, "val 0").values())
