import threading
from collections import OrderedDict

import pytest
import torch

from rankzero.runs.checkpoints.checkpoint_io import DirectoryCheckpointIO
from rankzero.runs.checkpoints.manifest import MANIFEST, STATE, checkpoints_in, read_manifest, verify
from rankzero.runs.checkpoints.write import write_directory
from running import SOURCES, run


def content(step, **entries):
    return {"epoch": 1, "global_step": step, "w": torch.full((3,), step), "rankzero": {"run": "x"}, **entries}


def save(folder, step, **entries):
    path = folder / f"step-{step:08d}"
    write_directory(content(step, **entries), path)
    return path


def load(path):
    return DirectoryCheckpointIO().load_checkpoint(path)


@pytest.fixture
def saved(tmp_path):
    for step in (10, 20):
        save(tmp_path, step)
    return tmp_path


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_saved_checkpoint_is_read_with_its_content_and_manifest(saved):
    path = saved / "step-00000020"
    assert torch.equal(load(path)["w"], torch.full((3,), 20))
    manifest = read_manifest(path)
    assert (manifest["epoch"], manifest["step"], manifest["rankzero"]) == (1, 20, {"run": "x"})
    assert (manifest["contents"], manifest["needs"]) == (["epoch", "global_step", "rankzero", "w"], [])
    assert names(path) == [MANIFEST, STATE]
    assert [entry.name for entry in checkpoints_in(saved)] == ["step-00000010", "step-00000020"]


def test_remove_checkpoint_removes_the_directory(saved):
    DirectoryCheckpointIO().remove_checkpoint(saved / "step-00000010")
    assert names(saved) == ["step-00000020"]


def test_the_manifest_lists_classes_that_need_trust_and_loading_requires_trust(saved, tmp_path, monkeypatch):
    path = save(saved, 30, own={"batches": range(3)})
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "another user"))
    assert read_manifest(path)["needs"] == ["builtins.range"]
    with pytest.raises(ValueError, match=r"builtins\.range(.|\n)*--trust_checkpoint yes"):
        load(path)
    assert DirectoryCheckpointIO(trusted=True).load_checkpoint(path)["own"] == {"batches": range(3)}


def test_a_ckpt_checkpoint_is_one_file_as_in_stock_lightning(tmp_path):
    plugin = DirectoryCheckpointIO()
    for value in (4, 5):
        plugin.save_checkpoint({"w": value}, tmp_path / "deep" / "best.ckpt")
    assert names(tmp_path / "deep") == ["best.ckpt"] and load(tmp_path / "deep" / "best.ckpt") == {"w": 5}
    plugin.remove_checkpoint(tmp_path / "deep" / "best.ckpt")
    assert names(tmp_path / "deep") == []


class Gate:
    """Blocks the background save that calls `commit` until `open` is set."""

    def __init__(self):
        self.open = threading.Event()

    def commit(self, path):
        self.open.wait()


def test_a_background_save_writes_the_state_at_the_time_of_the_call(tmp_path):
    gate = Gate()
    plugin = DirectoryCheckpointIO()
    plugin.on_committed = gate.commit
    weights = torch.zeros(1000)
    plugin.save_checkpoint({"w": weights, "step": [1]}, tmp_path / "step-1")
    weights.fill_(1)
    gate.open.set()
    plugin.wait()
    assert load(tmp_path / "step-1")["w"].sum() == 0 and plugin.last_seconds > 0
    plugin.save_checkpoint({"w": weights, "step": [1]}, tmp_path / "step-2")
    plugin.wait()
    assert load(tmp_path / "step-2")["w"].sum() == 1000 and load(tmp_path / "step-1")["w"].sum() == 0


def test_save_returns_before_the_background_save_ends_and_the_next_save_waits(tmp_path):
    gate, committed = Gate(), []
    plugin = DirectoryCheckpointIO()
    plugin.on_committed = lambda path: (gate.commit(path), committed.append(path.name))
    plugin.save_checkpoint(content(1), tmp_path / "step-1")
    assert committed == []
    second = threading.Thread(target=plugin.save_checkpoint, args=(content(2), tmp_path / "step-2"))
    second.start()
    gate.open.set()
    second.join()
    plugin.wait()
    assert committed == ["step-1", "step-2"]


def test_an_error_in_a_background_save_is_reported_by_the_writer_thread(tmp_path):
    (tmp_path / "file").touch()
    reported = []
    plugin = DirectoryCheckpointIO()
    plugin.on_error = lambda path, error: reported.append((path, type(error)))
    plugin.save_checkpoint(content(1), tmp_path / "file" / "step-1")
    plugin.wait()
    assert reported in ([(tmp_path / "file" / "step-1", kind)] for kind in (NotADirectoryError, FileExistsError))
    plugin.save_checkpoint(content(2), tmp_path / "step-2")
    plugin.wait()
    verify(tmp_path / "step-2")


