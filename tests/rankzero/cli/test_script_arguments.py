import sys
from datetime import timedelta
from pathlib import Path

import pytest

from rankzero.cli.script_arguments import as_arguments, as_list, read_arguments
from running import refusal_of


def test_flags_in_a_message_are_rewritten_as_trainer_arguments(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/train.py"])
    expected = {
        "--save_every 200steps": 'save_every="200steps"',
        "--epochs 4, or --backend gloo": 'max_epochs=4, or backend="gloo"',
        "--trainer.strategy auto or ddp": 'strategy="auto" or ddp',
        "the same command with --name ANOTHER-NAME": "the same command with name=ANOTHER-NAME",
        "--global_batch_size 3 with a BatchSizeFinder": "global_batch_size=3 with a BatchSizeFinder",
        "--seed 3": "seed=3",
        "omit --nodes and --devices": "omit num_nodes and devices",
        "srun --nodes=2 python launch/fit.py --epochs 3": "srun --nodes=2 python train.py --epochs 3",
    }
    assert {flags: as_arguments(flags) for flags in expected} == expected


@pytest.mark.parametrize(
    ("name", "argument", "value"),
    [
        *(("time_limit", timedelta(minutes=90), "5400s"), ("time_limit", "2h", "7200s"), ("save_every", 3, "3")),
        *(("trust_checkpoint", True, "yes"), ("fast", False, "no"), ("start_timeout", 10.0, 10)),
        ("accept_changed", ["data", "global_batch_size"], "data,global_batch_size"),
        *(("root", Path("runs/here"), "runs/here"), ("name", None, None)),
    ],
)
def test_trainer_arguments_are_read_like_the_flags_of_the_same_name(name, argument, value):
    assert read_arguments({name: argument}) == {name: value}


def test_a_wrong_argument_raises_a_request_error_and_lists_may_be_one_value():
    for name, argument in (("keep", 1.5), ("keep", True), ("batch_size", "many"), ("seed", -1)):
        assert refusal_of(read_arguments, {name: argument}).asked.startswith(f"--{name}")
    assert (as_list(None), as_list(1), as_list((1, 2))) == ([], [1], [1, 2])
