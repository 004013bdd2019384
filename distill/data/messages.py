"""Read messages and tools into one form, from any dialect in which conversations are published."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from redraft.distill.data.rows import UnusableRowError

Message = dict[str, Any]
"""A message has `role` and `content`, which is text. An assistant message may have `reasoning`
(text), `tool_calls` (as in the chat API, but with the arguments as an object), `cut` if the server
cut it, and `unlearned`. A tool result has `name` or `tool_call_id` if the data has them. If the
content consists of several texts, `parts` is a list of these texts.
"""

Tool = dict[str, Any]  # a function as vLLM passes it to a chat template, with `type` and `function`

# Role of a plain document, which bypasses the chat template and whose tokens are all labels.
TEXT_ROLE = "text"

ROLES = {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("ai", "gpt", "chatgpt", "bing", "bard", "bot", "model"), "assistant"),
    "developer": "system",
    **dict.fromkeys(("ipython", "function", "observation", "function_response"), "tool"),
}
"""Roles of speakers that have other names, by the name in lower case."""

CALL_ROLES = ("function_call", "tool_call")
CALL_KEYS = ("tool_calls", "function_call")
ROLE_KEYS = ("role", "from")
TEXT_KEYS = ("content", "value", "text")
NAMES = ("name", "tool_call_id")  # Keys of a tool's result about its call.
TOOL_KEYS = ("tools", "functions")  # keys that contain tools in a system prompt, in ChatGLM's data

MEDIA = re.compile(
    r"(image|img|picture|video|audio)s?(_(path|url|file|base64|b64|bytes?)s?)?|pixel_values"
)
"""Pattern for columns and message keys that contain media, optionally with a suffix that describes
the content.
"""

SPEAKERS = ("system", "user", "assistant", "tool")
# Types of content parts that contain text, in both APIs.
TEXT_PARTS = ("text", "input_text", "output_text")

PARAMETER_KEYS = ("parameters", "input_schema")
"""Keys of a tool definition that contain the schema of its arguments, in OpenAI's and in
Anthropic's API.
"""

ARGUMENT_KEYS = ("arguments", "parameters", "args", "input")
"""Keys of a tool call that contain its arguments, in the APIs of OpenAI, Llama, LangChain and
Anthropic.
"""

EVERYONE = ("all", "user")  # Recipients of a message in gpt-oss's format that is not a call.

FINISHES = ("finish_reason", "stop_reason", "done_reason")
"""Keys of an answer, or columns about a row's last answer, that give the reason why the answer
ended. The names come from OpenAI's, Anthropic's and Ollama's APIs.
"""

VERDICTS = ("weight", "train")
"""Keys that exclude an answer from training if their value is 0 or false, in OpenAI's fine-tuning
format and in axolotl's.
"""

CUTS = (
    *("length", "max_tokens", "max_output_tokens", "model_length", "model_context_window_exceeded"),
    *("content_filter", "abort", "error", "incomplete", "repetition"),
)
"""Reasons why a server ends an answer before the target ends it."""

REASONING_FIELDS = ("reasoning", "reasoning_content", "thinking")
"""Names of the field that contains the reasoning: in current vLLM, in earlier vLLM and other
servers, and in gpt-oss's template.
"""


def conversation_hash(messages: Sequence[Message]) -> str:
    """Return the SHA-256 (hex) of the messages, which identifies a conversation.

    Other columns have no effect.
    """
    canonical = json.dumps(
        [_identity(m) for m in messages], ensure_ascii=False, separators=(",", ":")
    )
    return hashlib.sha256(canonical.encode()).hexdigest()


def _identity(message: Message) -> list[Any]:
    rest = {key: message[key] for key in ("reasoning", "tool_calls") if key in message}
    return [message["role"], message["content"], *([rest] if rest else [])]


def parse_list(value: Any, name: str) -> list[Any]:
    """Return a list, parsed from JSON if necessary.

    Raises:
        UnusableRowError: the value is anything else.
    """
    values = parse_json(value, name)
    if not isinstance(values, list):
        raise UnusableRowError(f"with {name} that is not a list", f"it is {type(values).__name__}")
    return values


def begins_with_question(value: Any) -> bool:
    """Whether a value is a list of messages, or its JSON, starting with a user or system turn."""
    messages = _parse_messages(value)
    first = messages[0] if isinstance(messages, list) and messages else None
    return isinstance(first, dict) and ROLES.get(_speaker(first), _speaker(first)) in (
        "user",
        "system",
    )


def _parse_messages(value: Any) -> Any:
    if not isinstance(value, str) or not value.lstrip().startswith("[{"):
        return value
    try:
        messages = json.loads(value)
    except json.JSONDecodeError:
        return value
    return messages if all(isinstance(m, dict) and _speaker(m) for m in messages) else value


def _speaker(raw: Mapping[str, Any]) -> str:
    role = raw.get(first_key(raw, ROLE_KEYS))
    return role.lower() if isinstance(role, str) else ""


def first_key(values: Mapping[str, Any], keys: Iterable[str]) -> str:
    """Return the first key with a value, preferably a non-empty one. "" if there is none."""
    there = [key for key in keys if values.get(key) is not None]
    return next((key for key in there if values[key]), there[0] if there else "")


def _unknown(raw: Mapping[str, Any], *known: Iterable[str]) -> set[str]:
    """Return the keys whose values are not read.

    If several keys have the same meaning, this includes those whose value differs from the value
    that is read.
    """
    read = {key for keys in known for key in keys if raw.get(key) == raw.get(first_key(raw, keys))}
    return {
        key for key, value in raw.items() if key not in read and value not in (None, "", [], {})
    }


def read_messages(
    value: Any, role: str, unread: set[str] | None = None, name: str = "a conversation"
) -> list[Message]:
    """Read messages from a list in any dialect or its JSON, or one of `role` from plain text.

    The names of unread keys are added to `unread`.

    Raises:
        UnusableRowError: the value contains no text.
    """
    value = value if role == TEXT_ROLE else _parse_messages(value)
    if isinstance(value, str) or _is_whole_number(value):
        return [{"role": role, "content": read_text(value)}]
    if not isinstance(value, list):
        raise UnusableRowError(
            f"with {name} that is neither text nor a list", f"it is {type(value).__name__}"
        )
    return [read_message(raw, unread) for raw in value]


def _is_whole_number(value: Any) -> bool:
    """Whether a value is an integer, which has only one textual form.

    In contrast, `2.0` may be the 2 of a table with missing values.
    """
    return isinstance(value, int) and not isinstance(value, bool)


def read_message(raw: Any, unread: set[str] | None = None) -> Message:
    """Read a message that uses the keys of the chat API, of ShareGPT, or of both.

    The names of unread keys are added to `unread`.

    Raises:
        UnusableRowError: the message has no text, or its calls are not JSON.
    """
    role = _speaker(raw) if isinstance(raw, dict) else ""
    unread = set() if unread is None else unread
    if not role:
        found = (
            f"its keys are {', '.join(raw)}"
            if isinstance(raw, dict)
            else f"it is {type(raw).__name__}"
        )
        raise UnusableRowError(
            "with a message that has no role", f"{found}: expected {' or '.join(ROLE_KEYS)}"
        )
    if role in CALL_ROLES:
        unread |= _unknown(raw, ROLE_KEYS, TEXT_KEYS)
        return {"role": "assistant", "content": "", "tool_calls": read_calls(_content(raw), unread)}
    speaker = ROLES.get(role, role)
    if speaker not in SPEAKERS:
        raise UnusableRowError("with an unknown speaker", repr(role))
    if speaker == "assistant" and raw.get("recipient") not in (None, *EVERYONE):
        raw = _as_call(raw)
    content = _content(raw)
    message: Message = {"role": speaker, "content": read_text(content)}
    if isinstance(content, list) and len(texts := _texts(content)) > 1:
        message["parts"] = texts
    known: list[Iterable[str]] = [ROLE_KEYS, TEXT_KEYS]
    if speaker == "assistant":
        known += [REASONING_FIELDS, CALL_KEYS]
        _add_reasoning_and_calls(message, raw, content, unread)
        if raw.get("channel") == "analysis" and message["content"] and "reasoning" not in message:
            message["reasoning"], message["content"] = message["content"], ""
            message.pop("parts", None)
        known += [[key] for key in ("channel", "recipient", *FINISHES, *VERDICTS)]
        if any(raw.get(key) in (0, False) for key in VERDICTS if raw.get(key) is not None):
            message["unlearned"] = True
        if any(is_cut_reason(raw.get(key)) for key in FINISHES):
            message["cut"] = True
    if speaker == "tool":
        known += [[key] for key in NAMES]
        message |= {key: raw[key] for key in NAMES if isinstance(raw.get(key), str)}
    if speaker == "system":
        known += [[key] for key in TOOL_KEYS]
        message |= {key: raw[key] for key in TOOL_KEYS if raw.get(key)}
    unknown = _unknown(raw, *known)
    refuse_media(unknown)
    unread |= unknown
    return message


def _as_call(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a message to a function, gpt-oss's form of a call, to the chat API's form."""
    name = str(raw["recipient"]).removeprefix("functions.")
    call = {"name": name, "arguments": read_text(_content(raw))}
    rest = {key: value for key, value in raw.items() if key not in (*TEXT_KEYS, "content_type")}
    return {**rest, "content": "", "tool_calls": call}


