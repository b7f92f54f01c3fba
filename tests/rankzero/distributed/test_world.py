import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from rankzero.distributed import world
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.process import system
from rankzero.distributed.process.system import parse_cpus, usable_cores
from rankzero.distributed.world import Peer

VALID = Peer(1, 0, 0, 2, "a", 7, "boot", "pid:[1]", "0-3,8", 1.5, "job", "id")


def test_this_process_describes_itself_with_the_systems_values():
    this_peer = Peer.this(Launch(rank=2, local_rank=1, node_rank=0, world_size=3))
    assert this_peer[:4] == (2, 1, 0, 3)
    assert (this_peer.host, this_peer.pid) == (socket.gethostname(), os.getpid())
    assert this_peer.boot == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert this_peer.pids == os.readlink("/proc/self/ns/pid")  # noqa: PTH115
    assert parse_cpus(this_peer.cores) == set(usable_cores())


def test_a_description_has_the_cgroups_quota_and_without_proc_neither_boot_id_nor_pid_namespace(monkeypatch, tmp_path):
    for quota, described in ((None, (None, "")), (SimpleNamespace(cpus=1.5, cgroup="/job"), (1.5, "/job"))):
        monkeypatch.setattr(world, "cpu_quota", lambda quota=quota: quota)
        assert (Peer.this(Launch()).quota, Peer.this(Launch()).cgroup) == described
    for module in (world, system):
        monkeypatch.setattr(module, "Path", lambda path: tmp_path / path.lstrip("/"))
    this_peer = Peer.this(Launch())
    assert (this_peer.boot, this_peer.pids) == ("", "")


def test_a_description_is_unchanged_by_json():
    this_peer = Peer.this(Launch(rank=None, local_rank=None, node_rank=None))
    for peer in (VALID, this_peer, this_peer._replace(rank=0)):
        message = json.loads(json.dumps(peer._asdict()))
        assert Peer(**message) == Peer.from_message(message) == peer


@pytest.mark.parametrize(
    "fields",
    [
        *({"rank": 2}, {"rank": -1}, {"rank": "1"}, {"rank": True}, {"rank": 1.0}, {"local_rank": 2}, {"node_rank": 9}),
        *({"world_size": None}, {"world_size": 0}, {"pid": None}, {"pid": 1 << 70}, {"host": 7}, {"host": "a\x1b[2J"}),
        *({"host": "x" * 5000}, {"cores": "0-3; rm"}, {"cores": None}, {"quota": "1"}, {"quota": float("nan")}),
        *({"quota": -1.0}, {"boot": None}, {"cgroup": "\n"}, {"id": 7}, {"unknown": 1}),
    ],
    ids=lambda fields: str(fields)[:40],
)
def test_a_malformed_description_is_ignored(fields):
    assert Peer.from_message({**VALID._asdict(), **fields}) is None
    assert Peer.from_message({}) is None and Peer.from_message(dict.fromkeys(Peer._fields)) is None
