"""Lists the parts of a conversation, and replaces parts with other values, so that `chat_template.py` can find the
parts that a template drops.

A template may skip a message, or one of two calls, and the text still looks right. So the conversation is rendered
again with another value for each part. The template renders a part if the new text contains the new value, or if the
text changes when only this part is replaced. Otherwise the template drops the part.
"""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

Messages = list[dict[str, Any]]

REASONING = ("reasoning_content", "reasoning", "thinking")  # names of the reasoning field in templates
CALLS = ("tool_calls", "function_call")
KNOWN = ("role", "content", "name", *REASONING, *CALLS, "tool_call_id", "id", "weight")  # `Chat._count` reports others
DESCRIBED = ("name", "description")  # fields that describe a tool


class MessagePart(NamedTuple):
    """A value of a conversation that a template should render.

    Args:
        message: the index of the value's message; None for a value of the record's tools.
        title: name of the value in errors, such as "the name of call 1"; empty for the content of a message.
        mark: the replacement value, as a template renders it.
    """

    message: int | None
    title: str
    mark: str

    @property
    def is_reasoning(self) -> bool:
        return self.title in REASONING

    def named(self, messages: Messages) -> str:
        """Returns the part's description for an error."""
        if self.message is None:
            return self.title
        where = f"message {self.message + 1} ({messages[self.message]['role']})"
        title = f"the {self.title}" if self.is_reasoning else self.title or "the content"
        return f"{title} of {where}"


class Replaced:
    """A conversation in which all parts, or some of them, are replaced by other values of the same type.

    Args:
        only: the index, in `parts`, of the part to replace; None: all parts; -1: no part.
        of: the index of the message whose parts are replaced; None: all messages and the tools.

    Attributes:
        messages, tools: the new conversation; the original is unchanged.
        parts: all parts, replaced or not.
    """

    def __init__(self, messages: Messages, tools: list | None, only: int | None = None, of: int | None = None) -> None:
        self.parts: list[MessagePart] = []
        self._only, self._of = only, of
        called: set[str] = set()  # names of the functions that the last answer before message i calls
        self.messages = []
        for i, message in enumerate(messages):
            self.messages.append(self._message(i, message, called))
            if message["role"] == "assistant":
                called = {function.get("name") for function in functions(message) if _is_text(function.get("name"))}
        self.tools = tools and [self._tool(f"tool {number}", tool) for number, tool in enumerate(tools, 1)]

    def _message(self, i: int, message: dict, called: set[str]) -> dict:
        other = dict(message)
        other["content"] = self._other(i, "", message["content"])
        if "name" in message and not (message["role"] == "tool" and str(message["name"]) in called):
            other["name"] = self._other(i, "the name", message["name"])
        written = [(name, message[name]) for name in REASONING if name in message]
        for name, value in written:  # equal texts under two field names count as one part
            same = next((other[first] for first, text in written if text == value), value)
            other[name] = self._other(i, name, value) if same == value else same
        if "tool_calls" in message:
            calls = message["tool_calls"]
            numbered = isinstance(calls, list) and calls
            other["tool_calls"] = (
                [self._call(i, f"call {number}", call) for number, call in enumerate(calls, 1)]
                if numbered
                else self._other(i, "tool_calls", calls)
            )
        if "function_call" in message:
            other["function_call"] = self._call(i, "function_call", message["function_call"])
        return other

    def _call(self, i: int, title: str, call: object) -> object:
        if not isinstance(call, dict):
            return self._other(i, title, call)
        if isinstance(call.get("function"), dict):
            return call | {"function": self._call(i, title, call["function"])}
        other = dict(call)
        if "name" in call:
            other["name"] = self._other(i, f"the name of {title}", call["name"])
        if "arguments" in call:
            arguments, title = call["arguments"], f"the arguments of {title}"
            read = object_of(arguments)
            is_text = isinstance(arguments, str) and isinstance(read, dict)
            new = self._other(i, title, read)
            other["arguments"] = (arguments if new == read else json.dumps(new)) if is_text else new
        return other

    def _tool(self, title: str, tool: dict) -> dict:
        if isinstance(tool.get("function"), dict):
            return tool | {"function": self._tool(title, tool["function"])}
        if not any(name in tool for name in DESCRIBED):
            return self._other(None, title, tool)
        other = tool | {name: self._other(None, title, tool[name]) for name in DESCRIBED if name in tool}
        parameters = tool.get("parameters")
        if isinstance(parameters, dict) and isinstance(parameters.get("properties"), dict):
            properties = {self._other(None, title, key): value for key, value in parameters["properties"].items()}
            other["parameters"] = parameters | {"properties": properties}
        return other

    def _other(self, message: int | None, title: str, value: Any) -> Any:
        """Appends the parts of a value to `parts`, and returns the value with the selected parts (`only`, `of`)
        replaced by other values of the same type. In objects, the names of fields are parts, too. Booleans, null and
        blank text are not parts, and stay unchanged."""
        if isinstance(value, dict):
            return {self._other(message, title, key): self._other(message, title, of) for key, of in value.items()}
        if isinstance(value, list):
            return [self._other(message, title, item) for item in value]
        number = len(self.parts)
        if _is_text(value):
            other = f"Qz{number}zQ"
        elif isinstance(value, int | float) and not isinstance(value, bool):
            other = type(value)(860_400_000 + number)
        else:
            return value
        self.parts.append(MessagePart(message, title, str(other)))
        return other if self._only in (None, number) and self._of in (None, message) else value


