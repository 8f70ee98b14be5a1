"""Texts around the list of tools and around a call, for each model family, as data.

The list replaces ``{tool_text}``; in ``default`` the names of the tools replace ``{tool_names}``. All else is literal.
Source: the models' own chat templates, in the wording of LLaMA-Factory's tool_utils.py (August 2026).
"""

from typing import Final

_FUNCTIONS_IN_XML = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>{tool_text}\n</tools>\n\n"
)
_JSON_IN_XML = (
    "For each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)

PROMPTS: Final[dict[str, str]] = {
    "default": (
        "You have access to the following tools:\n{tool_text}Use the following format if using a tool:\n"
        "```\nAction: tool name (one of [{tool_names}])\n"
        "Action Input: the input to the tool, in a JSON format representing the kwargs "
        '(e.g. ```{"input": "hello world", "num_beams": 5}```)\n```\n'
    ),
    "glm4": (
        "你是一个名为 ChatGLM 的人工智能助手。你是基于智谱 AI 公司训练的语言模型 GLM-4 模型开发的，"
        "你的任务是针对用户的问题和要求提供适当的答复和支持。\n\n# 可用工具{tool_text}"
    ),
    "glm4_moe": (
        f"\n\n{_FUNCTIONS_IN_XML}"
        "For each function call, output the function name and arguments within the following XML format:"
        "\n<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>"
        "\n<arg_key>{arg-key-2}</arg_key>\n<arg_value>{arg-value-2}</arg_value>\n...\n</tool_call>\n"
    ),
    "lfm2": "List of tools: <|tool_list_start|>{tool_text}<|tool_list_end|>",
    "ling": f"{_FUNCTIONS_IN_XML}{_JSON_IN_XML}\ndetailed thinking off",
    "llama3": (
        # The date is the default of Meta's template; today's date would make the rows depend on the day.
        "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
        "You have access to the following functions. To call a function, please respond with JSON for a function call. "
        'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}. '
        "Do not use variables.\n\n{tool_text}"
    ),
    "minimax1": (
        "You are provided with these tools:\n<tools>\n{tool_text}</tools>\n\n"
        "If you need to call tools, please respond with <tool_calls></tool_calls> XML tags, and provide tool-name and "
        "json-object of arguments, following the format below:\n<tool_calls>\n"
        '{"name": <tool-name-1>, "arguments": <args-json-object-1>}\n...\n</tool_calls>'
    ),
    "minimax2": (
        "\n\n# Tools\n\nYou may call one or more tools to assist with the user query.\n"
        "Here are the tools available in JSONSchema format:\n\n<tools>\n{tool_text}</tools>\n\n"
        "When making tool calls, use XML format to invoke tools and pass parameters:\n"
        '\n<minimax:tool_call>\n<invoke name="tool-name-1">\n<parameter name="param-key-1">param-value-1</parameter>\n'
        '<parameter name="param-key-2">param-value-2</parameter>\n...\n</invoke>\n</minimax:tool_call>'
    ),
    "qwen": f"\n\n{_FUNCTIONS_IN_XML}{_JSON_IN_XML}",
    "qwen3_5": (
        "\n\n# Tools\n\nYou have access to the following functions:\n\n<tools>{tool_text}\n</tools>\n\n"
        "If you choose to call a function ONLY reply in the following format with NO suffix:\n\n"
        "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n"
        "<parameter=example_parameter_2>\nThis is the value for the second parameter\nthat can span\nmultiple lines\n"
        "</parameter>\n</function>\n</tool_call>\n\n<IMPORTANT>\nReminder:\n"
        "- Function calls MUST follow the specified format: "
        "an inner <function=...></function> block must be nested within <tool_call></tool_call> XML tags\n"
        "- Required parameters MUST be specified\n"
        "- You may provide optional reasoning for your function call in natural language "
        "BEFORE the function call, but NOT after\n"
        "- If there is no function call available, answer the question like normal with your current knowledge "
        "and do not tell the user about function calls\n</IMPORTANT>"
    ),
    "seed_oss": (
        "system\nYou are Doubao, a helpful AI assistant. "
        "You may call one or more functions to assist with the user query."
        "Tool List:\nYou are authorized to use the following tools (described in JSON Schema format). "
        "Before performing any task, you must decide how to call them based on the descriptions and parameters "
        "of these tools.{tool_text}\n"
        "工具调用请遵循如下格式:\n<seed:tool_call>\n<function=example_function_name>\n"
        "<parameter=example_parameter_1>value_1</parameter>\n<parameter=example_parameter_2>"
        "This is the value for the second parameter\nthat can span\nmultiple lines</parameter>\n"
        "</function>\n</seed:tool_call>\n"
    ),
}

TAGGED_CALLS: Final[dict[str, tuple[str, str, str]]] = {
    "glm4_moe": ("\n<tool_call>{name}", "\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>", ""),
    "minimax2": ('<invoke name="{name}">', '\n<parameter name="{key}">{value}</parameter>', "\n</invoke>"),
    "qwen3_5": (
        "<tool_call>\n<function={name}>",
        "\n<parameter={key}>\n{value}\n</parameter>",
        "\n</function>\n</tool_call>",
    ),
    # LLaMA-Factory leaves a tag open here and in glm4_moe; a data set must give the same rows there and here.
    "seed_oss": (
        "\n<seed:tool_call>\n<function={name}",
        "\n<parameter={key}>{value}</parameter>",
        "\n</function>\n</seed:tool_call>",
    ),
}
"""Formats that write each argument in a tag of its own: the text before a call, of each argument, after the call."""
