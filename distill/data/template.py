"""Find the inputs of a chat template in its syntax tree."""

import functools
import itertools
from typing import Any

from jinja2 import TemplateSyntaxError, meta, nodes

from redraft.distill.data.modes import EFFORT, EFFORTS, NO_EFFORTS, SWITCHES

# Variables of a template that the server sets itself, so a request cannot pass them as arguments.
FIXED = {"messages", "tools", "add_generation_prompt"}

Arguments = dict[str, Any]  # `chat_template_kwargs` of a request.


def find_arguments(tokenizer: Any) -> list[Arguments]:
    """Return the arguments with which a request may start an answer.

    The order is: no arguments, each switch on and off, an effort level, and a level without
    thinking.
    """
    read, trees = read_names(tokenizer), [_parse(text) for text in _templates(tokenizer)]
    found: list[Arguments] = [
        {name: value} for name in SWITCHES if name in read for value in (True, False)
    ]
    if EFFORT in read:
        texts = set[str]().union(*map(_constant_texts, trees))
        # A template without a list of levels writes any level.
        found += [{EFFORT: next((level for level in EFFORTS if level in texts), EFFORTS[0])}]
        found += [{EFFORT: level} for level in NO_EFFORTS if level in texts][:1]
    return [{}, *found]


def read_names(tokenizer: Any) -> set[str]:
    """Return the names that the template reads from a request.

    As in vLLM, other names are not passed to it.
    """
    trees = (_parse(text) for text in _templates(tokenizer))
    return set[str]().union(*map(meta.find_undeclared_variables, trees)) - FIXED


def asks_for_thought(arguments: Arguments) -> bool | None:
    """Whether these request arguments switch the reasoning on or off. None if they do neither."""
    for name, value in arguments.items():
        if name in SWITCHES:
            return bool(value)
        if name == EFFORT:
            return value not in NO_EFFORTS
    return None


def _constant_texts(tree: nodes.Template) -> set[str]:
    values = [const.value for const in tree.find_all(nodes.Const)]
    lists = [value for value in values if isinstance(value, list | tuple)]
    return {text for text in itertools.chain(values, *lists) if isinstance(text, str)}


def reads_parts(tokenizer: Any) -> bool:
    """Whether a server passes lists of parts to the template.

    As in vLLM, it does so if the template loops over a message's content.
    """
    return any(map(_loops_over_content, _templates(tokenizer)))


def _templates(tokenizer: Any) -> list[str]:
    template = tokenizer.chat_template
    # Some tokenizers have several templates by name, e.g. one for tools.
    return list(template.values()) if isinstance(template, dict) else [template] if template else []


@functools.lru_cache(maxsize=64)
def _parse(template: str) -> nodes.Template:
    """Return the syntax tree.

    Raises:
        ValueError: the template is not valid.
    """
    # Imported here, because it takes a second, too long for --help.
    from transformers.utils import chat_template_utils

    # The environment of transformers supports its tags, e.g. `generation`.
    try:
        compiled = chat_template_utils._compile_jinja_template(template)
    except TemplateSyntaxError as error:
        raise ValueError(
            f"the chat template is not valid (line {error.lineno}: {error.message}): correct it, or "
            "download it again"
        ) from error
    tree: nodes.Template = compiled.environment.parse(template)
    return tree


def _loops_over_content(template: str) -> bool:
    tree = _parse(template)
    messages = _loop_targets(tree, _aliases(tree, "messages"))

    def is_content(node: nodes.Node | None) -> bool:
        owner, key = _read_field(_inside(node))
        return key == "content" and owner in messages

    in_macros: dict[int, set[str]] = {}
    for macro in tree.find_all(nodes.Macro):
        given = _parameters_with(tree, macro, is_content)
        in_macros |= {id(loop): given for loop in macro.find_all(nodes.For)}
    for loop in tree.find_all(nodes.For):
        name = loop.iter.name if isinstance(loop.iter, nodes.Name) else None
        if is_content(loop.iter) or name in in_macros.get(id(loop), {"content"}):
            return True
    return False


def _aliases(tree: nodes.Template, name: str) -> set[str]:
    """Return `name`, and the variables set to it or to a slice of it."""
    names, grows = {name}, True
    while grows:
        found = {
            node.target.name
            for node in tree.find_all(nodes.Assign)
            if isinstance(node.target, nodes.Name) and _name(_inside(node.node)) in names
        }
        grows = not found <= names
        names |= found
    return names


def _loop_targets(tree: nodes.Template, sources: set[str]) -> set[str]:
    loops = (loop for loop in tree.find_all(nodes.For) if _name(_inside(loop.iter)) in sources)
    return {loop.target.name for loop in loops if isinstance(loop.target, nodes.Name)}


def _parameters_with(tree: nodes.Template, macro: nodes.Macro, fits: Any) -> set[str]:
    names, found = [parameter.name for parameter in macro.args], set()
    for call in tree.find_all(nodes.Call):
        if _name(call.node) == macro.name:
            found |= {name for name, value in zip(names, call.args, strict=False) if fits(value)}
            found |= {word.key for word in call.kwargs if word.key in names and fits(word.value)}
    return found


def _inside(node: nodes.Node | None) -> nodes.Node | None:
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    return node


def _name(node: nodes.Node | None) -> str | None:
    return node.name if isinstance(node, nodes.Name) else None


def _read_field(node: nodes.Node | None) -> tuple[str | None, Any]:
    """Return (variable, key) for `message.content` or `message['content']`."""
    if isinstance(node, nodes.Getattr):
        return _name(node.node), node.attr
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return _name(node.node), node.arg.value
    return None, None
