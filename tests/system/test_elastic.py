"""An elastic torchrun: a machine joins and is lost later; the run resumes each time."""

import json
import re

import pytest

from running import BIN, script, wait_until
from system.hosts import kill_group

TRAIN = (script("fit"), "--model", "MLP", "--data", "Toy", "--global_batch_size", "32", "--save_every", "20steps")


@pytest.mark.parametrize(
    ("first", "second"), [pytest.param("rz1", "rz2", marks=pytest.mark.soak), ("rz2", "rz1")], ids=["stays", "moves"]
)
def test_a_run_resumes_when_a_machine_joins_and_when_it_is_lost(tmp_path, hosts, first, second):
    """Rank 0 stays on its machine, or moves to the machine that joins."""
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:29510", "--rdzv-id", "grows")
    timing = ("--rdzv-conf", "last_call_timeout=2,keep_alive_interval=1")
    elastic = ("--nnodes", "1:2", "--max-restarts", "3", *timing, *rendezvous)
    # An elastic torchrun determines the world size, so --nodes has no effect.
    command = (str(BIN / "torchrun"), *elastic, *TRAIN, "--epochs", "100000", "--nodes", "2")
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    log = tmp_path / "log"
    log.touch()
    printed = log.read_text
    run_folder, start_line = tmp_path / "runs/MLP-Toy-grows", r"(\d) nodes? x 1 process.*run runs/MLP-Toy-grows"

    def starts():
        return re.findall(rf"{start_line}(?:, resuming from step-0*(\d+))?", printed())

    def trains(start_count):
        return len(starts()) == start_count and "epoch " in printed().rpartition("rankzero: torchrun")[2]

    def newest_step():
        return int(max((run_folder / "checkpoints").glob("step-*")).name.removeprefix("step-"))

    first_process = hosts.start(first, *command, folder=tmp_path, log=log, environment=environment)
    second_process = None
    try:
        wait_until(lambda: trains(1), "training on one host")
        second_process = hosts.start(second, *command, folder=tmp_path, log=log, environment=environment)
        wait_until(lambda: trains(2), "training on both hosts")
        joined = int(starts()[1][1])
        wait_until(lambda: newest_step() > joined, "a checkpoint of both")
        hosts.kill_all(second)
        wait_until(lambda: trains(3), "training on the remaining host")
    finally:
        for host, process in ((first, first_process), (second, second_process)):
            hosts.kill_all(host)
            if process:
                kill_group(process)
    (first_nodes, first_step), (second_nodes, joined), (third_nodes, third_step) = starts()
    assert (first_nodes, second_nodes, third_nodes) == ("1", "2", "1")
    assert not first_step and 0 < int(joined) < int(third_step)
    assert len(json.loads((run_folder / "run.json").read_text())["attempts"]) == 3
