from io import BytesIO

import pytest
from tensorboard.summary.writer.record_writer import RecordWriter

from rankzero.runs.tensorboard.records import CHECKSUM_BYTES, HEADER_BYTES, is_intact, record_length, record_of


@pytest.mark.parametrize("size", [0, 1, 79, 300, 70_000])
def test_a_record_equals_that_of_tensorboard_and_its_length_is_read_from_an_intact_header_only(size):
    data = bytes(number * 31 % 251 for number in range(size))
    file = BytesIO()
    RecordWriter(file).write(data)
    record = file.getvalue()
    header, checksum = record[:HEADER_BYTES], record[-CHECKSUM_BYTES:]
    assert record_of(data) == record and is_intact(data, checksum)
    assert not is_intact(data + b"x", checksum) and not is_intact(data, checksum[:-1])
    assert record_length(header) == size == len(record) - HEADER_BYTES - CHECKSUM_BYTES
    assert record_length(header[:-1]) is None and record_length(b"") is None
    assert record_length(bytes([header[0] ^ 1]) + header[1:]) is None
