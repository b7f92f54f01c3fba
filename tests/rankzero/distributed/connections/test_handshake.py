import socket
import threading
from contextlib import ExitStack

import pytest

from rankzero.distributed.connections import handshake
from rankzero.distributed.connections.handshake import GREETING, Challenge, answer_to_hello, hello, is_servers_proof
from rankzero.distributed.connections.line_connection import LineConnection

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
CHALLENGE = Challenge.new("job 7")


def test_each_end_proves_in_this_connection_only_that_it_knows_the_key():
    nonce, line = hello(CHALLENGE, KEY)
    answer, keys = answer_to_hello(CHALLENGE, line, KEY)
    assert is_servers_proof(answer, CHALLENGE, nonce, KEY)
    assert keys == handshake.session_keys(KEY, CHALLENGE, nonce) and keys.client != keys.server
    assert not is_servers_proof(line.split(b" ")[1], CHALLENGE, nonce, KEY), "the client's own proof proves nothing"
    for other in (Challenge.new("job 7"), CHALLENGE._replace(world_id="job 8")):
        assert answer_to_hello(other, line, KEY) == (b"-", None)
        assert not is_servers_proof(answer, other, nonce, KEY)


def test_without_a_common_key_nothing_is_proven():
    for of_client, of_server in ((KEY, OTHER_KEY), (KEY, None), (None, KEY), (None, None)):
        nonce, line = hello(CHALLENGE, of_client)
        answer, keys = answer_to_hello(CHALLENGE, line, of_server)
        assert answer == b"-" and keys is None
        assert not is_servers_proof(answer, CHALLENGE, nonce, KEY)


def test_malformed_hellos_and_greetings_of_another_world_are_not_recognized():
    nonce = b"0" * 32
    malformed = [b"", b"-", b"\xff", b"[" * 4000, b"G" * 32 + b" -", nonce[1:] + b" -"]
    malformed += [nonce + end for end in (b"", b" ", b" x")]
    assert [answer_to_hello(CHALLENGE, line, KEY) for line in malformed] == [None] * 9
    assert handshake.parse_greeting(CHALLENGE.line(), "job 7") == CHALLENGE
    assert handshake.parse_greeting(CHALLENGE.line(), "job 8") is None
    malformed = b"", b"HTTP/1.1 400", b"\xff" * 99, GREETING.encode(), b"[" * 4000, b'RANKZERO/3 short "job 7"'
    assert [handshake.parse_greeting(line, "job 7") for line in malformed] == [None] * 6


@pytest.fixture
def serve():
    """Returns a function that starts a server with a given key, or given answers, and connects a client to it."""

    def run(server, secret, answers):
        for answer in answers or (CHALLENGE.line(),):
            server.send_line(answer)
        if not answers and (line := server.receive_line(10)):
            answer, keys = answer_to_hello(CHALLENGE, line, secret)
            server.send_line(answer)
            if keys:
                server.sign_messages(keys.server, keys.client)
            server.send({"position": 1})

    def start(secret, *answers):
        first, second = (opened.enter_context(end) for end in socket.socketpair())
        thread = threading.Thread(target=run, args=(LineConnection(first), secret, answers))
        thread.start()
        opened.callback(thread.join, 10)
        return LineConnection(second)

    with ExitStack() as opened:
        yield start


@pytest.mark.parametrize(("secret", "requires_key", "is_signed"), [(KEY, True, True), (OTHER_KEY, False, False)])
def test_messages_are_signed_after_the_handshake_if_both_ends_have_the_key(serve, secret, requires_key, is_signed):
    client = serve(secret)
    assert handshake.perform_handshake(client, "job 7", KEY, requires_key, 10)
    assert client.is_authenticated == is_signed and client.receive(10) == [{"position": 1}]


@pytest.mark.parametrize(
    ("server", "secret", "requires_key"),
    [
        ((OTHER_KEY,), KEY, True),
        ((None, CHALLENGE.line(), b"required"), None, False),
        ((None, CHALLENGE.line(), b"0" * 64), KEY, False),
    ],
    ids=["required by the client", "required by the server", "a forged proof"],
)
def test_an_end_without_the_required_key_is_refused(serve, server, secret, requires_key):
    with pytest.raises(handshake.DifferentKeyError):
        handshake.perform_handshake(serve(*server), "job 7", secret, requires_key, 10)


@pytest.mark.parametrize("greeting", [b"", b"HTTP/1.1 400 Bad Request\r", b"RANKZERO/1 3"])
def test_another_listener_is_named_by_its_greeting(serve, greeting):
    with pytest.raises(handshake.WrongListenerError) as caught:
        handshake.perform_handshake(serve(None, greeting), "job 7", KEY, False, 10)
    assert str(caught.value) == greeting.decode().strip()


def test_a_silent_listener_is_another_one_and_a_handshake_that_ends_can_be_retried():
    first, second = socket.socketpair()
    with first, second, pytest.raises(handshake.WrongListenerError):
        handshake.perform_handshake(LineConnection(second), "job 7", KEY, False, 0.1)
    for lines in ((), (CHALLENGE.line(),)):
        first, second = socket.socketpair()
        with second:
            for line in lines:
                LineConnection(first).send_line(line)
            first.close()
            assert not handshake.perform_handshake(LineConnection(second), "job 7", KEY, False, 10)
