"""Mutual authentication of the two ends of a connection by HMAC challenge and response.

    server -> client   RANKZERO/3 <server's nonce> <world id as JSON>
    client -> server   <client's nonce> <proof>, or <client's nonce> - without a key
    server -> client   <proof>; `-` if the keys differ or one is missing; `required` if the server then refuses

Neither end parses other data before the handshake is complete. Each proof depends on both nonces, the world and the
role of its sender. So a recorded proof is of no use in another connection.
"""

import hmac
import json
import re
import secrets
from typing import NamedTuple

from rankzero.distributed.connections.line_connection import LineConnection

GREETING = "RANKZERO/3"
"""First word that a server sends on each new connection."""

NO_PROOF, KEY_REQUIRED = "-", "required"

MAX_HANDSHAKE_BYTES = 4096
"""Bytes of the longest line of the handshake."""

_NONCE = re.compile(r"[0-9a-f]{32}")


class WrongListenerError(Exception):
    """Raised if a listener is not rank zero, or a leader, of this run; the message is the first line that it sent."""


class DifferentKeyError(Exception):
    """Raised if one end requires that both know the same key, and they do not."""


class SessionKeys(NamedTuple):
    """Keys that sign the messages of one connection, one for each direction."""

    client: bytes
    server: bytes


class Challenge(NamedTuple):
    """What a server sends first."""

    world_id: str
    nonce: str

    @classmethod
    def new(cls, world_id: str) -> "Challenge":
        """Returns a challenge with a new nonce."""
        return cls(world_id, secrets.token_hex(16))

    def line(self) -> bytes:
        return f"{GREETING} {self.nonce} {json.dumps(self.world_id)}".encode()


def parse_greeting(line: bytes, world_id: str) -> Challenge | None:
    """Returns the challenge in a greeting; None if the line is not the greeting of this world."""
    words = line.decode(errors="replace").split(" ", 2)
    if len(words) != 3 or words[0] != GREETING or not _NONCE.fullmatch(words[1]):
        return None
    return Challenge(world_id, words[1]) if words[2] == json.dumps(world_id) else None


def hello(challenge: Challenge, secret: bytes | None) -> tuple[str, bytes]:
    """Returns a client's nonce, and the line in which it proves that it knows the key."""
    nonce = secrets.token_hex(16)
    proof = _proof(secret, "client", challenge, nonce) if secret else NO_PROOF
    return nonce, f"{nonce} {proof}".encode()


def perform_handshake(
    connection: LineConnection, world_id: str, secret: bytes | None, requires_key: bool, seconds: float
) -> bool:
    """Performs a client's part of the handshake; returns False if the connection ends.

    Afterwards, `connection.is_authenticated` states whether both ends know the key.

    Args:
        connection: A new connection.
        world_id: Identifier of the run's start.
        secret: The key; None if there is none.
        requires_key: Whether to refuse a server that does not know the key.
        seconds: How long the server may take to send a line.

    Raises:
        WrongListenerError: The listener does not belong to this run, or sends nothing.
        DifferentKeyError: One end requires a key that the other end does not know.
    """
    try:
        greeting = connection.receive_line(seconds)
    except TimeoutError:
        raise WrongListenerError("") from None
    if greeting is None:
        return False
    if (challenge := parse_greeting(greeting, world_id)) is None:
        raise WrongListenerError(greeting.decode(errors="replace").strip())
    nonce, line = hello(challenge, secret)
    connection.send_line(line)
    try:
        answer = connection.receive_line(seconds)
    except TimeoutError:
        return False
    if answer is None:
        return False
    if secret and is_servers_proof(answer, challenge, nonce, secret):
        session = session_keys(secret, challenge, nonce)
        connection.sign_messages(session.client, session.server)
    elif requires_key or answer != NO_PROOF.encode():
        raise DifferentKeyError
    return True


def answer_to_hello(challenge: Challenge, line: bytes, secret: bytes | None) -> tuple[bytes, SessionKeys | None] | None:
    """Returns the server's answer to a client, with the session keys if the client has proven that it knows the key.

    None if the line is malformed.
    """
    nonce, _, proof = line.decode(errors="replace").partition(" ")
    if not _NONCE.fullmatch(nonce) or (proof != NO_PROOF and len(proof) != 64):
        return None
    if secret and hmac.compare_digest(_proof(secret, "client", challenge, nonce).encode(), proof.encode()):
        return _proof(secret, "server", challenge, nonce).encode(), session_keys(secret, challenge, nonce)
    return NO_PROOF.encode(), None


def is_servers_proof(line: bytes, challenge: Challenge, nonce: str, secret: bytes) -> bool:
    """Returns whether a line proves that the server knows the key."""
    return hmac.compare_digest(_proof(secret, "server", challenge, nonce).encode(), line)


def session_keys(secret: bytes, challenge: Challenge, client_nonce: str) -> SessionKeys:
    """Returns the keys of one connection."""
    return SessionKeys(
        *(_digest(secret, f"messages of the {role}", challenge, client_nonce) for role in ("client", "server"))
    )


def _proof(secret: bytes, role: str, challenge: Challenge, client_nonce: str) -> str:
    return _digest(secret, f"proof of the {role}", challenge, client_nonce).hex()


def _digest(secret: bytes, purpose: str, challenge: Challenge, client_nonce: str) -> bytes:
    return hmac.digest(secret, json.dumps([purpose, *challenge, client_nonce]).encode(), "sha256")
