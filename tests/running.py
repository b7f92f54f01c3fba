"""Runs commands as a user does, or inside this process where a separate process does not matter."""

import atexit
import contextlib
import importlib
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from PIL import Image

from rankzero.cli.arguments import parse_arguments
from rankzero.cli.command import Command
from rankzero.distributed.coordination.coordinator import Coordinator
from rankzero.distributed.environments.launch import Launch, RequestedWorld
from rankzero.distributed.rendezvous.client import rendezvous
from rankzero.distributed.world import Peer, World
from rankzero.messages import RequestError, set_quiet, set_spelling
from rankzero.sampling.plan import SamplingPlan

REPOSITORY = Path(__file__).parent.parent
SOURCES = f"{REPOSITORY}:{REPOSITORY / 'project'}"
"""The folders of Rankzero's packages, in the format of PYTHONPATH."""
INTERPRETER_BIN = Path(sys.executable).parent
"""Programs that import everything when they start, for tests of the start itself."""

BIN = INTERPRETER_BIN
"""Programs for all other tests: in system tests those of `system/preloaded.py`, which start in a tenth of the time."""

TOY = ("--model", "MLP", "--data", "Toy", "--save_every", "10steps")
"""Flags of a short training: 64 steps an epoch, less than a second."""

LIMIT = 150.0
"""Seconds after which a test fails because an event has not happened: generous, since a machine may be busy."""

REQUIREMENTS = {"slurm": "srun", "openmpi": "mpirun.openmpi", "mpich": "mpiexec.hydra", "hosts": "ip", "ssh": "sshd"}
REQUIREMENTS |= {name: name for name in ("strace", "shellcheck", "chromium", "buildah", "flux")}
REQUIREMENTS["fashion-mnist"] = "/usr/share/datasets/fashion-mnist/train-images-idx3-ubyte.gz"
"""Part that a machine may lack -> a program or file that proves its presence."""


def require(requirement: str) -> None:
    """Skips the test if the machine lacks a part, or fails it if RANKZERO_REQUIRE names the part."""
    evidence, target = REQUIREMENTS[requirement], "image-tools" if requirement == "buildah" else "system-tools"
    is_installed = Path(evidence).exists() if evidence.startswith("/") else shutil.which(evidence) is not None
    if is_installed and (requirement == "fashion-mnist" or os.geteuid() == 0):
        return
    reason = f"{requirement} is not on this machine, or this is not root; to install it: make {target}"
    if requirement in os.environ.get("RANKZERO_REQUIRE", "").split(","):
        pytest.fail(reason)
    pytest.skip(reason)


@contextmanager
def reserved_port() -> Iterator[int]:
    """Reserves a free TCP port of 127.0.0.1 by a socket that is bound but does not listen, for SO_REUSEADDR."""
    with socket.socket() as bound_socket:
        bound_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound_socket.bind(("127.0.0.1", 0))
        yield int(bound_socket.getsockname()[1])


@contextmanager
def disk_at(folder: Path, size: str) -> Iterator[Path]:
    """Mounts a tmpfs of the given size, and yields it as a separate disk."""
    require("strace")  # includes the check for root, which mount needs
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@dataclass
class Result:
    """Exit code, output and working directory of a command."""

    code: int
    out: str
    err: str
    folder: Path

    def summary(self, run: str = "*") -> dict[str, Any]:
        """Returns the summary of the run with this name, or of the only run."""
        (path,) = (self.folder / "runs").glob(f"{run}/summary.json")
        content: dict[str, Any] = json.loads(path.read_text())
        return content


def run(
    *command: str, folder: Path, environment: dict[str, str] | None = None, seconds: float = LIMIT, code: int | None = 0
) -> Result:
    """Runs a command line in a folder, with the `python` and `torchrun` of this environment."""
    variables = {**os.environ, **(environment or {}), "PATH": f"{BIN}:{os.environ['PATH']}"}
    process = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=seconds)
    result = Result(process.returncode, process.stdout, process.stderr, folder)
    if code is not None and result.code != code:
        pytest.fail(f"{' '.join(command)} exited with code {result.code}, not {code}\n{result.out}\n{result.err}")
    return result


def run_without_importing(*modules: str, code: str, folder: Path) -> Result:
    """Runs Python code in a process of its own, and checks that it has not imported certain modules."""
    check = f"import sys\n{code}\nassert not (found := {set(modules)} & set(sys.modules)), found"
    return run("python", "-c", check, folder=folder, environment={"PYTHONPATH": SOURCES})


def processes_in(folder: Path) -> list[psutil.Process]:
    """Returns the processes whose working directory is a folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.cwd() == str(folder):
                found.append(process)
    return found


def write_program(path: Path, text: str) -> Path:
    """Writes a script of sh that can be executed, and returns its path."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def refusal_of(call: Callable[..., Any], *arguments: Any) -> RequestError:
    """Calls a function that refuses these arguments, and returns its error."""
    with pytest.raises(RequestError) as error:
        call(*arguments)
    return error.value


def script(name: str) -> str:
    return str(REPOSITORY / "launch" / f"{name}.py")


def fit(*arguments: str, folder: Path, **options: Any) -> Result:
    return run("python", script("fit"), *arguments, folder=folder, **options)


def command_of(name: str) -> Command:
    command: Command = getattr(importlib.import_module(f"rankzero.commands.{name}"), name.upper())
    return command


