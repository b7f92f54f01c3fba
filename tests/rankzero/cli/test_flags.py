import pytest
import yaml

from rankzero.cli import flags as values
from rankzero.cli.command_line import parse, run_command, unknown_flag
from rankzero.cli.flags import Flag, choice, file_path, flags_of, positive_int
from running import refusal_of

VALID = {
    values.save_interval: ["5", "200steps", "1step", "90s", "15min", "2h"],
    values.non_negative_int: {"0": 0},
    values.port_number: {"65535": 65535},
    values.seed_value: {"4294967295": 4294967295},
    values.hostname: ["node-1.example"],
    values.metric_to_keep: ["min:val/loss"],
    values.resume_value: {"last": "auto", "null": "never"},
    values.checkpoint_value: {"None": "last"},
    values.profiled_steps: ["10steps@200", "1000steps", "1step"],
    values.profiled_ranks: ["0,12", "all"],
    values.accepted_changes: ["global_batch_size,data"],
    values.yes_or_no: {"True": "yes"},
    values.export_file: ["out/model.safetensors"],
    values.seconds_value: {"300": 300.0, "2.5": 2.5, "5min": 300.0, "1h": 3600.0},
}
"""Reader -> text -> value, or texts that are values themselves."""
NAMES = ("../x", "a/b", "", ".hidden", "-x", "a b", "a\nb", "a\0b", "x" * 200, "$(rm)", "[x]")
INTERVALS = ("", "0", "0steps", "1.5", "-5", "5 steps", "5epochs", "min", "2d", "1.5h", "9999999999h", "1" * 10)
INVALID = {
    values.positive_int: ("whole number", ("0", "-1", "x", "", "1.5", "1e3", "٣", " 2", "0x10", "9" * 5000)),
    values.save_interval: ("a number of epochs", INTERVALS),
    values.run_name: ("folder", NAMES),
    values.seconds_value: (r"^a time in seconds \(300\) or with a unit", ("0", "-1", "", "90m", "soon", "nan", "1e3")),
    values.checkpoint_value: (".", []),
    values.non_negative_int: (".", ["-1"]),
    values.port_number: (".", ("0", "65536")),
    values.seed_value: (".", ["4294967296"]),
    values.hostname: (".", ["two words"]),
    values.metric_to_keep: (".", ["val/loss"]),
    values.resume_value: (".", [" "]),
    values.profiled_steps: (".", ("10", "0steps", "1001steps", "10steps@", "10s")),
    values.profiled_ranks: (".", ("0,", "-1", "zero")),
    values.accepted_changes: ("^one or more of data, global_batch_size, sep", ("data;global_batch_size", "data,", "")),
    values.yes_or_no: (".", ["maybe"]),
    values.export_file: (".", ["model.onnx"]),
}


@pytest.mark.parametrize("read", INVALID)
def test_valid_values_are_read_and_invalid_values_are_refused(read):
    valid = VALID.get(read, ())
    expected = valid if isinstance(valid, dict) else {text: text for text in valid}
    assert {text: read(text) for text in expected} == expected
    description, texts = INVALID[read]
    for text in texts:
        with pytest.raises(ValueError, match=description):
            read(text)


def test_a_time_limit_in_seconds_survives_a_round_trip_through_yaml():
    limit = values.time_limit_value("1:30:00")
    assert limit == "5400s" == values.time_limit_value(str(yaml.safe_load(f"limit: {limit}")["limit"]))
    with pytest.raises(ValueError, match="a time"):
        values.time_limit_value("soon")


ALL_FLAGS = {flag.name: flag for flag in flags_of("fit")}


def test_a_wrong_value_gives_a_message_with_asked_found_and_type():
    expected = "  asked  --devices 0\n  found  '0' is not a whole number >= 1\n  type   --devices 2"
    assert str(refusal_of(ALL_FLAGS["devices"].value, "0")) == expected
    assert refusal_of(ALL_FLAGS["launcher"].value, "torchrum").instead == "--launcher torchrun"


def test_every_flag_accepts_its_example_and_has_a_short_help_text():
    for flag in ALL_FLAGS.values():
        flag.value(flag.example)
        assert "\n" not in flag.help and len(flag.help) < 90


FLAGS = (
    Flag("root", "DIR", file_path, "folder", "runs", default="runs"),
    Flag("last", "N", positive_int, "number", "20", aliases=("newest",)),
    Flag("kind", "KIND", choice("one", "two"), "kind", "one", default=()),
    Flag("all", "", file_path, "switch", ""),
)


def test_values_switches_and_arguments_in_any_order():
    asked = []

    def called_with(line=""):
        assert run_command("list", "title", FLAGS, (), lambda *values: asked.append(values) or 0, line.split()) == 0
        return asked.pop()

    values, positional = called_with("a --newest=3 --all b --last 4 --kind one --kind=two -- --c")
    assert values == {"root": "runs", "last": 4, "kind": ("one", "two"), "all": True}
    assert positional == ["a", "b", "--c"]
    assert called_with() == ({"root": "runs", "last": None, "kind": (), "all": False}, [])


def test_wrong_flags_are_refused_with_the_words_to_type():
    expected = {"--lsat 3": "--last 3", "--lsat=3": "--last 3", "--unknown": "python launch/list.py --help"}
    expected |= {"--kind tow": "--kind two", "--all=yes": "--all", "--al x": "--all"}
    expected |= dict.fromkeys(("--last", "--last --all", "--last -- 3", "--last=0"), "--last 20")
    for text, instead in expected.items():
        error = refusal_of(parse, FLAGS, text.split(), lambda flag, value, _: unknown_flag("list", FLAGS, flag, value))
        assert error.instead == instead, text
