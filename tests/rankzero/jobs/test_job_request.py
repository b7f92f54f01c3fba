import shlex
from pathlib import Path

import pytest

from job_requests import MPIRUN, SLURM, refusal, request
from rankzero.jobs.job_request import hosts_in, read_site
from rankzero.jobs.options import FORMS, JOB_FLAGS, JobRequest, parse


def test_a_job_needs_a_scheduler_and_a_name_and_has_the_first_form_of_its_scheduler():
    for scheduler, form in {"slurm": "srun", "local": None, "pbs": "pbsdsh", "mpirun": "openmpi"}.items():
        assert request(f"--scheduler={scheduler}", "--name=x") == JobRequest(scheduler, "x", form)
    asked, found, instead = refusal("--name", "x")
    assert asked == "a job without --scheduler" and instead == "--scheduler slurm"
    assert all(scheduler in found for scheduler in FORMS)
    assert refusal("--scheduler", "slurm")[::2] == ("a job without --name", "--name my-run")


NO_OPTION = {
    "slurm --form pbsdsh": ("--form pbsdsh", "its forms are srun, torchrun", "--form srun"),
    "pbs --form srun": ("--form srun", "its forms are pbsdsh, torchrun, mpirun", "--form pbsdsh"),
    "local --form srun": ("--form srun", "local has only one form", "leave --form out"),
    "local --nodes 2": ("--nodes 2", "it is one machine", "--scheduler ssh --hosts n1,n2"),
    "slurm --hosts n1": ("--hosts", "slurm has no such option", "--extra"),
    "pbs --exclude n1": ("--exclude", "pbs has no such option", "--extra"),
    "local --partition gpu": ("--partition", "local has no such option", "leave --partition out"),
    "ssh --hostfile f": ("--hostfile", "ssh has no such option", "leave --hostfile out"),
    "mpirun --array 0-3": ("--array", "mpirun has no such option", "leave --array out"),
    "lsf --exclude n1": ("--exclude", "lsf has no such option", "--extra"),
    "flux --array 0-3": ("--array", "flux has no such option", "one job per member, such as --name my-run-0"),
    "flux --memory 1G": ("--memory", "flux has no such option", "--extra"),
    "kubernetes --image i --account a": (
        "--account",
        "kubernetes has no such option",
        "leave --account out; with --dry",
    ),
    "kubernetes --image i --array 0-3": ("--array", "kubernetes has no such option", "one job per member"),
    "slurm --volume work": ("--volume", "slurm has no such option", "leave --volume out"),
    "apptainer --image x --memory 1G": ("--memory", "apptainer has no such option", "leave --memory out"),
}


@pytest.mark.parametrize("options", NO_OPTION)
def test_an_option_that_the_scheduler_does_not_have_is_refused(options):
    scheduler, *tokens = options.split()
    flag, found, instead = NO_OPTION[options]
    error = refusal("--scheduler", scheduler, "--name", "x", *tokens)
    assert error[:2] == (f"{flag} with --scheduler {scheduler}", found) and error[2].startswith(instead)


def test_an_image_is_required_for_a_container_and_excludes_a_virtual_environment():
    for scheduler in ("slurm", "ssh", "docker"):
        tokens = ("--scheduler", scheduler, "--name", "x", "--image", "i", "--venv", ".venv")
        assert refusal(*tokens) == ("--venv with --image", "the image contains its own Python", "leave --venv out")
    for scheduler in ("docker", "apptainer", "kubernetes"):
        expected = (f"--scheduler {scheduler}", "the container image is missing", "--image IMAGE")
        assert refusal("--scheduler", scheduler, "--name", "x") == expected


