"""Imports of user code, in separate processes because `install` changes a process permanently."""

import sys

import pytest

from rankzero.cli.import_names import SOURCES
from running import fit, run


def run_code(code, folder):
    """Runs code in a user's folder, as Rankzero's commands run user code."""
    setup = f"import sys; sys.path[:0] = {SOURCES!r}\nfrom rankzero.cli import import_names\n"
    return run(sys.executable, "-c", setup + code, folder=folder).out


def write_files(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


MODEL_MODULE = """
import torch
import pytorch_lightning as pl
from project.width import WIDTH

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(WIDTH, 1)
    def training_step(self, batch, batch_idx):
        import evaluate, pytorch_lightning.callbacks.timer
        loss = self.layer(batch).square().mean()
        self.log("loss", loss, on_epoch=True)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)
"""
DATA_MODULE = """
import torch
from pytorch_lightning import LightningDataModule
from pytorch_lightning.utilities.types import TRAIN_DATALOADERS
from torch.utils.data import DataLoader, Dataset
from data_modules.deep.rows import row

class Rows(Dataset):
    def __len__(self):
        return 32
    def __getitem__(self, index):
        import evaluate, project.width, pytorch_lightning.profilers
        import data_modules.toy, lightning.fabric, lightning_fabric
        assert lightning_fabric is lightning.fabric and data_modules.toy.Toy
        return row(index)

class Data(LightningDataModule):
    def __init__(self, context: str = ""):
        super().__init__()
        self.context = context
    def train_dataloader(self) -> TRAIN_DATALOADERS:
        workers = {}
        if self.context:
            workers = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": self.context}
        return DataLoader(Rows(), 8, **workers)
"""
STOCK_SCRIPT = """
import_names.install()
import lightning.pytorch as pl
from data_modules.mine import Data
from project.nets import Net
trainer = pl.Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Net(), datamodule=Data())
print(trainer.callback_metrics["loss_epoch"].item())
"""


@pytest.fixture
def user_folder(tmp_path):
    """A user's folder with packages that have the same names as Rankzero's packages."""
    hiding_module = "raise RuntimeError('a file of the user hides a module')"
    files = {
        "project/nets.py": MODEL_MODULE,
        "project/width.py": "WIDTH = 4",
        "data_modules/__init__.py": "",
        "data_modules/mine.py": DATA_MODULE,
        "data_modules/toy.py": hiding_module,
        "data_modules/deep/rows.py": "import torch\ndef row(index): return torch.full((4,), index / 32)",
        "lightning_modules/mine.py": "from project.nets import Net\nclass Mine(Net): pass",
        "evaluate.py": "",
    }
    write_files(tmp_path, files)
    return tmp_path


@pytest.mark.system
@pytest.mark.parametrize(("context", "environment"), [("spawn", {"PYTHONPATH": "."}), ("forkserver", {})])
def test_user_packages_named_like_rankzeros_train_as_in_stock_lightning(user_folder, context, environment):
    (user_folder / "project/__init__.py").touch() if environment else None
    arguments = ["--data", "data_modules.mine.Data", "--data.context", context]
    arguments += ["--epochs", "2", "--run", "x", "--trainer.enable_progress_bar", "false"]
    result = fit("--model", "lightning_modules.mine.Mine", *arguments, folder=user_folder, environment=environment)
    stock_loss = float(run_code(STOCK_SCRIPT, user_folder))
    assert result.summary()["metrics"]["loss_epoch"] == pytest.approx(stock_loss, rel=1e-6)


@pytest.mark.system
def test_included_and_user_classes_train_on_two_ranks_despite_clashing_names(user_folder):
    fit("--model", "MLP", "--data", "Toy", "--epochs", "1", "--devices", "2", folder=user_folder)
    environment = {"PYTHONPATH": ":".join((str(user_folder), *SOURCES))}
    command = ("python", "-m", "launch.fit", "--model", "project.nets.Net", "--data", "data_modules.mine.Data")
    run(*command, "--epochs", "1", "--devices", "2", folder=user_folder, environment=environment)
