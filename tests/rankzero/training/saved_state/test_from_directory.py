"""Reading checkpoint directories with `load_from_checkpoint`."""

import pytest
import torch
from boring_models import DropoutNet, samples
from lightning.pytorch.core import saving
from lightning.pytorch.demos.boring_classes import BoringModel

from rankzero import Trainer
from rankzero.checkpoints.write import write_directory
from rankzero.messages import RequestError
from rankzero.training.saved_state import from_directory
from running import run, train_in_process
from stock import QUIET

LOAD = """
import sys
{first}
from lightning.pytorch.demos.boring_classes import BoringModel
{second}
print(BoringModel.load_from_checkpoint(sys.argv[1]).layer.weight.sum().item())
"""


@pytest.fixture
def module():
    module = BoringModel()
    train_in_process(model=module, max_steps=1)
    return module


@pytest.fixture
def saved(module, tmp_path):
    """A checkpoint directory, and a weight that it contains."""
    content = module.trainer._checkpoint_connector.dump_checkpoint()
    write_directory(content, tmp_path / "step-00000001")
    return tmp_path / "step-00000001", content["state_dict"]["layer.weight"]


@pytest.mark.system
@pytest.mark.parametrize(("first", "second"), [("import rankzero", ""), ("", "import rankzero")])
def test_a_directory_is_loaded_for_any_order_of_imports(saved, tmp_path, first, second):
    code = LOAD.format(first=first, second=second)
    assert float(run("python", "-c", code, str(saved[0]), folder=tmp_path).out) == pytest.approx(saved[1].sum().item())


@pytest.mark.system
def test_stock_lightning_reads_state_pt_but_not_the_directory(saved, tmp_path):
    code = LOAD.format(first="", second="assert 'rankzero' not in sys.modules")
    out = run("python", "-c", code, str(saved[0] / "state.pt"), folder=tmp_path).out
    assert float(out) == pytest.approx(saved[1].sum().item())
    failed = run("python", "-c", code, str(saved[0]), folder=tmp_path, code=1)
    assert "IsADirectoryError" in failed.err  # the reason why Rankzero replaces Lightning's function


def test_a_directory_that_is_damaged_or_has_no_manifest_is_refused(saved, tmp_path):
    state = saved[0] / "state.pt"
    state.write_bytes(state.read_bytes()[:-1])
    for folder, message in ((saved[0], "truncated"), (tmp_path, r"manifest\.json")):
        with pytest.raises(RequestError, match=message):
            BoringModel.load_from_checkpoint(folder)


def test_a_checkpoint_file_of_lightning_is_still_read_and_a_second_install_replaces_nothing(module, tmp_path):
    module.trainer.save_checkpoint(tmp_path / "x.ckpt")
    before = saving.pl_load
    from_directory.install()
    assert saving.pl_load is before and before.reads_directories
    with (tmp_path / "x.ckpt").open("rb") as file:
        loaded = [BoringModel.load_from_checkpoint(source) for source in (tmp_path / "x.ckpt", file)]
    assert all(torch.equal(other.layer.weight, module.layer.weight) for other in loaded)


class CompiledNet(DropoutNet):
    def __init__(self, compiled):
        super().__init__()
        if compiled:
            self.layer = torch.compile(self.layer, backend="eager")


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_checkpoint_fits_a_module_whether_or_not_its_submodules_are_compiled(script_folder, is_compiled):
    trainer, saved = Trainer(max_epochs=1, name="x", **QUIET), CompiledNet(is_compiled)
    trainer.fit(saved, samples(), samples())
    path = trainer.checkpoint_callback.best_model_path
    loaded = CompiledNet.load_from_checkpoint(path, compiled=not is_compiled)
    assert "load_state_dict" not in vars(CompiledNet)
    trainer.test(evaluated := CompiledNet(not is_compiled), samples(), ckpt_path=path, verbose=False)
    for module in (loaded, evaluated):
        assert all(map(torch.equal, module.parameters(), saved.parameters()))
    resumed = Trainer(max_epochs=2, name="x", **QUIET)
    resumed.fit(CompiledNet(not is_compiled), samples(), samples())
    assert resumed.global_step == 2 * trainer.global_step
