"""The processes that all Trainers of a program share."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from rankzero import Trainer
from rankzero.distributed.coordination import join
from rankzero.distributed.coordination.session import Session, _check_can_start, _script_name, report_uncaught_errors
from rankzero.distributed.environments.launch import Launch, RequestedWorld
from rankzero.messages import RequestError
from running import refusal_of, reserved_port, run, world_of

FROM_STANDARD_INPUT = """
from lightning.pytorch.demos.boring_classes import BoringModel
from rankzero import Trainer
trainer = Trainer(max_epochs=1, limit_train_batches=2, limit_val_batches=0, accelerator="cpu", devices={devices})
trainer.fit(BoringModel())
"""
REFUSED = """
from lightning.pytorch import LightningModule
from lightning.pytorch.demos.boring_classes import BoringModel
from rankzero import Trainer
kept = "still here"
trainer = Trainer(name="run-1", max_epochs=1, limit_train_batches=2, limit_val_batches=0, accelerator="cpu")
Trainer(save_every="often")
"""
JOINED_BY_HAND = """
import sys
from lightning.pytorch.demos.boring_classes import BoringModel
from rankzero import Trainer
rank, port = map(int, sys.argv[1:])
place = {"num_nodes": 2, "node_rank": rank, "master_addr": "127.0.0.1", "master_port": port, "start_timeout": 120}
trainer = Trainer(name="x", max_epochs=1, limit_train_batches=2, limit_val_batches=0, accelerator="cpu", **place)
trainer.fit(BoringModel())
print("rank", trainer.global_rank, "of", trainer.world_size)
"""


def session(**world):
    return Session(RequestedWorld(), SimpleNamespace(world=world_of(size=2, **world)), title="x", is_script=True)


def test_a_later_trainer_may_not_request_other_processes():
    for same in ({}, {"devices": 2}, {"nodes": 1, "accelerator": "cpu"}):
        session().check_same_processes(RequestedWorld(**same))
    for name, value in (("devices", 1), ("nodes", 2), ("accelerator", "gpu")):
        error = refusal_of(session().check_same_processes, RequestedWorld(**{name: value}))
        assert f"--{name} {value} for another Trainer" in error.asked


@pytest.mark.parametrize(("gpus", "chosen"), [((0, 2), "[0, 2]"), (None, "[0, 1]")])
def test_a_later_trainer_may_not_request_other_gpus(gpus, chosen):
    current = session(accelerator="cuda")
    current.requested = RequestedWorld(devices=2, gpus=gpus)
    current.check_same_processes(RequestedWorld(devices=2, gpus=gpus))
    current.check_same_processes(RequestedWorld(devices=2))
    error = refusal_of(current.check_same_processes, RequestedWorld(devices=2, gpus=(1, 3)))
    assert "devices=[1, 3] for another Trainer" in error.asked and f"devices={chosen}" in error.instead


def test_a_second_trainer_of_a_script_with_other_processes_is_refused(script_folder):
    Trainer(name="x", accelerator="cpu")
    with pytest.raises(RequestError, match="devices=2 for another Trainer of this program"):
        Trainer(name="y", devices=2, accelerator="cpu")
    with pytest.raises(RequestError, match="num_nodes=3"):
        Trainer(name="y", num_nodes=3, accelerator="cpu")


def test_the_scripts_exception_hook_receives_all_errors_except_refusals(script_folder, monkeypatch, capsys):
    errors = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: errors.append((kind, error, trace)))
    report_uncaught_errors()
    report_uncaught_errors()
    error, refusal = KeyError("x"), RequestError("--devices 9", "2 GPUs", "--devices 2")
    sys.excepthook(KeyError, error, None)
    assert errors == [(KeyError, error, None)]
    with pytest.raises(SystemExit) as caught:
        sys.excepthook(RequestError, refusal, None)
    assert caught.value.code == 2 and len(errors) == 1 and "cannot start" in capsys.readouterr().err
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    sys.excepthook(RequestError, refusal, None)  # the prompt appears again
    assert len(errors) == 1 and "cannot start" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "name"),
    [("train.py", "train"), ("my script.py", "my-script"), (".x.py", "x"), ("<stdin>", "run"), (None, "run")],
)
def test_a_run_is_named_after_the_script(monkeypatch, tmp_path, file, name):
    monkeypatch.chdir(tmp_path)
    if file and file.endswith(".py"):
        (tmp_path / file).write_text("")
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(**({"__file__": file} if file else {})))
    assert _script_name() == name


def test_several_processes_require_a_script_file(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace())
    assert "an interactive interpreter or standard input" in refusal_of(_check_can_start, 2).found
    monkeypatch.setitem(sys.modules, "ipykernel", SimpleNamespace())
    assert "a notebook" in refusal_of(_check_can_start, 2).found
    (tmp_path / "train.py").write_text("")
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=str(tmp_path / "train.py")))
    _check_can_start(2)


@pytest.mark.parametrize("count", [1, 2])
def test_the_parent_of_local_processes_exits_with_their_exit_code_and_silences_their_sockets(monkeypatch, count):
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "")  # restored after the test
    del os.environ["TORCH_CPP_LOG_LEVEL"]
    started = []

    def record(command, count, launch):
        started.append((count, os.environ["TORCH_CPP_LOG_LEVEL"]))
        return 7

    monkeypatch.setattr(join, "run_processes", record)
    with pytest.raises(SystemExit) as caught:
        join.join_ranks(RequestedWorld(), Launch(), count)
    assert caught.value.code == 7 and started == [(count, "ERROR")]


@pytest.mark.system
@pytest.mark.parametrize(("devices", "code"), [(1, 0), (2, 2)])
def test_a_program_from_standard_input_runs_only_in_one_process(tmp_path, devices, code):
    (tmp_path / "program").write_text(FROM_STANDARD_INPUT.format(devices=devices))
    result = run("sh", "-c", "python - < program", folder=tmp_path, code=code)
    assert "Traceback" not in result.err
    assert "run-1: finished" in result.out if code == 0 else "devices=1, or save the program" in result.err


@pytest.mark.system
def test_the_prompt_prints_a_refusal_without_traceback_and_an_error_once_and_the_session_goes_on(tmp_path):
    (tmp_path / "train.py").write_text(REFUSED)
    typed = "Trainer(max_epoch=3)\ntrainer.fit(BoringModel())\ntrainer.test(LightningModule())\nprint(kept)\n"
    (tmp_path / "typed").write_text(typed)
    result = run("sh", "-c", "python -i train.py < typed", folder=tmp_path)
    assert result.err.count("cannot start") == 2 and result.err.count("Traceback") == 1, result.err
    assert "run-1: finished" in result.out and "still here" in result.out


@pytest.mark.system
def test_a_script_on_nodes_joined_by_hand_trains_without_a_devices_argument(tmp_path):
    (tmp_path / "train.py").write_text(JOINED_BY_HAND)
    with reserved_port() as port:
        commands = [[sys.executable, "train.py", str(rank), str(port)] for rank in range(2)]
        pipe = subprocess.PIPE
        nodes = [subprocess.Popen(command, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True) for command in commands]
        try:
            results = [node.communicate(timeout=240) for node in nodes]
        finally:
            for node in nodes:
                node.kill()
    assert [node.returncode for node in nodes] == [0, 0], results
    assert [f"rank {rank} of 2" in out for rank, (out, _) in enumerate(results)] == [True, True], results
