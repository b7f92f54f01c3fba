"""All messages between processes: who sends them, what they contain, and which message answers them.

A connection transmits each as a line of JSON, with one entry for its content; the answer of the rendezvous has several.
After the rendezvous, a rank adds the entry "rank" with its number. An empty message is a heartbeat.
"""

from typing import Any, NamedTuple

from rankzero.distributed.connections.line_connection import Message
from rankzero.distributed.stop_and_failure.agreement import TOPICS
from rankzero.distributed.world import Peer
from rankzero.messages import printable, printable_line


class Text(NamedTuple):
    """Printable text, which is cut after `limit` characters; in one line unless `has_lines`."""

    limit: int
    has_lines: bool = False


class Many(NamedTuple):
    """A list of any length, given the content of an element."""

    content: "Content"


REASON, CAUSE, DIGEST = Text(200), Text(20_000, has_lines=True), Text(64)
MAX_NUMBER = 1 << 63
ANY = object()

Content = type | Text | Many | frozenset[str] | list[Any] | dict[str, Any] | object
"""A type, a text, one of some texts, or a list or an object with the content of each element.

A `Peer` checks its own fields. `ANY` is checked by the receiver.
"""

TOPIC = frozenset(TOPICS)

NODE: dict[str, Content] = {
    "first": Peer,  # rank zero
    "peers": Many(Peer),
    "counts": Many([int, int]),  # processes of a node, and the number of successive nodes with this count
}

FROM_RANK: dict[str, tuple[Content, str]] = {
    "peer": (Peer, "views"),  # the first message, or the answer is "refused"
    "stop": (REASON, "stop_requested"),
    "position": (int, "stop_at"),
    "answer": ([TOPIC, int, bool, int], "decision"),  # number of the question, whether the rank is there, batch
    "value": ([int, ANY], "decided"),  # number of the exchange
    "refusal": (DIGEST, "refusals"),  # of the text of this rank's refusal; empty to ask for those of all ranks
    "status": (ANY, ""),  # the values of a `Status`; null outside training
    "raised": (DIGEST, "same_error"),  # of an error and of where the rank is
    "failed": (CAUSE, "failed"),
    "leaving": (bool, ""),
    "lost": (REASON, "failed"),  # sent by the leader of the rank's node: how its connection ended
}

FROM_LEADER: dict[str, tuple[Content, str]] = {
    "statuses": (list, ""),  # [rank, status] of some ranks of the node
    "gone": (DIGEST, "failed"),  # id of a process, see `rendezvous.server`
}

FROM_SERVER: dict[str, tuple[Content, str]] = {
    "views": (Many(NODE), ""),  # of the nodes that the connection serves; with "key_problem", "ip" and "leader"
    "key_problem": (CAUSE, ""),
    "ip": (REASON, ""),  # of rank zero
    "leader": (int, ""),  # rank at the other end of the connection; zero if absent
    "refused": ([CAUSE, CAUSE, CAUSE], ""),  # what was requested, what was found, what to do instead
    "is_single": (bool, ""),  # whether only this process is refused
    "stop_requested": (REASON, "position"),
    "stop_at": (int, ""),
    "question": ([TOPIC, int], "answer"),  # batch
    "decision": ([TOPIC, int, list], ""),  # batch, ranks that are there
    "gathering": (int, "value"),  # number of the exchange in which rank zero waits
    "decided": ([int, dict], ""),  # number of the exchange; `decision`, `refused` or `missing`
    "refusals": ([dict, int], ""),  # digest -> name of the first rank with this refusal; the rank that asked
    "same_error": (bool, ""),  # whether all ranks have raised the same error at the same point
    "rank_zero": (REASON, "status"),  # phase and step of rank zero
    "hang": (CAUSE, ""),
    "failed": ([CAUSE, int, bool], ""),  # the reporting rank, and whether the failed rank exits by itself
    "done": (bool, ""),
    "rank_zero_lost": (REASON, ""),  # sent by the leader of the node: how the connection to rank zero ended
}


def read(message: Message, types: dict[str, tuple[Content, str]]) -> list[tuple[str, Any]]:
    """Returns name and content of the valid entries of a message, given the messages that its sender may send."""
    entries = []
    for name, value in message.items():
        if name in types:
            try:
                entries.append((name, _checked(value, types[name][0])))
            except ValueError:
                continue
    return entries


def _checked(value: Any, content: Content) -> Any:
    """Returns the value of an entry; raises ValueError if it is not the expected content."""
    if content is int and not (type(value) is int and abs(value) < MAX_NUMBER):
        raise ValueError(f"{value!r} is not a number")
    if content is ANY or type(value) is content:
        return value
    if content is Peer and (peer := Peer.from_message(value)):
        return peer
    if isinstance(content, frozenset) and isinstance(value, str) and value in content:
        return value
    if isinstance(content, Text) and isinstance(value, str):
        return (printable if content.has_lines else printable_line)(value[: content.limit])
    if isinstance(content, list) and isinstance(value, list):
        return [_checked(element, expected) for element, expected in zip(value, content, strict=True)]
    if isinstance(content, Many) and isinstance(value, list):
        return [_checked(element, content.content) for element in value]
    if isinstance(content, dict) and isinstance(value, dict) and value.keys() == content.keys():
        return {name: _checked(value[name], expected) for name, expected in content.items()}
    raise ValueError(f"{value!r} is not {content!r}")
