import re
from pathlib import Path

import pytest

from rankzero.distributed.stop_and_failure import protocol
from rankzero.distributed.stop_and_failure.protocol import FROM_LEADER, FROM_RANK, FROM_SERVER, read

SOURCES = [file.read_text() for file in Path(protocol.__file__).parents[1].glob("*/*.py")]
SENT = re.findall(r'(?:send(?:_all)?\(|message = )\{"(\w+)"', "".join(SOURCES))


def test_every_message_that_is_sent_is_in_a_table_and_so_is_its_answer():
    names = FROM_RANK.keys() | FROM_LEADER.keys() | FROM_SERVER.keys()
    assert len(set(SENT)) > 15 and set(SENT) - {"rank"} <= names
    answers = {answer for types in (FROM_RANK, FROM_LEADER, FROM_SERVER) for _, answer in types.values()}
    assert answers - {""} <= names


@pytest.mark.parametrize("types", [FROM_RANK, FROM_LEADER, FROM_SERVER], ids=["rank", "leader", "server"])
@pytest.mark.parametrize(
    "value", [None, 1.5, [], [1], ["x", 1, True, 2], {}, 1 << 64, [1, 2, 3], ["stop", True], [[], 1]], ids=repr
)
def test_content_of_another_type_is_ignored(types, value):
    for name, (content, _) in types.items():
        entries = read({name: value}, types)
        is_empty_list = value == [] and isinstance(content, protocol.Many)
        expected = content is protocol.ANY or is_empty_list or (type(value) is content and value != 1 << 64)
        assert entries == ([(name, value)] if expected else []), name


def test_valid_content_is_returned_and_text_is_cut_and_made_printable():
    message = {"rank": 3, "answer": ["stop", 1, False, 7], "unknown": 1, "stop": "\x1b[2J\nx" + "y" * 300}
    (answer, stop) = read(message, FROM_RANK)
    assert answer == ("answer", ["stop", 1, False, 7])
    assert stop[1].startswith("?[2J") and "\n" not in stop[1] and len(stop[1]) == protocol.REASON.limit
    assert read({"failed": ["first\nsecond", 0, True]}, FROM_SERVER) == [("failed", ["first\nsecond", 0, True])]
    assert read({"answer": ["another topic", 1, False, 7]}, FROM_RANK) == []
