"""Create conversations from the Python standard library.

Their text has two domains, and is available in every Python installation.

`code`   the user asks for a function by its qualified name and signature; the assistant answers with the source
`prose`  the user asks about an object; the assistant answers with the English documentation

A third kind has only questions, for a target to answer (`function_questions`): complete a function,
given its signature and docstring.
"""

import ast
import functools
import hashlib
import inspect
import re
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path

MAX_ANSWER_CHARS = 900
"""Maximum length of an answer in characters, about 250 tokens in the small target's tokenizer.
Answers are short enough to be complete, as in a chat.
"""

MIN_ANSWER_CHARS = 80
MAX_TURNS = 3
# Longer prompts are cut at the end of a line, because nothing is learned from a prompt.
MAX_DOCSTRING_CHARS = 600

Conversation = dict[str, object]


def stdlib_conversations(root: Path | None = None) -> Iterator[Conversation]:
    """Yield conversations made from the sources of Python's standard library.

    Each is `{"domain": "code" | "prose", "messages": [...]}`.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    seen: set[str] = set()
    for domain, question, answer in _questions(root):
        if len(answer) < MIN_ANSWER_CHARS or answer in seen:
            continue
        seen.add(answer)
        messages = []
        for turn, part in enumerate(_cut(answer)[:MAX_TURNS]):
            messages.append({"role": "user", "content": question if turn == 0 else "Go on."})
            messages.append({"role": "assistant", "content": part})
        yield {"domain": domain, "messages": messages}


def function_questions(root: Path | None = None) -> Iterator[Conversation]:
    """Yield conversations that consist of one question.

    Each asks a model to complete one of the standard library's functions that have a docstring. The
    questions are in the order of their hashes.
    """
    found = set()
    for module, tree, _ in _modules(root or Path(sysconfig.get_path("stdlib"))):
        for _, node in _definitions(tree, module):
            if (
                isinstance(node, ast.FunctionDef)
                and len(node.body) > 1
                and (text := ast.get_docstring(node))
            ):
                found.add(completion_question(f"def {node.name}({ast.unparse(node.args)}):", text))
    for question in sorted(found, key=lambda text: hashlib.sha256(text.encode()).digest()):
        yield {"domain": "code", "messages": [{"role": "user", "content": question}]}


def completion_question(signature: str, docstring: str) -> str:
    quoted = textwrap.indent(
        f'"""{_cut(docstring, MAX_DOCSTRING_CHARS)[0]}\n"""',
        "    ",
        lambda line: bool(line.strip()),
    )
    return ask_to_complete(f"{signature}\n{quoted}")


def ask_to_complete(code: str) -> str:
    return f"Complete this Python function:\n\n```python\n{code}\n```"


@functools.cache  # Parsing the library takes seconds, and it does not change.
def _questions(root: Path) -> tuple[tuple[str, str, str], ...]:
    found: list[tuple[str, str, str]] = []
    for module, tree, source in _modules(root):
        if module == "pydoc_data.topics":
            found += _topics(tree)
        else:
            found += _module_questions(module, tree, source.splitlines())
    return tuple(found)


def _modules(root: Path) -> Iterator[tuple[str, ast.Module, str]]:
    """Yield (name, syntax tree, source) for each of the library's modules, except tests."""
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if {"site-packages", "test", "tests", "idle_test", "encodings", "lib2to3"} & set(
            relative.parts
        ):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        # A few files are deliberately broken or in Latin-1.
        except (SyntaxError, UnicodeDecodeError):
            continue
        yield ".".join(relative.with_suffix("").parts).removesuffix(".__init__"), tree, source


def _module_questions(
    module: str, tree: ast.Module, lines: list[str]
) -> Iterator[tuple[str, str, str]]:
    for name, node in _definitions(tree, module):
        docstring = ast.get_docstring(node)
        if docstring:
            yield "prose", f"What does `{name}` do?", docstring
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and len(node.body) > 1:
            call = f"{name}({ast.unparse(node.args)})"
            yield "code", f"Write the function `{call}`.", _source_without_docstring(node, lines)


def _definitions(
    node: ast.AST, prefix: str
) -> Iterator[tuple[str, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]]:
    if isinstance(node, ast.Module):
        yield prefix, node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{prefix}.{child.name}"
            yield name, child
            yield from _definitions(child, name)


def _source_without_docstring(
    node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]
) -> str:
    # `lineno` is the line of `def`, so decorators are omitted.
    first, last = node.lineno - 1, node.end_lineno
    body = lines[first:last]
    if ast.get_docstring(node) is not None:
        docstring = node.body[0]
        assert docstring.end_lineno is not None
        body = lines[first : docstring.lineno - 1] + lines[docstring.end_lineno : last]
    return textwrap.dedent("\n".join(body)).strip("\n")


def _topics(tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    assignment = next(node for node in tree.body if isinstance(node, ast.Assign))
    for topic, text in ast.literal_eval(assignment.value).items():
        paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(text))
        step = 6
        for first in range(0, len(paragraphs), step):
            section = "" if first == 0 else f", part {first // step + 1}"
            yield (
                "prose",
                f"Explain `{topic}`{section}.",
                "\n\n".join(paragraphs[first : first + step]),
            )


def _cut(text: str, max_chars: int = MAX_ANSWER_CHARS) -> list[str]:
    """Cut `text` at line ends into parts of at most `max_chars` characters.

    Longer lines are not cut.
    """
    parts: list[str] = []
    current = ""
    for line in text.splitlines():
        if current and len(current) + len(line) + 1 > max_chars:
            parts.append(current)
            current = line
        else:
            current = f"{current}\n{line}" if current else line
    return [*parts, current]
