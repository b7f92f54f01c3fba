"""Messages about a user's class that does not exist or cannot be imported."""

import subprocess
import sys

import pytest

from rankzero.cli.user_classes import CHECKOUT, SOURCES, unknown_class_error
from running import fit, fit_in_process, refusal_of, run

BROKEN_FILES = {
    "missing.py": ("import json\nimport nosuchthing\n", "missing.py, line 2: import nosuchthing"),
    "name.py": ("x = undefined\n", "NameError: name 'undefined' is not defined"),
    "syntax.py": ("def f(:\n", "syntax.py, line 1: def f(:"),
    "raises.py": ("def f():\n    raise KeyError('mine')\nf()\n", "raises.py, line 2: raise KeyError('mine')"),
    "other.py": ("from json import no_such_name\n", "ImportError: cannot import name 'no_such_name'"),
}


@pytest.mark.parametrize(
    ("text", "found", "instead"),
    [
        ("net.py", "net.py is a file, not a class path; classes in this folder: net.Net, net.Data", "net.Net"),
        ("net", "; classes in this folder: net.Net, net.Data", "net.Net"),
        ("Data", "; classes in this folder: net.Data", "net.Data"),
        ("models/big.py", "; classes in this folder: models.big.Big", "models.big.Big"),
        ("Inner", "there is no model of that name; choose MLP, ResNet, or a class path", "MLP"),
        *((file, f"{file} is a file, not a class path", "MLP") for file in ("binary.py", "models/../net.py")),
        *((file, "there is no such file", "MLP") for file in ("missing.py", "x" * 300 + ".py")),
        *((text, "there is no model of that name", "MLP") for text in ("x" * 300, "a\0b")),
        ("ResNet50", "there is no model of that name", "ResNet --model.depth 50"),
        ("resnet-18", "there is no model of that name", "ResNet --model.depth 18"),
        ("resnet-20", "there is no model of that name", "ResNet"),
    ],
)
def test_an_unknown_class_suggests_classes_of_the_folder(cwd, text, found, instead):
    (cwd / "models").mkdir()
    (cwd / "net.py").write_text("class Net:\n    class Inner: ...\n\nclass Data(Net): ...\n")
    (cwd / "models/big.py").write_text("class Big: ...\n")
    (cwd / "binary.py").write_bytes(b"\xff\xfe\0class")
    error = unknown_class_error("model", text, ["MLP", "ResNet"])
    assert error.asked == f"--model {text}" and found in error.found
    assert error.instead == f"--model {instead}"
    assert unknown_class_error("data", "resnet50", ["Toy"]).instead == "--data Toy"  # only a model is completed


@pytest.mark.parametrize("file", BROKEN_FILES)
def test_an_error_in_a_users_module_names_its_file_and_line(cwd, monkeypatch, file):
    content, found = BROKEN_FILES[file]
    folder = cwd / "broken_modules"
    folder.mkdir()
    (folder / file).write_text(content)
    monkeypatch.syspath_prepend(folder)
    message = str(refusal_of(fit_in_process, "--model", f"{file.removesuffix('.py')}.Net"))
    assert found in message and "the folder that contains" not in message and "Traceback" not in message
    assert f"asked  --model {file.removesuffix('.py')}.Net" in message and "the same command, after" in message


def test_a_missing_class_of_a_module_names_the_classes_of_the_same_kind_that_it_defines(add_module):
    bases = {"Data": "LightningDataModule", "Other": "LightningModule", "Net": "LightningModule", "Plain": ""}
    classes = "\n".join(f"class {name}({base}): ..." for name, base in bases.items())
    add_module("seen", f"from lightning.pytorch import LightningDataModule, LightningModule\n{classes}\n")
    for flag, name, advice, defined in (
        *(("model", "Netz", "Net", "Other, Net"), ("model", "Missing", "Other", "Other, Net")),
        ("data", "Net_", "Data", "Data"),
    ):
        error = refusal_of(fit_in_process, f"--{flag}", f"seen.{name}")
        assert error.found == f"seen has no class {name}; it defines {defined}"
        assert (error.asked, error.instead) == (f"--{flag} seen.{name}", f"--{flag} seen.{advice}")


def test_a_class_of_the_users_package_is_named_with_its_file():
    for name, instead in (("Short", "lightning_modules.FILE.Short"), ("ResNt", "ResNet")):
        error = refusal_of(fit_in_process, "--model", f"lightning_modules.{name}", "--data", "Toy")
        assert error.found.startswith(f"lightning_modules has no class {name}; a class in your own folder")
        assert error.instead == f"--model {instead}"


@pytest.mark.system
def test_a_users_file_hidden_by_a_rankzero_module_is_named(cwd):
    (cwd / "data_modules").mkdir()
    (cwd / "data_modules/toy.py").write_text("class Mine: pass")
    command = [sys.executable, str(CHECKOUT / "launch/fit.py"), "--model", "data_modules.toy.Mine"]
    process = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert process.returncode == 2
    assert f"{cwd}/data_modules/toy.py cannot be imported as data_modules.toy: Rankzero has a module" in process.stderr


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
STOCK_SCRIPT = f"""
import sys; sys.path[:0] = {SOURCES!r}
from rankzero.cli.user_classes import extend_packages
extend_packages()
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
    files = {
        "project/nets.py": MODEL_MODULE,
        "project/width.py": "WIDTH = 4",
        "data_modules/__init__.py": "",
        "data_modules/mine.py": DATA_MODULE,
        "data_modules/toy.py": "raise RuntimeError('a file of the user hides a module')",
        "data_modules/deep/rows.py": "import torch\ndef row(index): return torch.full((4,), index / 32)",
        "lightning_modules/mine.py": "from project.nets import Net\nclass Mine(Net): pass",
        "evaluate.py": "",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    return tmp_path


@pytest.mark.system
@pytest.mark.parametrize(("context", "environment"), [("spawn", {"PYTHONPATH": "."}), ("forkserver", {})])
def test_user_packages_named_like_rankzeros_train_as_in_stock_lightning(user_folder, context, environment):
    (user_folder / "project/__init__.py").touch() if environment else None
    arguments = ["--data", "data_modules.mine.Data", "--data.context", context]
    arguments += ["--epochs", "2", "--run", "x", "--trainer.enable_progress_bar", "false"]
    result = fit("--model", "lightning_modules.mine.Mine", *arguments, folder=user_folder, environment=environment)
    stock_loss = float(run(sys.executable, "-c", STOCK_SCRIPT, folder=user_folder).out)
    assert result.summary()["metrics"]["loss_epoch"] == pytest.approx(stock_loss, rel=1e-6)


@pytest.mark.system
def test_included_and_user_classes_train_on_two_ranks_despite_clashing_names(user_folder):
    fit("--model", "MLP", "--data", "Toy", "--epochs", "1", "--devices", "2", folder=user_folder)
    environment = {"PYTHONPATH": ":".join((str(user_folder), *SOURCES))}
    command = ("python", "-m", "launch.fit", "--model", "project.nets.Net", "--data", "data_modules.mine.Data")
    run(*command, "--epochs", "1", "--devices", "2", folder=user_folder, environment=environment)
