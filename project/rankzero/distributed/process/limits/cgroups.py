"""The cgroups that limit this process (cgroup v1 and v2). Does not import torch."""

from pathlib import Path

PROC_SELF = Path("/proc/self")


def cgroup_folders(process_folder: Path, controller: str) -> list[Path]:
    """Returns the folders of all cgroups that may limit this process, outermost first.

    Args:
        process_folder: The folder of the process in /proc.
        controller: What the cgroup limits, for cgroup v1: `cpu` or `memory`.
    """
    try:
        memberships = [line.split(":", 2) for line in (process_folder / "cgroup").read_text().splitlines()]
        mounts = [line.split() for line in (process_folder / "mountinfo").read_text().splitlines()]
    except OSError:
        return []
    folders: list[Path] = []
    for _, controllers, path in memberships:
        for mount in mounts:
            root, mount_point, options = mount[3], mount[4], mount[-1].split(",")  # see proc(5)
            file_system_type = mount[mount.index("-") + 1]
            is_version_1 = (
                file_system_type == "cgroup" and controller in options and controller in controllers.split(",")
            )
            if is_version_1 or (file_system_type == "cgroup2" and not controllers):
                folders += _folders_on_path(Path(mount_point), path, root)
    return folders


def _folders_on_path(mount_point: Path, path: str, root: str) -> list[Path]:
    """Returns the folders from the mount point down to a cgroup's folder.

    A container may see its cgroup's full path but only its own subtree. The mount point is then the cgroup's folder.
    """
    try:
        relative_path = Path(path).relative_to(root)
    except ValueError:
        return [mount_point]
    folder = mount_point / relative_path
    return [*reversed([parent for parent in folder.parents if parent.is_relative_to(mount_point)]), folder]