def join_turns(messages: Iterable[Message]) -> list[Message]:
    """Join consecutive assistant messages into the single turn that a server writes.

    Some data sets store a turn's thought, text and calls in separate messages.
    """
    joined: list[Message] = []
    for message in messages:
        if joined and _continues_turn(joined[-1], message):
            joined[-1] = _join_messages(joined[-1], message)
        else:
            joined.append(message)
    return joined


def _continues_turn(first: Message, second: Message) -> bool:
    if not first["role"] == second["role"] == "assistant" or "cut" in first:
        return False
    if first.get("unlearned") != second.get("unlearned"):
        return False
    # Templates write a thought, then text, then calls. In any other order, they are separate turns.
    is_text_after_call = "tool_calls" in first and second["content"].strip()
    return not is_text_after_call and "reasoning" not in second


def _join_messages(first: Message, second: Message) -> Message:
    calls = [*first.get("tool_calls", ()), *second.get("tool_calls", ())]
    texts = [message["content"] for message in (first, second) if message["content"].strip()]
    return {
        **{key: value for key, value in first.items() if key != "parts"},
        "content": "\n\n".join(texts),
        **({"tool_calls": calls} if calls else {}),
        **({"cut": True} if "cut" in second else {}),
    }


def is_cut_reason(value: Any) -> bool:
    return isinstance(value, str) and value.lower() in CUTS


