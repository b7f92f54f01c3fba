from rankzero.cli.flags import Flag
from rankzero.cli.flags.command_line import help_text, parse
from rankzero.cli.flags.values import choice, file_path, positive_int
from running import refusal_of

FLAGS = (
    Flag("root", "DIR", file_path, "folder", "runs", default="runs"),
    Flag("last", "N", positive_int, "number", "20", aliases=("newest",)),
    Flag("kind", "KIND", choice("one", "two"), "kind", "one", default=()),
    Flag("all", "", file_path, "switch", ""),
)


def test_values_switches_and_arguments_in_any_order():
    command_line = parse("list", FLAGS, ["a", "--newest=3", "--all", "b", "--kind", "one", "--kind=two", "--", "--c"])
    assert command_line.values == {"root": "runs", "last": 3, "kind": ("one", "two"), "all": True}
    assert command_line.positional == ["a", "b", "--c"] and not command_line.wants_help
    assert parse("list", FLAGS, []).values == {"root": "runs", "last": None, "kind": (), "all": False}
    assert parse("list", FLAGS, ["-h"]).wants_help and parse("list", FLAGS, ["--help"]).wants_help


def test_wrong_flags_are_refused_with_the_words_to_type():
    expected = {"--lsat 3": "--last", "--lsat=3": "--last 3", "--unknown": "python launch/list.py --help"}
    expected |= {"--kind tow": "--kind two", "--all=yes": "--all"}
    expected |= dict.fromkeys(("--last", "--last --all", "--last=0"), "--last 20")
    assert {text: refusal_of(parse, "list", FLAGS, text.split()).instead for text in expected} == expected


def test_the_help_lists_every_flag_in_columns():
    lines = help_text("title", FLAGS, ["example"]).splitlines()
    assert lines[0] == "title" and lines[-1] == "  example"
    options = ["  --root DIR   folder", "  --last N     number", "  --kind KIND  kind", "  --all        switch"]
    assert lines[2:6] == options
