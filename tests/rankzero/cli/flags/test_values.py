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


@pytest.mark.parametrize("text", ["0", "-1", "x", "", "1.5", "1e3", "٣", " 2", "0x10", "9" * 5000])
def test_a_count_that_is_not_a_positive_whole_number_is_refused(text):
    with pytest.raises(ValueError, match="whole number"):
        positive_int(text)


@pytest.mark.parametrize("text", ["5", "200steps", "1step", "90s", "15min", "2h"])
def test_a_valid_save_interval_is_accepted(text):
    assert save_interval(text) == text


@pytest.mark.parametrize("text", ["0", "0steps", "5epochs", "min", "-5", "1.5h"])
def test_an_invalid_save_interval_is_refused(text):
    with pytest.raises(ValueError, match="steps"):
        save_interval(text)


def test_a_time_limit_in_seconds_survives_a_round_trip_through_yaml():
    limit = time_limit_value("1:30:00")
    assert limit == "5400s" == time_limit_value(str(yaml.safe_load(f"limit: {limit}")["limit"]))
    with pytest.raises(ValueError, match="a time"):
        time_limit_value("soon")


@pytest.mark.parametrize("text", ["../x", "a/b", "", ".hidden", "-x", "a b", "a\nb", "a\0b", "x" * 200, "$(rm)", "[x]"])
def test_a_run_name_that_is_not_a_plain_folder_name_is_refused(text):
    with pytest.raises(ValueError, match="folder"):
        run_name(text)


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (non_negative_int, "0", 0),
        (port_number, "65535", 65535),
        (seed_value, "4294967295", 4294967295),
        (hostname, "node-1.example", "node-1.example"),
        (metric_to_keep, "min:val/loss", "min:val/loss"),
        (resume_value, "last", "auto"),
        (resume_value, "null", "never"),
        (checkpoint_value, "None", "last"),
        (profiled_steps, "10steps@200", "10steps@200"),
        (profiled_steps, "1000steps", "1000steps"),
        (profiled_steps, "1step", "1step"),
        (profiled_ranks, "0,12", "0,12"),
        (profiled_ranks, "all", "all"),
        (choices("data", "size"), "size,data", "size,data"),
        (yes_or_no, "True", "yes"),
        (export_file, "out/model.safetensors", "out/model.safetensors"),
    ],
)
def test_a_valid_value_is_read(read, text, value):
    assert read(text) == value


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (non_negative_int, "-1"),
        (port_number, "0"),
        (port_number, "65536"),
        (seed_value, "4294967296"),
        (hostname, "two words"),
        (metric_to_keep, "val/loss"),
        (resume_value, " "),
        (profiled_steps, "10"),
        (profiled_steps, "0steps"),
        (profiled_steps, "1001steps"),
        (profiled_steps, "10steps@"),
        (profiled_steps, "10s"),
        (profiled_ranks, "0,"),
        (profiled_ranks, "-1"),
        (profiled_ranks, "zero"),
        (choices("data", "size"), "data;size"),
        (yes_or_no, "maybe"),
        (export_file, "model.onnx"),
    ],
)
def test_an_invalid_value_is_refused(read, text):
    with pytest.raises(ValueError, match="."):
        read(text)


@pytest.mark.parametrize(("text", "seconds"), [("300", 300.0), ("2.5", 2.5), ("5min", 300.0), ("1h", 3600.0)])
def test_seconds_value_reads_seconds_and_units(text, seconds):
    assert seconds_value(text) == seconds


@pytest.mark.parametrize("text", ["0", "-1", "", "90m", "soon", "nan", "1e3"])
def test_seconds_value_describes_valid_values(text):
    with pytest.raises(ValueError, match=r"^a time in seconds \(300\) or with a unit \(5min\)$"):
        seconds_value(text)
