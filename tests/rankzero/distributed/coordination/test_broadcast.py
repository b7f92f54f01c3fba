"""Real ranks: a file is read by rank zero only, and arrives on all."""

import io
import os
import zipfile
from pathlib import Path

import pytest
import torch

from rankzero.distributed.coordination import broadcast
from rankzero.distributed.coordination.broadcast import broadcast_file
from rankzero.messages import RequestError


def receive(coordinator, path, chunk, local_ranks=1):
    """Returns the content that one rank receives, the value, and how often this rank has opened the file."""
    opened = []

    def open_file(in_memory):
        opened.append(path)
        return Path(path).open("rb"), "a value"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(broadcast, "CHUNK_BYTES", chunk)
        file, value = broadcast_file(open_file, torch.device("cpu"), local_ranks)
        with file:
            return file.read(), value, len(opened)


@pytest.mark.parametrize("size", [0, 1, 1000, 1001])
def test_all_ranks_receive_the_content_that_rank_zero_reads(on_ranks, tmp_path, size):
    content = os.urandom(size)
    (tmp_path / "file").write_bytes(content)
    results = on_ranks(receive, 3, str(tmp_path / "file"), 100)
    assert results == [(content, "a value", int(rank == 0)) for rank in range(3)]


def test_each_rank_reads_a_file_that_does_not_fit_into_memory_once_per_rank(on_ranks, tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    assert on_ranks(receive, 2, str(tmp_path / "file"), 100, 10**15) == [(b"content", "a value", 1)] * 2


class Truncated(io.BufferedReader):
    """A file of five bytes that another process has truncated after its size of ten bytes was read."""

    def __init__(self):
        super().__init__(io.BytesIO(bytes(5)))

    def seek(self, offset, whence=io.SEEK_SET):
        return 10 if whence == io.SEEK_END else super().seek(offset, whence)


def read_truncated(coordinator):
    try:
        broadcast_file(lambda in_memory: (Truncated(), None), torch.device("cpu"), 1)
    except OSError as error:
        return str(error)
    return None


def test_a_file_that_ends_early_is_an_error_on_all_ranks(on_ranks):
    assert on_ranks(read_truncated, 2) == ["only 5 of 10 bytes could be read"] * 2


def load(coordinator, path):
    file, _ = broadcast_file(lambda in_memory: (io.BytesIO(Path(path).read_bytes()), None), torch.device("cpu"), 1)
    with zipfile.ZipFile(file) as archive:
        names = len(archive.namelist())
    file.seek(0)
    return torch.load(file, weights_only=True)["x"].sum().item(), names > 2


def test_torch_loads_the_received_file(on_ranks, tmp_path):
    torch.save({"x": torch.arange(1000.0)}, tmp_path / "file")
    assert on_ranks(load, 2, str(tmp_path / "file")) == [(499500.0, True)] * 2


def fail(coordinator):
    def open_file(in_memory):
        raise RequestError("the checkpoint x", "truncated", "another one")

    try:
        broadcast_file(open_file, torch.device("cpu"), 1)
    except RequestError as error:
        return error.args
    return None


def test_an_error_of_rank_zero_is_raised_on_all_ranks(on_ranks):
    assert on_ranks(fail, 2) == [("the checkpoint x", "truncated", "another one")] * 2
