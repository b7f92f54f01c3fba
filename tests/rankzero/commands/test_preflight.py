import json

import pytest

from rankzero.cli.arguments import parse_arguments
from rankzero.commands.preflight import PREFLIGHT, main, report_failed_rendezvous
from rankzero.distributed.environments.launch import Launch
from rankzero.messages import CannotStart, RequestError
from running import command_of

ERROR = RequestError("2 nodes x 1 process", "missing rank 1", "the same command on every machine")


def test_the_preflight_takes_the_flags_of_fit():
    missing = {flag.name for flag in command_of("fit").flags} - {flag.name for flag in PREFLIGHT.flags}
    assert missing == {"preflight"}


def test_a_wrong_request_exits_with_code_2(capsys):
    assert main(["--pairs", "some"]) == 2
    assert "asked  --pairs some\n  found  'some' is not one of quick, all, off" in capsys.readouterr().err
    assert main(["--warn_gbps", "fast"]) == 2
    assert "a number of Gbit/s (0.5, 10)" in capsys.readouterr().err


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failed_rendezvous_replaces_the_json_file_on_each_rank(cwd, monkeypatch, rank):
    monkeypatch.setattr("rankzero.commands.preflight.refuse", lambda error, launch, code: code)
    assert report_failed_rendezvous(CannotStart("reason"), parse_arguments(PREFLIGHT, []), Launch()) == 1
    assert list(cwd.iterdir()) == []  # without --json
    (cwd / "preflight.json").write_text('{"fit_to_train": true}')
    flags = parse_arguments(PREFLIGHT, ["--json", "preflight.json"])
    assert report_failed_rendezvous(ERROR, flags, Launch(launcher="slurm", rank=rank, world_size=2)) == 1
    content = json.loads((cwd / "preflight.json").read_text())
    assert [check["status"] for check in content["checks"][:3]] == ["ok", "fail", "skipped"]
    assert content["checks"][1]["summary"] == "missing rank 1" and not content["fit_to_train"]
    assert content["checks"][1]["advice"] == ["the same command on every machine"]
