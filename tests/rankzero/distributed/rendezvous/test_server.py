import socket
import time

import pytest

from rankzero.distributed.connections import line_server
from rankzero.distributed.connections.handshake import DifferentKeyError
from rankzero.distributed.connections.key import Key
from rankzero.distributed.process.stop_signals import SIGNALS
from rankzero.distributed.timers import TIMERS
from rankzero.messages import RequestError, Stopped

KEY = Key(b"k" * 32, "the tests")
REFUSAL = RequestError("asked", "found", "instead")
UNKNOWN = b'{"rank": 1, "local_rank": 1, "node_rank": 0, "world_size": 2, "host": "a", "pid": 1, "order": 0}'


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_process_receives_the_list_of_all_members(rendezvous, size):
    world = rendezvous(size)
    clients = [world.call(world.member(rank)) for rank in range(1, size)]
    members = world.members.result(10)
    assert [member.rank for member in members] == [*range(size)] and members[0].id == world.this_peer.id
    first = {**world.this_peer._asdict(), "rank": 0, "local_rank": 0, "node_rank": 0, "key_fingerprint": ""}
    for client in clients:
        answer = client.answer()
        (view,) = answer["views"]
        assert (answer["key_problem"], answer["ip"], view["counts"]) == ("", "127.0.0.1", [[size, 1]])
        assert view["peers"] == [member._asdict() for member in members] and view["first"] == first
    socket.create_connection(("127.0.0.1", world.port)).close()  # torch's store uses the socket next


@pytest.mark.parametrize(
    "body", [*(b"", b"{}", b"null", b"[1]", UNKNOWN, b"\xff", b"{", b"7", b'{"rank": 1}'), b"[" * 3000], ids=len
)
@pytest.mark.parametrize("secret", [KEY.secret, None], ids=["key", "no key"])
def test_a_malformed_message_admits_no_process(rendezvous, body, secret):
    world = rendezvous(2)
    unrelated_client = world.call(body, secret)
    world.call(world.member(1))
    assert [member.rank for member in world.members.result(10)] == [0, 1]
    answer = unrelated_client.answer()
    assert answer is None or "more processes" in answer["refused"][1]


def test_a_process_that_disconnects_may_connect_again(rendezvous):
    world = rendezvous(3)
    client = world.call(world.member(1))
    world.wait_for_members(2)
    client.close()
    world.wait_for_members(1)
    clients = [world.call(world.member(rank)) for rank in (1, 2)]
    assert len(world.members.result(10)) == 3
    assert all(len(client.answer()["views"][0]["peers"]) == 3 for client in clients)


def test_tasks_without_ranks_are_no_duplicates_but_processes_beyond_the_world_size_are_refused(rendezvous):
    world = rendezvous(3)
    late = world.call()
    for _ in range(2):
        world.call(world.member(None))
    assert [member.rank for member in world.members.result(10)] == [0, 1, 2]
    refused = ["a world of 3", "more processes than that", "fewer of them"]
    assert late.answer() == {"refused": refused, "is_single": True}


def test_all_processes_are_refused_if_the_world_sizes_differ(rendezvous):
    world = rendezvous(3)
    clients = [world.call(world.member(1))]
    world.wait_for_members(2)
    clients.append(world.call(world.member(2, world_size=8, host="b")))
    error = world.refused()
    assert error.asked == f"a world of 3 (rank 0 on {world.this_peer.host})"
    assert error.found == "rank 2 on b expects 8"
    assert all(client.answer() == {"refused": [*error.args]} for client in clients)
    assert world.listener.fileno() == -1


@pytest.mark.parametrize("rank", [0, 1])
def test_two_processes_with_the_same_rank_are_both_named(rendezvous, rank):
    world = rendezvous(4)
    existing = world.this_peer._replace(host="b", pid=8) if rank else world.this_peer
    if rank:
        world.call(world.member(rank, host="b", pid=8))
        world.wait_for_members(2)
    client = world.call(world.member(rank, host="c", pid=9))
    error = world.refused()
    assert error.asked == f"one process with rank {rank}"
    assert error.found == f"two: process {existing.pid} on {existing.host} and process 9 on c"
    assert client.answer() == {"refused": [*error.args]}


def test_at_the_deadline_all_processes_receive_the_missing_ranks(rendezvous):
    world = rendezvous(4)
    clients = [world.call(world.member(rank)) for rank in (1, 3)]
    world.wait_for_members(3)
    world.server.deadline = 0
    error = world.refused()
    assert error.found.startswith("missing rank 2;") and "within 10 s" in error.asked
    assert all(client.answer() == {"refused": [*error.args]} for client in clients)


@pytest.mark.parametrize(("size", "seconds"), [(2, 10.0), (3, 0.3)], ids=["complete", "at the deadline"])
def test_a_given_refusal_is_sent_instead_of_the_members(rendezvous, size, seconds):
    world = rendezvous(size, seconds=seconds, refusal=REFUSAL)
    client = world.call(world.member(1))
    assert world.refused() is REFUSAL
    assert client.answer() == {"refused": [*REFUSAL.args]}


