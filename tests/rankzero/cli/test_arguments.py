import pytest
import yaml

from rankzero.cli.arguments import parse_arguments, read_config
from running import command_of, fit, refusal_of

FIT = command_of("fit")


def parse(*arguments):
    return parse_arguments(FIT, arguments)


def test_short_flags_become_lightning_keys_and_override_long_flags_and_defaults():
    flags = parse("--epochs", "3", "--trainer.max_epochs", "9", "--model", "MLP", "--data=Toy", "--batch_size=8")
    model, data = "--model=lightning_modules.MLP", "--data=data_modules.Toy"
    assert flags.arguments == [model, data, "--trainer.max_epochs", "9", "--trainer.max_epochs=3", "--batch_size=8"]
    assert flags.get("epochs") == 3 and flags.get("batch_size") == 8 and flags.get("resume") == "auto"
    assert "--model=lightning_modules.ResNet" in parse().arguments and parse().explicitly_set == frozenset()
    flags = parse("--model", "my.Net")
    assert flags.explicitly_set == {"model"} and "--data=data_modules.Digits" in flags.arguments


@pytest.mark.parametrize(
    "arguments",
    [
        *(('--trainer={"devices": 2, "logger": false}',), ("--trainer", "{devices: 2}"), ("--trainer", "trainer.yaml")),
        ("--trainer", "trainer.yaml", "--trainer={max_epochs: 3}"),
        *(("--trainer={devices: 3}", "--trainer.devices=2"), ("--trainer.devices=3", "--trainer={devices: 2}")),
    ],
)
def test_devices_in_a_trainer_section_or_file_are_read(cwd, arguments):
    (cwd / "trainer.yaml").write_text("devices: 2\nlogger: false\n")
    flags = parse(*arguments)
    assert flags.requested_world.devices == 2 and "trainer.logger" not in flags.values
    assert set(arguments) <= set(flags.arguments)


@pytest.mark.parametrize(
    ("arguments", "found", "instead"),
    [
        (["--batchsize=3"], "similar names: --batch_size", "--batch_size 3"),
        (["--data", "Fashion"], "choose CIFAR10, Digits", "--data FashionMNIST"),
        (["--devices", "0"], "not a whole number", "--devices 2"),
        (["--epochs"], "it has no value", "--epochs VALUE"),
        (["trainn"], "the subcommands are fit, validate, test, predict", "fit.py fit ..."),
        (["evaluate"], "the subcommands are", "fit.py validate ..."),
        (["--model", "MLP", "test"], "must come before the flags", "fit.py test ..."),
        (["--epochs", "3", "4"], "unexpected argument", "--help"),
        (["--nodes", "-3"], "not a whole number", "--nodes 2"),
        (["--seed", "-1"], "0 to 4294967295", "--seed 0"),
        (["-x"], "no flag of that name", ""),
        (["--trainer", "qqqqq"], "no such file", "--trainer FILE, or omit it"),
        (["--trainer", "{devices"], "not YAML", "--print_config, to see an example"),
        (["--run", "../../etc"], "folder name", "--name my-run"),
        (["--foo", "3"], "no flag of that name", "--help"),
    ],
)
def test_a_wrong_argument_is_refused_with_a_suggestion(arguments, found, instead):
    error = refusal_of(parse, *arguments)
    assert found in error.found and error.instead.endswith(instead)


def test_hostile_arguments_give_a_short_printable_message():
    for argument in ("--g\x1b[31mpus", "\udcff\udcfe", "x" * 100_000, "--x=" + "\n" * 9, "--\x00", "--"):
        lines = str(refusal_of(parse, argument)).split("\n")
        assert len(lines) == 3 and all(line.isprintable() and len(line) < 700 for line in lines)


def test_an_alias_sets_the_flag():
    for arguments, name, value in (
        *((f"{flag} x", "name", "x") for flag in ("--name", "--run", "--run_name")),
        ("--total_epochs 50", "epochs", 50),
        *(("--ckpt_path last", "resume", "auto"), ("--ckpt_path null", "resume", "never")),
        ("--ckpt_path a/b.ckpt", "resume", "a/b.ckpt"),
    ):
        assert parse(*arguments.split()).get(name) == value


def test_flags_that_only_print_are_recognized():
    for arguments in (("--print_config", "--devices", "2"), ("--model.help", "ResNet"), ("--help_all",)):
        assert parse(*arguments).only_prints
    assert not parse("--model.hidden_sizes", "[8]").only_prints


