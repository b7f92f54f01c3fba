import re
from dataclasses import fields

import pytest

from rankzero.commands.jobs.request import options
from rankzero.commands.jobs.request.command_line import FILES, SWITCHES, parse
from rankzero.commands.jobs.request.job_request import FORMS, JobRequest, array_indices
from rankzero.commands.jobs.request.options import LISTS, SUBMIT_FLAGS, help_text
from running import REPOSITORY

DOCUMENTATION = REPOSITORY / "docs" / "jobs.md"
FLAGS = {flag.name: flag for flag in SUBMIT_FLAGS}
ACCEPTED = {
    options.memory_value: dict.fromkeys(("64G", "64gb", "64 GB", "64GiB"), "64G")
    | {"500m": "500M", "2Tb": "2T", "1KB": "1K"},
    options.one_line: ["gpu", "a b", "a&b|c", "*", "$HOME", "caf\u00e9", '"', "'", "\\", " a "],
    options.array_value: ["0", "0-3", "1,5,9", "0-10:2", "0-3,7,10-20:5", "0-99%4", "1,2%1"],
    options.host_value: ["n1", "n1.example.org", "10.0.0.1", "user@n1", "a_b-c@n-1", "_"],
    options.command_lines: ["source a.sh", "a\nb", "\texport A='b c'\n", "#SBATCH --exclusive"],
}
CONTROL = ["\x1b[31m", "\x7f", "\x85", "\u2028", "\udcff"]
CONTROL += [f"a{chr(code)}b" for code in (*range(32), *range(127, 160))]
REFUSED = {
    options.memory_value: (
        "a number with a unit",
        ["", "64", "0G", "-1G", "1.5G", "64  G", "64P", "G", "64G\n", "1234567890G", "\u0661G", "64Gi"],
    ),
    options.one_line: ("printable characters in one line", ["", " ", "a\nb", "a\r", "a\tb", "\0", *CONTROL]),
    options.array_value: (
        "a list of indices",
        [
            *("", "a", "-1", "0-", "0,", ",0", "0--3", "0-3:0", "0:2", "0%0", "0%", "0-3%2,5", "3-0", "0 1", "0-3\n"),
            "$(id)",
        ],
    ),
    options.host_value: (
        "a list of host names",
        ["", "-n1", "-o@n1", "n1 n2", "n1,n2", "n1:22", "a@b@c", "@n1", "n1@", "n1;id", "$(id)", "n1\n", ".n1", "é"],
    ),
    options.command_lines: ("lines of text", ["", " \n", "\0", "a\0b"]),
}


@pytest.mark.parametrize("read", ACCEPTED)
def test_valid_values_are_read_and_invalid_values_are_refused(read):
    values = ACCEPTED[read] if isinstance(ACCEPTED[read], dict) else {text: text for text in ACCEPTED[read]}
    assert {text: read(text) for text in values} == values
    description, texts = REFUSED[read]
    for text in texts:
        with pytest.raises(ValueError, match=description):
            read(text)


def test_flag_names_are_unique_and_their_examples_are_valid():
    for flag in SUBMIT_FLAGS:
        assert list(parse([f"--{flag.name}", flag.example]).values) == [flag.name]
    names = [name for flag in SUBMIT_FLAGS for name in (flag.name, *flag.aliases)]
    assert len(set(names)) == len(names)
    assert set(LISTS) <= set(FLAGS)


def test_the_help_lists_every_flag_and_action_in_columns():
    lines = help_text().splitlines()
    listed = [match[1] for line in lines if (match := re.match(r"  --(\w+)", line))]
    assert listed == [*FLAGS, *FILES, *(name for name in SWITCHES if name != "help")]
    for action in ("status", "log", "stop", "resume"):
        assert any(line.startswith(f"  {action} NAME ") for line in lines)
    assert max(map(len, lines)) <= 120
    rows = [line for line in lines if re.match(r"  (--\w+|[a-z]+ NAME)", line)]
    assert len(rows) > len(FLAGS) and all(row[27] == " " and row[28] != " " for row in rows)


def test_the_documentation_lists_every_flag_of_a_job_once_in_the_order_of_the_help():
    _, _, section = DOCUMENTATION.read_text().partition("## Options\n")
    rows = [line.split("|")[1] for line in section.partition("\n## ")[0].splitlines() if line.startswith("| `--")]
    aliases = {"partition": ["queue"]}  # the others are spellings such as `run-name`
    expected = [[flag.name, *aliases.get(flag.name, [])] for flag in SUBMIT_FLAGS]
    assert [re.findall(r"--(\w+)", row) for row in rows] == expected


FIELDS = {field.name: field for field in fields(JobRequest)}
STATED = {flag.name: match[1] for flag in SUBMIT_FLAGS if (match := re.search(r"\[([^]]*)\]$", flag.help))}
"""Flag -> the default that its help states in brackets."""


def test_the_fields_of_a_request_are_the_flags_of_submit():
    assert sorted(FIELDS) == sorted([*(flag.name for flag in SUBMIT_FLAGS), "arguments"])


def test_the_help_states_the_default_of_each_field():
    forms = "; ".join(f"{scheduler}: {forms[0]}" for scheduler, forms in FORMS.items() if forms)
    for name, stated in STATED.items():
        default = forms if name == "form" else FIELDS[name].default
        assert stated in ("the scheduler's default", "that of submit") if default is None else stated == str(default)


def test_an_array_is_expanded_to_its_indices():
    expected = {"3": [3], "0-3": [0, 1, 2, 3], "1,5-9:2%2": [1, 5, 7, 9], "0-5:2": [0, 2, 4]}
    assert {array: array_indices(array) for array in expected} == expected