@pytest.mark.parametrize(
    ("scheduler", "line", "found"),
    [
        ("slurm", "#PBS -q x", "slurm ignores a line that begins with #PBS"),
        ("pbs", "#SBATCH --qos=x", "pbs ignores a line that begins with #SBATCH"),
        ("slurm", "#SBATCH --nodes=8", "the script itself sets --nodes"),
        ("slurm", "#SBATCH -a 0-3", "the script itself sets -a"),
        ("slurm", "#SBATCH -N4", "the script itself sets -N"),
        ("slurm", "#SBATCH --qos=high --nodes=4", "the script itself sets --nodes"),
        ("pbs", "#PBS -l select=4", "the script itself sets -l select"),
        ("pbs", "#PBS -Nfoo", "the script itself sets -N"),
        ("lsf", "#SBATCH --qos=x", "lsf ignores a line that begins with #SBATCH"),
        ("lsf", "#BSUB -n8", "the script itself sets -n8"),
        ("flux", "#BSUB -x", "flux ignores a line that begins with #BSUB"),
        ("flux", "#flux: --nslots=8", "the script itself sets --nslots"),
        ("pbs", "#PBS -l walltime=1:00:00,select=4", "the script itself sets -l walltime=1:00:00,select"),
    ],
)
def test_an_extra_line_that_is_ignored_or_contradicts_the_script_is_refused(scheduler, line, found):
    error = refusal("--scheduler", scheduler, "--name", "x", "--extra", line)
    assert error[:2] == (f"--extra {shlex.quote(line)}", found)


@pytest.mark.parametrize("scheduler", ["local", "ssh", "mpirun"])
def test_gpus_are_requested_from_a_queue_or_for_a_container_only(scheduler):
    tokens = ("--scheduler", scheduler, "--name", "x", "--hosts" if scheduler != "local" else "--setup", "n1")
    asked, found, _ = refusal(*tokens, "--gpus_per_device", "1")
    assert asked == f"--gpus_per_device with --scheduler {scheduler}" and "the GPUs that they find" in found
    assert request(*tokens, "--gpus_per_device", "1", "--image", "i").gpus_per_device == 1


