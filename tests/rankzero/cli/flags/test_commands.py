from rankzero.cli.flags import COMMON_FLAGS, TRAINING_FLAGS
from running import refusal_of

FLAGS = {flag.name: flag for flag in (*COMMON_FLAGS, *TRAINING_FLAGS)}


def test_a_wrong_value_gives_a_message_with_asked_found_and_type():
    expected = "  asked  --devices 0\n  found  '0' is not a whole number >= 1\n  type   --devices 2"
    assert str(refusal_of(FLAGS["devices"].value, "0")) == expected
    assert refusal_of(FLAGS["launcher"].value, "torchrum").instead == "--launcher torchrun"


def test_every_flag_accepts_its_example_and_has_a_short_help_text():
    for flag in FLAGS.values():
        flag.value(flag.example)
        assert "\n" not in flag.help and len(flag.help) < 90
