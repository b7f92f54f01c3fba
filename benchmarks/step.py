"""Cost of a step of a tiny model: Rankzero compared with hand-written loops and stock Lightning.

python benchmarks/step.py --which one          # the MLP of the PyTorch DDP tutorial, one process
python benchmarks/step.py --which two          # the same model with two processes (gloo)
python benchmarks/step.py --which compiled     # --compile step, one process; compiled-two: two processes
python benchmarks/step.py --which own          # a LightningModule that does not use Rankzero, with one self.log

Rankzero is `launch/fit.py` as on a user's command line: logging, progress, checkpoints, sample ledger and the agreement
on stops are on. Only validation is off, because the other variants have none. Each figure comes from a separate process
with one thread, and is the mean over all epochs but the first.
"""

import json
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parent))

from contest import ROOT, Comparison, parser, run, run_for_json

TOY_CLASSES = ["--model", "MLP", "--data", "Toy"]
USER_CLASSES = ["--model", "step.Module", "--data", "step.Data"]


class Module(LightningModule):
    """The tutorial's model as an ordinary LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(20, 1)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.layer(inputs), targets)
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Data(LightningDataModule):
    """The tutorial's data in an ordinary DataLoader."""

    def __init__(self, count: int = 2048) -> None:
        super().__init__()
        self.data = TensorDataset(torch.rand(count, 20), torch.rand(count, 1))

    def train_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        return DataLoader(self.data, batch_size=32, shuffle=True)


def rankzero_microseconds(
    classes: list[str], count: int, epochs: int, processes: int = 1, compiled: str = "off"
) -> float:
    """Returns microseconds per step of a run."""
    with tempfile.TemporaryDirectory() as folder:
        clock = Path(folder) / "clock.json"
        command = [sys.executable, str(ROOT / "launch/fit.py"), *classes, "--data.count", str(count), "--root", folder]
        command += ["--batch_size", "32", "--epochs", str(epochs), "--devices", str(processes), "--accelerator", "cpu"]
        command += ["--trainer.callbacks", "clock.Clock", "--trainer.callbacks.path", str(clock)]
        command += ["--compile", compiled]
        run([*command, "--trainer.limit_val_batches", "0"], threads=1)
        return 1e6 * float(json.loads(clock.read_text()))


def script_microseconds(script: str, count: int, epochs: int, *flags: str, processes: int = 1) -> float:
    """Returns microseconds per step of a script in `by_hand/`."""
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [
        *launcher,
        str(ROOT / "benchmarks/by_hand" / script),
        "--count",
        str(count),
        "--epochs",
        str(epochs),
        *flags,
    ]
    return 1e6 * float(run_for_json(command, threads=1))


def main() -> None:
    """Measures the chosen variants in turn, and prints medians and spreads."""
    flags = parser(__doc__ or "")
    flags.add_argument("--which", choices=("one", "two", "own", "compiled", "compiled-two"), default="one")
    flags.add_argument("--count", type=int, default=65536, help="samples an epoch")
    flags.add_argument("--epochs", type=int, default=5)
    arguments = flags.parse_args()
    size = (arguments.count, arguments.epochs)

    def accelerate() -> float:
        return script_microseconds("wrappers.py", *size, "--with", "accelerate")

    comparisons = {
        "one": Comparison(
            "step-one",
            f"a step of the tutorial's MLP, {arguments.count:,} samples an epoch",
            "microseconds",
            {
                "ours": lambda: rankzero_microseconds(TOY_CLASSES, *size),
                "the tutorial's loop": lambda: script_microseconds("tutorial.py", *size),
                "a well-tuned loop": lambda: script_microseconds("tuned.py", *size),
                "a well-tuned loop, plain SGD": lambda: script_microseconds("tuned.py", *size, "--plain"),
                "Lightning, its defaults": lambda: script_microseconds("lightning_trainer.py", *size),
                "Lightning, everything off": lambda: script_microseconds("lightning_trainer.py", *size, "--off"),
                "Lightning Fabric": lambda: script_microseconds("wrappers.py", *size, "--with", "fabric"),
                **({"Accelerate": accelerate} if find_spec("accelerate") else {}),
            },
            targets={"the tutorial's loop": 0.9, "a well-tuned loop": 1.02, "Lightning, its defaults": 0.15},
        ),
        "two": Comparison(
            "step-two",
            f"the same on two processes, gloo, {arguments.count:,} samples an epoch",
            "microseconds",
            {
                "ours": lambda: rankzero_microseconds(TOY_CLASSES, *size, processes=2),
                "the DDP tutorial's loop": lambda: script_microseconds("tutorial.py", *size, processes=2),
                "a well-tuned loop": lambda: script_microseconds("tuned.py", *size, processes=2),
            },
            targets={"the DDP tutorial's loop": 1.0},
        ),
        "compiled": Comparison(
            "step-compiled",
            f"a step of the tutorial's MLP with --compile step, {arguments.count:,} samples an epoch",
            "microseconds",
            {
                "ours": lambda: rankzero_microseconds(TOY_CLASSES, *size, compiled="step"),
                "the tutorial's loop": lambda: script_microseconds("tutorial.py", *size),
                "the tutorial's loop, torch.compile(model)": lambda: script_microseconds(
                    "tutorial.py", *size, "--compile"
                ),
                "ours without --compile": lambda: rankzero_microseconds(TOY_CLASSES, *size),
                "Lightning, its defaults": lambda: script_microseconds("lightning_trainer.py", *size),
            },
            targets={"the tutorial's loop": 0.35, "Lightning, its defaults": 0.06},
        ),
        "compiled-two": Comparison(
            "step-compiled-two",
            f"the same on two processes, gloo, {arguments.count:,} samples an epoch",
            "microseconds",
            {
                "ours": lambda: rankzero_microseconds(TOY_CLASSES, *size, processes=2, compiled="step"),
                "the DDP tutorial's loop": lambda: script_microseconds("tutorial.py", *size, processes=2),
                "the DDP tutorial's loop, torch.compile(model)": lambda: script_microseconds(
                    "tutorial.py", *size, "--compile", processes=2
                ),
                "ours without --compile": lambda: rankzero_microseconds(TOY_CLASSES, *size, processes=2),
            },
            targets={"the DDP tutorial's loop": 0.6},
        ),
        "own": Comparison(
            "step-own",
            f"a step of a user's LightningModule with one self.log, {arguments.count:,} samples an epoch",
            "microseconds",
            {
                "ours": lambda: rankzero_microseconds(USER_CLASSES, *size),
                "the tutorial's loop": lambda: script_microseconds("tutorial.py", *size),
                "Lightning, its defaults": lambda: script_microseconds("lightning_trainer.py", *size),
            },
            targets={"the tutorial's loop": 0.8},
        ),
    }
    comparisons[arguments.which].run(arguments.pairs, arguments.json_dir)


if __name__ == "__main__":
    main()
