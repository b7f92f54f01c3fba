import pytest
import yaml

from rankzero.cli.command import EVERY_DAY, GROUPS
from rankzero.cli.flag_values import positive_int, run_name, save_interval
from rankzero.cli.flags import RUNNING, TRAINING
from rankzero.messages import RequestError
from running import command_of

FLAGS = {flag.name: flag for flag in (*RUNNING, *TRAINING)}


@pytest.mark.parametrize("text", ["0", "-1", "x", "", "1.5", "1e3", "٣", " 2", "0x10"])
def test_a_count_is_a_whole_number_of_one_or_more(text):
    with pytest.raises(ValueError, match="whole number"):
        positive_int(text)


@pytest.mark.parametrize("text", ["5", "200steps", "1step", "90s", "15min", "2h"])
def test_intervals(text):
    assert save_interval(text) == text


@pytest.mark.parametrize("text", ["0", "0steps", "5epochs", "min", "-5", "1.5h"])
def test_what_is_no_interval(text):
    with pytest.raises(ValueError, match="steps"):
        save_interval(text)


def test_a_time_limit_reads_the_same_wherever_it_is_written():
    limit = FLAGS["time_limit"].value("1:30:00")
    assert limit == "5400s" == FLAGS["time_limit"].value(str(yaml.safe_load(f"limit: {limit}")["limit"]))


def test_what_is_no_time_limit():
    with pytest.raises(RequestError, match="type   --time_limit 2h"):
        FLAGS["time_limit"].value("soon")


@pytest.mark.parametrize("text", ["../x", "a/b", "", ".hidden", "-x", "a b", "a\nb", "a\0b", "x" * 200, "$(rm)", "[x]"])
def test_a_run_name_is_one_folders_name(text):
    with pytest.raises(ValueError, match="folder"):
        run_name(text)


def test_a_wrong_value_says_asked_found_and_what_to_type():
    with pytest.raises(RequestError) as error:
        FLAGS["devices"].value("0")
    assert str(error.value).splitlines() == [
        "  asked  --devices 0",
        "  found  '0' is not a whole number of 1 or more",
        "  type   --devices 2",
    ]


def test_a_mistyped_choice_gets_its_nearest_match():
    with pytest.raises(RequestError, match="type   --launcher torchrun"):
        FLAGS["launcher"].value("torchrum")


@pytest.mark.parametrize("flag", FLAGS.values(), ids=FLAGS)
def test_every_flags_example_is_right(flag):
    flag.value(flag.example)
    assert "\n" not in flag.help and len(flag.help) < 90


@pytest.mark.parametrize("command", ["fit", "evaluate", "predict"])
def test_the_help_has_every_flag_in_one_group(command):
    grouped = [*EVERY_DAY, *(name for names in GROUPS.values() for name in names)]
    assert len(grouped) == len(set(grouped))
    assert {flag.name for flag in command_of(command).flags} <= set(grouped)
