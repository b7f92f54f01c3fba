import re

import pytest

from rankzero.commands.jobs.request.command_line import FILES, SWITCHES, parse
from rankzero.commands.jobs.request.job_request import FORMS
from rankzero.commands.jobs.request.options import (
    LISTS,
    SUBMIT_FLAGS,
    accepted_flags,
    array_value,
    command_lines,
    help_text,
    host_value,
    is_queuing,
    memory_value,
    one_line,
)
from running import REPOSITORY

DOCUMENTATION = REPOSITORY / "docs" / "jobs.md"
FLAGS = {flag.name: flag for flag in SUBMIT_FLAGS}


def results_of(read, texts):
    """Returns the value that `read` returns for each text, or the message of its error."""
    results = {}
    for text in texts:
        try:
            results[text] = read(text)
        except ValueError as error:
            results[text] = f"refused: {error}"
    return results


def not_refused(read, texts, message):
    """Returns the texts that `read` accepts, or refuses with a message that does not contain `message`."""
    pattern = re.compile(f"refused: .*{message}", re.DOTALL)
    return [text for text, result in results_of(read, texts).items() if not pattern.match(result)]


def test_memory_is_a_number_with_a_unit():
    values = {"64G": "64G", "64gb": "64G", "64 GB": "64G", "64GiB": "64G", "500m": "500M", "1KB": "1K", "2Tb": "2T"}
    assert results_of(memory_value, values) == values


def test_memory_without_a_valid_number_and_unit_is_refused():
    texts = ["", "64", "0G", "-1G", "1.5G", "64  G", "64P", "G", "64G\n", "1234567890G", "\u0661G", "64Gi"]
    assert not_refused(memory_value, texts, "a number with a unit") == []


def test_one_line_accepts_printable_text_unchanged():
    texts = ["gpu", "a b", "a&b|c", "*", "$HOME", "caf\u00e9", '"', "'", "\\", " a "]
    assert results_of(one_line, texts) == {text: text for text in texts}


def test_one_line_refuses_blank_text_and_control_characters():
    texts = ["", " ", "a\nb", "a\r", "a\tb", "\0", "\x1b[31m", "\x7f", "\x85", "\u2028", "\udcff"]
    texts += [f"a{chr(code)}b" for code in (*range(32), *range(127, 160))]
    assert not_refused(one_line, texts, "printable characters in one line") == []


def test_array_accepts_lists_of_indices():
    texts = ["0", "0-3", "1,5,9", "0-10:2", "0-3,7,10-20:5", "0-99%4", "1,2%1"]
    assert results_of(array_value, texts) == {text: text for text in texts}


def test_array_refuses_anything_else():
    texts = ["", "a", "-1", "0-", "0,", ",0", "0--3", "0-3:0", "0:2", "0%0", "0%", "0-3%2,5", "3-0", "0 1", "0-3\n"]
    assert not_refused(array_value, [*texts, "$(id)"], "a list of indices") == []


def test_host_accepts_names_and_users():
    texts = ["n1", "n1.example.org", "10.0.0.1", "user@n1", "a_b-c@n-1", "_"]
    assert results_of(host_value, texts) == {text: text for text in texts}


def test_host_refuses_anything_else():
    texts = ["", "-n1", "-o@n1", "n1 n2", "n1,n2", "n1:22", "a@b@c", "@n1", "n1@", "n1;id", "$(id)", "n1\n", ".n1", "é"]
    assert not_refused(host_value, texts, "a list of host names") == []


def test_command_lines_accept_text_unchanged():
    texts = ["source a.sh", "a\nb", "\texport A='b c'\n", "#SBATCH --exclusive"]
    assert results_of(command_lines, texts) == {text: text for text in texts}


def test_command_lines_refuse_blank_text_and_nul():
    assert not_refused(command_lines, ["", " \n", "\0", "a\0b"], "lines of text") == []


def test_the_example_of_each_flag_is_valid():
    for flag in SUBMIT_FLAGS:
        assert list(parse([f"--{flag.name}", flag.example]).values) == [flag.name]


def test_flag_names_are_unique():
    names = [name for flag in SUBMIT_FLAGS for name in (flag.name, *flag.aliases)]
    assert len(set(names)) == len(names)
    assert set(LISTS) <= set(FLAGS)


def test_slurm_accepts_all_flags_but_lists_of_machines():
    assert set(FLAGS) - set(accepted_flags("slurm", has_image=False)) == {"hosts", "hostfile"}
    assert set(FLAGS) - set(accepted_flags("pbs", has_image=False)) == {"hosts", "hostfile", "exclude"}


@pytest.mark.parametrize("has_image", [False, True])
@pytest.mark.parametrize("scheduler", FORMS)
def test_each_scheduler_accepts_the_flags_that_every_job_needs(scheduler, has_image):
    accepted = accepted_flags(scheduler, has_image)
    assert {"scheduler", "form", "name", "root", "nodes", "devices", "cpus_per_device", "time"} <= set(accepted)
    assert {"modules", "setup", "image"} <= set(accepted)
    assert list(accepted) == [name for name in FLAGS if name in accepted]


@pytest.mark.parametrize("scheduler", [name for name in FORMS if not is_queuing(name)])
def test_schedulers_without_a_queue_accept_no_options_of_a_queue(scheduler):
    queue_only = {"partition", "account", "constraint", "exclude", "mail", "array", "dependency"}
    assert not queue_only & set(accepted_flags(scheduler, has_image=True))
    assert ("memory" in accepted_flags(scheduler, has_image=True)) == (scheduler == "docker")


@pytest.mark.parametrize("scheduler", FORMS)
def test_a_virtual_environment_is_accepted_without_and_gpus_with_a_container_or_a_queue(scheduler):
    with_image, without = accepted_flags(scheduler, has_image=True), accepted_flags(scheduler, has_image=False)
    assert "venv" in without and "venv" not in with_image
    assert "gpus_per_device" in with_image and ("gpus_per_device" in without) == is_queuing(scheduler)


def test_the_help_lists_every_flag_and_action():
    lines = help_text().splitlines()
    listed = [match[1] for line in lines if (match := re.match(r"  --(\w+)", line))]
    assert listed == [*FLAGS, *FILES, *(name for name in SWITCHES if name != "help")]
    for action in ("status", "log", "stop", "resume"):
        assert any(line.startswith(f"  {action} NAME ") for line in lines)


def test_no_line_of_the_help_is_longer_than_120_columns():
    assert max(map(len, help_text().splitlines())) <= 120


def test_the_descriptions_in_the_help_begin_in_one_column():
    rows = [line for line in help_text().splitlines() if re.match(r"  (--\w+|[a-z]+ NAME)", line)]
    assert len(rows) > len(FLAGS) and all(row[27] == " " and row[28] != " " for row in rows)


def test_the_documentation_lists_every_flag_of_a_job_once_in_the_order_of_the_help():
    _, _, section = DOCUMENTATION.read_text().partition("## Options\n")
    rows = [line.split("|")[1] for line in section.partition("\n## ")[0].splitlines() if line.startswith("| `--")]
    assert [re.findall(r"--(\w+)", row) for row in rows] == [[flag.name, *documented(flag)] for flag in SUBMIT_FLAGS]


def documented(flag):
    """Returns the aliases that the documentation names; the others are spellings such as `run-name`."""
    return ["queue"] if flag.name == "partition" else []
