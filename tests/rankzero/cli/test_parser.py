"""Errors in the arguments of a model: jsonargparse finds them, Rankzero rewrites the message."""

import re
from argparse import ArgumentError
from collections.abc import Iterable
from enum import Enum

import pytest
from jsonargparse import Namespace
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback, Timer
from lightning.pytorch.loggers import Logger

from rankzero.cli.arguments import Origins
from rankzero.cli.flags import positive_int, save_interval
from rankzero.cli.parser import RankzeroParser, parsing_error, reader, without_enums
from rankzero.messages import RequestError
from running import refusal_of

MLP, BASE = "lightning_modules.MLP", "lightning_modules.supervised.Supervised"


def new_parser(**options):
    parser = RankzeroParser(**options)
    parser.add_argument("--config", action="config")
    parser.add_argument("--keep", type=reader(positive_int), default=3)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--logger", type=Logger | Iterable[Logger] | bool | None)
    parser.add_argument("--callbacks", type=list[Callback] | Callback | None)
    parser.add_lightning_class_args(LightningModule, "model", subclass_mode=True, required=False)
    return parser


def refusal(*arguments, files=(), stored=""):
    parser = new_parser()
    parser.origins = Origins(typed_arguments=arguments, sources=files, stored_source=stored)
    return refusal_of(parser.parse_args, arguments)


@pytest.mark.parametrize(
    ("arguments", "asked", "found", "instead"),
    [
        ("--kep=3", "--kep", "there is no such flag", "--keep"),
        ("--zzzz", "--zzzz", "there is no such flag", "--help_all"),
        ("--model MLP --model.hiden=[3]", "--model.hiden '[3]'", "MLP has no such", "--model.hidden_sizes '[3]'"),
        ("--model MLP --model.pretrained true", "--model.pretrained true", "MLP has no such", "--model.help"),
        ("--model json.JSONDecoder", "--model json.JSONDecoder", "is not a LightningModule", "the class path of"),
        ("--model no.such.Net", "--model no.such.Net", "No module named 'no'", "--model package.module.Class"),
        ("--model json.Nothing", "--model json.Nothing", "json has no class Nothing", "the class path of"),
        (
            "--model MLP --model.optimizer SGD --model.optimizer.lrr 0.1",
            *("--model.optimizer.lrr 0.1", "SGD has no such argument", "--model.optimizer.lr 0.1"),
        ),
        (
            *("--logger [CSVLogger,WandbLogger]", "--logger '[CSVLogger,WandbLogger]'", "required argument missing: "),
            "--logger+ CSVLogger --logger.save_dir VALUE --logger+ WandbLogger",
        ),
        (
            *("--callbacks.patience x", "--callbacks.patience x", "Callback has no such argument"),
            "--callbacks+ EarlyStopping --callbacks.monitor VALUE --callbacks.patience 1",
        ),
        (*[f"--model {BASE}"] * 2, "required argument missing: network", f"--model {BASE} --model.network VALUE"),
    ],
)
def test_a_wrong_argument_gives_a_message_with_asked_found_and_type(arguments, asked, found, instead, cwd):
    error = refusal(*arguments.replace(" MLP", f" {MLP}").split())
    assert error.asked == asked and found in error.found and error.instead.startswith(instead)
    assert "jsonargparse" not in str(error) and "Namespace" not in str(error) and len(str(error).splitlines()) < 6


@pytest.mark.parametrize(
    ("arguments", "found", "valid"),
    [
        ("--rate x", "expected float", "1"),
        ("--model MLP --model.hidden_sizes x", "expected list", "'[1]'"),
        ("--model MLP --model.hidden_sizes 64", "expected list", "'[64]'"),
        ("--model ResNet --model.depth 19", "expected one of 10, 18, 34", "18"),
        ("--model MLP --model.optimizer adam", "similar names: Adam, ", "Adam"),
        ("--model MLP --model.schedule Cosin", "or a class path", "Cosine"),
        ("--model MLP --model.optimizer SGD --model.optimizer.lr x", "expected float", "1"),
        ("--logger csv", "similar names: CSVLogger", "CSVLogger"),  # which has a required argument
        ("--logger CSVLogger --logger.flush_logs_every_n_steps x", "expected int", "1"),
        ("--callbacks+ EarlyStoping", "similar names: EarlyStopping", "EarlyStopping"),
        ("--callbacks+ EarlyStopping --callbacks.monitor loss --callbacks.patience x", "expected int", "1"),
    ],
)
def test_an_invalid_value_suggests_one_that_is_accepted(arguments, found, valid):
    error = refusal(*re.sub(r"--model (MLP|ResNet)", r"--model lightning_modules.\1", arguments).split())
    asked = arguments.split(" ")[-2:]
    assert error.asked == " ".join(asked) and found in error.found and error.instead == f"{asked[0]} {valid}"


