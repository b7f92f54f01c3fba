import pytest

from rankzero.cli.flags import COMMON_FLAGS, TRAINING_FLAGS
from rankzero.messages import RequestError

FLAGS = {flag.name: flag for flag in (*COMMON_FLAGS, *TRAINING_FLAGS)}


def test_a_wrong_value_gives_a_message_with_asked_found_and_type():
    with pytest.raises(RequestError) as error:
        FLAGS["devices"].value("0")
    assert str(error.value).splitlines() == [
        "  asked  --devices 0",
        "  found  '0' is not a whole number >= 1",
        "  type   --devices 2",
    ]


def test_a_mistyped_choice_suggests_the_nearest_match():
    with pytest.raises(RequestError, match="type   --launcher torchrun"):
        FLAGS["launcher"].value("torchrum")


@pytest.mark.parametrize("flag", FLAGS.values(), ids=FLAGS)
def test_every_flag_accepts_its_example_and_has_a_short_help_text(flag):
    flag.value(flag.example)
    assert "\n" not in flag.help and len(flag.help) < 90
