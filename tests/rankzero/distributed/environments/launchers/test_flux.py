import pytest

from rankzero.distributed.environments.detect import detect
from rankzero.distributed.environments.launch import RequestedWorld, Variables
from rankzero.distributed.environments.launchers import flux
from recorded import FLUX
from running import write_program

TWO_NODES = FLUX | {"FLUX_JOB_NNODES": "2"}


def read(variables, **requested):
    return flux.read(Variables(variables), RequestedWorld(**requested))


def test_tasks_on_one_node_rendezvous_on_loopback_at_a_port_of_their_job():
    launch = detect(None, FLUX)
    assert (launch.rank, launch.local_rank, launch.world_size, launch.local_world_size) == (3, None, 4, 4)
    assert (launch.address, launch.num_nodes, launch.node_rank, launch.job_id) == ("127.0.0.1", 1, 0, "Abc")
    assert launch.port != read(FLUX | {"FLUX_JOB_ID": "ƒAbd"}).port
    assert not flux.found(Variables({"FLUX_URI": "local:///run/flux/local"}))  # the script of `flux batch`


def test_flux_is_asked_for_the_first_host_unless_the_user_names_it(tmp_path, monkeypatch):
    answer = '{"execution": {"nodelist": ["n[07-08]", "m1"]}}'
    write_program(tmp_path / "flux", f"[ \"$*\" = 'job info ƒAbc R' ] && echo '{answer}'")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    launch = read(TWO_NODES)
    assert (launch.address, launch.local_world_size, launch.node_rank) == ("n07", None, None)
    write_program(tmp_path / "flux", "exit 1")
    assert read(TWO_NODES, address="n9").address == read(TWO_NODES | {"MASTER_ADDR": "n9"}).address == "n9"
    with pytest.raises(KeyError, match="MASTER_ADDR"):
        read(TWO_NODES)