def refuse_media(names: Iterable[str]) -> None:
    """Refuse a row whose text is about an image or audio.

    Raises:
        UnusableRowError: one of these columns or keys contains images or audio.
    """
    if media := next(filter(MEDIA.fullmatch, names), None):
        raise UnusableRowError("with images or audio, which are not read", f"under {media}")


def _content(raw: Mapping[str, Any]) -> Any:
    """Return the text of a message, or its parts.

    Return None for an empty message, and for one that has only calls or reasoning.
    """
    has_place = any(key in raw for key in (*TEXT_KEYS, *CALL_KEYS, *REASONING_FIELDS))
    texts = [
        key
        for key, value in raw.items()
        if isinstance(value, str) and key not in (*ROLE_KEYS, *NAMES)
    ]
    if texts and not has_place:
        raise UnusableRowError(
            f"with a message without {', '.join(TEXT_KEYS)}", f"its keys are {', '.join(texts)}"
        )
    return raw.get(first_key(raw, TEXT_KEYS))


def _add_reasoning_and_calls(
    message: Message, raw: Mapping[str, Any], content: Any, unread: set[str]
) -> None:
    thoughts = [raw[name] for name in REASONING_FIELDS if raw.get(name)][:1] or _thinking_parts(
        content
    )
    calls = raw.get(first_key(raw, CALL_KEYS))
    if thoughts:
        message["reasoning"] = read_text(thoughts)
        message["content"] = message["content"].lstrip()
    if calls:
        message["tool_calls"] = read_calls(calls, unread)


def read_text(content: Any) -> str:
    """Return a message's content as a single text, without reasoning.

    Raises:
        UnusableRowError: the content is not text.
    """
    if content is None:
        return ""
    if isinstance(content, list):
        content = "\n".join(
            _texts(content)
        )  # vLLM joins the parts in the same way for a template that reads text
    if _is_whole_number(content):
        return str(content)
    if not isinstance(content, str):
        raise UnusableRowError("content that is not text", f"it is {type(content).__name__}")
    return content


