import inspect
import shlex
from importlib import import_module

import pytest
from lightning.pytorch import Trainer

from rankzero.cli import foreign_flags
from rankzero.cli.arguments import parse_arguments
from rankzero.cli.command import OTHER_SUBCOMMANDS, SUBCOMMANDS
from rankzero.cli.flags import FLAGS
from rankzero.cli.foreign_flags import TRAINER_ARGUMENTS, equivalent_flag
from rankzero.messages import nearest, quoted, similar_names
from running import command_of, refusal_of

FIT = command_of("fit")
COMMAND_NAMES = ("fit", "evaluate", "predict", "preflight")


def test_help_shows_all_flags_in_groups(capsys):
    with pytest.raises(SystemExit) as exit_info:
        parse_arguments(FIT, ["--help"])
    text = capsys.readouterr().out
    assert exit_info.value.code == 0
    assert all(f"--{flag.name} " in text for flag in FIT.flags)
    assert len(text.splitlines()) <= 64 and max(map(len, text.splitlines())) <= 120
    titles = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles == [f"{title}:" for title in FLAGS if title]
    first_options = [line.split()[0] for line in text.splitlines()[2:7]]
    assert first_options == ["--model", "--data", "--epochs", "--name", "--devices"]
    assert all(example in text for example in FIT.examples) and len(FIT.examples) == 3


def test_every_command_has_one_flag_of_a_name_and_each_flag_has_a_key_of_lightning_or_is_an_own_flag():
    for command in COMMAND_NAMES:
        names = [flag.name for flag in command_of(command).flags]
        assert len(names) == len(set(names))
    assert "pass N times over the data [20] (also --total_epochs)" in FIT.help()
    assert FIT.keys["total_epochs"] == FIT.keys["epochs"] == "trainer.max_epochs"
    assert FIT.keys["ckpt_path"] == FIT.keys["resume"] == "resume"
    own = {flag.name for flag in FIT.own_flags}
    assert {"save_every", "batch_size"} <= own and not own & {"epochs", "devices", "seed"}


@pytest.mark.parametrize("name", COMMAND_NAMES)
def test_the_help_of_each_command_shows_exactly_its_flags(name):
    command = command_of(name)
    lines = command.help().splitlines()
    assert lines[0] == f"python launch/{name}.py: {command.purpose} (defaults are in brackets)"
    printed_options = [line.split()[0].removeprefix("--") for line in lines if line.startswith("  --")]
    other_options = {"model", "data", "explain", "config", "model.X"}
    assert sorted(printed_options) == sorted({flag.name for flag in command.flags} | other_options)
    titles = [number for number, line in enumerate(lines) if line.endswith(":") and not line.startswith(" ")]
    assert all(lines[number + 1].startswith("  --") for number in titles)
    verb = {"fit": "train", "preflight": "check"}.get(name, name)
    assert [line for line in lines if line.startswith("What to ")] == [f"What to {verb}:"]
    assert [line.strip() for line in lines[-len(command.examples) :]] == list(command.examples)


def test_every_subcommand_maps_to_a_command_that_accepts_its_flags():
    for name, flags in SUBCOMMANDS.values():
        assert callable(import_module(f"rankzero.commands.{name}").main)
        parse_arguments(command_of(name), flags)
    assert set(OTHER_SUBCOMMANDS.values()) <= SUBCOMMANDS.keys() and not OTHER_SUBCOMMANDS.keys() & SUBCOMMANDS.keys()