@pytest.mark.parametrize("flag", ["root", "venv", "hostfile", "image"])
def test_the_home_folder_is_expanded_in_a_path_that_the_shell_has_not_expanded(flag, tmp_path, monkeypatch):
    (tmp_path / "my runs").write_text("n1\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    job = request(*(MPIRUN if flag == "hostfile" else SLURM), f"--{flag}=~/my runs")
    assert getattr(job, flag) == str(tmp_path / "my runs")


@pytest.mark.parametrize("scheduler", ["ssh", "mpirun", "docker", "apptainer", "local"])
def test_all_hosts_are_used_unless_fewer_are_requested_too_few_are_refused_and_without_a_list_it_is_this_one(scheduler):
    image = ("--image", "i") if scheduler in ("docker", "apptainer") else ()
    tokens = ("--scheduler", scheduler, "--name", "x", *image)
    if scheduler == "ssh":
        assert refusal(*tokens)[1:] == ("ssh does not choose machines", "--hosts n1")
        for nodes, hosts in (((), ("n1", "n2", "n3")), (("--nodes", "2"), ("n1", "n2"))):
            job = request(*tokens, "--hosts", "n1,n2,n3", *nodes)
            assert (job.nodes, job.hosts) == (len(hosts), hosts)
    else:
        job = request(*tokens, "--devices", "2")
        assert (job.nodes, job.hosts) == (1, ())
    if scheduler != "local":
        expected = ("3 machines (--nodes 3)", "--hosts lists 2: n1, n2", "--hosts n1,n2,n3")
        assert refusal(*tokens, "--nodes", "3", "--hosts", "n1,n2") == expected
        assert refusal(*tokens, "--nodes", "3")[1] == f"{scheduler} does not choose machines"


def test_a_hostfile_lists_machines_in_order_and_once(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# two machines\nn2 slots=4\n\n  n1:4  # fast\nn2 slots=2\n#n3\n")
    assert hosts_in(file) == ("n2", "n1")
    job = request(*MPIRUN, "--hostfile", str(file))
    assert (job.nodes, job.hosts, job.hostfile) == (2, ("n2", "n1"), str(file))
    assert request(*MPIRUN, "--hostfile", str(file), "--nodes", "1").hosts == ("n2",)
    assert refusal(*MPIRUN, "--hostfile", str(file), "--nodes", "3")[1] == "--hostfile lists 2: n2, n1"


def test_a_wrong_hostfile_is_refused(tmp_path):
    file = tmp_path / "hosts"
    unread = "cannot read this file: "
    option = (*MPIRUN, "--hostfile", str(file))
    assert refusal(*option) == (f"--hostfile {file}", f"{unread}No such file or directory", "--hosts n1,n2")
    assert refusal(*MPIRUN, "--hostfile", str(tmp_path))[1] == f"{unread}Is a directory"
    for content, found in {
        b"\xff\xfe": f"{unread}not a text file",
        **dict.fromkeys((b"n1\n$(touch PWNED)\n", b"-x\n", b"a b;c\nn1/x\n"), "a line does not begin with a host name"),
        b"# nothing\n\n": "it names no machine",
    }.items():
        file.write_bytes(content)
        assert refusal(*option)[1] == found
    file.write_text("n1\n")
    assert refusal(*option, "--hosts", "n1")[:2] == ("--hosts and --hostfile", "both list machines")


def test_values_that_pbs_does_not_accept_are_refused():
    array = "--array 0-3"
    refused = {"--array 1,5,9": array, "--array 3": array, "--constraint a100": "--constraint gpu_type=a100"}
    for options, instead in refused.items():
        tokens = options.split()
        assert refusal("--scheduler", "pbs", "--name", "x", *tokens)[2] == instead
        assert request(*SLURM, *tokens)


def test_values_that_lsf_and_kubernetes_do_not_accept_are_refused():
    lsf = ("--scheduler", "lsf", "--name", "x")
    for array in ("0-3", "1,0,2", "0-8:2%4"):
        assert refusal(*lsf, "--array", array) == (f"--array {array}", "the indices of LSF begin at 1", "--array 1-4")
    assert request(*lsf, "--array", "1-10:10,100%10").array == "1-10:10,100%10"
    for name in ("my_run", "Run", "1a", "a-", "a.b", "a" * 51):
        asked, found, instead = refusal("--scheduler", "kubernetes", "--image", "i", "--name", name)
        assert (asked, instead) == (f"--name {name}", "--name my-run") and found.startswith("a TrainJob has a name of")
    expected = ("--root /runs", "the runs are in a folder of the volume", "--root runs")
    assert refusal("--scheduler", "kubernetes", "--image", "i", "--name", "a", "--root", "/runs") == expected
    for name in ("a", "my-run-2", "a" * 50):
        assert request("--scheduler", "kubernetes", "--image", "i", "--name", name).name == name


@pytest.fixture
def site(tmp_path):
    """Returns a function that writes a site file, and returns the flag for it."""

    def write(text):
        (tmp_path / "site.yaml").write_text(text)
        return f"--site={tmp_path / 'site.yaml'}"

    return write


def test_a_site_file_sets_values_that_the_command_line_overrides(site):
    text = "scheduler: slurm\nqueue: gpu\nnodes: 2\ntime: 90min\nmemory: 64gb\nname: other\n"
    expected = JobRequest("slurm", "x", "srun", nodes=2, time=5400, memory="64G", partition="gpu")
    assert request(site(text), "--name", "x") == expected
    option = site("scheduler: pbs\npartition: gpu\nnodes: 2\nform: mpirun\n")
    job = request(*SLURM, option, "--nodes", "4", "--queue", "cpu", "--form", "torchrun")
    assert job == JobRequest("slurm", "x", "torchrun", nodes=4, partition="cpu")


def test_lists_of_a_site_file_come_before_those_of_the_command_line_but_hosts_are_replaced(site):
    option = site("setup: [a, b]\nmodules: m1, m2\nextra: '#SBATCH --exclusive'\n")
    job = request(*SLURM, option, "--setup", "c", "--modules", "m3", "--extra", "#SBATCH --x")
    assert job.setup == ("a", "b", "c") and job.modules == ("m1", "m2", "m3")
    assert job.extra == ("#SBATCH --exclusive", "#SBATCH --x")
    assert request(*SLURM, option).setup == ("a", "b")
    option = site("hosts: [n1, n2]\n")
    assert request(*MPIRUN, option).hosts == ("n1", "n2")
    assert request(*MPIRUN, option, "--hosts", "n3").hosts == ("n3",)


def test_keys_of_a_site_file_that_the_scheduler_does_not_accept_are_ignored(site):
    option = site("partition: gpu\nhosts: n1\nmodules: m1\nform: srun\nmemory: 1G\n")
    assert request("--scheduler", "local", "--name", "x", option) == JobRequest("local", "x", modules=("m1",))
    expected = JobRequest("pbs", "x", "pbsdsh", partition="gpu", modules=("m1",), memory="1G")
    assert request("--scheduler", "pbs", "--name", "x", option) == expected


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        *(("time", "1:30:00", 5400), ("time", "'30:00'", 1800), ("time", "30:00", 1800), ("time", "90", 5400)),
        *(("time", "1-00:00:00", 86400), ("account", "0123", "0123"), ("partition", "no", "no")),
    ],
)
def test_a_value_in_a_site_file_means_the_same_as_on_the_command_line(site, name, text, value):
    assert getattr(request(*SLURM, site(f"{name}: {text}\n")), name) == value
    assert getattr(request(*SLURM, f"--{name}", text.strip("'")), name) == value


