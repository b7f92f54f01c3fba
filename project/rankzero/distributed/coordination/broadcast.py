"""Sends a file of rank zero to all ranks through the process group."""

import io
from collections.abc import Callable
from typing import Any, BinaryIO

import torch
import torch.distributed as dist

CHUNK_BYTES = 16 << 20
"""Bytes that one collective sends."""


def broadcast_file(open_file: Callable[[], tuple[BinaryIO, bool]], device: torch.device) -> tuple[BinaryIO, bool]:
    """Reads a file on rank zero only; returns a file with the same content on every rank. All ranks must call.

    Args:
        open_file: Opens the file, and returns it with a value that all ranks receive. Called on rank zero.
        device: This rank's device, for the process group.

    Raises:
        Exception: On all ranks, if `open_file` or reading raised it on rank zero.
    """
    header: list[Any] = [None]
    file: BinaryIO | None = None
    if dist.get_rank() == 0:
        try:
            file, value = open_file()
            header = [(file.seek(0, io.SEEK_END), value)]
            file.seek(0)
        except Exception as error:
            header = [error]
    dist.broadcast_object_list(header, src=0, device=device if dist.get_backend() == "nccl" else None)
    if isinstance(header[0], Exception):
        raise header[0]
    size, value = header[0]
    content = bytearray(size)
    for start in range(0, size, CHUNK_BYTES):
        part = torch.frombuffer(content, dtype=torch.uint8, offset=start, count=min(CHUNK_BYTES, size - start))
        if file is not None:
            file.readinto(memoryview(content)[start : start + len(part)])  # type: ignore[attr-defined]
        _broadcast(part, device)
    if file is not None:
        file.close()
    return io.BufferedReader(_MemoryFile(memoryview(content))), value


def _broadcast(part: torch.Tensor, device: torch.device) -> None:
    """Sends a tensor in CPU memory from rank zero to all ranks."""
    if dist.get_backend() != "nccl":
        dist.broadcast(part, src=0)
        return
    on_device = part.to(device)
    dist.broadcast(on_device, src=0)
    part.copy_(on_device)


class _MemoryFile(io.RawIOBase):
    """A file whose content is in memory. Unlike io.BytesIO, it does not copy the content.

    Args:
        content: The content.
    """

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
