"""Finds the commands of a bash script. Does not import torch.

The grammar is that of tree-sitter-bash, so that quotes, loops, functions, here-documents and continued lines are read
as bash reads them.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

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


def functions_of(text: str) -> set[str]:
    """Returns the names of the functions that a script defines."""
    nodes = _descendants(_PARSER.parse(text.encode()).root_node)
    names = (node.child_by_field_name("name") for node in nodes if node.type == "function_definition")
    return {_source(name) for name in names if name is not None}


def here_document_lines(text: str) -> set[int]:
    """Returns the numbers of the lines, from 1, that are the text of here-documents."""
    found: set[int] = set()
    for node in _descendants(_PARSER.parse(text.encode()).root_node):
        if node.type == "heredoc_body":
            found.update(range(node.start_point.row + 1, node.end_point.row + 1))
    return found


def commands_of(text: str) -> list[Command]:
    """Returns the commands of a script in their order, without those in command substitutions and here-documents."""
    return list(_statements(_PARSER.parse(text.encode()).root_node, Position()))


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
        is_last = i == len(children) - 1
        if node.type == "pipeline" and not is_last:
            inner = inner._replace(piped=True)
        is_condition = node.type in ("if_statement", "elif_clause", "while_statement") and i == 0
        if is_condition or node.type == "negated_command" or (node.type == "list" and not is_last):
            inner = inner._replace(handled=True)
        if node.type in _LOOPS:
            inner = inner._replace(in_loop=True)
        if (node.type in _BRANCHES and not is_condition) or (node.type == "list" and i):
            inner = inner._replace(is_conditional=True)
        yield from _statements(child, inner)


def _command(node: Node, position: Position) -> Command:
    """Returns the command of a node that is one."""
    parts = [node] if node.type == "variable_assignment" else node.named_children
    assignments, words = {}, []
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
        text=re.sub(r"\s*\\\n\s*", " ", source),
        words=() if declares else tuple(words),
        assignments=assignments,
        is_export=declares and source.startswith(("export", "declare -x")),
        position=position,
    )


def _assignment(node: Node, value: Node | None) -> Assignment:
    """Returns what a node assigns."""
    is_array = value is not None and value.type == "array"
    words = tuple(map(_word, value.named_children)) if value and is_array else (_word(value) if value else Word(""),)
    text = _source(value) if value and is_array else words[0].text
    return Assignment(text, words, is_array, any(child.type == "+=" for child in node.children))


def _word(node: Node) -> Word:
    """Returns a word of a command."""
    names = {_source(part) for part in _descendants(node) if part.type == "variable_name"}
    is_substituted = any(part.type == "command_substitution" for part in _descendants(node))
    return Word(_text(node), frozenset(names), is_substituted)


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
    launcher, text, expanded, substituted = found
    for inner in commands_of(text):
        words = [_as_expanded(word, expanded, substituted) for word in inner.words]
        assignments = {
            name: item._replace(words=tuple(_as_expanded(word, expanded, substituted) for word in item.words))
            for name, item in inner.assignments.items()
        }
        yield replace(
            command,
            words=(*launcher, *words) if words else (),
            assignments=assignments,
            is_export=inner.is_export,
            position=_combined(command.position, inner.position),
        )


def _combined(outer: Position, inner: Position) -> Position:
    """Returns the position of an inner command; an `&` in the inner text is the other shell's."""
    either = Position(*(first or second for first, second in zip(outer, inner, strict=True)))
    return either._replace(in_background=outer.in_background)


def _as_expanded(word: Word, expanded: frozenset[str], substituted: bool) -> Word:
    """Returns a word of an inner command, whose variables the job script replaces only if they are in `expanded`."""
    return Word(word.text, word.expanded & expanded, word.substituted and substituted)


def _inner_text(command: Command) -> tuple[tuple[Word, ...], str, frozenset[str], bool] | None:
    """Returns the words before an inner command, its text, and what the job script replaces in it; None without one."""
    words = command.words
    for i, word in enumerate(words):
        name = word.text.rpartition("/")[2]
        if name in ("bash", "sh", "zsh"):
            for j in range(i + 1, len(words) - 1):
                if re.fullmatch(r"-[a-z]*c", words[j].text):
                    text = words[j + 1]
                    return words[:i], text.text, text.expanded, text.substituted
                if not words[j].text.startswith("-"):
                    break
        if LAUNCHERS.get(name) == "ssh":
            rest = _after_host(words[i + 1 :])
            if rest:
                expanded = frozenset[str]().union(*(part.expanded for part in rest))
                return words[: i + 1], " ".join(part.text for part in rest), expanded, any(p.substituted for p in rest)
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
    """Returns the text of a node as written."""
    return (node.text or b"").decode()
