"""Chat templates of nine families, shortened.

The parts about text, reasoning, tools and the date, with their quirks.

They are written from the published templates and model cards; wording that changes no token's role
is shortened.
"""

from __future__ import annotations

from dataclasses import dataclass

# Today's date in a system turn that is always there, contents trimmed, tools in the first user
# turn, one call a message, text beside a call dropped, results as `ipython`.
LLAMA_3_2 = (
    "{{ bos_token }}{% set today = strftime_now('%d %b %Y') %}{% set system = '' %}"
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}{% set "
    "messages = messages[1:] %}"
    "{% endif %}<|start_header_id|>system<|end_header_id|>\n\n{% if tools %}Environment: "
    "ipython\n{% endif %}"
    "Today Date: {{ today }}\n\n{{ system }}<|eot_id|>"
    "{% if tools %}<|start_header_id|>user<|end_header_id|>\n\n{% for tool in tools %}{{ tool | "
    "tojson(indent=4) }}\n\n"
    "{% endfor %}{{ messages[0].content | trim }}<|eot_id|>{% set messages = messages[1:] %}{% "
    "endif %}"
    "{% for m in messages %}{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n{% set call = m.tool_calls[0].function %}"
    '{{ \'{"name": "\' + call.name + \'", "parameters": \' }}{{ call.arguments | tojson }}{{ "}" '
    "}}<|eot_id|>"
    "{% elif m.role in ['tool', 'ipython'] %}<|start_header_id|>ipython<|end_header_id|>\n\n{{ "
    "m.content | tojson }}"
    "<|eot_id|>{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim "
    "}}<|eot_id|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% "
    "endif %}"
)

