import os
import subprocess
import sys

import pytest

from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.process import threads
from rankzero.distributed.process.threads import MARK, Threads, choose_threads, set_threads, user_setting
from rankzero.distributed.world import Peer, World
from running import INTERPRETER_BIN

SETTING = """
import os
from rankzero.distributed.process.threads import user_setting
found = f"{os.environ['OMP_NUM_THREADS']}, set by the user: {user_setting(os.environ)}"
os.write(1, f"rank {os.environ['RANK']}: {found}\\n".encode())  # at once: both ranks write to one pipe
"""


def make_peers(*cores, machines=None, quotas=None):
    """Returns one process for each given set of cores, all on one machine unless `machines` is given."""
    machines = machines or ["a"] * len(cores)
    quotas = quotas or [(None, "")] * len(cores)
    return [
        Peer(rank, rank, machines.index(machines[rank]), len(cores), machines[rank], 1, machines[rank], "", *mask)
        for rank, mask in enumerate((own_cores, *quota) for own_cores, quota in zip(cores, quotas, strict=True))
    ]


def chosen(peers, rank=0, **environ):
    sizes = {"world_size": len(peers), "local_world_size": sum(peer.boot == peers[rank].boot for peer in peers)}
    launch = Launch(launcher="slurm", rank=rank, externally_created=True, **sizes)
    threads = choose_threads(World(launch, dict(enumerate(peers))), environ)
    return threads.count, threads.reason


def test_ranks_divide_the_cores_that_they_share():
    for masks, counts, reason in (
        *[(["0-11"], [12], "12 cores"), (["0-11"] * 4, [3] * 4, "12 cores / 4 ranks")],
        *[(["0-1"] * 2, [1] * 2, "2 cores / 2 ranks"), (["0-1"] * 5, [1] * 5, "2 cores / 5 ranks")],
        *[(["0-3", "4-7", "8-11"], [4] * 3, "bound to 4 cores"), (["0-3", "4"], [4, 1], "bound to 4 cores")],
        (["0"] * 2 + ["1"] * 2, [1] * 4, "1 core / 2 ranks"),
        (["0-7"] * 2 + ["8-15"] * 2, [4] * 4, "8 cores / 2 ranks"),
        (["0-3", "2-5"], [3, 3], "4 cores / 2 ranks"),
    ):
        peers = make_peers(*masks)
        assert [chosen(peers, rank)[0] for rank in range(len(masks))] == counts
        assert chosen(peers)[1] == reason


def test_ranks_on_other_machines_or_of_another_cgroup_share_no_cores():
    peers = make_peers("0-5", "0-5", "0-1", machines=["a", "a", "b"])
    assert [chosen(peers, rank) for rank in range(3)] == [(3, "6 cores / 2 ranks")] * 2 + [(2, "2 cores")]
    assert chosen(make_peers(*["0-63"] * 2, quotas=[(6.0, "job")] * 2)) == (3, "CPU quota of 6 cores / 2 ranks")
    peers = make_peers(*["0-63"] * 2, quotas=[(6.0, "one"), (4.0, "two")])
    assert [chosen(peers, rank) for rank in range(2)] == [(6, "CPU quota of 6 cores"), (4, "CPU quota of 4 cores")]


@pytest.mark.parametrize(("cpus", "count"), [(0.2, 1), (1.4, 1), (1.5, 2), (1.9999, 2), (3.4, 3), (100.0, 8)])
def test_a_quota_is_rounded_to_whole_cores(cpus, count):
    assert chosen(make_peers("0-7", quotas=[(cpus, "job")]))[0] == count


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_the_users_number_of_threads_is_kept_but_not_that_of_a_rankzero_parent(name):
    assert chosen(make_peers(*["0-11"] * 4), **{name: "7"}) == (None, f"{name}=7")
    assert chosen(make_peers("0-1"), **{name: ""}) == (2, "2 cores")
    of_parent = {MARK: "3"}
    assert chosen(make_peers("0-7"), OMP_NUM_THREADS="3", **of_parent) == (8, "8 cores")
    assert chosen(make_peers("0-7"), OMP_NUM_THREADS="4", **of_parent) == (None, "OMP_NUM_THREADS=4")


def test_the_number_of_threads_set_by_pbs_is_only_an_upper_limit():
    job = {"PBS_JOBID": "1.pbs", "NCPUS": "12", "OMP_NUM_THREADS": "12"}
    assert chosen(make_peers(*["0-11"] * 4), **job) == (3, "12 cores / 4 ranks")
    assert chosen(make_peers("0-63"), **job) == (12, "PBS set NCPUS=12")
    assert chosen(make_peers("0-63"), **{**job, "OMP_NUM_THREADS": "20"}) == (None, "OMP_NUM_THREADS=20")


def test_before_the_rendezvous_local_ranks_are_assumed_to_share_cores_unless_bound(monkeypatch):
    def choice(launcher="torchrun", cores="0-11"):
        launch = Launch(launcher=launcher, world_size=4, local_world_size=4, externally_created=True)
        return choose_threads(World(launch, dict(enumerate(make_peers(cores)))), {})

    monkeypatch.setattr(threads, "usable_cores", lambda process: frozenset(range(12)))
    assert choice() == Threads(3, "12 cores / 4 ranks")
    assert choice(cores="0-1") == Threads(2, "bound to 2 cores", uses_all_cores=True)
    assert choice("local", "0-1") == Threads(1, "2 cores / 4 ranks")


def test_omp_num_threads_is_set_only_if_the_default_differs():
    waiting = {"OMP_WAIT_POLICY": "ACTIVE"}
    environ = {**waiting}
    set_threads(Threads(2, "2 cores", uses_all_cores=True), environ)
    set_threads(Threads(None, "OMP_NUM_THREADS=7"), environ)
    assert environ == waiting
    set_threads(Threads(3, "12 cores / 4 ranks"), environ)
    assert environ == {"OMP_NUM_THREADS": "3", MARK: "3", **waiting}
    assert user_setting(environ) is None
    set_threads(Threads(12, "12 cores", uses_all_cores=True), environ)
    assert environ == {"OMP_NUM_THREADS": "12", MARK: "12", **waiting}


def test_threads_keep_their_cores_for_a_short_time_unless_the_user_decides():
    for given in ({}, {"GOMP_SPINCOUNT": "0"}, {"KMP_BLOCKTIME": "0"}, {"OMP_WAIT_POLICY": "ACTIVE"}):
        environ = dict(given)
        set_threads(Threads(None, "OMP_NUM_THREADS=7"), environ)
        assert environ == (given or {"GOMP_SPINCOUNT": "10000"})


@pytest.mark.system
@pytest.mark.parametrize(
    ("user_value", "setting", "wrapped"),
    [(None, "None", True), ("1", "OMP_NUM_THREADS=1", False)],
    ids=["torchrun", "user"],
)
def test_the_default_of_a_real_torchrun_is_not_taken_for_the_users_setting(tmp_path, user_value, setting, wrapped):
    (tmp_path / "worker.py").write_text(SETTING)
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environ |= {"OMP_NUM_THREADS": user_value} if user_value else {}
    worker = ["--no-python", "sh", "-c", f"{sys.executable} worker.py; true"] if wrapped else ["worker.py"]
    command = [str(INTERPRETER_BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", *worker]
    result = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60)
    lines = sorted(line for line in result.stdout.splitlines() if line.startswith("rank "))
    assert lines == [f"rank {rank}: 1, set by the user: {setting}" for rank in range(2)], result.stderr
