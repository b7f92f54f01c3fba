import json
from itertools import permutations

import pytest

from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.rendezvous.ranks import assign_ranks, node_views, read_view, world_of_rank_zero
from rankzero.distributed.stop_and_failure.protocol import FROM_SERVER, read
from rankzero.distributed.world import Peer, World

WORLD = Launch(launcher="env", num_nodes=None, externally_created=True)


def tasks(*positions):
    """Returns the processes of a world from the rank, local rank, node rank and host of each."""
    return [
        Peer(rank, local_rank, node, len(positions), host, pid=100 + index, id=str(index))
        for index, (rank, local_rank, node, host) in enumerate(positions)
    ]  # fmt: skip


def assigned(members, index=0):
    """Returns the completed launch and the known processes of one process, as rank zero determines them."""
    own = members[index]
    launch = WORLD._replace(rank=own.rank, world_size=len(members), node_rank=own.node_rank, local_rank=own.local_rank)
    world = world_of_rank_zero(launch, own, assign_ranks(members))
    return world.launch, list(world.peers.values())


def positions(members):
    return [(member.rank, member.local_rank, member.node_rank, member.host) for member in members]


def test_host_names_determine_the_positions_in_any_order_of_arrival():
    members = tasks((0, None, None, "b"), (1, None, None, "a"), (2, None, None, "b"))
    for arrivals in permutations(members):
        members_by_rank = assign_ranks(arrivals)
        launch = world_of_rank_zero(WORLD._replace(world_size=3), members[2], members_by_rank).launch
        assert positions(members_by_rank) == [(0, 0, 0, "b"), (1, 0, 1, "a"), (2, 1, 0, "b")]
        assert (launch.rank, launch.local_rank, launch.node_rank) == (2, 1, 0)
        assert (launch.processes_per_node, launch.hosts, launch.local_world_size) == ((2, 1), ("b", "a"), 2)


def test_node_ranks_of_the_launcher_override_host_names_and_become_consecutive():
    launch, members_by_rank = assigned(tasks((0, 0, 1, "a"), (1, 0, 0, "a")))
    assert positions(members_by_rank) == [(0, 0, 1, "a"), (1, 0, 0, "a")]
    assert (launch.num_nodes, launch.hosts) == (2, ("a", "a"))
    launch, members_by_rank = assigned(tasks((0, 0, 3, "a"), (1, 0, 7, "b"), (2, 1, 7, "b")), index=2)
    assert [member.node_rank for member in members_by_rank] == [0, 1, 1]
    assert (launch.num_nodes, launch.processes_per_node, launch.hosts) == (2, (1, 2), ("a", "b"))
    assert (launch.node_rank, launch.local_world_size) == (1, 2)


def test_boot_ids_and_host_names_distinguish_machines_and_local_ranks_of_the_launcher_are_kept():
    members = [Peer(rank, None, None, 2, "node", 1, boot=f"boot {rank}") for rank in range(2)]
    assert [member.node_rank for member in assign_ranks(members)] == [0, 1]
    _, members_by_rank = assigned(tasks((0, None, 5, "a"), (1, None, None, "b"), (2, None, 5, "b")))
    assert [member.node_rank for member in members_by_rank] == [0, 1, 1]
    _, members_by_rank = assigned(tasks((0, 1, 0, "a"), (1, 0, 0, "a"), (2, None, 0, "a")))
    assert [member.local_rank for member in members_by_rank] == [1, 0, 2]


@pytest.mark.parametrize("listener", [7, 8, 9])
def test_of_tasks_without_ranks_the_listening_one_is_rank_zero_and_node_and_process_id_order_the_others(listener):
    processes = [(0, "a", 7), (0, "a", 8), (0, "a", 9), (1, "b", 1), (1, "b", 2)]
    tasks = [Peer(None, None, node, 5, host, pid, id=str(pid)) for node, host, pid in processes]
    first = next(task for task in tasks if task.pid == listener)
    expected = [listener, *(pid for pid in (7, 8, 9) if pid != listener), 1, 2]
    for others in permutations(task for task in tasks if task is not first):
        members_by_rank = assign_ranks([first, *others])
        assert [(member.rank, member.pid) for member in members_by_rank] == [*enumerate(expected)]
        assert [member.local_rank for member in members_by_rank] == [0, 1, 2, 0, 1]
        world = world_of_rank_zero(WORLD._replace(rank=None, world_size=5), first, members_by_rank)
        assert (world.rank, world.launch.processes_per_node, len(world.peers)) == (0, (3, 2), 5)


def known_by(members, index):
    """Returns the world of one process, from the view of its node."""
    this_peer, ranks = members[index], assign_ranks(members)
    [(_, views)] = read(json.loads(json.dumps({"views": node_views(ranks)})), FROM_SERVER)
    launch = WORLD._replace(world_size=len(members))
    worlds = [world for view in views if (world := read_view(launch, this_peer, view))]
    assert all(world.launch == worlds[0].launch for world in worlds)
    return worlds[0]


@pytest.mark.parametrize("states_nodes", [True, False])
def test_a_process_knows_rank_zero_and_its_own_node(states_nodes):
    members = tasks(*[(rank, None, rank // 2 if states_nodes else None, f"n{rank // 2}") for rank in range(6)])
    for index in range(6):
        world, node = known_by(members, index), index // 2
        launch = world.launch
        assert (launch.rank, launch.local_rank, launch.node_rank, launch.num_nodes) == (index, index % 2, node, 3)
        assert launch.processes_per_node == (2, 2, 2) and launch.local_world_size == 2
        assert set(world.peers) == {0, 2 * node, 2 * node + 1}


def test_a_view_does_not_grow_with_the_number_of_nodes():
    def size(nodes):
        members = tasks(*[(rank, None, rank // 8, f"n{rank // 8:04}") for rank in range(8 * nodes)])
        return len(json.dumps(node_views(assign_ranks(members))[-1]))

    assert size(400) < size(4) + 100


def test_processes_of_two_nodes_on_one_machine_know_one_another_and_names_have_known_hosts_only():
    world = known_by(tasks((0, 0, 0, "a"), (1, 0, 1, "a"), (2, 0, 2, "b")), 1)
    assert (world.devices, world.nodes) == (1, 3) and set(world.peers) == {0, 1}
    world = known_by(tasks((0, 0, 0, "a"), (1, 0, 1, "b"), (2, 0, 2, "c")), 1)
    assert [world.name_of(rank) for rank in range(3)] == ["rank 0 on a", "rank 1 on b", "rank 2"]


@pytest.mark.parametrize("name", ["first", "peers", "counts"])
@pytest.mark.parametrize("value", [None, 7, "x", [], [[]], [{}], {}, [[1, "x"]], [[1, 10**12]]], ids=str)
def test_a_malformed_view_is_ignored(name, value):
    members = tasks((0, 0, 0, "a"), (1, 0, 1, "b"))
    view = json.loads(json.dumps(node_views(assign_ranks(members))[1]))
    entries = read({"views": [{**view, name: value}]}, FROM_SERVER)
    worlds = [read_view(WORLD._replace(world_size=2), members[1], view) for _, views in entries for view in views]
    assert worlds in ([], [None]) or (name == "counts" and isinstance(worlds[0], World))
