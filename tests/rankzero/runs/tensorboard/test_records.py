from io import BytesIO

from tensorboard.summary.writer.record_writer import RecordWriter

from rankzero.runs.tensorboard.records import CHECKSUM_BYTES, HEADER_BYTES, record_length


def test_the_length_of_a_record_is_read_from_an_intact_header_only():
    file = BytesIO()
    RecordWriter(file).write(bytes(300))
    data = file.getvalue()
    header = data[:HEADER_BYTES]
    assert record_length(header) == 300 == len(data) - HEADER_BYTES - CHECKSUM_BYTES
    assert record_length(header[:-1]) is None and record_length(b"") is None
    assert record_length(bytes([header[0] ^ 1]) + header[1:]) is None
