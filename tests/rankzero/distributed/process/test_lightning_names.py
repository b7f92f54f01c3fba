"""The two names of Lightning's package, in separate processes because an import changes a process permanently."""

import re
import shutil
import sys
from pathlib import Path

import lightning
import pytest

from running import run

EVERY_IMPORT_FORM = """
import sys, rankzero
import pytorch_lightning as pl, lightning.pytorch
import pytorch_lightning.loggers as l
import pytorch_lightning.callbacks.early_stopping
from pytorch_lightning.utilities.types import STEP_OUTPUT
from pytorch_lightning.callbacks import model_checkpoint
from pytorch_lightning import LightningModule, Trainer, seed_everything
import lightning_fabric.utilities.seed, lightning.fabric.utilities.seed

assert pl is lightning.pytorch and LightningModule is lightning.pytorch.LightningModule
assert l is lightning.pytorch.loggers
assert pytorch_lightning.callbacks.early_stopping is lightning.pytorch.callbacks.early_stopping
assert model_checkpoint is lightning.pytorch.callbacks.model_checkpoint
assert lightning_fabric.utilities.seed is lightning.fabric.utilities.seed
assert issubclass(type("Net", (pl.LightningModule,), {}), lightning.pytorch.LightningModule)

import importlib, importlib.util, pickle
for module in (pl, pl.callbacks, pytorch_lightning.callbacks.early_stopping):
    assert module.__spec__.name == module.__name__ and module.__name__.startswith("lightning.pytorch")
    assert sys.modules[module.__name__] is module
named = pickle.loads(b"cpytorch_lightning.callbacks.early_stopping\\nEarlyStopping\\n.")
assert named is lightning.pytorch.callbacks.EarlyStopping
assert b"pytorch_lightning" not in pickle.dumps(named, 0)
assert importlib.util.find_spec("pytorch_lightning.strategies.ddp") is not None
assert importlib.util.find_spec("pytorch_lightning.nothing") is None
again = importlib.reload(pytorch_lightning.callbacks.early_stopping)
assert again is lightning.pytorch.callbacks.early_stopping is pytorch_lightning.callbacks.early_stopping
try:
    import pytorch_lightning.nothing
except ModuleNotFoundError as error:
    assert error.name == "pytorch_lightning.nothing", error
else:
    raise AssertionError
"""


def run_code(text, folder, **options):
    (folder / "train.py").write_text(text)
    return run(sys.executable, "train.py", folder=folder, **options)


@pytest.mark.system
def test_every_import_of_an_uninstalled_pytorch_lightning_gives_lightning_pytorch(tmp_path):
    hide_packages = (
        "import sys\nclass Hidden:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name in ('pytorch_lightning', 'lightning_fabric'): raise ModuleNotFoundError(name=name)\n"
        "sys.meta_path.insert(0, Hidden())\n"
    )
    run_code(hide_packages + EVERY_IMPORT_FORM, tmp_path)


@pytest.fixture
def second_copy(tmp_path):
    """A folder with the packages `pytorch_lightning` and `lightning_fabric`, made of Lightning's as its authors do."""
    for name, copy in (("pytorch", "pytorch_lightning"), ("fabric", "lightning_fabric")):
        shutil.copytree(Path(lightning.__file__).with_name(name), tmp_path / copy)
        (tmp_path / copy / "__version__.py").write_text(f"version = {lightning.__version__!r}")
    for file in [*tmp_path.rglob("*.py")]:
        text = re.sub(r"\blightning\.pytorch\b", "pytorch_lightning", file.read_text())
        file.write_text(re.sub(r"\blightning\.fabric\b", "lightning_fabric", text))
    return tmp_path


TRAINING = """
from pytorch_lightning.demos.boring_classes import BoringModel
trainer = rankzero.Trainer(max_steps=2, name="x", accelerator="cpu", callbacks=[pl.callbacks.LearningRateMonitor()])
model = BoringModel()
trainer.fit(model)
assert trainer.global_step == 2 and isinstance(trainer, pl.Trainer)
type(model).load_from_checkpoint(str(next(trainer.run.path.glob("checkpoints/*"))))
"""


@pytest.mark.system
@pytest.mark.parametrize(
    ("imports", "code"),
    [
        ("import pytorch_lightning as pl\nimport rankzero", 0),
        ("import rankzero\nimport pytorch_lightning as pl", 0),
        ("import lightning.pytorch\nimport pytorch_lightning as pl\nimport rankzero", 2),
    ],
)
def test_a_module_of_pytorch_lightning_trains_in_either_order_of_imports(second_copy, imports, code):
    errors = run_code(imports + TRAINING, second_copy, environment={"PYTHONPATH": "."}, code=code).err
    assert ("BoringModel uses the package pytorch_lightning" in errors) is bool(code)
    assert "Traceback" not in errors and "slower training loop" not in errors
