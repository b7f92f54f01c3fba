import fcntl
import os
import select
import socket
import threading

import pytest

from rankzero.distributed.connections import line_connection
from rankzero.distributed.connections.line_connection import LineConnection, keep_alive
from rankzero.distributed.coordination import network


@pytest.fixture
def pair():
    """Both ends of a connection."""
    first, second = socket.socketpair()
    with first, second:
        yield LineConnection(first), LineConnection(second)


def test_messages_and_heartbeats_arrive_unchanged_even_in_pieces(pair):
    assert pair[1].receive(0.01) == []
    messages = [{"stop": "SIGTERM"}, {"position": -1}, {"failed": "a\nb ä \x00"}, {"deep": {"list": [1, None]}}]
    for message in (*messages, None):
        pair[0].send(message)
    assert pair[1].receive(10) == [*messages, {}]
    found = []
    for piece in (b'{"stop"', b': "now"', b'}\n{"position": 1}\n{"pos', b'ition": 2}\n'):
        pair[0].connection.sendall(piece)
        found.append(pair[1].receive(10))
    assert found == [[], [], [{"stop": "now"}, {"position": 1}], [{"position": 2}]]


@pytest.mark.parametrize(
    "line", [b"GET / HTTP/1.1\r", b"\xff", b"[]", b"7", b"null", b'"a"', b"{", b"9" * 5000, b"[" * 5000], ids=len
)
def test_invalid_lines_are_skipped(pair, line):
    pair[0].connection.sendall(line + b'\n{"position": 1}\n')
    assert pair[1].receive(10) == [{"position": 1}]


def test_messages_of_several_threads_are_not_interleaved(pair):
    count, text = 8, "x" * 20_000
    pair[0].connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # one line takes several system calls
    threads = [threading.Thread(target=pair[0].send, args=({"failed": f"{n}{text}"},)) for n in range(count)]
    for thread in threads:
        thread.start()
    found = set()
    while len(found) < count:
        found |= {message["failed"] for message in pair[1].receive(10)}
    for thread in threads:
        thread.join()
    assert found == {f"{n}{text}" for n in range(count)}


def test_the_messages_after_the_first_can_be_received_later(pair):
    for position in range(3):
        pair[0].send({"position": position})
    assert pair[1].receive(10, only_first=True) == [{"position": 0}]
    pair[0].close()
    assert pair[1].receive(10) == [{"position": 1}, {"position": 2}]


def test_a_message_that_the_other_end_does_not_accept_in_time_ends_the_connection(pair):
    pair[0].connection.settimeout(0.1)
    pair[0].send({"value": "x" * (8 << 20)})
    assert pair[0].receive(10) is None and pair[0].close_reason == " (it does not accept messages)"


def test_receive_returns_none_and_records_a_reason_when_the_connection_ends(pair):
    pair[0].connection.close()
    assert pair[1].receive(10) is None and pair[1].close_reason == " (killed? out of memory?)"
    pair[0].send({"stop": "unread"})
    pair[1].send(None)
    with network.listen("127.0.0.1", 0) as listener:
        client = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    with accepted:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # close() resets the connection
        client.close()
        connection = LineConnection(accepted)
        assert connection.receive(10) is None and connection.close_reason == " (killed? out of memory?)"
        assert connection.receive(10) is None


def test_a_connection_may_have_a_descriptor_above_1023(pair):
    with socket.socket(fileno=fcntl.fcntl(pair[1].connection, fcntl.F_DUPFD, 1024)) as connection:
        with pytest.raises(ValueError, match="out of range"):
            select.select([connection], [], [], 0)
        pair[0].send({"position": 1})
        assert LineConnection(connection).receive(10) == [{"position": 1}]


def test_connections_are_closed_in_a_forked_process(pair):
    process = os.fork()
    if process == 0:
        os._exit(0 if pair[0].connection.fileno() == -1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    assert pair[0].connection.fileno() != -1


def test_tcp_options_detect_a_lost_connection_within_15_seconds():
    with socket.socket() as connection:
        keep_alive(connection)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
        idle, interval, count, unacknowledged = (connection.getsockopt(socket.IPPROTO_TCP, name) for name in options)
        assert idle + interval * count <= 15 and unacknowledged <= 15_000
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


def test_signed_messages_arrive_unchanged_in_both_directions(pair):
    first, second = pair
    first.sign_messages(b"first", b"second")
    second.sign_messages(b"second", b"first")
    for message in ({"stop": "SIGTERM"}, {}, {"position": 3}):
        first.send(message)
        second.send(message)
    assert second.receive(10) == first.receive(10) == [{"stop": "SIGTERM"}, {}, {"position": 3}]


@pytest.mark.parametrize("attack", ["unsigned", "altered", "repeated", "reordered", "removed"])
def test_a_message_that_the_other_end_did_not_send_ends_the_connection(pair, attack):
    recorder, recorded = pair
    recorder.sign_messages(b"first", b"second")
    for number in range(3):
        recorder.send({"position": number})
    lines = [recorded.receive_line(10) for _ in range(3)]
    lines = {
        "unsigned": [lines[0], b'{"stop": "now"}'],
        "altered": [lines[0], lines[1].replace(b"1", b"9")],
        "repeated": [lines[0], lines[0]],
        "reordered": [lines[1], lines[0]],
        "removed": [lines[0], lines[2]],
    }[attack]
    first, second = socket.socketpair()
    with first, second:
        victim = LineConnection(second)
        victim.sign_messages(b"second", b"first")
        first.sendall(b"".join(line + b"\n" for line in lines))
        assert victim.receive(10) is None and victim.close_reason == " (a message has a wrong signature)"


def test_too_long_a_line_ends_the_connection(pair):
    short = LineConnection(pair[1].connection, max_line_bytes=100)
    pair[0].send_line(b"x" * 100)
    assert short.receive_line(10) == b"x" * 100
    pair[0].connection.sendall(b"x" * 101)
    assert short.receive(10) is None and short.close_reason == " (it sent too long a line)"


def test_sending_to_a_non_blocking_socket_never_waits_and_a_client_that_never_reads_is_lost(pair, monkeypatch):
    sender, receiver = pair
    sender.connection.setblocking(False)
    count, message = 0, {"failed": "x" * 10_000}
    while not sender.has_unsent_bytes:
        sender.send(message)
        count += 1
    received = 0
    while received < count:
        received += len(receiver.receive(10))
        sender.flush()
    assert received == count and not sender.has_unsent_bytes
    monkeypatch.setattr(line_connection, "MAX_UNSENT_BYTES", 1 << 20)
    for _ in range(400):
        sender.send(message)
    assert sender.receive(10) is None
    assert sender.close_reason == " (it does not read its control connection)"