def functions(message: dict) -> Iterator[dict]:
    """Yields the functions that a message calls, each a dict such as {"name": ..., "arguments": ...}."""
    calls = message.get("tool_calls")
    for call in [*(calls if isinstance(calls, list) else []), message.get("function_call")]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if isinstance(function, dict):
            yield function


def is_blank(message: dict) -> bool:
    """Returns whether a message has no content, no reasoning and no calls."""
    said = [message.get(name) for name in ("content", *REASONING, *CALLS)]
    return not any(part.strip() if isinstance(part, str) else part for part in said)


def with_arguments(messages: Messages, as_text: bool) -> Messages:
    """Returns the messages with the arguments of every call as objects, or (`as_text`) as JSON text. Arguments that are
    not a JSON object are unchanged; without `as_text`, blank text becomes an empty object."""
    return [_spelled(message, as_text) if any(name in message for name in CALLS) else message for message in messages]


def with_schemas(tools: list[dict]) -> list[dict]:
    """Returns the tools with the schema of their parameters as an object. In some data sets the schema is JSON text,
    which templates would render as a quoted string."""
    return [
        tool
        | ({"parameters": object_of(tool["parameters"])} if "parameters" in tool else {})
        | ({"function": with_schemas([tool["function"]])[0]} if isinstance(tool.get("function"), dict) else {})
        for tool in tools
    ]


def _spelled(message: dict, as_text: bool) -> dict:
    def spelled(call: object) -> object:
        if not isinstance(call, dict):
            return call
        if isinstance(call.get("function"), dict):
            return call | {"function": spelled(call["function"])}
        if "arguments" not in call:
            return call
        arguments = call["arguments"] if as_text else object_of(call["arguments"])
        is_object = as_text and isinstance(arguments, dict)
        return call | {"arguments": json.dumps(arguments, ensure_ascii=False) if is_object else arguments}

    calls = message.get("tool_calls")
    return (
        message
        | ({"tool_calls": [spelled(call) for call in calls]} if isinstance(calls, list) else {})
        | ({"function_call": spelled(message["function_call"])} if "function_call" in message else {})
    )


def object_of(arguments: Any) -> Any:
    """Returns the object that a JSON text contains, or an empty object for blank text. Any other value is returned
    unchanged."""
    if not isinstance(arguments, str):
        return arguments
    read = read_json(arguments) if arguments.strip() else {}
    return read if isinstance(read, dict) else arguments


def read_json(value: Any) -> Any:
    """Returns the value that a JSON text contains. (The columns of a table may contain JSON text.) A value that is not
    JSON text is returned unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())
