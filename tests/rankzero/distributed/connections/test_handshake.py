"""Both ends of a connection are sockets of the test; one of them follows the protocol."""

import socket
import threading

import pytest

from rankzero.distributed.connections.handshake import (
    GREETING,
    Challenge,
    DifferentKeyError,
    WrongListenerError,
    answer_to_hello,
    hello,
    is_servers_proof,
    parse_greeting,
    perform_handshake,
    session_keys,
)
from rankzero.distributed.connections.line_connection import LineConnection

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
CHALLENGE = Challenge.new("control", "job 7")


def test_each_end_proves_that_it_knows_the_key():
    nonce, line = hello(CHALLENGE, KEY)
    answer, keys = answer_to_hello(CHALLENGE, line, KEY)
    assert is_servers_proof(answer, CHALLENGE, nonce, KEY)
    assert keys == session_keys(KEY, CHALLENGE, nonce) and keys.client != keys.server


@pytest.mark.parametrize(("of_client", "of_server"), [(KEY, OTHER_KEY), (KEY, None), (None, KEY), (None, None)])
def test_without_a_common_key_nothing_is_proven(of_client, of_server):
    nonce, line = hello(CHALLENGE, of_client)
    answer, keys = answer_to_hello(CHALLENGE, line, of_server)
    assert answer == b"-" and keys is None
    assert not is_servers_proof(answer, CHALLENGE, nonce, KEY)


def test_a_recorded_proof_is_of_no_use_in_another_connection():
    nonce, line = hello(CHALLENGE, KEY)
    answer, _ = answer_to_hello(CHALLENGE, line, KEY)
    for other in (
        Challenge.new("control", "job 7"),
        CHALLENGE._replace(service="rendezvous"),
        CHALLENGE._replace(world_id="job 8"),
    ):
        assert answer_to_hello(other, line, KEY) == (b"-", None)
        assert not is_servers_proof(answer, other, nonce, KEY)


def test_a_server_that_reflects_the_clients_proof_proves_nothing():
    nonce, line = hello(CHALLENGE, KEY)
    assert not is_servers_proof(line.split(b" ")[1], CHALLENGE, nonce, KEY)


NONCE = b"0" * 32


@pytest.mark.parametrize(
    "line",
    [b"", b"-", b"\xff", NONCE, NONCE + b" ", NONCE + b" x", b"G" * 32 + b" -", b"[" * 4000, NONCE[1:] + b" -"],
    ids=len,
)
def test_a_malformed_hello_has_no_answer(line):
    assert answer_to_hello(CHALLENGE, line, KEY) is None


def test_a_greeting_is_recognized_only_by_its_own_service_and_world():
    assert parse_greeting(CHALLENGE.line(), "control", "job 7") == CHALLENGE
    assert parse_greeting(CHALLENGE.line(), "rendezvous", "job 7") is None
    assert parse_greeting(CHALLENGE.line(), "control", "job 8") is None
    for line in (
        b"",
        b"HTTP/1.1 400",
        b"\xff" * 99,
        GREETING.encode(),
        b"[" * 4000,
        b'RANKZERO/2 control short "job 7"',
    ):
        assert parse_greeting(line, "control", "job 7") is None  # fmt: skip


@pytest.fixture
def serve():
    """Returns a function that starts a server with a given key, or given answers, and connects a client to it."""
    opened = []

    def start(secret, *answers):
        first, second = socket.socketpair()
        opened.extend((first, second))
        server, client = LineConnection(first), LineConnection(second)

        def run():
            if answers:
                for answer in answers:
                    server.send_line(answer)
                return
            server.send_line(CHALLENGE.line())
            if line := server.receive_line(10):
                answer, keys = answer_to_hello(CHALLENGE, line, secret)
                server.send_line(answer)
                if keys:
                    server.sign_messages(keys.server, keys.client)
                server.send({"position": 1})

        thread = threading.Thread(target=run)
        thread.start()
        opened.append(thread)
        return client

    yield start
    for item in opened:
        item.join(10) if isinstance(item, threading.Thread) else item.close()


def test_messages_are_signed_after_the_handshake(serve):
    client = serve(KEY)
    assert perform_handshake(client, "control", "job 7", KEY, True, 10)
    assert client.is_authenticated and client.receive(10) == [{"position": 1}]


def test_without_a_common_key_messages_are_not_signed(serve):
    client = serve(OTHER_KEY)
    assert perform_handshake(client, "control", "job 7", KEY, False, 10)
    assert not client.is_authenticated and client.receive(10) == [{"position": 1}]


def test_a_client_that_requires_the_key_refuses_a_server_without_it(serve):
    with pytest.raises(DifferentKeyError):
        perform_handshake(serve(OTHER_KEY), "control", "job 7", KEY, True, 10)


def test_a_server_that_requires_the_key_refuses_a_client_without_it(serve):
    with pytest.raises(DifferentKeyError):
        perform_handshake(serve(None, CHALLENGE.line(), b"required"), "control", "job 7", None, False, 10)


def test_a_forged_proof_is_refused(serve):
    with pytest.raises(DifferentKeyError):
        perform_handshake(serve(None, CHALLENGE.line(), b"0" * 64), "control", "job 7", KEY, False, 10)


@pytest.mark.parametrize("greeting", [b"", b"HTTP/1.1 400 Bad Request\r", b"RANKZERO/1 3"])
def test_another_listener_is_named_by_its_greeting(serve, greeting):
    with pytest.raises(WrongListenerError) as caught:
        perform_handshake(serve(None, greeting), "control", "job 7", KEY, False, 10)
    assert caught.value.greeting == greeting.decode().strip()


def test_a_listener_that_sends_nothing_is_another_one(serve):
    first, second = socket.socketpair()
    with first, second, pytest.raises(WrongListenerError):
        perform_handshake(LineConnection(second), "control", "job 7", KEY, False, 0.1)


def test_a_connection_that_ends_in_the_handshake_can_be_retried(serve):
    first, second = socket.socketpair()
    first.close()
    with second:
        assert not perform_handshake(LineConnection(second), "control", "job 7", KEY, False, 10)
