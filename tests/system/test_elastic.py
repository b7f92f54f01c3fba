"""An elastic torchrun: a machine joins and is lost later; the run resumes each time."""

import json
import re

import pytest

from running import BIN, script
from system.hosts import end
from system.slurm import wait_until

pytestmark = pytest.mark.xdist_group("hosts")

TRAIN = (script("fit"), "--model", "MLP", "--data", "Toy", "--global_batch_size", "32", "--save_every", "20steps")


@pytest.mark.parametrize(
    ("first", "second"), [pytest.param("rz1", "rz2", marks=pytest.mark.soak), ("rz2", "rz1")], ids=["stays", "moves"]
)
def test_a_run_resumes_when_a_machine_joins_and_when_it_is_lost(tmp_path, hosts, first, second):
    """Rank 0 stays on its machine, or moves to the machine that joins."""
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:29510", "--rdzv-id", "grows")
    elastic = ("--nnodes", "1:2", "--max-restarts", "3", "--rdzv-conf", "last_call_timeout=2", *rendezvous)
    # An elastic torchrun determines the world size, so --nodes has no effect.
    command = (str(BIN / "torchrun"), *elastic, *TRAIN, "--epochs", "100000", "--nodes", "2")
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    log = tmp_path / "log"

    def starts():
        return re.findall(
            r"(\d) nodes? x 1 process.*run runs/MLP-Toy-grows(?:, carrying on from step-0*(\d+))?", said()
        )

    def said():
        return log.read_text() if log.exists() else ""

    def under_way(times):
        wait_until(
            lambda: len(starts()) == times and "epoch " in said().rpartition("rankzero: torchrun")[2], "training"
        )

    def saved():
        return sorted((tmp_path / "runs/MLP-Toy-grows/checkpoints").glob("step-*"))

    stays = hosts.start(first, *command, folder=tmp_path, log=log, environment=environment)
    joins = None
    try:
        under_way(1)
        joins = hosts.start(second, *command, folder=tmp_path, log=log, environment=environment)
        under_way(2)
        joined = int(starts()[1][1])
        wait_until(lambda: int(saved()[-1].name.removeprefix("step-")) > joined, "a checkpoint of both")
        hosts.lose(second)
        under_way(3)
    finally:
        for host, process in ((first, stays), (second, joins)):
            hosts.lose(host)
            if process:
                end(process)
    (alone, begun), (both, joined), (again, left) = starts()
    assert (alone, both, again) == ("1", "2", "1")
    assert not begun and 0 < int(joined) < int(left)
    record = json.loads((tmp_path / "runs/MLP-Toy-grows/run.json").read_text())
    assert len(record["attempts"]) == 3
