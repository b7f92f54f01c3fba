"""Export of weights for other programs; tests/system/test_disks.py exports to a full disk."""

import pytest
import safetensors.torch
import torch
from boring_models import DropoutNet, samples
from lightning.pytorch.core import saving
from lightning.pytorch.demos.boring_classes import BoringModel

from data_modules import Digits
from lightning_modules import ResNet
from rankzero import Trainer
from rankzero.checkpoints.export import export_weights
from rankzero.checkpoints.write import write_directory
from rankzero.messages import CannotStart, RequestError
from rankzero.training.saved_state import from_directory
from running import evaluate_in_process, fit_in_process, run, train_in_process, weights
from stock import QUIET

LOADERS = {".pt": lambda path: torch.load(path, weights_only=True), ".safetensors": safetensors.torch.load_file}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    root = tmp_path_factory.mktemp("export")
    fit_in_process("--model", "ResNet", "--data", "Digits", "--epochs", "1", "--root", str(root), "--run", "x")
    return root / "x"


@pytest.mark.parametrize(("suffix", "source"), [(".pt", "run"), (".safetensors", "checkpoint")])
def test_exported_weights_load_into_the_same_model(exported, cwd, capsys, suffix, source):
    flags = ("--root", str(exported.parent), "--run", "x") if source == "run" else ("--checkpoint", str(exported))
    assert evaluate_in_process(*flags, "--export", f"deep/model{suffix}") == 0
    file = cwd / "deep" / f"model{suffix}"
    found, expected = LOADERS[suffix](file), weights(exported)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    sizes = {name: getattr(Digits(), name) for name in ("in_channels", "image_size", "num_classes")}
    (model := ResNet(**sizes)).load_state_dict(found)
    for loaded in (model, ResNet.load_from_checkpoint(max((exported / "checkpoints").iterdir()), **sizes)):
        assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())
    (line,) = capsys.readouterr().out.splitlines()
    assert f"{len(expected)} tensors" in line and f"{file.stat().st_size:,} bytes" in line
    assert f"{sum(value.numel() for value in expected.values()):,} parameters and buffers" in line
    assert "model.load_state_dict(" in line and [path.name for path in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize("suffix", LOADERS)
def test_shared_tensors_and_views_are_exported_and_other_values_only_to_pt(tmp_path, suffix):
    matrix = torch.arange(12.0).reshape(3, 4)
    state = {"embedding": matrix, "head": matrix, "turned": matrix.t(), "part": matrix[1, 1:3]}
    state["none"] = torch.empty(0, 2)
    torch.save({"state_dict": {**state, "_extra_state": {"seen": 3}}}, tmp_path / "x.ckpt")
    assert "5 tensors, 38 parameters" in export_weights(tmp_path / "x.ckpt", tmp_path / f"x{suffix}")
    found = LOADERS[suffix](tmp_path / f"x{suffix}")
    assert found.pop("_extra_state", None) == ({"seen": 3} if suffix == ".pt" else None)
    assert found.keys() == state.keys() and all(torch.equal(found[name], state[name]) for name in state)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--export", "model.onnx"), "ends in .pt or .safetensors"),
        (("--export", "model"), "ends in .pt or .safetensors"),
        (("--export", "/proc/model.pt"), "folder where you may write"),
        (("--export", "x.pt", "--checkpoint", "bare.ckpt"), "contains no weights"),
    ],
)
def test_a_wrong_file_and_a_checkpoint_without_weights_are_refused(exported, cwd, arguments, message):
    torch.save({"epoch": 3}, "bare.ckpt")
    with pytest.raises(CannotStart, match=message):
        evaluate_in_process("--root", str(exported.parent), *arguments)
    assert not (cwd / "x.pt").exists()


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
@pytest.mark.parametrize("order", [("import rankzero", ""), ("", "import rankzero")])
def test_a_directory_is_loaded_for_any_order_of_imports(saved, tmp_path, order):
    first, second = order
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