def _texts(parts: list[Any]) -> list[str]:
    return [
        part if isinstance(part, str) else _part_text(part)
        for part in parts
        if not _is_thinking(part)
    ]


def with_parts(message: Message) -> Message:
    """Return the message in the form that requests use.

    Several texts in the content stay separate parts, because some templates read them one by one.
    """
    if "parts" not in message:
        return message
    rest = {key: value for key, value in message.items() if key != "parts"}
    return {**rest, "content": [{"type": "text", "text": text} for text in message["parts"]]}


def _part_text(part: Any) -> str:
    kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
    # In a Parquet file, every part has all fields, e.g. `image_url` with the value None next to the
    # text.
    if kind not in TEXT_PARTS or not isinstance(part.get("text"), str):
        raise UnusableRowError("content that is not text", f"a part of type {kind}")
    text: str = part["text"]
    return text


def _is_thinking(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "thinking"


def _thinking_parts(content: Any) -> list[Any]:
    """Return the reasoning in Mistral's content parts, each of which is text or a list of parts."""
    parts = (
        [part.get("thinking") for part in content if _is_thinking(part)]
        if isinstance(content, list)
        else []
    )
    return [read_text(part) for part in parts]


def read_calls(value: Any, unread: set[str]) -> list[dict[str, Any]]:
    """Read one tool call or a list, as JSON or parsed, into the form that a template expects.

    The names of unread keys are added to `unread`.

    Raises:
        UnusableRowError
    """
    calls = parse_json(value, "a tool call")
    return [_read_call(call, unread) for call in (calls if isinstance(calls, list) else [calls])]


def _read_call(call: Any, unread: set[str]) -> dict[str, Any]:
    call = parse_json(call, "a tool call")
    function = (
        parse_json(call.get("function", call), "a tool call") if isinstance(call, dict) else {}
    )
    if not isinstance(function, dict):
        function = {}
    name = function.get("name")
    # A server passes an object to the template, because most templates write arguments with
    # `tojson`.
    arguments = parse_json(function.get(first_key(function, ARGUMENT_KEYS)) or {}, "a tool call")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise UnusableRowError("with a tool call that has no name or arguments")
    known = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    about = {
        key: value
        for key, value in (call | function).items()
        if key not in ("id", "type", "index", "function")
    }
    unread |= {f"tool_calls.{key}" for key in _unknown(about, ["name"], ARGUMENT_KEYS)}
    return {**known, "type": "function", "function": {"name": name, "arguments": arguments}}


def read_tools(value: Any, unread: set[str]) -> list[Tool]:
    """Read function definitions, from a list or its JSON, into the form that templates expect.

    vLLM passes them to a template in this form. The names of unread keys are added to `unread`.

    Raises:
        UnusableRowError
    """
    tools = parse_list(parse_json(value or [], "a tool's definition") or [], "a column of tools")
    return [_read_tool(parse_json(tool, "a tool's definition"), unread) for tool in tools]


def _read_tool(tool: Any, unread: set[str]) -> Tool:
    function = tool.get("function", tool) if isinstance(tool, dict) else {}
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UnusableRowError("with a tool that is not a function definition")
    # Keep the fields and their order as in vLLM's request, because templates write them with
    # `tojson`.
    fields = {
        "name": function["name"],
        "description": function.get("description"),
        "parameters": parse_json(
            function.get(first_key(function, PARAMETER_KEYS)), "a tool's parameters"
        ),
    }
    if function.get("strict") is not None:
        fields["strict"] = function["strict"]
    unread |= _unknown(
        tool | function,
        ["type"],
        ["function"],
        ["name"],
        ["description"],
        ["strict"],
        PARAMETER_KEYS,
    )
    return {"type": "function", "function": fields}


def require_json(value: Any) -> None:
    """Refuse values that a server never passes to a chat template.

    Raises:
        UnusableRowError: a text contains an incomplete character, or a tool call contains
            a date value from a table.
    """
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # e.g. half of an emoji, cut by a tool that counts UTF-16 units
        raise UnusableRowError("with an incomplete character", "an unpaired surrogate") from None
    except TypeError as error:
        raise UnusableRowError("with a value that JSON cannot represent", str(error)) from None


def parse_json(value: Any, name: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise UnusableRowError(
            f"with {name} that is not JSON", f"{error.msg} at character {error.pos}"
        ) from None
