"""The values that a job script assigns to its variables, as far as they can be read. Does not import torch."""

import re
from collections.abc import Container, Iterable, Mapping

from rankzero.commands.jobs.check.bash import commands_of
from rankzero.commands.jobs.check.command import Assignment, Command, Value, Word

MAX_CHARACTERS = 4_000
"""Longest value that is followed; a value can double its length with each assignment."""

_VARIABLE = r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?:\[[@*]\])?\})"


Values = dict[str, Value]


def assign(values: Values, command: Command, changing: Container[str] = ()) -> None:
    """Applies the assignments of a command, unless they hold for its own program only.

    Args:
        values: The values before the command; changed.
        command: The command.
        changing: Names of variables whose values are never certain.
    """
    if command.words:
        return
    for name, assignment in command.assignments.items():
        earlier = values.get(name)
        words: tuple[Word, ...] | None = _words(values, assignment)
        if assignment.appends and words is not None:
            words = _appended(earlier, words, assignment) if earlier else None
        is_certain = not (command.position.is_conditional or command.position.in_function or name in changing)
        if not is_certain or sum(len(word.text) for word in words or ()) > MAX_CHARACTERS:
            words = None
        values[name] = Value(command.line, assignment.text, words, assignment.is_array)


def expanded(values: Mapping[str, Value], words: Iterable[Word]) -> tuple[Word, ...]:
    """Returns words, with several words for a variable that holds several, such as `$CMD` or `${ARGS[@]}`."""
    found: list[Word] = []
    for word in words:
        match = re.fullmatch(_VARIABLE, word.text)
        value = values.get(match[1] or match[2]) if match else None
        if value is not None and value.words is not None and (value.is_array or len(value.words) > 1):
            found += value.words
        else:
            found.append(word)
    return tuple(found)


def resolved(values: Mapping[str, Value], text: str) -> str:
    """Returns a text with the values of variables in it."""

    def replaced(match: re.Match[str]) -> str:
        value = values.get(match[1] or match[2])
        return match[0] if value is None or value.words is None else " ".join(word.text for word in value.words)

    return re.sub(_VARIABLE, replaced, text)


def _words(values: Values, assignment: Assignment) -> tuple[Word, ...]:
    """Returns the words of an assigned value."""
    if assignment.is_array:
        elements = expanded(values, assignment.words)
        return tuple(word._replace(text=resolved(values, word.text), expanded=frozenset()) for word in elements)
    (word,) = assignment.words
    text = resolved(values, word.text)
    names = (first or second for first, second in re.findall(_VARIABLE, word.text))
    used = [values[name].words or () for name in names if name in values]
    is_substituted = word.substituted or any(part.substituted for words in used for part in words)
    commands = commands_of(f"echo {text}")  # a text such as `--nodes=2` alone would be an assignment
    if len(commands) != 1 or len(commands[0].words) == 1:
        return (Word(text, frozenset(), is_substituted),)
    return tuple(Word(part.text, frozenset(), part.substituted and is_substituted) for part in commands[0].words[1:])


def _appended(earlier: Value, words: tuple[Word, ...], assignment: Assignment) -> tuple[Word, ...] | None:
    """Returns the words of a value after `+=`."""
    if earlier.words is None:
        return None
    if assignment.is_array or not earlier.words or assignment.words[0].text[:1].isspace():
        return (*earlier.words, *words)
    *first, last = earlier.words
    joined = Word(last.text + words[0].text, frozenset(), last.substituted or words[0].substituted)
    return (*first, joined, *words[1:])
