"""A tool parser for vLLM that reads the first words of any answer as a call.

So a small target without tools calls them: `--tool-parser-plugin` names this file.
"""

from __future__ import annotations

import json
from typing import Any

from vllm.entrypoints.generate.base.protocol import (
    ExtractedToolCallInformation,
    FunctionCall,
    ToolCall,
)
from vllm.tool_parsers import ToolParser, ToolParserManager

NAME = "words"
STEPS = 3


@ToolParserManager.register_module(NAME)
class WordCallParser(ToolParser):  # type: ignore[misc]
    """The first STEPS answers of a session are calls."""

    def adjust_request(self, request: Any) -> Any:
        return request

    def extract_tool_calls(self, model_output: str, request: Any) -> Any:
        num_results = sum(message["role"] == "tool" for message in request.messages)
        words = {"words": " ".join(model_output.split()[:3])}
        call = ToolCall(function=FunctionCall(name="say", arguments=json.dumps(words)))
        calls = [call] if num_results < STEPS else []
        return ExtractedToolCallInformation(
            tools_called=bool(calls), tool_calls=calls, content=model_output
        )
