"""Suggestions for a `--model` or `--data` that is neither a short name nor a class path. Does not import torch."""

import re
from pathlib import Path


def user_classes(text: str) -> list[str]:
    """Returns the class paths in the current folder that the user may mean by the name of a file, module or class.

    Args:
        text: `net.py`, `models/net.py`, `net` or `Net`; files are searched for class definitions, not imported.
    """
    file = Path(text if text.endswith(".py") else f"{text}.py")
    if file.is_file() and not file.is_absolute() and ".." not in file.parts:
        return [f"{_module(file)}.{name}" for name in _classes(file)]
    return [f"{_module(file)}.{text}" for file in sorted(Path().glob("*.py")) if text in _classes(file)]


def with_depth(text: str) -> str | None:
    """Returns the flags for a ResNet whose name includes its depth, such as `resnet50`; None for any other name."""
    match = re.fullmatch(r"resnet[-_]?(\d+)", text.lower())
    return f"--model ResNet --model.depth {match[1]}" if match else None


def _module(file: Path) -> str:
    return ".".join(file.with_suffix("").parts)


def _classes(file: Path) -> list[str]:
    try:
        return re.findall(r"^class (\w+)", file.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    except OSError:
        return []