@pytest.mark.parametrize(("arguments", "code"), [(("--help",), 0), (("--devices", "0"), 2)])
def test_help_and_a_refusal_do_not_import_torch(tmp_path, arguments, code):
    (tmp_path / "torch.py").write_text("raise ImportError('torch was imported')")
    result = fit(*arguments, folder=tmp_path, environment={"PYTHONPATH": str(tmp_path)}, code=code)
    assert "asked  --devices 0" in result.err if code else "--devices N" in result.out
    assert "Traceback" not in result.err
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["torch.py"]


def test_every_form_of_lightnings_devices_argument_is_read():
    counts = {"2": (None, 2), "auto": (None, None), "-1": ((), None), "'4'": (None, 4)}
    for text, expected in (counts | {"[0,3]": ((0, 3), 2), "0,3,5": ((0, 3, 5), 3), "1,": ((1,), 1)}).items():
        requested = parse(f"--trainer.devices={text}").requested_world
        assert parse("--trainer.devices", text).requested_world == requested
        assert (requested.gpus, requested.devices) == expected, text


@pytest.mark.parametrize("name", ["fit", "evaluate", "predict", "preflight"])
def test_quiet_needs_no_value(name):
    expected = {(): "no", ("--quiet",): "yes", ("--quiet", "--devices", "3"): "yes", ("--quiet", "no"): "no"}
    for arguments, value in expected.items():
        assert parse_arguments(command_of(name), arguments).get("quiet") == value


def parse_file(path, text):
    path.write_text(text)
    return read_config(FIT, str(path))[::2]


def test_a_file_with_only_lightning_keys_is_passed_on_unchanged(tmp_path):
    path = tmp_path / "a.yaml"
    text, values = parse_file(path, "trainer:\n  max_epochs: 3\n  devices: 2\nmodel:\n  class_path: my.Net\n")
    assert text == str(path)
    assert values == {"trainer.max_epochs": 3, "trainer.devices": 2, "model": {"class_path": "my.Net"}}


def test_short_names_in_a_file_become_lightning_keys_and_numbers_are_unchanged(tmp_path):
    content = "epochs: 3\nmodel: MLP\ndata: {class_path: Toy}\nseed: 1\nbatch_size: 8\n"
    text, values = parse_file(tmp_path / "a.yaml", content)
    assert yaml.safe_load(text) == {
        "trainer": {"max_epochs": 3},
        "model": {"class_path": "lightning_modules.MLP"},
        "data": {"class_path": "data_modules.Toy"},
        "seed_everything": 1,
        "batch_size": 8,
    }
    assert values["trainer.max_epochs"] == 3 and values["batch_size"] == 8
    text, _ = parse_file(tmp_path / "a.yaml", "epochs: 1\ntrainer: {gradient_clip_val: 1e-3}\n")
    assert "gradient_clip_val: 1e-3" in text  # plain YAML reads this number as text


def test_the_config_of_a_lightning_cli_with_fixed_classes_needs_flags_that_name_them(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("weights_only: null\nckpt_path: null\nmodel: {lr: 0.1}\ndata: {size: 4}\n")
    flags = "--model", "mine.Line", "--data", "src/mine.py:Data"
    first, *others = parse_arguments(FIT, [*flags, "--config", str(path)]).arguments
    assert yaml.safe_load(first.removeprefix("--config=")) == {
        "model": {"class_path": "mine.Line", "init_args": {"lr": 0.1}},
        "data": {"class_path": "src.mine.Data", "init_args": {"size": 4}},
    }
    assert others == ["--model=mine.Line", "--data=src.mine.Data"]
    error = refusal_of(parse_arguments, FIT, ["--config", str(path), *flags[2:]])
    assert error.found == "it has the arguments of a class, but names no class"
    assert error.instead == f"--model MODULE.CLASS --config {path}"


def test_a_wrong_or_missing_config_file_is_refused(tmp_path):
    expected = {"epoch: 3": "no such key", "a: [": "not YAML", "devices: 0": "not a whole number"}
    expected |= dict.fromkeys(("just words", ""), "no 'key: value' lines")
    for text, found in (expected | {"model: RezNet": "no model of that name"}).items():
        assert found in refusal_of(parse_file, tmp_path / "train.yaml", text).found
    for text, end in {"gpus: 2": "devices: 2", "fp16: true": "precision: 16-mixed", "epocs: 3": "epochs: 3"}.items():
        assert refusal_of(parse_file, tmp_path / "train.yaml", text).instead.endswith(end)
    error = refusal_of(read_config, FIT, str(tmp_path / "trian.yaml"))
    assert "contains train.yaml" in error.found and error.instead.endswith("train.yaml")
    assert refusal_of(read_config, FIT, str(tmp_path / "other.yaml")).instead == "--config FILE, or omit it"