# Reasoning from a field or the content, dropped before the last question, kept within its tool
# calls; an empty block in the last answer without any; results inside a user turn.
QWEN_3 = (
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content "
    "+ '\n\n' }}{% endif %}"
    "# Tools\n<tools>{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}{{ '\n' "
    "}}</tools><|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content "
    "}}<|im_end|>\n{% endif %}"
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set "
    "ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'user' or m.role == 'system' "
    "and not loop.first %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% elif m.role == 'assistant' %}"
    "{% set thought, said = '', m.content %}{% if m.reasoning_content is string %}{% set thought = "
    "m.reasoning_content %}"
    "{% elif '</think>' in said %}{% set thought = "
    "said.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}<think>\n{{ thought.strip('\n') "
    "}}\n</think>\n\n"
    "{{ said.lstrip('\n') }}{% else %}{{ said }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{% if loop.first and said or not loop.first %}{{ '\n' "
    "}}{% endif %}<tool_call>\n"
    '{{ \'{"name": "\' + call.function.name + \'", "arguments": \' }}{{ call.function.arguments | '
    'tojson }}{{ "}\n" }}'
    "</tool_call>{% endfor %}<|im_end|>\n{% elif m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}{{ "
    "'\n' }}<tool_response>\n"
    "{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}{% endif "
    "%}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is false "
    "%}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)

# Today's date; a switch in the system prompt; reasoning stays in the content of every turn; calls
# are left out, and results look like a user's turn. Without reasoning, each answer has an empty
# block, also in the generation prompt.
SMOLLM_3 = (
    "{% set mode = '/think' if enable_thinking | default(true) else '/no_think' %}{% set system = "
    "'You are SmolLM.' %}"
    "{% if messages[0].role == 'system' %}{% if '/no_think' in messages[0].content %}{% set mode = "
    "'/no_think' %}{% endif %}"
    "{% set system = messages[0].content.replace('/no_think', '').replace('/think', '').rstrip() "
    "%}{% endif %}"
    "<|im_start|>system\n## Metadata\n\nToday Date: {{ strftime_now('%d %B %Y') }}\nReasoning "
    "Mode: {{ mode }}\n\n"
    "{{ system }}\n\n{% if tools %}### Tools\n<tools>\n{% for tool in tools %}{{ tool | string "
    "}}\n{% endfor %}</tools>\n\n"
    "{% endif %}<|im_end|>\n{% for m in messages %}{% if m.role in ['user', 'tool'] "
    "%}<|im_start|>user\n{{ m.content }}"
    "<|im_end|>\n{% elif m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if mode == '/no_think' %}<think>\n\n</think>\n{% endif %}{{ m.content.lstrip('\n') "
    "}}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if mode == '/no_think' %}<think>\n\n</think>\n{% endif %}{% endif %}"
)

# Today's date; channels, which the generation prompt leaves to the model; <|return|> after the last
# answer and <|end|> after any other; reasoning of the field `thinking`, kept before a call until an
# answer follows.
GPT_OSS = (
    "<|start|>system<|message|>You are ChatGPT.\nCurrent date: {{ strftime_now('%Y-%m-%d') "
    "}}\n\nReasoning: "
    "{{ reasoning_effort | default('medium') }}\n\n# Valid channels: analysis, commentary, "
    "final.<|end|>{% set instructions = '' %}{% if messages[0].role in ['developer', 'system'] %}"
    "{% set instructions = messages[0].content %}{% set messages = messages[1:] %}{% endif %}"
    "{% if instructions or tools %}<|start|>developer<|message|>{{ instructions }}{% for tool in "
    "tools or [] %}{{ '\n' }}// "
    "{{ tool.function.description }}\ntype {{ tool.function.name }} = () => any;{% endfor "
    "%}<|end|>{% endif %}"
    "{% set last = namespace(name=none) %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if '<|channel|>' in m.content %}{{ raise_exception('You have passed <|channel|> tags in "
    "the content.') }}{% endif %}"
    "{% if 'tool_calls' in m %}{% set later = namespace(final=false) %}{% for n in "
    "messages[loop.index:] %}"
    "{% if n.role == 'assistant' and 'tool_calls' not in n %}{% set later.final = true %}{% endif "
    "%}{% endfor %}"
    "{% if m.content and m.thinking %}{{ raise_exception('Cannot pass both content and thinking "
    "with tool calls!') }}{% elif (m.content or m.thinking) and not later.final "
    "%}<|start|>assistant<|channel|>analysis<|message|>"
    "{{ m.content or m.thinking }}<|end|>{% endif %}{% set last.name = "
    "m.tool_calls[0].function.name %}"
    "<|start|>assistant to=functions.{{ last.name }}<|channel|>commentary json<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% elif loop.last and not "
    "add_generation_prompt %}"
    "{% if 'thinking' in m %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking "
    "}}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>{% else %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}{% elif m.role "
    "== 'tool' %}"
    "{% if last.name is none %}{{ raise_exception('A tool message, but there was no previous tool "
    "call!') }}{% endif %}"
    "<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | "
    "tojson }}<|end|>"
    "{% else %}<|start|>user<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)

# Today's date unless there is a system prompt; reasoning and answer both in tags, asked for by
# `thinking`; calls as a list after a special token; an end of text that the tokenizer also calls
# the end of the turn.
GRANITE_3_3 = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = "
    "messages[1:] %}{% else %}"
    "{% set system = \"Today's Date: \" + strftime_now('%B %d, %Y') + '.\nYou are Granite, "
    "developed by IBM.' %}"
    "{% if thinking %}{% set system = system + ' Write your thoughts between <think></think> and "
    "write your response "
    "between <response></response> for each user query.' %}{% endif %}{% endif %}"
    "<|start_of_role|>system<|end_of_role|>{{ system }}<|end_of_text|>\n{% if tools %}"
    "<|start_of_role|>available_tools<|end_of_role|>{{ tools | tojson(indent=4) "
    "}}<|end_of_text|>\n{% endif %}"
    "{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}{% if "
    "m.tool_calls %}<|tool_call|>["
    "{% for call in m.tool_calls %}{{ call.function | tojson }}{{ ', ' if not loop.last }}{% "
    "endfor %}]{% endif %}<|end_of_text|>\n{% endfor %}{% if add_generation_prompt "
    "%}<|start_of_role|>assistant<|end_of_role|>{% endif %}"
)

# A default system prompt, roles in turn except for tools, [THINK] in the content only, no role
# header for the answer.
MAGISTRAL = (
    "{% macro show(content) %}{% if content is string %}{{ content }}{% else %}{% for part in "
    "content %}"
    "{% if part.type == 'thinking' %}[THINK]{{ part.thinking }}[/THINK]{% else %}{{ part.text }}{% "
    "endif %}{% endfor %}{% endif %}{% endmacro %}"
    "{{ bos_token }}{% if messages[0].role == 'system' %}[SYSTEM_PROMPT]{{ "
    "show(messages[0].content) }}[/SYSTEM_PROMPT]"
    "{% set messages = messages[1:] %}{% else %}[SYSTEM_PROMPT]First draft your thinking: "
    "[THINK]...[/THINK]Here, answer."
    "[/SYSTEM_PROMPT]{% endif %}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson "
    "}}[/AVAILABLE_TOOLS]{% endif %}{% set ns = namespace(index=0) %}{% for m in messages %}"
    "{% if m.role == 'user' or m.role == 'assistant' and not m.tool_calls %}{% if (m.role == "
    "'user') != (ns.index % 2 == 0) %}"
    "{{ raise_exception('After the optional system message, conversation roles must alternate.') "
    "}}{% endif %}{% set ns.index = ns.index + 1 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ show(m.content) }}[/INST]{% elif "
    "m.role == 'assistant' %}{{ show(m.content) }}"
    "{% for call in m.tool_calls or [] %}[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ "
    "call.function.arguments | tojson }}"
    "{% endfor %}{{ eos_token }}{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content "
    "}}[/TOOL_RESULTS]{% else %}"
    "{{ raise_exception('Only user, assistant and tool roles are supported.') }}{% endif %}{% "
    "endfor %}"
)

# The generation prompt opens the reasoning, but not after a tool's result. No answer, not even the
# last, is rendered with its reasoning. Calls need a content of none and arguments as text, which a
# server does not give.
DEEPSEEK_R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% "
    "endfor %}"
    "{% set ns = namespace(tool=false) %}{% for m in messages %}{% if m.role == 'user' %}{% set "
    "ns.tool = false %}<｜User｜>{{ m.content }}{% elif m.role == 'tool' %}{% set ns.tool = true "
    "%}<｜tool▁outputs▁begin｜>{{ m.content }}{% elif m.role == 'assistant' %}"
    "{% if m.content is none %}<｜Assistant｜><｜tool▁calls▁begin｜>{{ m.tool_calls[0].function.name + "
    "'\n```json\n' + "
    "m.tool_calls[0].function.arguments }}\n```<｜tool▁calls▁end｜><｜end▁of▁sentence｜>{% else %}"
    "{{ '<｜tool▁outputs▁end｜>' if ns.tool else '<｜Assistant｜>' }}{{ "
    "m.content.split('</think>')[-1] }}"
    "<｜end▁of▁sentence｜>{% set ns.tool = false %}{% endif %}{% endif %}{% endfor %}"
    "{% if ns.tool %}<｜tool▁outputs▁end｜>{% elif add_generation_prompt %}<｜Assistant｜><think>\n{% "
    "endif %}"
)

