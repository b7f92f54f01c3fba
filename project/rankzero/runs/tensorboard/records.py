"""Header of a record in a TensorBoard file. Imports neither torch, Lightning nor TensorFlow."""

import struct
from functools import lru_cache

HEADER_BYTES, CHECKSUM_BYTES = 12, 4
"""Bytes before and after the data of a record: its length with a checksum, and a checksum of the data."""


def record_length(header: bytes) -> int | None:
    """Returns the number of data bytes of a record; None if its header is incomplete or damaged.

    The checksum of the data is not verified: tensorboard's reader (2.21) computes checksums in Python, which takes most
    of its time.

    Args:
        header: The first `HEADER_BYTES` of the record.
    """
    if len(header) < HEADER_BYTES:
        return None
    length, checksum = struct.unpack("<QI", header)
    return int(length) if checksum == _checksum(header[:8]) else None


@lru_cache(maxsize=1024)  # most records of a file have one of a few sizes
def _checksum(size: bytes) -> int:
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    return int(masked_crc32c(size))
