"""Opens pages in headless Chromium, and serves runs with TensorBoard."""

import json
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from running import BIN, LIMIT, reserved_port, wait_until

OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-breakpad", "--hide-scrollbars"),
)


def chromium(folder: Path, address: str, *options: str) -> str:
    """Opens a page and returns what Chromium prints, given a folder for its own files, and options (`--dump-dom`)."""
    command = ["chromium", *OPTIONS, f"--user-data-dir={folder / 'profile'}", *options, address]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=True).stdout


@contextmanager
def tensorboard(*arguments: str, runs: set[str], folder: Path | None = None) -> Iterator[str]:
    """Starts a TensorBoard, and yields its address once it shows these runs."""
    with reserved_port() as port:
        command, address = [str(BIN / "tensorboard"), *arguments, "--port", str(port)], f"http://localhost:{port}"
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        def shows_runs() -> bool:
            assert process.poll() is None, "TensorBoard has ended"
            try:
                return runs <= set(read_json(f"{address}/data/runs"))
            except OSError:
                return False

        try:
            wait_until(shows_runs, "TensorBoard")
            yield address
        finally:
            process.terminate()
            process.wait(LIMIT)


def read_json(request: str | urllib.request.Request) -> Any:
    """Returns what a server answers."""
    return json.loads(urllib.request.urlopen(request, timeout=10).read())