def test_a_mistake_in_a_config_file_names_the_file(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("model: {class_path: lightning_modules.MLP, init_args: {hiden: 3}}")
    content = {"model": {"class_path": MLP, "init_args": {"hiden": 3}}}
    error = refusal("--config", str(file), files=[("--config c.yaml", content)])
    assert error.asked == "model.hiden: 3, in --config c.yaml"
    assert error.instead == "model.hidden_sizes: 3, in --config c.yaml"
    content["model"]["init_args"] = {"optimizer": "Adan"}
    file.write_text(str(content))
    error = refusal("--config", str(file), files=[("--config c.yaml", content)])
    assert error.asked == "model.optimizer: Adan, in --config c.yaml"
    assert error.instead == "model.optimizer: Adam, in --config c.yaml"


def test_the_suggestion_for_a_stored_configuration_omits_a_removed_argument():
    name, arguments = "the stored configuration", {"hidden_sizes": [3], "gone": 1}
    content = {"model": {"class_path": MLP, "init_args": arguments}}
    error = refusal("--model", MLP, "--model.gone", "1", files=[(name, content)], stored=name)
    assert error.found.startswith("MLP has no such argument")  # the argument was typed, not only stored
    parser = new_parser()
    parser.origins = Origins(sources=[(name, content)], stored_source=name)
    error = refusal_of(parser.parse_object, {"model": content["model"]})
    assert error.found.startswith("gone is no longer an argument of MLP; the stored configuration")
    assert error.instead.startswith('--model \'{"class_path": "lightning_modules.MLP", "init_args": {"hid')


def test_errors_of_another_caller_or_of_a_users_class_are_raised_unchanged():
    with pytest.raises(ArgumentError):
        new_parser(exit_on_error=False).parse_args(["--rate", "x"])
    refused = RequestError("--data.root nowhere", "nowhere does not exist", "--data.root DIR")
    wrapped = ValueError("in jsonargparse")
    wrapped.__cause__ = TypeError("around it")
    wrapped.__cause__.__context__ = refused
    assert refusal_of(new_parser().error, "Problem with given class_path", wrapped) is refused


def test_any_parsing_error_becomes_a_printable_message_of_three_parts():
    for message in ("", "\n\n", 'Parser key "model":', "x" * 10_000, "\x1b[31m", "Option ''"):
        lines = str(parsing_error(message, {})).splitlines()
        assert [line.split()[0] for line in lines] == ["asked", "found", "type"]
        assert all(line.isprintable() and len(line) < 700 for line in lines)


def test_a_reader_accepts_numbers_that_yaml_has_parsed():
    assert reader(positive_int)(4) == reader(positive_int)("4") == 4
    assert reader(save_interval)(200) == "200" and reader(save_interval)("200steps") == "200steps"
    with pytest.raises(ValueError, match="a whole number >= 1"):
        reader(positive_int)(0)
    assert new_parser().parse_args(["--keep", "4"]).keep == 4


def test_enum_members_are_replaced_by_their_values_such_as_that_of_lightnings_timer():
    class Text(str, Enum):
        A = "a"

    class Number(Enum):
        ONE = 1

    content = Namespace(a=Text.A, b={"c": [Text.A, "x"], "d": (Text.A, 3)}, e=Number.ONE, f=Namespace(g=None))
    expected = Namespace(a="a", b={"c": ["a", "x"], "d": ("a", 3)}, e=Number.ONE, f=Namespace(g=None))
    assert repr(without_enums(content)) == repr(expected)  # compares reprs, because a member of `Text` equals its value
    assert type(without_enums(Text.A)) is str
    parser = RankzeroParser()
    parser.add_lightning_class_args(Timer, "timer")
    assert "interval: step" in parser.dump(without_enums(parser.parse_args([])), skip_unset=False)


ORIGINS = Origins(
    typed_arguments=["--model", "my.Net", "--model.width=3", "--epochs", "2", "--flag", "--data.n", "a\x1b[31mb"],
    keys={"epochs": "trainer.max_epochs"},
    sources=[
        ("the stored configuration", {"data": {"class_path": "my.Data", "init_args": {"n": 1, "sleep": 0.5}}}),
        ("--config c.yaml", {"model": {"class_path": "my.Net", "init_args": {"width": 4, "depth": 5}}}),
    ],
    stored_source="the stored configuration",
)


def test_a_value_is_named_as_typed_or_with_its_file():
    expected = {
        "model.width": "--model.width 3",
        "trainer.max_epochs": "--epochs 2",
        "data.n": "--data.n 'a?[31mb'",
        "model.depth": "model.depth: 5, in --config c.yaml",
        "data.sleep": "data.sleep: 0.5, in the stored configuration",
        "model.other": "--model my.Net",
        "trainer.logger": "--trainer.logger",
    }
    assert {key: ORIGINS.request_for(key) for key in expected} == expected


def test_a_stored_section_is_shown_as_a_flag_without_an_argument():
    assert ORIGINS.flag_without("data.sleep") == """--data '{"class_path": "my.Data", "init_args": {"n": 1}}'"""