def test_a_stop_signal_ends_the_wait(rendezvous, monkeypatch):
    monkeypatch.setattr(SIGNALS, "received", "SIGTERM")
    monkeypatch.setattr(SIGNALS, "received_at", time.monotonic() - 3600)
    with pytest.raises(Stopped, match="SIGTERM"):
        rendezvous(2).members.result(10)


@pytest.mark.parametrize(
    ("key", "secret", "seconds", "problem"),
    [
        (KEY, b"another", 0.3, "another key (the tests) than rank 1 on b"),
        (Key(None, "no home"), None, 100, "no key (no home)"),
    ],
    ids=["after a wait for the key", "at once, as rank zero has no key"],
)
def test_an_unauthenticated_process_is_admitted(rendezvous, monkeypatch, key, secret, seconds, problem):
    monkeypatch.setattr(TIMERS, "key", seconds)
    world = rendezvous(2, key=key)
    client = world.call(world.member(1, host="b"), secret)
    assert [member.host for member in world.members.result(10)][1] == "b"
    assert world.server.key_problem == client.answer()["key_problem"]
    assert world.server.key_problem == f"rank 0 on {world.this_peer.host} has {problem}"


def test_a_process_with_the_key_takes_the_place_of_one_without(rendezvous):
    world = rendezvous(2)
    attacker = world.call(world.member(1, host="attacker"), secret=None)
    world.wait_for_members(2)
    client = world.call(world.member(1, host="b"))
    assert [member.host for member in world.members.result(10)][1] == "b"
    assert client.answer()["key_problem"] == world.server.key_problem == ""
    assert "on attacker and process" in attacker.answer()["refused"][1]


@pytest.mark.parametrize("fields", [{"rank": 0}, {"world_size": 8}, {"rank": 1, "host": "c"}])
def test_the_conflict_of_an_unauthenticated_process_does_not_end_the_run(rendezvous, fields):
    world = rendezvous(3)
    clients = [world.call(world.member(1))]
    world.wait_for_members(2)
    attacker = world.call(world.member(**{"rank": 2} | fields), secret=None).answer()
    assert len(attacker["refused"]) == 3 and attacker["is_single"] is True
    clients.append(world.call(world.member(2)))
    assert len(world.members.result(10)) == 3
    assert all(len(client.answer()["views"][0]["peers"]) == 3 for client in clients)


def test_unauthenticated_processes_are_refused_once_another_machine_has_the_key(rendezvous, monkeypatch):
    monkeypatch.setattr(TIMERS, "key", 0.0)
    world = rendezvous(3, seconds=1.0)
    attacker = world.call(world.member(1), secret=None)
    world.wait_for_members(2)
    world.call(world.member(2, host="b"))
    assert "does not have the key of rank 0" in attacker.answer()["refused"][1]
    error = world.refused()
    assert "missing rank 1;" in error.found and "without rank 0's key connected from 127.0.0.1" in error.found
    assert "RANKZERO_KEY" in error.instead


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_a_local_rank_with_another_key_is_refused_if_another_machine_has_the_key(rendezvous, order):
    world = rendezvous(3)
    members = {1: world.member(1, key_fingerprint="of another home"), 2: world.member(2, host="b")}
    for rank in order:
        client = world.call(members[rank])
        if rank == order[0]:
            world.wait_for_members(2)
    problem = f"rank 0 on {world.this_peer.host} has another key (the tests) than rank 1 on {world.this_peer.host}"
    assert world.refused().found == client.answer()["refused"][1] == problem


@pytest.mark.parametrize("options", [{"requires_key": True}, {"key": Key(KEY.secret, "explicit", is_explicit=True)}])
def test_no_unauthenticated_process_is_admitted_if_the_key_is_required(rendezvous, options):
    world = rendezvous(2, **options)
    with pytest.raises(DifferentKeyError):
        world.call(world.member(1), secret=None)
    world.call(world.member(1))
    assert len(world.members.result(10)) == 2


def test_a_process_without_the_key_that_describes_no_process_any_more_is_disconnected(rendezvous):
    """It would otherwise keep a connection that counts neither as unidentified nor as a process."""
    world = rendezvous(2)
    attacker = world.call(world.member(None), secret=None)
    world.wait_for_members(2)
    attacker.send({"gone": "process 0"})
    assert attacker.connection.receive(10) is None
    world.wait_for_members(1)
    world.call(world.member(1))
    assert len(world.members.result(10)) == 2


def test_connections_that_wait_at_the_end_are_closed(rendezvous, monkeypatch):
    """torch's store, which uses the socket next, would accept them."""
    monkeypatch.setattr(line_server, "MAX_UNIDENTIFIED", 2)
    monkeypatch.setattr(TIMERS, "make_room", 100)
    world = rendezvous(2)
    client = world.call()
    world.clients += [socket.create_connection(("127.0.0.1", world.port), timeout=10) for _ in range(5)]
    client.send(world.member(1))
    assert len(world.members.result(10)) == 2
    world.listener.setblocking(False)
    with pytest.raises(BlockingIOError):
        world.listener.accept()
