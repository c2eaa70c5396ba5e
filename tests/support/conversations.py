"""Defines twenty conversations with features that chat templates render differently.

Each conversation is a record of `data=chat`. Among the features are system prompts, several answers, tools and calls,
reasoning, an empty turn, several scripts, code, and white space around contents.
"""


def said(*contents: str) -> list[dict]:
    """Returns messages with these contents. The user and the assistant alternate, beginning with the user."""
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def called(*calls: dict, content: str = "", **others: str) -> dict:
    return {"role": "assistant", "content": content, "tool_calls": [*calls], **others}


def call(name: str, **arguments: object) -> dict:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def result(content: str, name: str = "weather") -> dict:
    return {"role": "tool", "name": name, "content": content}


def tool(name: str, description: str, **properties: dict) -> dict:
    parameters = {"type": "object", "properties": properties, "required": [*properties][:1]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


SYSTEM = {"role": "system", "content": "Answer briefly, and in the language of the question."}
TOOLS = [
    tool(
        "weather",
        "The weather of a city today.",
        city={"type": "string", "description": "The name of the city."},
        unit={"type": "string", "enum": ["celsius", "fahrenheit"], "description": "The unit of temperatures."},
    ),
    tool("add", "The sum of two numbers.", a={"type": "number"}, b={"type": "number"}),
    tool("book", "Book a journey.", stops={"type": "array", "items": {"type": "object"}}, options={"type": "object"}),
]
ASKED = said("What is the weather in Paris?")
PARIS = call("weather", city="Paris", unit="celsius")
CODE = 'def f(x: int) -> str:\n\tif x < 0:\n\t\treturn "{{ \\"no\\" }}"  # <b>&amp;</b>\n    return f"{x!r}\\n"\n'


def with_tools(*messages: dict) -> dict:
    return {"messages": [*messages], "tools": TOOLS}


CONVERSATIONS: dict[str, dict] = {
    "one answer": {"messages": said("What is the capital of France?", "It is Paris.")},
    "system prompt, two answers": {
        "messages": [SYSTEM, *said("What is 2 + 2?", "4", "And 3 + 3?", "That is 6, of course.")]
    },
    "four answers": {
        "messages": said("One?", "uno", "Two?", "dos", "Three?", "tres", "And four, please?", "cuatro, and that is all")
    },
    "ends with a call": with_tools(*ASKED, called(PARIS)),
    "call, result, answer": with_tools(
        *ASKED, called(PARIS), result('{"degrees": 21}'), *said("", "It is 21 degrees in Paris.")[1:]
    ),
    "two calls at once, two results": with_tools(
        SYSTEM,
        *said("The weather in Paris and in Rome?"),
        called(PARIS, call("weather", city="Rome", unit="celsius")),
        result('{"degrees": 21}'),
        result('{"degrees": 28}'),
        *said("", "Paris has 21 degrees, Rome 28.")[1:],
    ),
    "call with a text": with_tools(
        *ASKED, called(PARIS, content="I look that up."), result("21"), *said("", "It is 21 degrees.")[1:]
    ),
    "a call after a call": with_tools(
        *said("Add 2, 3 and 4."),
        called(call("add", a=2, b=3)),
        result("5", "add"),
        called(call("add", a=5, b=4)),
        result("9", "add"),
        *said("", "The sum is 9.")[1:],
    ),
    "a question after a call": with_tools(
        *ASKED,
        called(PARIS),
        result("21"),
        *said("", "It is 21 degrees.", "Is that warm?", "For Paris in April, yes.")[1:],
    ),
    "numbers and nested arguments": with_tools(
        *said("Book it."),
        called(
            call(
                "book",
                stops=[{"city": "São Paulo", "nights": 2}, {"city": "Lima", "nights": 0}],
                options={"budget": 1234.5, "seats": [1, 2], "pets": False, "note": None, "code": "007", "tiny": 1e-7},
            )
        ),
    ),
    "arguments as a text of JSON": with_tools(
        *ASKED,
        called(
            {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris", "unit": "celsius"}'}}
        ),
        result("21"),
        *said("", "It is 21 degrees.")[1:],
    ),
    "reasoning in the last answer": {
        "messages": [
            *said("Is 91 a prime?"),
            {"role": "assistant", "content": "No, it is 7 times 13.", "reasoning_content": "7 * 13 = 91, so no."},
        ]
    },
    "reasoning in both answers": {
        "messages": [
            *said("Is 91 a prime?"),
            {"role": "assistant", "content": "No, it is 7 times 13.", "reasoning_content": "7 * 13 = 91, so no."},
            *said("And 97?"),
            {"role": "assistant", "content": "Yes.", "reasoning_content": "Not divisible by 2, 3, 5 or 7."},
        ]
    },
    "reasoning before a call and after": with_tools(
        *ASKED,
        called(PARIS, reasoning_content="I have to ask for the weather."),
        result("21"),
        {"role": "assistant", "content": "It is 21 degrees.", "reasoning_content": "The tool says 21."},
    ),
    "reasoning under another name": {
        "messages": [
            *said("Is 91 a prime?"),
            {"role": "assistant", "content": "No, it is 7 times 13.", "thinking": "7 * 13 = 91, so no."},
        ]
    },
    "reasoning in tags inside the content": {
        "messages": said(
            "Is 91 a prime?",
            "<think>\n7 * 13 = 91, so no.\n</think>\n\nNo.",
            "And 97?",
            "<think>\nNot divisible by 2, 3, 5 or 7.\n</think>\n\nYes.",
        )
    },
    "an empty turn of the assistant": {"messages": said("Hello?", "", "Are you there?", "Yes, I am.")},
    "scripts and emoji": {
        "messages": [
            {"role": "system", "content": "Ты — помощник. 日本語も話す。"},
            *said("Как дела? 👩‍👩‍👧 e\u0301", "هذا جيد، 谢谢 🙂 Ünïcödé", "नमस्ते", "안녕하세요 — ok"),
        ]
    },
    "code": {"messages": said(f"Explain this:\n```python\n{CODE}```", f"```python\n{CODE}```", "Again.", CODE)},
    "white space at both ends": {"messages": said("  two spaces \n", " one space ", "\n\nlines\n\n", "a line end\n")},
}
