import torch

from rankzero.runs.checkpoints.checkpoint_io import DirectoryCheckpointIO
from rankzero.runs.checkpoints.snapshot import Snapshots


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
