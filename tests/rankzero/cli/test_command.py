from importlib import import_module

import pytest

from rankzero.cli.arguments import parse_arguments
from rankzero.cli.command import FIRST_FLAGS, GROUPS, OTHER_SUBCOMMANDS, SUBCOMMANDS
from rankzero.messages import set_spelling
from running import command_of, refusal_of

FIT = command_of("fit")
COMMAND_NAMES = ("fit", "evaluate", "predict", "preflight")


def test_help_shows_all_flags_in_groups(capsys):
    with pytest.raises(SystemExit) as exit_info:
        parse_arguments(FIT, ["--help"])
    text = capsys.readouterr().out
    assert exit_info.value.code == 0
    assert all(f"--{flag.name} " in text for flag in FIT.flags)
    assert len(text.splitlines()) <= 63 and max(map(len, text.splitlines())) <= 120
    titles = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles == [f"{title}:" for title in GROUPS]
    first_options = [line.split()[0] for line in text.splitlines()[2:7]]
    assert first_options == [f"--{name}" for name in FIRST_FLAGS]
    assert all(example in text for example in FIT.examples) and len(FIT.examples) == 3


def test_every_flag_belongs_to_one_help_group_and_has_a_key_of_lightning_or_is_an_own_flag():
    grouped = [*FIRST_FLAGS, *(name for names in GROUPS.values() for name in names)]
    assert len(grouped) == len(set(grouped))
    assert {flag.name for command in COMMAND_NAMES for flag in command_of(command).flags} <= set(grouped)
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
    other_options = {"model", "data", "explain", "config", "model.X", "help_all"}
    assert sorted(printed_options) == sorted({flag.name for flag in command.flags} | other_options)
    titles = [number for number, line in enumerate(lines) if line.endswith(":") and not line.startswith(" ")]
    assert all(lines[number + 1].startswith("  --") for number in titles)
    verb = {"fit": "train", "preflight": "check"}.get(name, name)
    assert [line for line in lines if line.startswith("What to ")] == [f"What to {verb}:"]
    assert [line.strip() for line in lines[-len(command.examples) :]] == list(command.examples)


def test_the_help_names_the_command_as_typed():
    set_spelling(lambda text: text.replace("python launch/fit.py", "rankzero fit"))
    try:
        assert FIT.help().startswith("rankzero fit: ") and "python launch/fit.py" not in FIT.help()
    finally:
        set_spelling(None)


def test_short_names_become_class_paths_and_other_values_are_unchanged():
    assert FIT.class_path("model", "MLP") == "lightning_modules.MLP"
    assert FIT.class_path("data", "Toy") == "data_modules.Toy"
    for flag, text in (("model", "my_package.Net"), ("data", "data.yaml"), ("model", '{"class_path": "x"}')):
        assert FIT.class_path(flag, text) == text


def test_an_unknown_model_or_data_name_suggests_the_nearest_or_first_name():
    nearest = (("model", "RezNet", "ResNet"), ("data", "Tooy", "Toy"))
    for flag, text, instead in (*nearest, ("model", "Toy", "MLP"), ("data", "", "CIFAR10")):
        error = refusal_of(FIT.class_path, flag, text)
        assert (error.asked, error.instead) == (f"--{flag} {text}", f"--{flag} {instead}")
        names = (FIT.models if flag == "model" else FIT.data).__all__
        assert error.found == f"there is no {flag} of that name; choose {', '.join(names)}, or a class path"


SIMILAR = "; similar names: --batch_size, --global_batch_size, --max_device_batch_size"


@pytest.mark.parametrize(
    ("arguments", "asked", "found", "instead"),
    [
        (("epocs", "", "3"), "--epocs 3", "flag of that name", "--epochs 3"),
        (("epocs", ""), "--epocs", "flag of that name", "--epochs"),
        (("gpus", "", "2"), "--gpus 2", "flag of that name", "--devices 2"),
        (("zzzz", "", "a b"), "--zzzz 'a b'", "flag of that name", "python launch/fit.py --help"),
        (("trainr.devices", "", "2"), "--trainr.devices 2", "flag of that name", "--trainer.devices 2"),
        (("batchsize", "", "3"), "--batchsize 3", f"flag of that name{SIMILAR}", "--batch_size 3"),
        (("epocs", "c.yaml: "), "c.yaml: epocs", "such key", "epochs"),
        (("gpus", "c.yaml: "), "c.yaml: gpus", "such key", "devices: VALUE"),
        (("fp16", "c.yaml: "), "c.yaml: fp16", "such key", "precision: 16-mixed"),
        (("hlp", ""), "--hlp", "flag of that name", "--help"),
        (("hlp", "c.yaml: "), "c.yaml: hlp", "such key", "python launch/fit.py --help"),
    ],
)
def test_an_unknown_flag_or_key_gives_one_message_with_a_suggestion(arguments, asked, found, instead):
    error = FIT.unknown_flag_error(*arguments)
    assert (error.asked, error.found, error.instead) == (asked, f"there is no {found}", instead)


def test_every_subcommand_maps_to_a_command_that_accepts_its_flags():
    for name, flags in SUBCOMMANDS.values():
        assert callable(import_module(f"rankzero.commands.{name}").main)
        parse_arguments(command_of(name), flags)
    assert set(OTHER_SUBCOMMANDS.values()) <= SUBCOMMANDS.keys() and not OTHER_SUBCOMMANDS.keys() & SUBCOMMANDS.keys()