@pytest.mark.system
def test_a_process_exits_only_after_its_background_save(tmp_path):
    (tmp_path / "late.py").write_text(
        "import threading, torch\n"
        "from pathlib import Path\n"
        "from rankzero.runs.checkpoints.checkpoint_io import DirectoryCheckpointIO\n"
        "def late(path):\n"
        "    threading.main_thread().join()\n"
        "    path.rename('step-2')\n"
        "plugin = DirectoryCheckpointIO()\n"
        "plugin.on_committed = late\n"
        "plugin.save_checkpoint({'w': torch.zeros(9)}, Path('step-1'))\n"
    )
    run("python", "late.py", folder=tmp_path, environment={"PYTHONPATH": SOURCES})
    verify(tmp_path / "step-2")


def test_a_state_that_cannot_be_copied_raises_an_error_immediately(tmp_path):
    plugin = DirectoryCheckpointIO()
    with pytest.raises(TypeError, match="cannot pickle"):
        plugin.save_checkpoint({"lock": threading.Lock()}, tmp_path / "step-1")
    assert names(tmp_path) == []


def test_a_background_save_writes_the_same_content_as_torch_save(tmp_path):
    tensor = torch.arange(10.0)
    layer = torch.nn.Linear(3, 3)
    state = OrderedDict(whole=tensor, part=tensor[2:6], again=tensor, turned=layer.weight.t(), own=layer.weight)
    state["nested"] = ({"x": [tensor[::3]], "none": torch.empty(0)}, torch.float16, torch.tensor(3))
    torch.save(state, tmp_path / "plain.pt")
    expected = torch.load(tmp_path / "plain.pt")
    plugin = DirectoryCheckpointIO()
    plugin.save_checkpoint(state, tmp_path / "step-1")
    plugin.wait()
    found = load(tmp_path / "step-1")
    assert list(found) == list(expected) and type(found) is type(expected) and type(found["own"]) is torch.nn.Parameter
    for name in ("whole", "part", "again", "turned", "own"):
        assert torch.equal(found[name], expected[name]) and found[name].stride() == expected[name].stride()
    found["whole"].fill_(7)
    assert found["part"].tolist() == [7] * 4 and found["nested"][0]["x"][0].tolist() == [7] * 4
    assert (tmp_path / "step-1" / STATE).stat().st_size == pytest.approx(
        (tmp_path / "plain.pt").stat().st_size, abs=512
    )


@pytest.fixture
def io(tmp_path):
    """Returns a checkpoint plugin that writes in the background, below `tmp_path`."""
    plugin = DirectoryCheckpointIO()
    plugin.folder = tmp_path
    return plugin


def hold(io, step):
    io.holds = True
    io.save_checkpoint(content(step), io.folder / f"step-{step:08d}")
    io.holds = False


def test_a_held_checkpoint_is_written_on_request(io, tmp_path):
    hold(io, 10)
    hold(io, 20)
    io.wait()
    assert names(tmp_path) == []
    io.write_held()
    io.write_held()
    io.wait()
    assert names(tmp_path) == ["step-00000020"] and verify(tmp_path / "step-00000020") is None
    assert torch.equal(load(tmp_path / "step-00000020")["w"], torch.full((3,), 20))


def test_without_a_held_checkpoint_nothing_is_written(io, tmp_path):
    io.write_held()
    io.wait()
    assert names(tmp_path) == []


def test_a_save_replaces_the_held_checkpoint(io, tmp_path):
    hold(io, 10)
    io.save_checkpoint(content(20), tmp_path / "step-00000020")
    io.write_held()
    io.wait()
    assert names(tmp_path) == ["step-00000020"]


def test_a_held_checkpoint_that_exists_is_not_written_again(io, tmp_path):
    path = save(tmp_path, 10)
    before = (path / STATE).stat().st_mtime_ns
    hold(io, 10)
    io.write_held()
    io.wait()
    assert (path / STATE).stat().st_mtime_ns == before


def test_nothing_is_held_while_an_earlier_copy_is_written(io, tmp_path):
    """The copies share their memory."""
    may_end, written = threading.Event(), []
    io.on_committed = lambda path: may_end.wait(30) and written.append(path.name)
    io.save_checkpoint(content(10), tmp_path / "step-00000010")
    hold(io, 20)
    io.write_held()
    may_end.set()
    io.wait()
    assert written == names(tmp_path) == ["step-00000010"]


def test_the_held_checkpoint_does_not_change_with_the_state(io, tmp_path):
    state = content(10)
    io.holds = True
    io.save_checkpoint(state, tmp_path / "step-00000010")
    state["w"].fill_(99)
    io.write_held()
    io.wait()
    assert torch.equal(load(tmp_path / "step-00000010")["w"], torch.full((3,), 10))