def test_a_flag_of_another_trainer_suggests_the_rankzero_flag_with_the_users_value():
    for arguments, instead in (
        *(("--gpus 2", "--devices 2"), ("--nproc_per_node=4", "--devices 4"), ("--num_nodes 2", "--nodes 2")),
        ("--lr 0.1", "--model.optimizer AdamW --model.optimizer.lr 0.1"),
        ("--model my.Net --learning_rate 0.1", "--model.learning_rate 0.1, where the model takes it"),
        *((f"--{name} 7", f"--trainer.{name} 7") for name in ("strategy", "max_steps", "gradient_clip_val")),
        *(("--max_epochs 7", "--epochs 7"), ("--num_workers 7", "--data.num_workers 7"), ("--log_dir x", "--root x")),
        *(("--num-workers=7", "--data.num_workers 7"), ("--checkpoint_path a.ckpt", "--resume a.ckpt")),
        *(("--gpu 0,2", "--trainer.devices [0,2]"), ("--gpu all", "--accelerator gpu --devices N")),
        *(("--device cuda:1", "--trainer.devices [1]"), ("--device 2", "--devices 2, or")),
        *(("--device cuda", "--accelerator cuda"), ("--Epochs", "--epochs VALUE")),
        *(("--NUM-WORKERS 3", "--data.num_workers 3"), ("--trainer_epochs=3", "--epochs 3")),
        *(("--log_dir=$(rm)", "--root '$(rm)'"), ("--log_dir=", "--root ''"), ("--max_epochs", "--epochs VALUE")),
        *(("--fp16", "--precision 16-mixed"), ("--bf16 --epochs 3", "--precision bf16-mixed")),
        ("--accumulate_grad_batches 2", "--trainer.accumulate_grad_batches 2"),
        ("--trainr.max_epochs 3", "--trainer.max_epochs 3"),
        *(("--logger wandb", "--trainer.logger WandbLogger"), ("--logger tensorboard", "--trainer.logger true")),
    ):
        error = refusal_of(parse_arguments, FIT, arguments.split())
        assert error.instead.startswith(instead) and len(error.found) < 120


@pytest.mark.parametrize("name", ["fit", "evaluate", "predict"])
def test_every_suggested_flag_is_accepted_by_the_command(name):
    command = command_of(name)
    values = {flag.name: flag.example for flag in command.flags} | {"model": "MLP", "data": "Toy"}
    for target, other_names in foreign_flags._OTHER_NAMES.items():
        if "." in target or target in values:
            for other_name in other_names.split():
                suggestion = equivalent_flag(other_name, values.get(target, "1"), list(values), model="")
                assert suggestion == f"--{target} {values.get(target, '1')}"
                parse_arguments(command, shlex.split(suggestion))


def test_every_argument_of_lightnings_trainer_is_known_and_every_target_is_a_flag():
    assert set(TRAINER_ARGUMENTS) == set(inspect.signature(Trainer.__init__).parameters) - {"self"}
    flags = {flag.name for name in ("fit", "evaluate", "predict") for flag in command_of(name).flags}
    keys = {f"trainer.{name}" for name in TRAINER_ARGUMENTS}
    assert foreign_flags._OTHER_NAMES.keys() <= flags | keys | {"model", "data", "data.num_workers", "data.root"}
    for switch in foreign_flags._SWITCHES:
        suggestion = equivalent_flag(switch, None, list(FIT.keys), model="")
        assert suggestion == equivalent_flag(switch, "true", list(FIT.keys), model="")
        parse_arguments(FIT, suggestion.replace("N", "2").split())


def test_similar_names_finds_similar_flags_and_no_unrelated_flags_with_the_nearest_first():
    flags = ["epochs", "data.batch_size", "batch_size", "model"]
    expected = {"epocs": ["epochs"], "EPOCHS": ["epochs"], "batch-size": ["batch_size", "data.batch_size"]}
    expected |= {"": [], "zzzz": [], "x" * 100_000: []}
    assert {name: similar_names(name, flags) for name in expected} == expected
    names = [f"abcde{i}" for i in range(9)]
    assert similar_names("abcde7", names)[0] == "abcde7" and len(similar_names("abcde7", names)) == 4
    assert [nearest(name, ["MLP", "ResNet"]) for name in ("mlp", "reznet", "qqq", "")] == ["MLP", "ResNet", None, None]


def test_a_shell_reads_a_quoted_value_unchanged_if_it_is_short_and_printable():
    for value in ("", "a", "a b", "$(rm)", "it's", "[1, 2]", "*", "ümlaut", "x" * 120):
        assert shlex.split(quoted(value)) == [value]
    assert quoted("x" * 121) == "x" * 117 + "..."
    for value in ("\x1b[31m", "\n", "\x7f", "\x9b", "\x00", "\udcff"):
        assert quoted(f"a{value}b") == shlex.quote(f"a?{value[1:]}b")
