"""Finds the commands of a bash script. Does not import torch.

The grammar is that of tree-sitter-bash, so that quotes, loops, functions, here-documents and continued lines are read
as bash reads them.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

from rankzero.commands.jobs.check.command import LAUNCHERS, Assignment, Command, Position, Word

_PARSER = Parser(Language(tree_sitter_bash.language()))
_QUOTED = {"string": 1, "raw_string": 1, "ansi_c_string": 2}
"""Type of a quoted word -> number of characters before its text."""

_LOOPS = ("for_statement", "c_style_for_statement", "while_statement")
_BRANCHES = (*_LOOPS, "if_statement", "elif_clause", "else_clause", "case_item")

_PREFIXES = ("exec", "time", "nohup", "command")
"""Programs that run the rest of the command."""


_READERS = ("read", "let", "unset", "mapfile", "readarray", "getopts", "printf -v")
"""Commands that change the variables in their arguments."""


class HereDocument(NamedTuple):
    """A here-document.

    Args:
        line: Number of the line, from 1, of its command.
        text: The text.
        is_expanded: Whether bash expands variables in the text.
    """

    line: int
    text: str
    is_expanded: bool


def here_documents(text: str) -> list[HereDocument]:
    """Returns the here-documents of a script."""
    found = []
    for node in _descendants(_parse(text)):
        if node.type == "heredoc_redirect":
            start = next((child for child in node.children if child.type == "heredoc_start"), None)
            is_expanded = start is not None and not re.search(r"[\"'\\]", _source(start))
            body = next((_source(child) for child in node.children if child.type == "heredoc_body"), "")
            found.append(HereDocument(node.start_point.row + 1, body, is_expanded))
    return found


def changing_names(text: str) -> set[str]:
    """Returns the names of variables that a loop or a command such as `read` changes."""
    found: set[str] = set()
    for node in _descendants(_parse(text)):
        source = _source(node)
        if node.type in _LOOPS:
            found.update(re.findall(r"\bfor\s+(\w+)\s+in\b", source))
            assigned = [part.child_by_field_name("name") for part in _descendants(node) if "assignment" in part.type]
            found.update(_source(name) for name in assigned if name is not None)
        if node.type.endswith("command") and re.match(rf"(\w+=\S* )*({'|'.join(_READERS)})\s", source):
            found.update(re.findall(r"[A-Za-z_]\w*", source))
        if source.startswith(("((", "$((")):
            found.update(re.findall(r"([A-Za-z_]\w*)\s*(?:\+\+|--|[-+*/%]?=(?!=))", source))
            found.update(re.findall(r"(?:\+\+|--)\s*([A-Za-z_]\w*)", source))
    return found


def functions_of(text: str) -> set[str]:
    """Returns the names of the functions that a script defines."""
    nodes = _descendants(_parse(text))
    names = (node.child_by_field_name("name") for node in nodes if node.type == "function_definition")
    return {_source(name) for name in names if name is not None}


def here_document_lines(text: str) -> set[int]:
    """Returns the numbers of the lines, from 1, that are the text of here-documents."""
    found: set[int] = set()
    for node in _descendants(_parse(text)):
        if node.type == "heredoc_body":
            found.update(range(node.start_point.row + 1, node.end_point.row + 1))
    return found


def commands_of(text: str) -> list[Command]:
    """Returns the commands of a script in their order, without those in command substitutions and here-documents."""
    return list(_statements(_parse(text), Position()))


def _parse(text: str) -> Node:
    """Returns the syntax tree of a script."""
    # The grammar (0.25.1) splits words such as $A/$B/x, but not ${A}/${B}/x. `_without_braces` removes the braces.
    text = re.sub(r"(?<![\\$])\$([A-Za-z_]\w*)", r"${\1}", text)
    return _PARSER.parse(text.encode()).root_node


def _statements(node: Node, position: Position) -> Iterator[Command]:
    """Yields the commands in a node of the syntax tree."""
    if node.next_sibling is not None and node.next_sibling.type == "&":
        position = position._replace(in_background=True)
    if node.type in ("command", "declaration_command", "variable_assignment"):
        yield from _nested(_command(node, position))
        return
    if node.type == "function_definition":
        position = position._replace(in_function=True)
    children = [child for child in node.named_children if not child.type.endswith(("_substitution", "_redirect"))]
    for i, child in enumerate(children):
        inner = position
        is_condition = node.type in ("if_statement", "elif_clause", "while_statement") and i == 0
        if node.type in _LOOPS:
            inner = inner._replace(loop=node.start_point.row + 1)
        if (node.type in _BRANCHES and not is_condition) or (node.type == "list" and i):
            inner = inner._replace(is_conditional=True)
        yield from _statements(child, inner)


def _command(node: Node, position: Position) -> Command:
    """Returns the command that a node represents."""
    parts = [node] if node.type == "variable_assignment" else node.named_children
    assignments: dict[str, Assignment] = {}
    words: list[Word] = []
    for part in parts:
        if part.type == "variable_assignment":
            name, value = part.child_by_field_name("name"), part.child_by_field_name("value")
            if name is not None:
                assignments[_source(name)] = _assignment(part, value)
        elif not part.type.endswith("_redirect"):
            words.append(_word(part))
    while words and words[0].text in _PREFIXES:
        del words[0]
    declares = node.type == "declaration_command"
    source = _source(node)
    return Command(
        line=node.start_point.row + 1,
        text=_without_braces(re.sub(r"\s*\\\n\s*", " ", source)),
        words=() if declares else tuple(words),
        assignments=assignments,
        is_export=declares and source.startswith(("export", "declare -x")),
        position=position,
    )


def _assignment(node: Node, value: Node | None) -> Assignment:
    """Returns what a node assigns."""
    is_array = value is not None and value.type == "array"
    words = tuple(map(_word, value.named_children)) if value and is_array else (_word(value) if value else Word(""),)
    text = _without_braces(_source(value)) if value and is_array else words[0].text
    return Assignment(text, words, is_array, any(child.type == "+=" for child in node.children))


def _word(node: Node) -> Word:
    """Returns a word of a command."""
    names = {_source(part) for part in _descendants(node) if part.type == "variable_name"}
    is_substituted = any(part.type == "command_substitution" for part in _descendants(node))
    return Word(_without_braces(_text(node)), frozenset(names), is_substituted)


def _text(node: Node) -> str:
    """Returns the text of a word without its quotes."""
    source = _source(node)
    if node.type in ("concatenation", "command_name"):
        return "".join(map(_text, node.named_children))
    if node.type in _QUOTED:
        inside = source[_QUOTED[node.type] : -1]
        return re.sub(r'\\([$`"\\])', r"\1", inside) if node.type == "string" else inside
    return re.sub(r"\\(.)", r"\1", source) if node.type == "word" else source


def _nested(command: Command) -> Iterator[Command]:
    """Yields the commands in the text of `bash -c TEXT` or after `ssh HOST`; otherwise, the command itself."""
    found = _inner_text(command)
    if found is None:
        yield command
        return
    launcher, outer = found
    for inner in commands_of(outer.text):
        words = [_as_expanded(word, outer) for word in inner.words]
        assignments = {
            name: item._replace(words=tuple(_as_expanded(word, outer) for word in item.words))
            for name, item in inner.assignments.items()
        }
        yield replace(
            command,
            is_nested=True,
            words=(*launcher, *words) if words else (),
            assignments=assignments,
            is_export=inner.is_export,
            position=_combined(command.position, inner.position),
        )


def _combined(outer: Position, inner: Position) -> Position:
    """Returns the position of an inner command; an `&` in the inner text affects the inner shell only."""
    return Position(
        in_background=outer.in_background,
        in_function=outer.in_function or inner.in_function,
        loop=outer.loop,
        is_conditional=outer.is_conditional or inner.is_conditional,
    )


def _as_expanded(word: Word, outer: Word) -> Word:
    """Returns a word of an inner command, in which the job script expands only what it expands in the outer word."""
    return Word(word.text, word.expanded & outer.expanded, word.substituted and outer.substituted)


def _inner_text(command: Command) -> tuple[tuple[Word, ...], Word] | None:
    """Returns the words before an inner command, and the word with its text; None without one."""
    words = command.words
    for i, word in enumerate(words):
        name = word.text.rpartition("/")[2]
        if name in ("bash", "sh", "zsh"):
            for j in range(i + 1, len(words) - 1):
                if re.fullmatch(r"-[a-z]*c", words[j].text):
                    return words[:i], words[j + 1]
                if not words[j].text.startswith("-"):
                    break
        if LAUNCHERS.get(name) == "ssh":
            rest = _after_host(words[i + 1 :])
            if rest:
                expanded = frozenset[str]().union(*(part.expanded for part in rest))
                text, substituted = " ".join(part.text for part in rest), any(part.substituted for part in rest)
                return words[: i + 1], Word(text, expanded, substituted)
    return None


def _after_host(words: tuple[Word, ...]) -> tuple[Word, ...]:
    """Returns the words after the options and the host of ssh, or after the options of pdsh."""
    i = 0
    while i < len(words) and words[i].text.startswith("-"):
        i += 2 if re.fullmatch(r"-[bcDEeFIiJLlmOopQRSWwf]", words[i].text) else 1
    uses_w = any(word.text.startswith("-w") for word in words[:i])
    return words[i if uses_w else i + 1 :]


def _descendants(node: Node) -> Iterator[Node]:
    """Yields a node and all nodes in it."""
    yield node
    for child in node.named_children:
        yield from _descendants(child)


def _source(node: Node) -> str:
    """Returns the text of a node."""
    return (node.text or b"").decode()


def _without_braces(text: str) -> str:
    """Removes the braces of `${NAME}` where bash does not need them."""
    return re.sub(r"\$\{([A-Za-z_]\w*)\}(?![\w\[])", r"$\1", text)
