import pytest
import yaml

from rankzero.cli.flags.values import (
    checkpoint_value,
    choices,
    export_file,
    hostname,
    metric_to_keep,
    non_negative_int,
    port_number,
    positive_int,
    profiled_ranks,
    profiled_steps,
    resume_value,
    run_name,
    save_interval,
    seconds_value,
    seed_value,
    time_limit_value,
    yes_or_no,
)

VALID = {
    save_interval: ["5", "200steps", "1step", "90s", "15min", "2h"],
    non_negative_int: {"0": 0},
    port_number: {"65535": 65535},
    seed_value: {"4294967295": 4294967295},
    hostname: ["node-1.example"],
    metric_to_keep: ["min:val/loss"],
    resume_value: {"last": "auto", "null": "never"},
    checkpoint_value: {"None": "last"},
    profiled_steps: ["10steps@200", "1000steps", "1step"],
    profiled_ranks: ["0,12", "all"],
    choices("data", "size"): ["size,data"],
    yes_or_no: {"True": "yes"},
    export_file: ["out/model.safetensors"],
    seconds_value: {"300": 300.0, "2.5": 2.5, "5min": 300.0, "1h": 3600.0},
}
"""Reader -> text -> value, or texts that are values themselves."""
NAMES = ("../x", "a/b", "", ".hidden", "-x", "a b", "a\nb", "a\0b", "x" * 200, "$(rm)", "[x]")
INVALID = {
    positive_int: ("whole number", ("0", "-1", "x", "", "1.5", "1e3", "٣", " 2", "0x10", "9" * 5000)),
    save_interval: ("steps", ("0", "0steps", "5epochs", "min", "-5", "1.5h")),
    run_name: ("folder", NAMES),
    seconds_value: (
        r"^a time in seconds \(300\) or with a unit \(5min\)$",
        ("0", "-1", "", "90m", "soon", "nan", "1e3"),
    ),
    checkpoint_value: (".", []),
    non_negative_int: (".", ["-1"]),
    port_number: (".", ("0", "65536")),
    seed_value: (".", ["4294967296"]),
    hostname: (".", ["two words"]),
    metric_to_keep: (".", ["val/loss"]),
    resume_value: (".", [" "]),
    profiled_steps: (".", ("10", "0steps", "1001steps", "10steps@", "10s")),
    profiled_ranks: (".", ("0,", "-1", "zero")),
    choices("data", "size"): (".", ["data;size"]),
    yes_or_no: (".", ["maybe"]),
    export_file: (".", ["model.onnx"]),
}


@pytest.mark.parametrize("read", INVALID)
def test_valid_values_are_read_and_invalid_values_are_refused(read):
    valid = VALID.get(read, ())
    values = valid if isinstance(valid, dict) else {text: text for text in valid}
    assert {text: read(text) for text in values} == values
    description, texts = INVALID[read]
    for text in texts:
        with pytest.raises(ValueError, match=description):
            read(text)


def test_a_time_limit_in_seconds_survives_a_round_trip_through_yaml():
    limit = time_limit_value("1:30:00")
    assert limit == "5400s" == time_limit_value(str(yaml.safe_load(f"limit: {limit}")["limit"]))
    with pytest.raises(ValueError, match="a time"):
        time_limit_value("soon")
