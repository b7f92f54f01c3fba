"""Real ranks: a file is read by rank zero only, and arrives on all."""

import io
import os
from unittest.mock import Mock

import pytest
import torch

from rankzero.distributed.coordination import broadcast
from rankzero.distributed.coordination.broadcast import broadcast_file
from rankzero.messages import RequestError

CHUNK, FITS, DOES_NOT_FIT = 100, 1, 10**15
"""Bytes that are sent at once, and numbers of local ranks for which a file does or does not fit into memory."""


def receive(coordinator, files):
    """Returns, for each file, the content that one rank receives, the value, and how often it has opened the file."""
    received = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(broadcast, "CHUNK_BYTES", CHUNK)
        for path, local_ranks in files:
            open_file = Mock(side_effect=lambda in_memory, path=path: (path.open("rb"), "a value"))
            file, value = broadcast_file(open_file, torch.device("cpu"), local_ranks)
            with file:
                received.append((file.read(), value, open_file.call_count))
    return received


def test_rank_zero_reads_a_file_for_all_ranks_unless_it_does_not_fit_into_memory(on_ranks, tmp_path):
    contents = [os.urandom(size) for size in (0, 1, 10 * CHUNK, 10 * CHUNK + 1)]
    for number, content in enumerate(contents):
        (tmp_path / str(number)).write_bytes(content)
    files = [*((tmp_path / str(number), FITS) for number in range(4)), (tmp_path / "3", DOES_NOT_FIT)]
    for rank, received in enumerate(on_ranks(receive, 3, files)):
        assert received[:4] == [(content, "a value", int(rank == 0)) for content in contents]
        assert received[4] == (contents[3], "a value", 1)


class Truncated(io.BufferedReader):
    """A file of five bytes that another process has truncated after its size of ten bytes was read."""

    def __init__(self):
        super().__init__(io.BytesIO(bytes(5)))

    def seek(self, offset, whence=io.SEEK_SET):
        return 10 if whence == io.SEEK_END else super().seek(offset, whence)


def receive_errors_and_tensors(coordinator, path):
    """Returns the errors for a truncated and a refused file, and the sum in a file that torch loads."""
    errors, refuse = [], Mock(side_effect=RequestError("the checkpoint x", "truncated", "another one"))
    for open_file in (lambda in_memory: (Truncated(), None), refuse):
        with pytest.raises((OSError, RequestError)) as error:
            broadcast_file(open_file, torch.device("cpu"), FITS)
        errors.append(error.value.args)
    file, _ = broadcast_file(lambda in_memory: (io.BytesIO(path.read_bytes()), None), torch.device("cpu"), FITS)
    return errors, torch.load(file, weights_only=True)["x"].sum().item()


def test_an_error_of_rank_zero_is_raised_on_all_ranks_and_torch_loads_a_received_file(on_ranks, tmp_path):
    torch.save({"x": torch.arange(1000.0)}, tmp_path / "file")
    errors = [("only 5 of 10 bytes could be read",), ("the checkpoint x", "truncated", "another one")]
    assert on_ranks(receive_errors_and_tensors, 2, tmp_path / "file") == [(errors, 499500.0)] * 2
