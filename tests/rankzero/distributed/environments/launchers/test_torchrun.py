import pytest

from rankzero.distributed.environments.detect import detect
from rankzero.distributed.environments.launch import RequestedWorld, Variables
from rankzero.distributed.environments.launchers import torchrun
from rankzero.messages import RequestError
from recorded import TORCHRUN


def read(**changes):
    return torchrun.read(Variables(TORCHRUN | changes), RequestedWorld())


def test_torchruns_variables_are_read_and_the_job_id_is_derived_from_the_run_id():
    launch = read()
    assert (launch.rank, launch.local_rank, launch.world_size) == (3, 1, 4)
    assert (launch.num_nodes, launch.node_rank, launch.local_world_size, launch.job_id) == (2, 1, 2, "job-7")
    assert launch.uses_agent_store and launch.elastic is None and "TORCHELASTIC_RUN_ID=job-7" in launch.evidence
    job_ids = {"none": None, "221830f4-58ef-4bbe-9de5-a47d32b1b98b": "221830f4", "my-job": "my-job"}
    assert {run_id: read(TORCHELASTIC_RUN_ID=run_id).job_id for run_id in job_ids} == job_ids


def test_an_elastic_torchrun_is_detected_by_its_command_line_or_a_variable(monkeypatch):
    commands = {"torchrun --nnodes 1:2 fit.py": "--nnodes 1:2", "torchrun --nnodes=1:4 fit.py": "--nnodes 1:4"}
    commands |= dict.fromkeys(("torchrun --nnodes 2 fit.py", "torchrun --nnodes 1:1 fit.py", "torchrun fit.py", ""))
    for command, elastic in commands.items():
        monkeypatch.setattr(torchrun, "ancestor_commands", lambda line=command: [["sh", "-c", "x"], line.split()])
        assert read().elastic == elastic
    assert read(PET_NNODES="1:3").elastic == "PET_NNODES=1:3"


def test_an_elastic_torchrun_that_shares_its_store_is_refused(monkeypatch):
    monkeypatch.setattr(torchrun, "ancestor_commands", lambda: [["torchrun", "--nnodes", "1:2", "fit.py"]])
    with pytest.raises(RequestError, match=r"an elastic torchrun \(--nnodes 1:2\)") as error:
        detect(environ=TORCHRUN)
    assert error.value.instead.startswith("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun")
    assert detect(environ=TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"}).elastic == "--nnodes 1:2"


def test_an_option_is_matched_by_its_whole_name_in_all_notations():
    values = {"": None, "--nnodes": "", "--nnodes= fit.py": "", "--nnodes=a=b": "a=b", "--nnodes 1 --nnodes 2": "1"}
    values |= {"--nnodes-max 1": None, "-nnodes 1": None, "nnodes 1": None, "torchrun --nnodes x fit.py": "x"}
    assert {line: torchrun.option(line.split(), "nnodes") for line in values} == values
    arguments = ["torchrun", "--rdzv_endpoint=a:1", "--rdzv-id", "x", "fit.py"]
    assert [torchrun.option(arguments, name) for name in ("rdzv-endpoint", "rdzv-id", "nnodes")] == ["a:1", "x", None]