def test_an_unreadable_site_file_an_unknown_key_and_an_invalid_value_are_refused(site, tmp_path):
    file = tmp_path / "site.yaml"
    expected = (f"--site {file}", "cannot read this file: No such file or directory", "--site FILE")
    assert refusal(*SLURM, "--site", str(file)) == expected
    file.write_bytes(b"\xff\xfe\xff")
    assert refusal(*SLURM, "--site", str(file))[1].startswith("cannot read this file: ")
    asked, found, instead = refusal(*SLURM, site("partitn: gpu\n"))
    assert asked == f"{file}: partitn" and instead == "partition: ..."
    assert found.startswith("there is no such key; the keys are scheduler, form, name, ")
    expected = (f"{file}: nodes: two", "'two' is not a whole number >= 1", "nodes: 2")
    assert refusal(*SLURM, site("nodes: two\n")) == expected
    for text, key in {"7: gpu\n": "7", "hosts: [n1, 'n 2']\n": "hosts: n 2"}.items():
        assert refusal(*SLURM, site(text))[0] == f"{file}: {key}"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        *((text, "not YAML: ") for text in ("a: [", "a: b: c", "\x01")),
        *((text, "not a YAML mapping") for text in ("- a", "text", "3")),
        *((text, "the value is not text") for text in ("partition: [a, b]", "modules: {a: b}", "modules: [[a]]")),
        *(
            (text, "the value is empty; a value that begins with # needs quotes")
            for text in ("partition:", "extra:\n  - #SBATCH --exclusive", "modules: []\nsetup: ['']")
        ),
    ],
)
def test_a_wrong_site_file_is_refused(site, text, found):
    assert refusal(*SLURM, site(text))[1].startswith(found)


def test_paths_in_a_site_file_may_begin_with_the_home_folder_or_a_variable(site, monkeypatch):
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    job = request(*SLURM, site("root: $SCRATCH/runs\nvenv: ~/venv\naccount: $SCRATCH\n"))
    assert (job.root, job.venv, job.account) == ("/scratch/me/runs", str(Path.home() / "venv"), "$SCRATCH")
    assert refusal(*SLURM, site("root: $SCRATCHH/runs\n"))[1] == "a variable in this path is not set"
    found = refusal(*SLURM, site("root: ~no-such-user/runs\n"))[1]
    assert found == "'~no-such-user/runs' is not a path in the home folder of an existing user"


def test_the_users_own_site_file_is_read_unless_another_one_is_given(tmp_path, monkeypatch, site):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert request(*SLURM) == request(*SLURM, site("# nothing\n")) == JobRequest("slurm", "x", "srun")
    (tmp_path / "rankzero").mkdir()
    (tmp_path / "rankzero" / "site.yaml").write_text("account: mine\n")
    assert request(*SLURM) == JobRequest("slurm", "x", "srun", account="mine")
    assert request(*SLURM, site("partition: gpu\n")) == JobRequest("slurm", "x", "srun", partition="gpu")


def test_each_flag_can_be_a_key_of_a_site_file(site, tmp_path):
    site("".join(f"{flag.name}: '{shlex.split(flag.example)[0]}'\n" for flag in JOB_FLAGS))
    line = parse([token for flag in JOB_FLAGS for token in (f"--{flag.name}", shlex.split(flag.example)[0])])
    assert read_site(tmp_path / "site.yaml") == line.values
