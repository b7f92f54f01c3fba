import pytest
import yaml

from rankzero.cli.flags import values

CHOICES = values.choices("data", "size")
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
    CHOICES: ["size,data"],
    values.yes_or_no: {"True": "yes"},
    values.export_file: ["out/model.safetensors"],
    values.seconds_value: {"300": 300.0, "2.5": 2.5, "5min": 300.0, "1h": 3600.0},
}
"""Reader -> text -> value, or texts that are values themselves."""
NAMES = ("../x", "a/b", "", ".hidden", "-x", "a b", "a\nb", "a\0b", "x" * 200, "$(rm)", "[x]")
INVALID = {
    values.positive_int: ("whole number", ("0", "-1", "x", "", "1.5", "1e3", "٣", " 2", "0x10", "9" * 5000)),
    values.save_interval: ("steps", ("0", "0steps", "5epochs", "min", "-5", "1.5h")),
    values.run_name: ("folder", NAMES),
    values.seconds_value: (
        r"^a time in seconds \(300\) or with a unit \(5min\)$",
        ("0", "-1", "", "90m", "soon", "nan", "1e3"),
    ),
    values.checkpoint_value: (".", []),
    values.non_negative_int: (".", ["-1"]),
    values.port_number: (".", ("0", "65536")),
    values.seed_value: (".", ["4294967296"]),
    values.hostname: (".", ["two words"]),
    values.metric_to_keep: (".", ["val/loss"]),
    values.resume_value: (".", [" "]),
    values.profiled_steps: (".", ("10", "0steps", "1001steps", "10steps@", "10s")),
    values.profiled_ranks: (".", ("0,", "-1", "zero")),
    CHOICES: (".", ["data;size"]),
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
