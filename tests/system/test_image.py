"""The images of containers/, built and run by buildah in a chroot: Docker and Apptainer cannot run on every machine.

The base is a minimal Debian from debootstrap, since no registry of images is needed for it. `buildah` reads the
Dockerfile itself. For Apptainer, this test follows the sections of the definition; only the runtime is missing.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from running import BIN, REPOSITORY, require

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3000), pytest.mark.xdist_group("image")]

BASE, IMAGE = "localhost/rankzero-test-base", "localhost/rankzero-test"
BUILDAH = ("buildah", "--storage-driver", "vfs")
ISOLATION = ("--isolation", "chroot")


def call(*command, **settings):
    """Runs a command and returns its output; fails with the output of a failed command."""
    process = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **settings)
    assert process.returncode == 0, f"{command}\n{process.stdout[-4000:]}"
    return process.stdout


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    """Returns a function that calls buildah with a storage of its own, which is removed after the tests."""
    require("buildah")
    folder = tmp_path_factory.mktemp("storage")

    def buildah(*arguments, **settings):
        roots = ("--root", str(folder / "root"), "--runroot", str(folder / "run"))
        return call(*BUILDAH, *roots, *arguments, **settings)

    yield buildah
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def pip_settings(tmp_path_factory):
    """Returns options of buildah that pass on the settings of this machine's pip: its index, and local packages."""
    lines = call(str(BIN / "python"), "-m", "pip", "config", "list").splitlines()
    settings = dict(re.fullmatch(r":?\w+:?\.([\w-]+)='(.*)'", line).groups() for line in lines)
    file = tmp_path_factory.mktemp("pip") / "pip.conf"
    file.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items()))
    words = [word for value in settings.values() for word in value.split()]
    folders = {urlsplit(word).path if word.startswith("file:") else word for word in words}
    volumes = [f"{file}:/etc/pip.conf:ro"]
    for folder in sorted(folder for folder in folders if folder.startswith("/") and Path(folder).exists()):
        volumes.append(f"{folder}:{folder}:ro")
    return [argument for volume in volumes for argument in ("--volume", volume)]


@pytest.fixture(scope="module")
def base(storage, tmp_path_factory):
    """Returns the name of an image of a minimal Debian with Python."""
    root = tmp_path_factory.mktemp("debian") / "root"
    call("debootstrap", "--variant=minbase", "--include=python3-venv,ca-certificates", "bookworm", str(root))
    container = storage("from", "scratch").strip()
    storage("add", "--quiet", container, str(root), "/")
    shutil.rmtree(root)
    storage("commit", "--quiet", "--rm", container, BASE)
    return BASE


def test_the_image_of_the_dockerfile_trains(storage, base, pip_settings):
    file = REPOSITORY / "containers/Dockerfile"
    arguments = ("--file", str(file), "--ignorefile", f"{file}.dockerignore", "--build-arg", f"BASE_IMAGE={base}")
    storage("build", "--quiet", *ISOLATION, *pip_settings, *arguments, "--tag", IMAGE, str(REPOSITORY))
    container = storage("from", IMAGE).strip()
    script = "rankzero fit --name one && rankzero fit --name two --model MLP --data Toy --devices 2 && id -un && cat"
    command = ["sh", "-c", f"{script} runs/one/summary.json runs/two/summary.json"]
    output = storage("run", *ISOLATION, container, "--", *command)
    assert "\nrankzero\n" in output  # the user of the image
    one, two = map(json.loads, re.findall(r"^\{\n.*?^\}$", output, re.MULTILINE | re.DOTALL))
    assert (one["status"], two["status"], two["world_size"]) == ("finished", "finished", 2)
    assert all("each once" in entry for entry in two["ledger"])
    pinned = Path(REPOSITORY / "containers/requirements.txt").read_text().split()
    installed = storage("run", *ISOLATION, container, "--", "pip", "freeze", "--all").lower().replace("_", "-").split()
    assert set(pinned) <= set(installed)


def test_the_steps_of_the_apptainer_definition_make_an_image_that_trains(storage, base, pip_settings):
    """Copies `%files`, runs `%post`, and starts `%runscript` with `%environment`, as Apptainer does."""
    text = (REPOSITORY / "containers/rankzero.def").read_text()
    sections = dict(re.findall(r"^%(\w+)\n(.*?)(?=^%|\Z)", text, re.MULTILINE | re.DOTALL))
    assert "From: {{ BASE_IMAGE }}" in text and "BASE_IMAGE=" in sections["arguments"]
    container = storage("from", base).strip()
    for line in filter(None, map(str.split, sections["files"].splitlines())):
        storage("copy", "--quiet", container, str(REPOSITORY / line[0]), line[1])
    storage("run", *ISOLATION, *pip_settings, container, "--", "sh", "-c", sections["post"])
    script = sections["environment"] + sections["runscript"]
    command = ("sh", "-c", f"cd /tmp\n{script}", "rankzero", "fit", "--devices", "2", "--model", "MLP", "--data", "Toy")
    output = storage("run", *ISOLATION, container, "--", *command)
    assert "finished" in output
