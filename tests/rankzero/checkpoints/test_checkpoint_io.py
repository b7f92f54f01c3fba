import threading
from collections import OrderedDict

import pytest
import torch
from checkpoint_files import content, load, names

from rankzero.checkpoints.checkpoint_io import DirectoryCheckpointIO, Snapshots
from rankzero.checkpoints.manifest import MANIFEST, STATE, Retention, checkpoints_in, read_manifest, verify
from rankzero.checkpoints.write import write_directory


def test_weights_of_a_gpu_are_copied_in_its_queue_and_awaited_before_they_are_read(monkeypatch):
    calls, weights, copy, empty = [], torch.arange(3.0), torch.UntypedStorage.copy_, torch.empty
    on_gpu = weights.untyped_storage()._cdata

    class Event:
        record = lambda self: calls.append("event")  # noqa: E731
        synchronize = lambda self: calls.append("wait")  # noqa: E731

    def device_of(storage):
        return torch.device("cuda" if storage._cdata == on_gpu else "cpu")

    def recorded_copy(storage, source, non_blocking):
        calls.append(f"copy, non_blocking={non_blocking}")
        return copy(storage, source, non_blocking)

    def new_memory(*size, pin_memory=False, **settings):
        if pin_memory:
            calls.append("new pinned memory")
        return empty(*size, **settings)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.UntypedStorage, "device", property(device_of))
    monkeypatch.setattr(torch.UntypedStorage, "copy_", recorded_copy)
    monkeypatch.setattr(torch, "empty", new_memory)
    snapshots = Snapshots()
    copied = snapshots.take({"weights": weights})
    assert calls == ["new pinned memory", "copy, non_blocking=True", "event"]
    snapshots.wait()
    assert calls.pop() == "wait" and torch.equal(copied["weights"], weights)
    snapshots.take({"weights": weights})
    assert calls[3:] == ["copy, non_blocking=True", "event"]


def test_the_writer_reads_a_copy_after_the_gpu_has_made_it(tmp_path):
    io, calls = DirectoryCheckpointIO(), []
    io.folder, io.accepts = tmp_path, lambda checkpoint, path: calls.append("read")
    io._snapshots.wait = lambda: calls.append("wait")
    io.save_checkpoint({}, tmp_path / "step-00000001")
    io.wait()
    assert calls == ["wait", "read"]


@pytest.fixture
def io():
    return DirectoryCheckpointIO()


def test_a_saved_checkpoint_is_read_with_its_content_and_manifest_until_it_is_removed(saved, io):
    path = saved / "step-00000020"
    assert torch.equal(load(path)["w"], torch.full((3,), 20))
    manifest = read_manifest(path)
    assert (manifest["epoch"], manifest["step"], manifest["rankzero"]) == (1, 20, {"run": "x"})
    assert (manifest["contents"], manifest["needs"]) == (["epoch", "global_step", "rankzero", "w"], [])
    assert names(path) == [MANIFEST, STATE]
    assert [entry.name for entry in checkpoints_in(saved)] == ["step-00000010", "step-00000020"]
    io.remove_checkpoint(saved / "step-00000010")
    assert names(saved) == ["step-00000020"]
    best = saved / "deep/best.ckpt"  # one file, as in stock Lightning
    for value in (4, 5):
        io.save_checkpoint({"w": value}, best)
    assert names(best.parent) == ["best.ckpt"] and load(best) == {"w": 5}
    io.remove_checkpoint(best)
    assert names(best.parent) == []


def test_a_background_save_writes_the_state_at_the_time_of_the_call_and_the_next_save_waits(tmp_path, io):
    may_end, committed, weights = threading.Event(), [], torch.zeros(1000)
    state = {"w": weights, "list": [1, {"x": (2,)}], "dtype": torch.float16, "shape": torch.Size([2])}
    io.on_committed = lambda path: may_end.wait() and committed.append(path.name)
    io.save_checkpoint(state, tmp_path / "step-1")
    assert committed == []
    weights.fill_(1)
    state["list"][1]["x"] = None
    second = threading.Thread(target=io.save_checkpoint, args=(state, tmp_path / "step-2"))
    second.start()
    may_end.set()
    second.join()
    io.wait()
    assert committed == ["step-1", "step-2"] and io.last_seconds > 0
    for name, total, nested in (("step-1", 0, (2,)), ("step-2", 1000, None)):
        loaded = load(tmp_path / name)
        assert loaded.pop("w").sum() == total and loaded.pop("list") == [1, {"x": nested}]
        assert loaded == {"dtype": torch.float16, "shape": torch.Size([2])}


