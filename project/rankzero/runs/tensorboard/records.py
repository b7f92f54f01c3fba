"""Records of a TensorBoard file. Imports neither torch, Lightning nor TensorFlow.

tensorboard (2.21) computes checksums in Python, which takes most of the time of reading or writing a file.
"""

import struct

from google_crc32c import value as crc32c

HEADER_BYTES, CHECKSUM_BYTES = 12, 4
"""Bytes before and after the data of a record: its length with a checksum, and a checksum of the data."""


def record_of(data: bytes) -> bytes:
    """Returns a record with header and checksums, as TensorBoard's `RecordWriter` writes it."""
    length = struct.pack("<Q", len(data))
    return length + _checksum(length) + data + _checksum(data)


def record_length(header: bytes) -> int | None:
    """Returns the number of data bytes of a record; None if its header is incomplete or damaged."""
    if len(header) < HEADER_BYTES or _checksum(header[:8]) != header[8:]:
        return None
    return int(struct.unpack_from("<Q", header)[0])


def is_intact(data: bytes, checksum: bytes) -> bool:
    """Returns whether the data of a record matches the checksum after it."""
    return _checksum(data) == checksum


def _checksum(data: bytes) -> bytes:
    """Returns the masked CRC-32C of the TFRecord format."""
    crc = crc32c(data)
    rotated = crc >> 15 | crc << 17 & 0xFFFFFFFF
    return struct.pack("<I", rotated + 0xA282EAD8 & 0xFFFFFFFF)
