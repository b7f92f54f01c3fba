"""The record of a submitted job, beside its run, and the state of a job. Does not import torch.

runs/NAME.job.sh      the script
runs/NAME.job.json    the record
runs/NAME.job.log     the output; NAME.job-INDEX.log for a member of a job array
runs/NAME.job.log.ID  the output of an earlier job (PBS)
runs/.NAME.job        the time at which the job began (PBS)
runs/.NAME.job.next   id of the job that the script has submitted after a stop (PBS)
runs/.NAME.job.stop   shows that `submit stop` has stopped the job, so that the script does not submit another (PBS)
"""

import glob
import json
import re
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rankzero.checkpoints.atomic_files import write_text
from rankzero.messages import RequestError
from rankzero.runs.recorded_run import modified_at


@dataclass(frozen=True)
class Record:
    """A submitted job; `id` is the scheduler's id of it, or the id of the script's process.

    `name` is that of the run, `form` None if the scheduler has only one, and `array` has the indices of a job array.
    The job was submitted on `host`; `started` is the start time of the script's process in clock ticks after boot, or
    empty for a scheduler with a queue.
    """

    name: str
    scheduler: str
    form: str | None
    id: str
    array: str | None = None
    host: str = ""
    started: str = ""


@dataclass(frozen=True)
class State:
    """The state of a job in the scheduler's own word, such as `RUNNING`, with details for the user, such as the nodes.

    `is_active` tells whether the job waits or runs, None if the scheduler does not answer; `has_failed`, whether an
    ended job has failed or was canceled, None if unknown.
    """

    word: str
    is_active: bool | None
    details: str = ""
    has_failed: bool | None = None

    def __str__(self) -> str:
        """Returns the text for the user."""
        return f"{self.word} {self.details}".rstrip()


def joint_state(words: Sequence[str], active: Collection[str], finished: str) -> State:
    """Returns the state of a job, or of all members of a job array, from the scheduler's word for each."""
    is_active = any(word in active for word in words)
    has_failed = None if is_active else any(word != finished for word in words)
    counts = ", ".join(f"{count} {word}" for word, count in Counter(words).items())
    return State(counts if len(words) > 1 else words[0], is_active, has_failed=has_failed)


def record_path(root: Path, name: str) -> Path:
    """Returns the file of a job's record."""
    return root / f"{name}.job.json"


def write_record(root: Path, record: Record) -> None:
    """Writes the record of a job."""
    next_id_path(root, record.name).unlink(missing_ok=True)
    write_text(record_path(root, record.name), json.dumps(asdict(record), indent=2) + "\n")


def read_record(root: Path, name: str) -> Record | None:
    """Returns the record of a run's job; None if there is none.

    Raises:
        RequestError: The record is not valid.
    """
    path = record_path(root, name)
    try:
        record = Record(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RequestError(f"--root {root}", f"cannot read {path}: {error.strerror}", "--root DIR") from None
    except (ValueError, TypeError, RecursionError) as error:
        found = f"{path} is not a record of a job: {error}"
        raise RequestError(f"the job of run {name}", found, f"rm {path}") from None
    try:
        next_id = next_id_path(root, name).read_text().strip()
    except (OSError, UnicodeError):
        next_id = ""
    return replace(record, id=next_id) if next_id else record


def recorded_jobs(root: Path) -> dict[str, Record]:
    """Returns the jobs that were submitted from a root, by the name of the run; skips files that are no records."""
    jobs = {}
    for path in sorted(root.glob("*.job.json")):
        name = path.name.removesuffix(".job.json")
        with suppress(RequestError):
            if (record := read_record(root, name)) is not None:
                jobs[name] = record
    return jobs


def array_indices(array: str) -> list[int]:
    """Returns the indices of a job array, such as 0, 2 and 4 for `0-5:2`."""
    indices: list[int] = []
    for part in array.partition("%")[0].split(","):
        bounds, _, step = part.partition(":")
        first, _, last = bounds.partition("-")
        indices += range(int(first), int(last or first) + 1, int(step or 1))
    return indices


def member_records(record: Record) -> list[Record]:
    """Returns the records of the members of an array, such as jobs `15[0].pbs1`, `15[1]` or `12_0`; else the record."""
    if record.array is None:
        return [record]
    form = record.id.replace("[]", "[%d]") if "[]" in record.id else record.id
    form += {"lsf": "[%d]", "slurm": "_%d"}.get(record.scheduler, "")
    return [replace(record, name=f"{record.name}-{i}", id=form % i, array=None) for i in array_indices(record.array)]


def logs_of(root: Path, name: str, is_array: bool) -> list[Path]:
    """Returns the existing log files of a run's jobs, for each member of an array with the newest job last."""
    pattern = re.compile(re.escape(name) + (r"\.job-([0-9]+)\.log" if is_array else r"\.job()\.log") + r"(\..+)?")
    found = []
    for path in root.iterdir() if root.is_dir() else ():
        if match := pattern.fullmatch(path.name):
            index, archived = match.groups()
            with suppress(FileNotFoundError):  # renamed since
                found.append((int(index or 0), archived is None, path.stat().st_mtime, path))
    return [path for *_, path in sorted(found)]


def job_files(root: Path, name: str) -> list[Path]:
    """Returns the files of the jobs of a run; none for the member of a job array."""
    patterns = [f"{start}{glob.escape(name)}.job{end}" for start, end in (("", ".*"), (".", ""), (".", ".*"))]
    return [path for pattern in patterns for path in root.glob(pattern) if path.is_file()]


def archive_logs(root: Path, record: Record, archived: dict[Path, Path]) -> None:
    """Renames the logs of an ended PBS job, because PBS would overwrite them."""
    for path in logs_of(root, record.name, record.array is not None):
        if path.suffix == ".log":
            archived[path] = path.rename(path.with_name(f"{path.name}.{record.id}"))


def submitted_at(root: Path, record: Record) -> float:
    """Returns when a job was submitted, in seconds since 1970."""
    return max(modified_at(record_path(root, record.name)), modified_at(next_id_path(root, record.name)))


def stop_path(root: Path, name: str) -> Path:
    """Returns the file that keeps the script of a PBS job from submitting itself again."""
    return root / f".{name}.job.stop"


def next_id_path(root: Path, name: str) -> Path:
    """Returns the file with the id of the job that the script of a PBS job has submitted."""
    return root / f".{name}.job.next"
