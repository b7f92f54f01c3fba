"""The built wheel in a separate virtual environment, in a user's folder with packages named like Rankzero's."""

import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from running import LIMIT, REPOSITORY, require, run
from system.forks import summary

pytestmark = pytest.mark.xdist_group("wheel")

USER_CLASSES = """
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel


class Net(BoringModel):
    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.step(batch))


class Data(BoringDataModule):
    pass
"""

TRAIN_SCRIPT = """
from project.settings import EPOCHS  # a package of the user's, named as the source folder of the wheel
from data_modules.mine import Data
from lightning import seed_everything
from models import Net
from rankzero import Trainer

seed_everything(1)  # for equal random data on all ranks
trainer = Trainer(max_epochs=EPOCHS, accelerator="cpu", name="script", enable_progress_bar=False)
trainer.fit(Net(), datamodule=Data())
print(f"rank {trainer.global_rank} of {trainer.world_size} done")
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> Path:
    """Installs the wheel in an environment that uses the other packages of this one, and returns its program folder."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("project", "lightning_modules", "data_modules"):
        shutil.copytree(REPOSITORY / name, folder / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, folder / "source")
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    build = (*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(folder / "source"))
    subprocess.run(build, check=True, timeout=LIMIT)
    venv.create(folder / "venv", symlinks=True)
    (wheel,) = folder.glob("rankzero-*.whl")
    python = folder / "venv/bin/python"
    subprocess.run((*pip, "--python", str(python), "install", "--no-deps", str(wheel)), check=True, timeout=LIMIT)
    (packages,) = folder.glob("venv/lib/python*/site-packages")
    (packages / "others.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
    return folder / "venv/bin"


@pytest.fixture
def folder(tmp_path) -> Path:
    """Writes a user's folder with packages named like Rankzero's."""
    for name in ("project", "data_modules"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / "project/settings.py").write_text("EPOCHS = 2\n")
    (tmp_path / "data_modules/mine.py").write_text(USER_CLASSES)
    (tmp_path / "models.py").write_text("from data_modules.mine import Net\n")
    (tmp_path / "train.py").write_text(TRAIN_SCRIPT)
    return tmp_path


def last_ledger_line(folder: Path, name: str) -> str:
    """Returns the last line of a run's sample ledger."""
    written = summary(folder, name)
    assert written["status"] == "finished"
    return str(written["ledger"][-1])


def test_rankzero_is_imported_from_the_wheel_and_imports_no_torch(programs, folder):
    code = "import rankzero, sys; print(rankzero.__file__, 'torch' in sys.modules, rankzero.Trainer.__module__)"
    installed = next(programs.parent.glob("lib/python*/site-packages/rankzero/__init__.py"))
    printed = run(str(programs / "python"), "-c", code, folder=folder).out
    assert printed.split() == [str(installed), "False", "rankzero.trainer"]


@pytest.mark.parametrize(
    "command",
    [
        ("{bin}/rankzero", "fit"),
        ("{bin}/python", "-m", "rankzero", "fit"),
        ("{bin}/python", "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "rankzero", "fit"),
    ],
    ids=["rankzero", "python -m rankzero", "torchrun -m rankzero"],
)
def test_the_command_line_finds_the_users_classes(programs, folder, command):
    arguments = ("--model", "models.Net", "--data", "data_modules.mine.Data", "--epochs", "1")
    program = [argument.format(bin=programs) for argument in command]
    run(*program, *arguments, "--name", "mine", "--accelerator", "cpu", folder=folder)
    assert last_ledger_line(folder, "mine") == "epoch 1: 64 of 64 samples, each once"
    assert (folder / "runs/mine/report.html").is_file()
    if command[0] == "{bin}/rankzero":
        assert "val/loss" in run(program[0], "evaluate", "--name", "mine", folder=folder).out


@pytest.mark.parametrize(
    ("ranks", "command"),
    [
        (1, ()),
        (2, ("{python}", "-m", "torch.distributed.run", "--nproc-per-node", "2")),
        (2, ("srun", "--nodes=2", "--ntasks-per-node=1", "{python}")),
        (2, ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-np", "2", "{python}")),
    ],
    ids=["python", "torchrun", "srun", "mpirun"],
)
def test_a_script_trains_under_each_launcher(programs, folder, ranks, command, request):
    environment = request.getfixturevalue("slurm") if "srun" in command else None
    if "mpirun.openmpi" in command:
        require("openmpi")
    command_line = [argument.format(python=programs / "python") for argument in command or ("{python}",)]
    printed = run(*command_line, "train.py", folder=folder, environment=environment).out
    assert sorted(line for line in printed.splitlines() if line.startswith("rank ") and "done" in line) == [
        f"rank {rank} of {ranks} done" for rank in range(ranks)
    ]
    assert last_ledger_line(folder, "script") == "epoch 2: 64 of 64 samples, each once"
