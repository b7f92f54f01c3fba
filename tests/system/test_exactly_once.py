"""Every sample is used exactly once, at any world size and after any crash, by classes without code for Rankzero."""

import json
import math
from itertools import chain, product
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from running import weights
from system.forks import Forks

CLASSES = ("--model", "recording.Net", "--data", "recording.Data", "--trainer.num_sanity_val_steps", "0")

pytestmark = pytest.mark.xdist_group("forks")


def noted(folder: Path, what: str = "train") -> dict[tuple[int, int], dict[int, list[int]]]:
    """Returns (epoch, step) -> rank -> the samples that the rank received."""
    steps: dict[tuple[int, int], dict[int, list[int]]] = {}
    for file in sorted(folder.glob("noted-*.jsonl")):
        rank = int(file.stem.removeprefix("noted-"))
        for line in file.read_text().splitlines():
            kind, epoch, step, samples = json.loads(line)
            if kind == what:
                steps.setdefault((epoch, step), {}).setdefault(rank, []).extend(samples)
    return steps


def summary(folder: Path, run: str) -> dict:
    return json.loads((folder / "runs" / run / "summary.json").read_text())


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
def test_each_epoch_reads_every_sample_once(forks: Forks, mine, count, world):
    for size in sizes_for(count, world):
        arguments = (*CLASSES, "--data.count", str(count), "--global_batch_size", str(size), "--epochs", "2")
        forks.fit(*arguments, "--data.held_out", "1", "--run", f"{size}", folder=mine, world=world)
        steps = noted(mine)
        for epoch in (0, 1):
            given = [
                [sample for samples in ranks.values() for sample in samples]
                for (of_epoch, _), ranks in steps.items()
                if of_epoch == epoch
            ]
            assert sorted(sample for step in given for sample in step) == list(range(count))
            assert sorted(map(len, given)) == sorted([size] * (count // size) + [count % size] * (count % size > 0))
        assert summary(mine, f"{size}")["steps"] == 2 * math.ceil(count / size)
        assert summary(mine, f"{size}")["ledger"] == [
            f"epoch {epoch}: {count:,} of {count:,} samples, each once" for epoch in (1, 2)
        ]
        for file in mine.glob("noted-*"):
            file.unlink()


def test_uneven_shares_learn_the_same_weights_as_one_process(forks: Forks, mine):
    """Covers a global batch that no world size divides, a last batch that leaves ranks empty, and micro-batches."""
    arguments = (*CLASSES, "--data.count", "203", "--global_batch_size", "25", "--epochs", "2", "--data.noise", "0.1")
    forks.fit(*arguments, "--run", "one", folder=mine)
    expected, metrics = weights(mine / "runs/one"), summary(mine, "one")["metrics"]
    ways = [(2, ()), (3, ()), (4, ()), (1, ("--max_device_batch_size", "4")), (4, ("--max_device_batch_size", "2"))]
    ways += [(2, ("--trainer.accumulate_grad_batches", "3")), (3, ("--data.workers", "1"))]
    for number, (world, settings) in enumerate(ways):
        forks.fit(*arguments, *settings, "--run", f"{number}", folder=mine, world=world)
        found = weights(mine / f"runs/{number}")
        assert all(torch.allclose(found[name], expected[name], atol=1e-6, rtol=0) for name in expected), settings
        here = summary(mine, f"{number}")["metrics"]
        names = [name for name in metrics if name not in ("loss_step", "synced_step")]
        assert {name: here[name] for name in names} == pytest.approx({name: metrics[name] for name in names}, rel=1e-5)


def test_an_epoch_resumed_at_world_sizes_1_2_3_2_1_uses_every_sample_once(forks: Forks, mine):
    arguments = (*CLASSES, "--data.count", "637", "--global_batch_size", "16", "--epochs", "1", "--data.noise", "0.1")
    arguments += ("--save_every", "3steps")
    forks.fit(*arguments, "--run", "one", folder=mine)
    once = {step: sorted(ranks[0]) for step, ranks in noted(mine).items()}
    (mine / "noted-0.jsonl").unlink()
    for world, step in ((1, 8), (2, 16), (3, 24), (2, 33)):
        kill = ("--trainer.callbacks", "recording.KillAt", "--trainer.callbacks.step", f"{step}")
        codes = forks.fit(*arguments, "--run", "x", *kill, folder=mine, world=world, code=None)
        assert codes[0] == -9
        keep_what_was_saved(mine, "x")
    forks.fit(*arguments, "--run", "x", folder=mine)
    assert {step: sorted(chain(*ranks.values())) for step, ranks in noted(mine).items()} == once
    one, parts = (summary(mine, run) for run in ("one", "x"))
    assert parts["attempts"] == 5 and parts["ledger"] == ["epoch 1: 637 of 637 samples, each once"]
    expected, found = weights(mine / "runs/one"), weights(mine / "runs/x")
    assert all(torch.allclose(found[name], expected[name], atol=1e-5, rtol=0) for name in expected)
    assert parts["metrics"] == pytest.approx(one["metrics"], abs=1e-5)


def keep_what_was_saved(folder: Path, run: str) -> None:
    """Deletes the records of steps after the newest checkpoint, which the next attempt repeats."""
    saved = sorted((folder / "runs" / run / "checkpoints").glob("step-*"))
    step = int(saved[-1].name.removeprefix("step-")) if saved else 0
    for file in folder.glob("noted-*.jsonl"):
        lines = [line for line in file.read_text().splitlines() if json.loads(line)[2] < step]
        file.write_text("".join(f"{line}\n" for line in lines))


def scalars(run: Path) -> dict[str, list[tuple[int, float]]]:
    """Returns the scalars that TensorBoard shows, except the speed."""
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if "samples_per_second" not in tag]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


def learned(run: Path) -> dict:
    """Returns the states of model, optimizers, schedules, ranks and sample ledger from the newest checkpoint."""
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    state = torch.load(newest / "state.pt", weights_only=True)
    return {name: state[name] for name in ("state_dict", "optimizer_states", "lr_schedulers", "rank_states", "ledger")}


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


RANDOM = ("--model.dropout", "0.2", "--data.noise", "0.1", "--global_batch_size", "16", "--epochs", "2")
OFTEN = ("--trainer.val_check_interval", "0.25", "--trainer.log_every_n_steps", "3")


@pytest.mark.parametrize(
    ("world", "every", "steps", "settings"),
    [
        (1, "1steps", (1, 11, 40), ()),
        (1, "7steps", (33, 80), ("--max_device_batch_size", "6")),
        (1, "3steps", (20,), ("--data.workers", "2")),
        (2, "1steps", (10,), ()),
        (2, "7steps", (38,), ("--data.count", "633", "--max_device_batch_size", "3")),
        pytest.param(1, "1steps", range(1, 41), (), marks=pytest.mark.soak),
        pytest.param(2, "1steps", range(1, 41), (), marks=pytest.mark.soak),
    ],
)
def test_a_run_killed_and_resumed_equals_an_uninterrupted_run(forks: Forks, mine, world, every, steps, settings):
    """Compares weights bit for bit, optimizer, schedule, generators, metrics and TensorBoard; an epoch has 40 steps."""
    arguments = (*CLASSES, *RANDOM, *OFTEN, "--save_every", every, *settings)
    forks.fit(*arguments, "--run", "whole", folder=mine, world=world)
    given = noted(mine)
    for step in steps:
        for file in mine.glob("noted-*"):
            file.unlink()
        kill = ("--trainer.callbacks", "recording.KillAt", "--trainer.callbacks.step", f"{step}")
        kill += ("--trainer.callbacks.rank", f"{world - 1}")
        run = f"killed-{step}"
        assert -9 in forks.fit(*arguments, "--run", run, *kill, folder=mine, world=world, code=None)
        keep_what_was_saved(mine, run)
        forks.fit(*arguments, "--run", run, folder=mine, world=world)
        assert noted(mine) == given
        assert same(learned(mine / "runs" / run), learned(mine / "runs/whole"))
        assert scalars(mine / "runs" / run) == scalars(mine / "runs/whole")
        here, there = summary(mine, run), summary(mine, "whole")
        assert all(here[name] == there[name] for name in ("metrics", "ledger", "steps", "epochs", "samples"))


def test_validation_metrics_are_the_same_at_any_world_size(forks: Forks, mine):
    """Covers 1,001 samples, which neither 2, 3 nor 4 ranks divide, and 3, which leave a rank without samples."""
    for held_out, worlds in ((1001, (1, 2, 3, 4)), (3, (1, 4))):
        found = []
        for world in worlds:
            run = f"{held_out}-{world}"
            arguments = ("--data.held_out", f"{held_out}", "--data.size", "12", "--global_batch_size", "64")
            arguments += ("--data.count", "64", "--epochs", "1", "--model.rate", "0", "--run", run)
            forks.fit(*CLASSES, *arguments, folder=mine, world=world)
            samples = [
                sample for ranks in noted(mine, "val").values() for samples in ranks.values() for sample in samples
            ]
            assert sorted(samples) == list(range(held_out))
            found.append({name: summary(mine, run)["metrics"][name] for name in ("val_loss", "val_error")})
            for file in mine.glob("noted-*"):
                file.unlink()
        for metrics in found[1:]:
            assert metrics == pytest.approx(found[0], abs=1e-6)


def test_evaluate_returns_the_same_metrics_on_one_and_three_ranks(forks: Forks, tmp_path):
    """Evaluates a ResNet with batch norm on 180 samples, which the batch size of 7 does not divide."""
    forks.fit("--epochs", "2", "--run", "x", folder=tmp_path)
    found = {}
    for world in (1, 3):
        arguments = ("--batch_size", "7", "--output", f"{world}")
        forks.fit(*arguments, folder=tmp_path, world=world, script="evaluate")
        found[world] = json.loads((tmp_path / f"{world}").read_text())
    assert (found[1]["world_size"], found[3]["world_size"]) == (1, 3)
    assert found[3]["metrics"] == pytest.approx(found[1]["metrics"], abs=1e-6)


@pytest.mark.parametrize(("name", "held_out"), [("Scored", 50), ("Brief", 3)])
def test_logged_validation_metrics_are_exact_at_any_world_size(forks: Forks, mine, name, held_out):
    """Covers sums, maxima, torchmetrics that keep all samples, and values that only some batches log."""
    arguments = ("--model", f"recording.{name}", "--data", "recording.Data", "--data.count", "16", "--epochs", "1")
    arguments += ("--data.held_out", f"{held_out}", "--global_batch_size", "8")
    found = {}
    for world in (1, 2, 4):
        forks.fit(*arguments, "--run", f"{world}", folder=mine, world=world)
        found[world] = summary(mine, f"{world}")["metrics"]
    names = ("val_loss", "val_error", "area", "error", "square", "samples", "largest", "stepped_epoch")
    for world in (2, 4):
        assert {name: found[world][name] for name in names} == pytest.approx(
            {name: found[1][name] for name in names}, abs=1e-6
        )
    assert found[1]["samples"] == held_out and {"early", "late"} <= set(found[4])
    said = forks.said(mine)[0]
    assert "self.log('late') in on_validation_epoch_end has another value on each rank" in said


def test_manual_optimization_gets_a_sample_on_every_rank(forks: Forks, mine):
    arguments = ("--model", "recording.Alone", "--data", "recording.Data", "--data.count", "33", "--epochs", "1")
    forks.fit(*arguments, "--global_batch_size", "8", "--run", "one", folder=mine)
    forks.fit(*arguments, "--global_batch_size", "8", "--run", "four", folder=mine, world=4)
    assert "manual optimisation cannot do without a sample on each" in forks.said(mine)[0]
    expected, found = weights(mine / "runs/one"), weights(mine / "runs/four")
    assert all(torch.allclose(found[name], expected[name], atol=1e-6, rtol=0) for name in expected)


def test_several_training_loaders_resume_independently(forks: Forks, mine):
    arguments = ("--model", "recording.OfPairs", "--data", "recording.Pair", "--epochs", "2", "--save_every", "1steps")
    forks.fit(*arguments, "--run", "whole", folder=mine)
    given = noted(mine)
    for step in (5, 29):
        (mine / "noted-0.jsonl").unlink()
        kill = ("--trainer.callbacks", "recording.KillAt", "--trainer.callbacks.step", f"{step}")
        forks.fit(*arguments, "--run", f"{step}", *kill, folder=mine, code=-9)
        keep_what_was_saved(mine, f"{step}")
        forks.fit(*arguments, "--run", f"{step}", folder=mine)
        assert noted(mine) == given
        assert same(learned(mine / f"runs/{step}"), learned(mine / "runs/whole"))


def test_all_gather_in_a_step_is_refused_if_a_rank_has_no_sample(forks: Forks, mine):
    """A rank without samples skips the step, so the other ranks would wait for it in the collective forever."""
    text = (mine / "recording.py").read_text()
    gathers = "        self.all_gather(loss)\n        self.train_error(outputs, targets)\n"
    (mine / "recording.py").write_text(text.replace("        self.train_error(outputs, targets)\n", gathers))
    arguments = (*CLASSES, "--data.count", "17", "--global_batch_size", "16", "--epochs", "1")
    forks.fit(*arguments, folder=mine, world=2, code=1)
    assert "all_gather in a step in which some rank has no sample" in forks.said(mine)[0]


def test_a_stream_beside_a_sharded_loader_is_not_sharded(forks: Forks, mine):
    """A rank without samples of the sharded loader still validates its samples of the stream."""
    arguments = ("--model", "recording.OfStreams", "--data", "recording.Stream", "--epochs", "2")
    forks.fit(*arguments, folder=mine, world=2)
    for what in ("train", "val 1"):
        for ranks in noted(mine, what).values():
            assert {sample // 10 for sample in ranks[0]} == {0} and {sample // 10 for sample in ranks[1]} == {1}
    trained = [ranks[1] for (epoch, _), ranks in noted(mine).items() if epoch == 1]
    assert sorted(chain(*trained)) == list(range(10, 20))
    assert all(ranks == {0: [0]} for ranks in noted(mine, "val 0").values())


def test_micro_batches_are_refused_with_manual_optimization(forks: Forks, mine):
    arguments = ("--model", "recording.Alone", "--data", "recording.Data", "--max_device_batch_size", "2")
    forks.fit(*arguments, folder=mine, code=2)
    assert "a module that optimises by hand" in forks.said(mine)[0] and not (mine / "runs").exists()
