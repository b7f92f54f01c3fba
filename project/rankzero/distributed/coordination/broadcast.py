"""Sends a file of rank zero to all ranks through the process group."""

import io
from collections.abc import Callable
from typing import Any, BinaryIO

import torch
import torch.distributed as dist

from rankzero.distributed.process.system import available_memory

CHUNK_BYTES = 16 << 20
"""Bytes that one collective sends."""


def broadcast_file(
    open_file: Callable[[bool | None], tuple[BinaryIO, bool]], device: torch.device, local_ranks: int
) -> tuple[BinaryIO, bool]:
    """Reads a file on rank zero only; returns a file with the same content on every rank. All ranks must call.

    Each rank keeps the content in memory. If this takes more than half of the memory that is available to rank zero and
    the other processes of its machine, each rank opens the file itself.

    Args:
        open_file: Opens the file, and returns it with a value that all ranks receive. Its argument states whether to
            read the file into memory; None if it may choose.
        device: This rank's device, for the process group.
        local_ranks: The largest number of ranks on a machine.

    Raises:
        Exception: On all ranks, if `open_file` or reading raised it on rank zero.
    """
    header: list[Any] = [None]
    opened: tuple[BinaryIO, bool] | None = None
    content: bytearray | memoryview = bytearray()
    if dist.get_rank() == 0:
        try:
            opened = open_file(None)
            file, value = opened
            size = file.seek(0, io.SEEK_END)
            file.seek(0)
            if fits := size * local_ranks <= available_memory() // 2:
                content = _read(file, size)
            header = [(size, fits, value)]
        except Exception as error:
            header = [error]
    dist.broadcast_object_list(header, src=0, device=device if dist.get_backend() == "nccl" else None)
    if isinstance(header[0], Exception):
        raise header[0]
    size, fits, value = header[0]
    if not fits:
        return opened or open_file(False)
    content = content or bytearray(size)
    for start in range(0, size, CHUNK_BYTES):
        part = torch.frombuffer(content, dtype=torch.uint8, offset=start, count=min(CHUNK_BYTES, size - start))
        sent = part.to(device) if dist.get_backend() == "nccl" else part
        dist.broadcast(sent, src=0)
        if sent is not part:
            part.copy_(sent)
    return io.BufferedReader(_MemoryFile(memoryview(content))), value


def _read(file: BinaryIO, size: int) -> bytearray | memoryview:
    """Returns the whole content of a file; of a file in memory, without a copy."""
    if isinstance(file, io.BytesIO):
        return file.getbuffer()
    content = bytearray(size)
    with file:
        if (count := file.readinto(content)) != size:  # type: ignore[attr-defined]
            raise OSError(f"only {count} of {size} bytes could be read")
    return content


class _MemoryFile(io.RawIOBase):
    """A file whose content is in memory. Unlike io.BytesIO, it does not copy the content."""

    def __init__(self, content: memoryview) -> None:
        super().__init__()
        self._content, self._position = content, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._content)}[whence]
        self._position = max(0, origin + offset)
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        part = self._content[self._position : self._position + len(buffer)]
        buffer[: len(part)] = part
        self._position += len(part)
        return len(part)