def test_an_error_in_a_background_save_is_reported_by_the_writer_thread_and_one_in_its_copy_is_raised(tmp_path, io):
    (tmp_path / "file").touch()
    reported = []
    io.on_error = lambda path, error: reported.append((path, type(error)))
    io.save_checkpoint(content(1), tmp_path / "file" / "step-1")
    io.wait()
    assert reported in ([(tmp_path / "file" / "step-1", kind)] for kind in (NotADirectoryError, FileExistsError))
    with pytest.raises(TypeError, match="cannot pickle"):
        io.save_checkpoint({"lock": threading.Lock()}, tmp_path / "step-1")
    io.save_checkpoint(content(2), tmp_path / "step-2")
    io.wait()
    verify(tmp_path / "step-2")
    assert names(tmp_path) == ["file", "step-2"]


def test_a_background_save_writes_the_same_content_as_torch_save(tmp_path, io):
    tensor, layer = torch.arange(10.0), torch.nn.Linear(3, 3)
    state = OrderedDict(whole=tensor, part=tensor[2:6], again=tensor, turned=layer.weight.t(), own=layer.weight)
    state["nested"] = ({"x": [tensor[::3]], "none": torch.empty(0)}, torch.float16, torch.tensor(3))
    torch.save(state, tmp_path / "plain.pt")
    expected = torch.load(tmp_path / "plain.pt")
    io.save_checkpoint(state, tmp_path / "step-1")
    io.wait()
    found = load(tmp_path / "step-1")
    assert list(found) == list(expected) and type(found) is type(expected) and type(found["own"]) is torch.nn.Parameter
    for name in ("whole", "part", "again", "turned", "own"):
        assert torch.equal(found[name], expected[name]) and found[name].stride() == expected[name].stride()
    found["whole"].fill_(7)
    assert found["part"].tolist() == [7] * 4 and found["nested"][0]["x"][0].tolist() == [7] * 4
    plain_bytes = (tmp_path / "plain.pt").stat().st_size
    assert (tmp_path / "step-1" / STATE).stat().st_size == pytest.approx(plain_bytes, abs=512)


def hold(io, state, folder):
    io.holds = True
    io.save_checkpoint(state, folder / f"step-{state['global_step']:08d}")
    io.holds = False


def write_held(io):
    io.write_held()
    io.wait()


def test_only_the_newest_held_checkpoint_is_written_on_request_as_it_was_held(io, tmp_path):
    write_held(io)  # nothing is held
    state = content(20)
    hold(io, content(10), tmp_path)
    hold(io, state, tmp_path)
    io.wait()
    state["w"].fill_(99)
    assert names(tmp_path) == []
    io.write_held()
    write_held(io)
    assert names(tmp_path) == ["step-00000020"] and verify(tmp_path / "step-00000020") is None
    assert torch.equal(load(tmp_path / "step-00000020")["w"], torch.full((3,), 20))
    hold(io, content(30), tmp_path)
    io.save_checkpoint(content(40), tmp_path / "step-00000040")  # replaces the held checkpoint
    write_held(io)
    assert names(tmp_path) == ["step-00000020", "step-00000040"]
    before = (tmp_path / "step-00000040" / STATE).stat().st_mtime_ns
    hold(io, content(40), tmp_path)  # exists
    write_held(io)
    assert (tmp_path / "step-00000040" / STATE).stat().st_mtime_ns == before


def test_nothing_is_held_while_an_earlier_copy_is_written(io, tmp_path):
    """The copies share their memory."""
    may_end, written = threading.Event(), []
    io.on_committed = lambda path: may_end.wait() and written.append(path.name)
    io.save_checkpoint(content(10), tmp_path / "step-00000010")
    hold(io, content(20), tmp_path)
    io.write_held()
    may_end.set()
    io.wait()
    assert written == names(tmp_path) == ["step-00000010"]


@pytest.fixture
def folder(tmp_path):
    for step, loss in ((1, 3.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, None), (6, 2.5)):
        metrics = {"val/loss": loss, "val/accuracy": step / 10}
        write_directory({"global_step": step, "rankzero": {"metrics": metrics}}, tmp_path / f"step-{step:08d}")
    return tmp_path


def steps(paths):
    return [int(path.name.removeprefix("step-")) for path in paths]


def test_the_newest_checkpoints_are_kept(folder):
    assert steps(Retention(keep=2).surplus(folder)) == [1, 2, 3, 4]
    assert Retention(keep=6).surplus(folder) == Retention(keep=9).surplus(folder) == []
    for newest_or_unknown in ("max:val/accuracy", "min:other"):
        assert steps(Retention(keep=1, best=newest_or_unknown).surplus(folder)) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("best", "kept_step"), [("min:val/loss", 2), ("max:val/loss", 1), ("min:val/accuracy", 1)])
def test_the_best_checkpoint_with_a_valid_manifest_is_kept_too(folder, best, kept_step):
    retention = Retention(keep=1, best=best)
    assert steps([retention.best_in(folder)]) == [kept_step]
    assert steps(retention.surplus(folder)) == [step for step in range(1, 6) if step != kept_step]
    (folder / f"step-{kept_step:08d}/manifest.json").write_text("{}")
    assert steps([retention.best_in(folder)]) == [{"min:val/loss": 3, "max:val/loss": 6, "min:val/accuracy": 2}[best]]
