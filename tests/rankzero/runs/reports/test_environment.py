import json

from reported import ENVIRONMENT

from rankzero import __version__
from rankzero.distributed.coordination.coordinator import Coordinator
from rankzero.distributed.devices import WorldInfo
from rankzero.distributed.environments.launch import Launch, RequestedWorld
from rankzero.distributed.rendezvous.result import RendezvousResult
from rankzero.distributed.session import Session
from rankzero.runs.reports.environment import describe_environment


def test_the_environment_is_json_without_secrets_and_has_all_fields_of_the_report(cwd, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "--token", "abc", "--width", "8"])
    coordinator = Coordinator(RendezvousResult.without_rendezvous(Launch()), RequestedWorld())
    environment = describe_environment(Session(RequestedWorld(), coordinator, WorldInfo("cpu"), "", is_script=True))
    assert json.loads(json.dumps(environment)) == environment and set(environment) == set(ENVIRONMENT)
    assert (environment["folder"], environment["rankzero"]) == (str(cwd), __version__)
    assert environment["is_script"] and environment["backend"] is None and environment["device"].startswith("cpu (")
    assert environment["command"][-4:] == ["--token", "...", "--width", "8"]
