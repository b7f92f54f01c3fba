"""Opens pages in headless Chromium."""

import subprocess
from pathlib import Path

OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-breakpad", "--hide-scrollbars"),
)


def chromium(folder: Path, address: str, *options: str) -> str:
    """Opens a page and returns what Chromium prints.

    Args:
        folder: Folder for Chromium's own files.
        address: Address of the page.
        options: Options of Chromium, such as `--dump-dom`.
    """
    command = ["chromium", *OPTIONS, f"--user-data-dir={folder / 'profile'}", *options, address]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