# The system prompt folded into the first question, strict turns, contents trimmed, no tools.
GEMMA_3 = (
    "{{ bos_token }}{% set first = '' %}{% if messages[0].role == 'system' %}"
    "{% set first = (messages[0].content if messages[0].content is string else "
    "messages[0].content[0].text) + '\n\n' %}"
    "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') "
    "}}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ first if loop.first }}"
    "{% if m.content is string %}{{ m.content | trim }}{% else %}{% for part in m.content %}{{ "
    "part.text | trim }}"
    "{% endfor %}{% endif %}<end_of_turn>\n{% endfor %}{% if add_generation_prompt "
    "%}<start_of_turn>model\n{% endif %}"
)

# Tools only as a field of the system message, which no server fills; calls left out; the end of
# text after the last turn, which the model does not write.
PHI_4_MINI = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'system' and m.tools "
    "%}<|tool|>{{ m.tools }}"
    "<|/tool|>{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% else "
    "%}{{ eos_token }}{% endif %}"
)


@dataclass(frozen=True)
class Family:
    name: str
    template: str
    end: str
    """End of the tokenizer's text, `eos_token`."""
    special: tuple[str, ...]
    """The other special tokens."""
    bos: str = "<|bos|>"


FAMILIES = {
    family.name: family
    for family in (
        Family("Llama 3.2", LLAMA_3_2, "<|eot_id|>", ("<|start_header_id|>", "<|end_header_id|>")),
        Family("Qwen3", QWEN_3, "<|im_end|>", ("<|im_start|>",)),
        Family("SmolLM3", SMOLLM_3, "<|im_end|>", ("<|im_start|>",)),
        Family(
            "gpt-oss",
            GPT_OSS,
            "<|return|>",
            ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>"),
        ),
        Family(
            "Granite 3.3",
            GRANITE_3_3,
            "<|end_of_text|>",
            ("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"),
        ),
        Family(
            "Magistral",
            MAGISTRAL,
            "</s>",
            (
                *(
                    "[INST]",
                    "[/INST]",
                    "[SYSTEM_PROMPT]",
                    "[/SYSTEM_PROMPT]",
                    "[AVAILABLE_TOOLS]",
                    "[/AVAILABLE_TOOLS]",
                ),
                *(
                    "[TOOL_CALLS]",
                    "[ARGS]",
                    "[TOOL_RESULTS]",
                    "[/TOOL_RESULTS]",
                    "[THINK]",
                    "[/THINK]",
                ),
            ),
        ),
        Family(
            "DeepSeek-R1", DEEPSEEK_R1, "<｜end▁of▁sentence｜>", ("<｜User｜>", "<｜Assistant｜>")
        ),
        Family("Gemma 3", GEMMA_3, "<eos>", ("<start_of_turn>", "<end_of_turn>")),
        Family(
            "Phi-4-mini",
            PHI_4_MINI,
            "<|endoftext|>",
            ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        ),
    )
}