@contextmanager
def restore_process_state():
    """Restores the process-wide state that Lightning changes: environment variables (seeds), threads, grad mode."""
    variables, threads = dict(os.environ), torch.get_num_threads()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(variables)
        torch.set_num_threads(threads)
        torch.set_grad_enabled(True)


@contextmanager
def script_process(folder: Path) -> Iterator[None]:
    """Makes a folder the working directory of a process in which no Trainer has been built."""
    from tensorboard.summary.writer import event_file_writer

    from rankzero.distributed.coordination import session

    with pytest.MonkeyPatch.context() as patch, restore_process_state():
        patch.chdir(folder)
        patch.setattr(session.Session, "current", None)
        patch.setattr(sys, "excepthook", sys.excepthook)
        # TensorBoard reads the files of one second in the order of this number as text.
        patch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(1000))
        try:
            yield
        finally:
            session._close_coordinator(None)
            set_spelling(None)
            set_quiet(False)
            atexit.unregister(session._close_at_exit)


@contextmanager
def small_figures() -> Iterator[None]:
    """Replaces each figure of a validation by a small image, since drawing takes longer than a short run."""
    from rankzero.show.figures import drawing

    buffer = io.BytesIO()
    Image.new("RGB", (4, 4)).save(buffer, format="PNG")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing, "png", lambda figure: buffer.getvalue())
        yield


def train_in_process(
    *callbacks: Callback,
    model: LightningModule | None = None,
    data: Any = None,
    loops: bool = False,
    resume: Path | None = None,
    plan: SamplingPlan | None = None,
    subscribers: Sequence[Any] = (),
    **settings: Any,
) -> None:
    """Trains a model with Lightning's Trainer; with `loops` or a plan, Rankzero's loops replace Lightning's."""
    from rankzero.training.fit_loop import fit_loop_of, install
    from rankzero.training.strategies import OneProcess
    from stock import SILENT

    if loops or plan:
        settings["strategy"] = OneProcess(plan or SamplingPlan(), device="cpu")
        if not plan:
            settings["strategy"].process_dataloader = lambda loader: loader
    with restore_process_state():
        trainer = Trainer(callbacks=list(callbacks), **{**SILENT, "limit_val_batches": 1, **settings})
        if loops or plan:
            trainer.callbacks.insert(0, install(trainer, plan or SamplingPlan()))
            fit_loop_of(trainer).extra_subscribers += subscribers
        trainer.fit(model or BoringModel(), data, ckpt_path=resume)


def world_of(
    accelerator: str = "cpu", size: int = 1, nodes: int = 1, devices: int | None = None, **fields: Any
) -> World:
    """Returns the world of rank zero, on one machine unless `nodes` and `devices` are given."""
    launch = Launch(world_size=size, num_nodes=nodes, local_world_size=devices or size)
    return World(launch, dict.fromkeys(range(size), Peer.this(launch)), accelerator=accelerator, **fields)


def as_rank(work: Callable[..., Any], launch: Launch, *arguments: Any) -> Any:
    """Calls a function with a coordinator, as one rank of a gloo process group in a process of its own."""
    torch.set_num_threads(1)
    is_single = launch.world_size == 1
    world = World(launch) if is_single else rendezvous(launch, 30)
    with Coordinator(world, RequestedWorld(start_timeout=30)) as coordinator:
        if is_single:
            torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        coordinator.init_process_group("gloo", torch.device("cpu"), timedelta(seconds=60))
        return work(coordinator, *arguments)


def on_each_rank(ranks: Sequence[Any], work: Callable[[Any], Any]) -> list[Any]:
    """Calls a function for each rank, in threads of their own; an exception counts as a result."""

    def result_of(rank: Any) -> Any:
        try:
            return work(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(result_of, ranks))


def wait_until(condition: Callable[[], Any], event: str = "the event", seconds: float = LIMIT) -> None:
    """Waits until a condition is true, and calls it by the name of the event if that does not happen."""
    deadline, pause = time.monotonic() + seconds, 0.005
    while not condition():
        assert time.monotonic() < deadline, f"{event} did not happen within {seconds} s"
        time.sleep(pause)
        pause = min(2 * pause, 0.2)


def fit_in_process(*arguments: str, launch: Launch | None = None) -> int:
    """Runs `fit` in this process, without drawing its figures; errors are raised as exceptions."""
    with restore_process_state(), small_figures():
        from rankzero.commands.fit import fit as run_fit

        return run_fit(parse_arguments(command_of("fit"), arguments), World(launch or Launch()))


def fit_in_folder(folder: Path, *arguments: str) -> Path:
    """Runs `fit` in this process with a folder as the working directory, and returns the folder of its runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        fit_in_process(*arguments)
    return folder / "runs"


def evaluate_in_process(*arguments: str) -> int:
    """Runs `evaluate` in this process; errors are raised as exceptions."""
    with restore_process_state():
        from rankzero.commands.evaluation import evaluate as run_evaluate

        return run_evaluate(parse_arguments(command_of("evaluate"), arguments), World())


def weights(run: Path, checkpoint: str = "") -> dict[str, torch.Tensor]:
    """Returns the model's weights from a checkpoint of a run, by default from the newest."""
    folder = run / "checkpoints" / checkpoint if checkpoint else sorted((run / "checkpoints").glob("step-*"))[-1]
    return dict(torch.load(folder / "state.pt", weights_only=True)["state_dict"])
