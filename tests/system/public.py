"""Describes how to train the modules in tests/public, which are written in the style of public code."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from system.forks import fit_on_ranks

FOLDER = Path(__file__).parent.parent / "public"


@dataclass(frozen=True)
class Module:
    """A module in tests/public and the arguments that train it.

    Args:
        size: Samples per step over all processes; None if the user's sampler determines order and batches.
        kill_at: Batch after which a run is killed, in the middle of an epoch.
        fixed: Arguments that disable shuffling and random data.
        stock: Arguments of a stock `Trainer` that are equivalent to `arguments`.
        list_metrics: Metrics that the module computes from lists that no checkpoint contains.
    """

    model: str
    data: str
    size: int | None
    kill_at: int
    arguments: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=lambda: {"data.shuffle": False})
    stock: Mapping[str, Any] = field(default_factory=dict)
    list_metrics: tuple[str, ...] = ()

    @property
    def command(self) -> tuple[str, ...]:
        """The arguments that train the module for two epochs."""
        size = ("--global_batch_size", f"{self.size}") if self.size else ()
        classes = ("--model", self.model, "--data", self.data)
        return (*classes, *size, *self.arguments, "--epochs", "2", "--save_every", "3steps")


TEXT_CLASSIFIER = ("text_classifier.TextClassifier", "text_classifier.ReviewData")
MODULES = {
    "gan": Module(
        *("gan.GAN", "gan.RingDataModule", 16, 14),
        arguments=("--trainer.profiler", "simple", "--trainer.strategy", "ddp_find_unused_parameters_true"),
        stock={"profiler": "simple"},
        list_metrics=("g_loss_of_rank",),
    ),
    "language model": Module(
        *("language_model.GPT", "language_model.TextModule", 16, 9),
        arguments=("--trainer.accumulate_grad_batches", "2", "--trainer.gradient_clip_val", "1.0"),
        stock={"accumulate_grad_batches": 2, "gradient_clip_val": 1.0},
    ),
    "text classifier": Module(
        *(*TEXT_CLASSIFIER, 12, 5),
        fixed={"data.sampling": "plain", "data.shuffle": False},
        arguments=("--data.sampling", "plain"),
    ),
    "text classifier, drawn by weight": Module(*TEXT_CLASSIFIER, size=None, kill_at=5, fixed={}),
    "text classifier, batched by length": Module(
        *(*TEXT_CLASSIFIER, None, 5), arguments=("--data.sampling", "buckets"), fixed={"data.sampling": "buckets"}
    ),
    "contrastive": Module(
        "contrastive.SimCLR", "contrastive.ViewData", 16, 5, fixed={"data.shuffle": False, "data.noise": 0.0}
    ),
    "stream": Module(
        *("stream.OnlineRegressor", "stream.StreamData", None, 11),
        arguments=("--data.num_workers", "2"),
        fixed={"data.num_workers": 2},
    ),
}


def copy_files(folder: Path) -> Path:
    """Copies the files of tests/public into a folder, and returns the folder."""
    for file in FOLDER.glob("*.py"):
        shutil.copy(file, folder)
    return folder


def train(module: Module, run: str, folder: Path, world: int = 1, kill: int | None = None) -> list[int]:
    """Trains to the end, or kills rank zero after a batch; returns the exit codes."""
    kill_arguments = ("--trainer.callbacks+=killing.KillAt", "--trainer.callbacks.batch", f"{kill}") if kill else ()
    command = (*module.command, "--run", run, *kill_arguments)
    return fit_on_ranks(*command, folder=folder, world=world, code=None if kill else 0)


def result(folder: Path, run: str) -> dict:
    """Returns step, weights, optimizer states and schedules from the newest checkpoint of a run."""
    newest = sorted((folder / "runs" / run / "checkpoints").glob("step-*"))[-1]
    state = torch.load(newest / "state.pt", weights_only=True)
    return {name: state[name] for name in ("global_step", "state_dict", "optimizer_states", "lr_schedulers")}


def curves(run: Path) -> dict[str, list[tuple[int, float]]]:
    """Returns the scalars that TensorBoard shows of a run, as (step, value) pairs by tag."""
    events = EventAccumulator(str(run), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
