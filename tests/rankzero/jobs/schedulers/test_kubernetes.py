"""kubectl is a stand-in: a cluster cannot be installed here. Its output is that of kubectl 1.33."""

import re
from pathlib import Path

import pytest
import yaml

from job_requests import CASES, script
from rankzero.jobs.record import Record, State
from rankzero.jobs.schedulers import kubernetes

RECORD = Record("my-run", "kubernetes", None, "my-run")

FIELDS = {
    "spec": {"activeDeadlineSeconds", "runtimePatches", "runtimeRef", "trainer"},
    "trainer": {"args", "command", "env", "image", "numNodes", "numProcPerNode", "resourcesPerNode"},
    "podSpec": {"containers", "terminationGracePeriodSeconds", "volumes"},
    "container": {"name", "volumeMounts"},
}
"""The fields of a TrainJob of Kubeflow Trainer 2.3 that the template uses; it has no others."""


def test_a_trainjob_has_only_fields_of_its_resource_definition():
    job = yaml.safe_load(script(CASES["kubernetes-all"]))
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert job["metadata"] == {"name": "my-run", "labels": {"kueue.x-k8s.io/queue-name": "gpu"}}
    (patch,) = job["spec"]["runtimePatches"]
    (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]["spec"]
    found = {"spec": job["spec"], "trainer": job["spec"]["trainer"], "podSpec": pod, "container": pod["containers"][0]}
    assert {name: set(fields) for name, fields in found.items()} == FIELDS
    assert replicated["name"] == pod["containers"][0]["name"] == "node"  # those of the runtime torch-distributed
    claims = [volume.get("persistentVolumeClaim") for volume in pod["volumes"]]
    assert claims == [{"claimName": "claim"}, None]


def test_the_processes_and_resources_are_those_of_the_request():
    trainer = yaml.safe_load(script(CASES["kubernetes-all"]))["spec"]["trainer"]
    assert (trainer["image"], trainer["numNodes"], trainer["numProcPerNode"]) == ("rankzero", 2, 4)
    assert trainer["resourcesPerNode"] == {"limits": {"cpu": 32, "memory": "64Gi", "nvidia.com/gpu": 4}}
    minimal = yaml.safe_load(script(CASES["kubernetes-minimal"]))["spec"]["trainer"]
    assert "resourcesPerNode" not in minimal and "env" not in minimal


def test_kubectl_replaces_an_ended_job_and_prints_its_name():
    command = kubernetes.submit_command(Path("/runs/my-run.job.yaml"))
    assert command == ("kubectl", "replace", "--force", "--cascade=foreground", "-f", "/runs/my-run.job.yaml")
    output = 'trainjob.trainer.kubeflow.org "my-run" deleted\ntrainjob.trainer.kubeflow.org/my-run replaced'
    assert re.search(kubernetes.JOB_ID, output)[0] == "my-run"


@pytest.mark.parametrize(
    ("output", "state"),
    [
        *((f"echo '{text}'", State("PENDING", True)) for text in ("|", "|0", "|0 0")),
        ("echo '|1'", State("RUNNING", True)),
        ("echo 'Suspended|0'", State("QUEUED", True)),
        ("echo 'Complete|1'", State("COMPLETED", False, has_failed=False)),
        ("echo 'Failed|0'", State("FAILED", False, has_failed=True)),
        (
            "echo 'Error from server (NotFound): trainjobs.trainer.kubeflow.org \"my-run\" not found' >&2; exit 1",
            State("ENDED", False, "(Kubernetes no longer knows the job)"),
        ),
        ("printf 'E1129 x\\nwas refused\\n' >&2; exit 1", State("UNKNOWN", None, "(kubectl: was refused)")),
    ],
)
def test_the_state_follows_from_the_conditions(programs, output, state):
    programs(kubectl=output)
    assert kubernetes.state(RECORD) == state
