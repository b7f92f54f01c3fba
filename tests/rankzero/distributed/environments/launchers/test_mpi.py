import pytest

import recorded
from rankzero.distributed.environments.detect import detect
from rankzero.distributed.environments.launch import RequestedWorld, Variables
from rankzero.distributed.environments.launchers import mpi
from recorded import HYDRA, JSRUN, OPEN_MPI_5, PALS

OPEN_MPI = recorded.OPEN_MPI | {  # as set by mpirun 4.1.4 on the second of two hosts
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "PMIX_NAMESPACE": "2774990849",
    "PMIX_RANK": "3",
    "OMPI_MCA_orte_hnp_uri": "2774990848.0;tcp://10.77.0.1,192.168.1.1:53847;tcp6://[fd00::2]:39667",
}
PROXY = ["/usr/bin/hydra_pmi_proxy", "--control-port", "h1:39039", "--rmk", "user"]


def read(variables, **requested):
    return mpi.read(Variables(variables), RequestedWorld(**requested))


def test_open_mpis_variables_are_read_and_processes_on_one_machine_rendezvous_on_loopback():
    launch = read(OPEN_MPI)
    assert (launch.rank, launch.local_rank, launch.world_size, launch.local_world_size) == (3, 1, 4, 2)
    assert launch.num_nodes is None  # unknown from the variables; the rendezvous counts the nodes
    assert launch.address == "10.77.0.1,192.168.1.1"
    assert read(OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}).port == launch.port
    assert read(OPEN_MPI | {"PMIX_NAMESPACE": "2774990850"}).port != launch.port  # another mpirun
    launch = read(OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"})
    assert launch.address == "127.0.0.1" and launch.num_nodes == 1 and launch.node_rank == 0


def test_open_mpi_5_states_mpiruns_host_in_its_namespace():
    launch = read(OPEN_MPI_5 | {"OMPI_COMM_WORLD_SIZE": "4"})
    assert (launch.rank, launch.world_size, launch.local_world_size, launch.address) == (1, 4, 2, "node-7")
    assert read(OPEN_MPI_5).address == "127.0.0.1"


def test_the_variables_of_hydra_and_intel_mpi_and_their_proxy_are_read(monkeypatch):
    monkeypatch.setattr(mpi, "ancestor_commands", lambda: [["bash", "run.sh"], PROXY])
    launch = read(HYDRA)
    assert (launch.rank, launch.local_rank, launch.world_size, launch.address) == (3, 1, 4, "h1")
    monkeypatch.setattr(mpi, "ancestor_commands", lambda: [[*PROXY[:2], "h1:39040"]])
    assert read(HYDRA).port != launch.port  # another mpiexec
    proxy = ["hydra_bstrap_proxy", "--upstream-host", "n7", "--upstream-port", "4711"]
    monkeypatch.setattr(mpi, "ancestor_commands", lambda: [proxy])
    assert read(HYDRA | {"I_MPI_MPIRUN": "mpirun"}).address == "n7"


def test_rank_zeros_address_comes_from_a_flag_a_variable_or_the_scheduler(monkeypatch, tmp_path):
    monkeypatch.setattr(mpi, "ancestor_commands", list)
    nodes = tmp_path / "nodes"
    nodes.write_text("pbs1\npbs1\npbs2\n")
    assert read(OPEN_MPI | {"SLURM_JOB_NODELIST": "n[4-5]", "SLURM_JOB_ID": "3"}).address == "n4"
    assert read(HYDRA | {"PBS_JOBID": "1.pbs1", "PBS_NODEFILE": str(nodes)}).address == "pbs1"
    assert read(OPEN_MPI | {"MASTER_ADDR": "b"}).address == "b"
    assert read(OPEN_MPI | {"MASTER_ADDR": "b"}, address="c").address == "c"
    with pytest.raises(KeyError, match="MASTER_ADDR"):
        read(HYDRA)


def test_jsrun_and_pals_take_hosts_and_size_from_the_files_of_their_schedulers(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("batch5\nh4\nh4\nh5\n")
    launch = read(JSRUN | {"LSB_DJOB_RANKFILE": str(hosts)})
    assert (launch.rank, launch.local_rank, launch.world_size, launch.address, launch.job_id) == (3, 1, 4, "h4", "7")
    launch = detect(None, OPEN_MPI | {"LSB_DJOB_RANKFILE": str(hosts), "LSB_JOBID": "7", "LSB_JOBINDEX": "3"})
    assert (launch.address, launch.job_id) == ("batch5", "7-3")
    for slots in ({"LSB_HOSTS": "batch5 h4 h4 h5"}, {"LSB_MCPU_HOSTS": "batch5 1 h4 2 h5 1"}):
        assert read(JSRUN | slots).address == "h4"
        assert read(OPEN_MPI | slots).address == "batch5"
    launch = read(PALS | {"PBS_NODEFILE": str(hosts)})  # with PMIx, PALS states no world size
    assert (launch.rank, launch.local_rank, launch.world_size, launch.address) == (3, 1, 6, "batch5")
    assert read(PALS | {"PBS_NODEFILE": str(hosts)}, nodes=2, devices=2).world_size == 4
    assert read(PALS | {"PBS_NODEFILE": str(hosts), "PMI_SIZE": "5"}).world_size == 5
    assert read(OPEN_MPI | {"AZ_BATCH_MASTER_NODE": "10.0.0.4:6105", "OMPI_MCA_orte_hnp_uri": ""}).address == "10.0.0.4"


def test_pmix_alone_does_not_provide_the_world_size_but_flags_may():
    assert read({"PMIX_RANK": "1", "PMIX_NAMESPACE": "7", "MASTER_ADDR": "a"}, nodes=2, devices=2).world_size == 4
