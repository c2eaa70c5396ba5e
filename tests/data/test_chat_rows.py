"""Tests cases in which part of a conversation could be lost: the template omits a part, tool calls have arguments,
answers need several rows, answers are empty, or records are skipped. Such a part must be kept, refused or reported.

Each small template has one property of a published chat template. Expected rows are written by hand. `marked` and
`encoded` are defined in `test_chat.py`.
"""

import json
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_chat import QWEN, BadRecord, conversation, encoded, marked, tokenizer
from tokenizers import AddedToken

from conftest import ROOT
from lowmem.data import token_store
from lowmem.data.sources.chat import Chat
from lowmem.data.sources.chat_template import CHATML
from lowmem.data.sources.jsonl import jsonl
from lowmem.data.sources.preference import Preference
from lowmem.system.errors import Refused

START, END = "<|im_start|>", "<|im_end|>"
ASKS = "{% if add_generation_prompt %}<|im_start|>A:{% endif %}"
LETTERS = {"system": "S", "user": "U", "assistant": "A", "tool": "T"}


def turns(answer: str, others: str = "", end: str = END) -> str:
    """Returns a chat template.

    Args:
        answer: template text that renders a message `m` of the assistant.
        others: `elif` branches for messages of further roles.
        end: text after each answer.
    """
    return (
        "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>U:{{ m.content }}<|im_end|>"
        "{% elif m.role == 'system' %}<|im_start|>S:{{ m.content }}<|im_end|>"
        f"{others}{{% elif m.role == 'assistant' %}}<|im_start|>A:{answer}{end}{{% endif %}}{{% endfor %}}{ASKS}"
    )


CALLS = "{% for c in m.tool_calls %} call {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
TOOL = "{% elif m.role == 'tool' %}<|im_start|>T:{{ m.content }}<|im_end|>"
THREE = turns("{{ m.content }}")
BOTH = turns("{{ m.content }}" + CALLS, TOOL)


def message(role: str, content: str = "", **others) -> dict:
    return {"role": role, "content": content, **others}


def call(name: str = "weather", **arguments) -> dict:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


USER, ANSWER = message("user", "hello"), message("assistant", "fine")
PARIS = call(city="Paris")
LOOKS = message("assistant", "I am", tool_calls=[PARIS])


def learned(template: str, *messages: dict, **how) -> list[str]:
    """Returns the text of each row, with brackets around each run of learned tokens."""
    made, written = tokenizer(template, (START, END, "</s>")), []
    one = encoded(made, {"messages": [*messages]}, **how)
    for row in one if isinstance(one, list) else [one]:
        text = ""
        for token, is_learned in zip(row.ids.tolist(), row.learned, strict=True):
            said = made.convert_ids_to_tokens(token).translate(str.maketrans("ĠĊ", " \n"))
            text += f"[{said}]" if is_learned else said
        written.append(text.replace("][", ""))
    return written


# ---- parts that a template omits


@pytest.mark.parametrize(
    ("template", "messages", "missing"),
    [
        (THREE, [message("developer", "the cat"), USER, ANSWER], "message 1 (developer)"),
        (THREE, [USER, ANSWER, message("tool", "26"), ANSWER], "message 3 (tool)"),
        (BOTH, [USER, ANSWER, message("tool", "26", name="weather"), ANSWER], "the name of message 3 (tool)"),
        (BOTH, [message("user", "hello", name="cat"), ANSWER], "the name of message 1 (user)"),
        (THREE, [USER, LOOKS], "the name of call 1 of message 2 (assistant)"),
        (
            turns("{% if m.content %}{{ m.content }}{% elif m.tool_calls %}" + CALLS + "{% endif %}"),
            [USER, LOOKS],
            "the name of call 1 of message 2 (assistant)",
        ),
        (
            turns("{% if m.tool_calls %}" + CALLS + "{% else %}{{ m.content }}{% endif %}"),
            [USER, LOOKS],
            "message 2 (assistant)",
        ),
        (
            turns("{{ m.content }}" + CALLS.replace("in m.tool_calls", "in m.tool_calls[:1]")),
            [USER, message("assistant", tool_calls=[PARIS, call(city="Rome")])],
            "the name of call 2 of message 2 (assistant)",
        ),
        (
            turns("{{ m.content }}" + CALLS.replace("arguments |", "arguments.values() | list |")),
            [USER, LOOKS],
            "the arguments of call 1 of message 2 (assistant)",
        ),
        (
            turns("{{ m.content }}" + CALLS.replace("arguments |", "arguments.keys() | list |")),
            [USER, message("assistant", tool_calls=[call(a=1, b=[2.5, {"c": "cat"}])])],
            "the arguments of call 1 of message 2 (assistant)",
        ),
        (BOTH, [USER, message("assistant", "fine", function_call={"name": "f", "arguments": "{}"})], "the name of fun"),
        (THREE, [USER, message("assistant", "fine", thinking="I am")], "the thinking of message 2 (assistant)"),
        (THREE, [USER, message("assistant", "fine", reasoning="I am")], "the reasoning of message 2 (assistant)"),
        (turns("{{ messages[0].content }}"), [USER, ANSWER], "message 2 (assistant)"),
    ],
    ids=[
        *("developer message", "tool message", "name of a tool message", "name of a user message", "tool call"),
        *("call beside an answer", "answer beside a call", "second call", "argument keys", "argument values"),
        *("function_call", "thinking", "reasoning", "answer"),
    ],
)
def test_message_part_missing_from_the_rendered_text_is_refused(template, messages, missing):
    said = re.escape(missing) + r".* is missing from the text that the chat template renders; .* type data.template="
    with pytest.raises(BadRecord, match=said):
        encoded(tokenizer(template), {"messages": messages})


@pytest.mark.parametrize("value", [7, 2.5, "cat", ["cat", 7], {"deep": {"cat": 7}}])
def test_number_text_list_and_object_in_tool_call_arguments_are_learned(value):
    (row,) = learned(BOTH, USER, message("assistant", tool_calls=[call(value=value)]))
    assert f"A:[ call weather {json.dumps({'value': value})}{END}]" in row


@pytest.mark.parametrize("value", [True, False, None, "", {}, []])
def test_boolean_null_and_empty_tool_call_arguments_are_accepted_and_rendered(value):
    (row,) = learned(BOTH, USER, message("assistant", tool_calls=[call(value=value)]))
    assert json.dumps({"value": value}) in row


def test_tool_message_name_is_accepted_only_if_it_equals_the_name_in_the_preceding_call():
    named = message("tool", "26", name="weather")
    assert learned(BOTH, USER, LOOKS, named, ANSWER) == learned(BOTH, USER, LOOKS, message("tool", "26"), ANSWER)
    with pytest.raises(BadRecord, match="the name of message 3"):
        learned(BOTH, USER, LOOKS, named | {"name": "other"}, ANSWER)


def test_record_is_refused_unless_the_template_renders_name_and_description_of_every_tool():
    asked = {"messages": [USER, ANSWER], "tools": [{"name": "cat", "description": "the mat"}, {"name": "sat"}]}
    both = "{% for t in tools %}{{ t.name }} {{ t.description }}{% endfor %}" + THREE
    assert "cat· the· mat·sat" in marked(tokenizer(both), asked)
    for template, missing in ((both.replace("t in tools", "t in tools[:1]"), 2), (both.replace("t.desc", "t.no"), 1)):
        with pytest.raises(BadRecord, match=f"tool {missing} is missing from the text"):
            encoded(tokenizer(template), asked)


def test_template_that_ignores_the_role_is_refused():
    anyone = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    with pytest.raises(BadRecord, match=r"the chat template ignores the role of message 1 \(user\)"):
        learned(anyone, USER, ANSWER)


def test_template_that_renders_a_role_differently_with_tools_is_accepted():
    """The template of Llama 3.1 renders the tools inside the first user message."""
    first = "<|im_start|>U:{{ messages[0].content }}{{ tools[0].name }}<|im_end|>"
    knows = "{% if tools %}" + first + "{% set messages = messages[1:] %}{% endif %}" + THREE
    assert "U·:·hello·cat" in marked(tokenizer(knows), {"messages": [USER, ANSWER], "tools": [{"name": "cat"}]})


def test_white_space_inside_a_generation_tag_after_the_answer_end_is_not_learned():
    inside = THREE.replace(
        "A:{{ m.content }}<|im_end|>", "A:{% generation %}{{ m.content }}<|im_end|>\n{% endgeneration %}"
    )
    assert learned(inside, USER, ANSWER) == [f"{START}U:hello{END}{START}A:[fine{END}]\n"]


def test_tool_call_that_is_not_rendered_is_refused_even_if_the_template_rejects_placeholders():
    """The check replaces all parts of the messages by placeholders, and this template raises an error for placeholders.
    The omitted tool call must still be found."""
    choosy = "{% if 'hello' not in messages[0].content %}{{ raise_exception('no') }}{% endif %}"
    assert learned(choosy + THREE, USER, ANSWER) == learned(THREE, USER, ANSWER)
    with pytest.raises(BadRecord, match="the name of call 1"):
        learned(choosy + THREE, USER, LOOKS)


def test_blank_system_message_and_white_space_that_the_template_trims_are_accepted():
    trims = turns("{{ m.content | trim }}").replace("U:{{ m.content }}", "U:{{ m.content | trim }}")
    assert learned(trims, message("system", ""), message("user", " hello\n"), message("assistant", "fine \n\n")) == [
        f"{START}S:{END}{START}U:hello{END}{START}A:[fine{END}]"
    ]


def test_answer_with_reasoning_that_the_template_always_cuts_out_is_refused():
    cuts = turns("{{ m.content.split('</think>')[-1] }}")
    with pytest.raises(
        BadRecord, match=r"'I am' of message 2 \(assistant\) is missing from the text that the chat template renders"
    ):
        learned(cuts, USER, message("assistant", "<think>I am</think>fine"), USER, ANSWER)


def test_message_field_that_the_template_does_not_render_is_reported_with_its_count():
    chat = Chat()
    chat.encode(tokenizer(THREE), [{"messages": [USER | {"mood": "good"}, ANSWER | {"id": "1"}]}] * 3)
    assert dict(chat.remarks()) == {'messages with a field "mood" that the chat template does not render': 3}
    assert not chat.remarks()


# ---- arguments as JSON text


SPELLINGS = {
    "tojson": "{{ c.arguments | tojson }}",
    "guarded": "{{ c.arguments if c.arguments is string else c.arguments | tojson }}",
    "items": "{% for k, v in c.arguments | items %}{{ k }}={{ v }};{% endfor %}",
    "text": "{{ '' + c.arguments }}",
    "as it is": "{{ c.arguments }}",
}
ARGUMENTS = {"city": "Paris", "days": [1, {"unit": "m"}]}


def with_calls(name: str) -> str:
    """Returns a template that renders tool-call arguments as `SPELLINGS[name]` does."""
    one_call = "{% set c = t.function %} {{ c.name }} " + SPELLINGS[name]
    return turns("{{ m.content }}{% for t in m.tool_calls %}" + one_call + "{% endfor %}")


@pytest.mark.parametrize("name", SPELLINGS)
def test_tool_call_arguments_as_an_object_and_as_json_text_give_equal_tokens(name):
    template, written = with_calls(name), json.dumps(ARGUMENTS, ensure_ascii=False)
    found = [
        learned(template, USER, message("assistant", "fine", tool_calls=[{"function": {"name": "f"} | spelled}]))
        for spelled in ({"arguments": ARGUMENTS}, {"arguments": written})
    ]
    assert found[0] == found[1]
    said = written if name != "items" else "city=Paris;days=[1, {'unit': 'm'}];"
    assert f"[fine f {said}{END}]" in found[0][0]


@pytest.mark.parametrize("quoted", ["{'value': 'cat'}", json.dumps('{"value": "cat"}')])
@pytest.mark.parametrize("name", SPELLINGS)
def test_user_message_that_quotes_tool_call_arguments_does_not_change_their_rendering(name, quoted):
    """The rendered text shows whether a template needs arguments as an object or as text. Arguments that a user message
    quotes must not be mistaken for rendered arguments."""
    asked = [message("user", f"call with {say}") for say in (quoted, "words")]
    called = message("assistant", "fine", tool_calls=[call(value="cat")])
    quoting, plain = (learned(with_calls(name), user, called)[0].partition("A:")[2] for user in asked)
    assert quoting == plain


def test_tool_call_arguments_of_invalid_json_are_refused_if_the_template_renders_an_object():
    broken = message("assistant", tool_calls=[{"function": {"name": "f", "arguments": '{"city": "Par'}}])
    with pytest.raises(BadRecord, match=r"message 2 \(assistant\) has tool-call arguments that are not a JSON object"):
        learned(BOTH, USER, broken)
    items = turns("{% for k, v in m.tool_calls[0].function.arguments | items %}{{ k }}{% endfor %}")
    with pytest.raises(BadRecord, match="rejects the conversation"):
        learned(items, USER, broken)


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        ("f()", r"the tool_calls of message 2 \(assistant\) must be a list of calls, but are text"),
        ([None], r"call 1 of message 2 \(assistant\) must be an object with the name of a function"),
        (
            [PARIS, {"function": {"arguments": {}}}],
            r"call 2 of message 2 \(assistant\) must be an object with the name",
        ),
    ],
)
def test_tool_calls_that_are_not_a_list_of_named_functions_are_refused(calls, said):
    with pytest.raises(BadRecord, match=said):
        learned(BOTH, USER, message("assistant", "fine", tool_calls=calls))


def test_blank_tool_call_arguments_are_rendered_as_an_empty_object():
    blank = {"function": {"name": "f", "arguments": ""}}
    assert learned(BOTH, USER, message("assistant", tool_calls=[blank]))[0].endswith(f"call f {{}}{END}]")


# ---- rows of answers


PAIR = [message("user", "hello"), message("assistant", "fine"), message("user", "the cat"), message("assistant", "sat")]


def test_earlier_answers_are_learned_if_the_template_appends_text_after_the_last_message():
    ends = f"{THREE}{{% if not add_generation_prompt %}}{{{{ '\\n</s>' }}}}{{% endif %}}"
    assert learned(ends, *PAIR) == [
        f"{START}U:hello{END}{START}A:[fine{END}]{START}U:the cat{END}{START}A:[sat{END}\n</s>]"
    ]


OPENS = THREE.replace(ASKS, "{% if add_generation_prompt %}<|im_start|>A:<think>{% endif %}").replace("A:{{", "A:{{")


@pytest.mark.parametrize("how", ["all", "last"])
def test_generation_prompt_that_opens_reasoning_absent_from_answers_is_reported(how):
    chat = Chat(assistant=how)
    made = tokenizer(OPENS)
    (one,) = chat.encode(made, [{"messages": PAIR}])
    assert made.decode(one.ids[one.learned]) == (f"fine{END}sat{END}" if how == "all" else f"sat{END}")
    ((told, count),) = chat.remarks().items()
    assert "it ends with '<think>', which is not rendered before" in told and count == (2 if how == "all" else 1)


THINKS = turns(  # renders reasoning only after the last user message
    "{% if loop.index0 > ns.last %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}" + CALLS, TOOL
)
THINKS = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}" + THINKS
)


def thought(text: str, content: str, **others) -> dict:
    return message("assistant", content, reasoning_content=text, **others)


def test_each_answer_has_its_own_row_if_the_template_drops_earlier_reasoning():
    first, second = [USER, thought("I am", "fine")], [message("user", "the cat"), thought("on", "sat")]
    one = f"{START}U:hello{END}{START}A:[<think>I am</think>fine{END}]"
    two = f"{START}U:hello{END}{START}A:fine{END}{START}U:the cat{END}{START}A:[<think>on</think>sat{END}]"
    assert learned(THINKS, *first, *second) == [one, two]
    assert learned(THINKS, *first, *second, assistant="last") == [two]
    assert learned(THINKS, *first, USER) == [one]  # a question without an answer adds no row


def test_answers_to_one_question_share_a_row_and_the_next_question_gets_another_row():
    asks, looks = message("user", "the cat"), thought("I", "am", tool_calls=[PARIS])
    one = f"{START}U:hello{END}{START}A:[<think>I</think>am call weather" + ' {"city": "Paris"}' + f"{END}]"
    one += f"{START}T:26{END}{START}A:[<think>on</think>sat{END}]"
    (row,) = learned(THINKS, USER, looks, message("tool", "26"), thought("on", "sat"))
    assert row == one
    found = learned(THINKS, USER, looks, message("tool", "26"), thought("on", "sat"), asks, thought("I", "am"))
    assert found[0] == one and len(found) == 2
    assert found[1].endswith(f"U:the cat{END}{START}A:[<think>I</think>am{END}]") and found[1].count("[") == 1


DROPS = turns(  # drops the reasoning before a call once an answer follows
    "{% if m.tool_calls %}{% if loop.last or messages[-1].role != 'assistant' %}<think>{{ m.reasoning_content }}"
    "</think>{% endif %}" + CALLS + "{% else %}{{ m.content }}{% endif %}",
    TOOL,
)


def test_row_keeps_reasoning_before_a_tool_call_that_the_template_drops_once_the_answer_follows():
    """Once an answer follows the tool call, the template drops the reasoning before the call. The row is therefore
    built from the prompt that is rendered for the answer, because this prompt contains the reasoning."""
    looks = message("assistant", reasoning_content="I am", tool_calls=[PARIS])
    assert learned(DROPS, USER, looks, message("tool", "26"), ANSWER) == [
        f"{START}U:hello{END}{START}A:[<think>I am</think> call weather"
        + ' {"city": "Paris"}'
        + f"{END}]{START}T:26{END}{START}A:[fine{END}]"
    ]


def test_template_that_adds_context_to_the_generation_prompt_only_is_refused():
    other = THREE.replace(ASKS, "{% if add_generation_prompt %}<|im_start|>other:{% endif %}").replace(
        "{% for m", "{% if add_generation_prompt %}the cat{% endif %}{% for m"
    )
    with pytest.raises(BadRecord, match=r"the context of message 2 \(assistant\) differently in the generation prompt"):
        learned(other, USER, ANSWER)


def test_rows_of_answers_with_dropped_reasoning_are_equal_with_and_without_a_generation_tag():
    tagged = THINKS.replace("A:{% if", "A:{% generation %}{% if").replace(
        f"{END}{{% endif %}}{{% endfor %}}", f"{END}{{% endgeneration %}}{{% endif %}}{{% endfor %}}"
    )
    assert "endgeneration" in tagged
    several = [USER, thought("I am", "fine"), message("user", "the cat"), thought("on", "sat")]
    assert learned(tagged, *several) == learned(THINKS, *several)
    assert learned(tagged, *several, assistant="last") == learned(THINKS, *several, assistant="last")


def test_answer_whose_inline_reasoning_is_dropped_later_has_its_own_row():
    """In the template of LFM2.5, the generation tag encloses an earlier answer without its reasoning."""
    cuts = "{{ m.content if loop.last else m.content.split('</think>')[-1] }}" + END
    several = [USER, message("assistant", "<think>I am</think>fine"), message("user", "the cat"), ANSWER]
    for tag, end in (("", ""), ("{% generation %}", "{% endgeneration %}")):
        assert learned(turns(tag + cuts + end, end=""), *several) == [
            f"{START}U:hello{END}{START}A:[<think>I am</think>fine{END}]",
            f"{START}U:hello{END}{START}A:fine{END}{START}U:the cat{END}{START}A:[fine{END}]",
        ]


def test_answer_that_is_rendered_differently_once_messages_follow_has_its_own_row_with_a_generation_tag():
    """The template of Qwen3 renders empty <think> tags before the last answer only."""
    empty = "{% if loop.last %}<think></think>{% endif %}{{ m.content }}" + END
    several = [USER, ANSWER, message("user", "the cat"), message("assistant", "sat")]
    for tag, end in (("", ""), ("{% generation %}", "{% endgeneration %}")):
        assert learned(turns(tag + empty + end, end=""), *several) == [
            f"{START}U:hello{END}{START}A:[<think></think>fine{END}]",
            f"{START}U:hello{END}{START}A:fine{END}{START}U:the cat{END}{START}A:[<think></think>sat{END}]",
        ]


@pytest.mark.parametrize(
    "template",
    [
        turns("{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% if loop.last %}</s>{% endif %}", end=""),
        "{% if messages | length == 2 %}{{ raise_exception('too short') }}{% endif %}"
        + turns("{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}", end=""),
    ],
    ids=["text after the last answer", "complete conversations only"],
)
def test_conversation_is_one_row_if_later_messages_change_only_text_outside_of_its_generation_tags(template):
    several = [USER, ANSWER, message("user", "the cat"), message("assistant", "sat")]
    (row,) = learned(template, *several)
    assert f"A:[fine{END}]" in row and f"A:[sat{END}]" in row


def test_tool_call_outside_the_generation_tag_is_refused():
    outside = BOTH.replace("A:{{ m.content }}", "A:{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}")
    with pytest.raises(
        BadRecord, match=r"the name of call 1 of message 2 \(assistant\) is outside of the generation block of"
    ):
        learned(outside, USER, LOOKS)


def test_learned_tokens_begin_after_the_generation_prompt_even_if_newlines_would_merge():
    """The header ends in a newline and the rendered answer begins with a newline. The tokenizer would merge the two
    newlines into one token if header and answer were tokenized together."""
    opens = turns("<think>\n{{ m.reasoning_content or '' }}\n</think>{{ m.content }}").replace(
        ASKS, "{% if add_generation_prompt %}<|im_start|>A:<think>\n{% endif %}"
    )
    made = tokenizer(opens)
    made.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    asked = made.encode(f"{START}U:hello{END}{START}A:<think>\n", add_special_tokens=False)
    one = encoded(made, {"messages": [USER, ANSWER]})
    assert one.ids[: len(asked)].tolist() == asked and one.learned.argmax() == len(asked)
    assert made.decode(one.ids[one.learned]) == f"\n</think>fine{END}"


def test_template_with_an_end_token_for_tool_calls_but_not_for_answers_is_refused():
    """In the template of GLM-4.5, only the next header ends an answer. A model that learns only the end of tool calls
    would not stop after other answers."""
    glm = BOTH.replace(END, "").replace("tojson }}", "tojson }}</call>")
    made = tokenizer(glm)
    made.add_tokens([AddedToken("</call>", normalized=False)])
    for answer in (LOOKS, ANSWER):
        with pytest.raises(Refused, match=r"the header of the next message ends.*never learn to stop"):
            encoded(made, {"messages": [USER, answer]})
    made.chat_template = BOTH.replace("tojson }}", "tojson }}</call>")
    assert made.decode(encoded(made, {"messages": [USER, LOOKS]}).ids).endswith(f"</call>{END}")


def test_added_non_special_token_that_ends_every_answer_is_learned_as_its_end():
    made = tokenizer(turns("{{ m.content }}", end="<end>"), (START, END, "</s>"))
    made.add_tokens([AddedToken("<end>", special=False, normalized=False)])
    row = encoded(made, {"messages": [USER, ANSWER]})
    assert made.convert_ids_to_tokens(row.ids[row.learned].tolist())[-1] == "<end>"


# ---- empty answers, skipped records, counts


def test_empty_answer_is_kept_as_context_and_not_learned():
    said, empty = (
        conversation("hello", "", "the cat", "sat"),
        "empty answers of the assistant, kept as context and not in the loss",
    )
    for template in (CHATML, THREE, QWEN):
        chat, made = Chat(), tokenizer(template)
        (one,) = chat.encode(made, [said])
        assert made.decode(one.ids[one.learned]).removeprefix("<think></think>") == f"sat{END}"
        assert made.decode(one.ids).count(START) == 4
        assert dict(chat.remarks()) == {empty: 1}


@pytest.mark.parametrize(("how", "answers"), [("all", ["", " \n"]), ("last", ["", " \n"]), ("last", ["I am", ""])])
def test_conversation_whose_answers_to_learn_are_all_blank_is_refused(how, answers):
    said = conversation("hello", answers[0], "the cat", answers[1])
    with pytest.raises(BadRecord, match="message 4 is an empty answer of the assistant, so there is nothing to"):
        encoded(tokenizer(CHATML), said, assistant=how)


def test_tool_call_arguments_nested_3000_deep_are_refused():
    value: list = []
    for _ in range(3000):
        value = [value]
    with pytest.raises(BadRecord, match="nested too deeply"):
        encoded(tokenizer(BOTH), {"messages": [USER, message("assistant", "fine", tool_calls=[call(value=value)])]})


def write(path, records):
    path.write_text("\n".join(map(json.dumps, records)))
    return str(path)


def source(folder, records, **typed):
    """Returns a source of these conversations, with a template that drops earlier reasoning and renders an answer
    without reasoning after empty <think> tags."""
    (folder / "own.jinja").write_text(THINKS)
    typed = {"messages": "messages", "template": str(folder / "own.jinja"), "assistant": "all"} | typed
    path, val = write(folder / "a.jsonl", records), write(folder / "v.jsonl", [VALIDATION])
    return jsonl(path=path, pattern="*.jsonl", val_fraction=0.1, val_path=val, **typed)


VALIDATION = conversation("on", "mat")
SEVERAL = {"messages": [USER, thought("I am", "fine"), message("user", "the cat"), thought("on", "sat")]}


def test_notes_of_a_chat_source_count_its_empty_answers_skipped_records_and_tokens_of_additional_rows(tmp_path):
    made = source(
        tmp_path, [SEVERAL, SEVERAL, conversation("hello", "", "the cat", "sat"), {"messages": []}], skip_bad=True
    )
    tokens = token_store.tokenize(made, tmp_path / "cache", 400, tokenizer(None))
    one, two = token_store.tokenize(source(tmp_path, [SEVERAL]), tmp_path / "other", 400, tokenizer(None)).train.ends
    assert len(tokens.train.ends) == 5
    notes = made.notes()
    assert notes[0] == "train: empty answers of the assistant, kept as context and not in the loss: 1."
    assert notes[1].startswith("train: tokens in additional rows of conversations, because data.template=")
    assert notes[1].endswith(f": {2 * one:,}.")
    assert notes[2].startswith("data.skip_bad=true: skipped 1 of 4 train records") and len(notes) == 3
    assert two - one > one  # the first row counts as additional, because it is not the longest


def test_too_long_conversation_is_refused_with_its_line_after_records_with_two_rows_or_none(tmp_path):
    """The records before the conversation that is too long have two rows, one row and no row, so row numbers and line
    numbers differ."""
    long = conversation("hello", "I am fine " * 60)
    made = source(
        tmp_path, [SEVERAL, conversation("sat", "on"), {"messages": 5}, long, SEVERAL], too_long="refuse", skip_bad=True
    )
    tokens = token_store.tokenize(made, tmp_path / "cache", 400, tokenizer(None))
    with pytest.raises(
        Refused, match=r"too_long=refuse: .* 1 document .*\(of 6\).*The first one is a\.jsonl, line 4\.$"
    ):
        made.rows(tokens.train, 100, "train")


def test_pair_whose_answer_needs_two_rows_is_refused_unless_only_the_last_answer_is_learned(tmp_path):
    (tmp_path / "own.jinja").write_text(THINKS)
    before, last = SEVERAL["messages"][:-1], SEVERAL["messages"][-1]
    pairs = [{"prompt": before, "chosen": [last], "rejected": [thought("on", "am")]}]
    said = {"val_path": write(tmp_path / "v.jsonl", pairs), "template": str(tmp_path / "own.jinja")}
    path = write(tmp_path / "a.jsonl", [{**pairs[0], "prompt": [message("system", "cat"), *before]}])
    with pytest.raises(
        Refused, match=r'"chosen" would take 2 rows, because .* data\.assistant=last trains on the last answer'
    ):
        token_store.tokenize(Preference(path, assistant="all", **said), tmp_path / "cache", 400, tokenizer(None))
    made = token_store.tokenize(Preference(path, **said), tmp_path / "cache", 400, tokenizer(None))
    assert len(made.train.ends) == 2


def test_pair_with_a_blank_last_answer_is_refused_for_assistant_all(tmp_path):
    pair = {"prompt": SEVERAL["messages"][:-1], "chosen": [ANSWER], "rejected": [message("assistant", " ")]}
    path = write(tmp_path / "a.jsonl", [pair])
    val = write(tmp_path / "v.jsonl", [pair])
    made = Preference(path, val_path=val, assistant="all", template="chatml")
    with pytest.raises(Refused, match='"rejected" ends with an empty answer of the assistant'):
        token_store.tokenize(made, tmp_path / "cache", 400, tokenizer(None))


TOOLS = "{% for t in tools %}{{ t.function.name }} {{ t.function.parameters | tojson }}{% endfor %}"
TOOLS += THINKS.replace("{{ m.reasoning_content }}", "{{ m.reasoning_content or '' }}")


def data_page() -> tuple[str, dict]:
    """Returns the text of docs/data.md, and that page's example record with tools."""
    page = (ROOT / "docs" / "data.md").read_text()
    (line,) = (line for line in page.splitlines() if line.startswith('    {"tools"'))
    return page, json.loads(line)


def test_tool_example_of_the_data_page_learns_its_reasoning_tool_call_and_answer():
    made, (_, record) = tokenizer(TOOLS), data_page()
    one = encoded(made, record)
    assert made.decode(one.ids[one.learned]).split(END) == [
        '<think>I have to look.</think> call weather {"city": "Paris"}',
        "<think></think>Yes, it is 21 degrees.",
        "",
    ]


def test_data_page_quotes_the_refusal_of_a_second_tool_call_that_the_template_does_not_render():
    page, record = data_page()
    record["messages"][1]["tool_calls"] *= 2
    del record["messages"][1]["reasoning_content"]
    first = TOOLS.replace("in m.tool_calls", "in (m.tool_calls or [])[:1]")
    said = "the name of call 2 of message 2 (assistant) is missing from the text that the chat template renders"
    with pytest.raises(BadRecord, match=re.escape(said)):
        encoded(tokenizer(first), record)
    assert said in " ".join(page.split())


words = st.sampled_from(["hello", "I am", "\n\nthe cat ", "", " ", "mat"])
arguments = st.dictionaries(
    st.sampled_from(["a", "b"]), st.sampled_from(["cat", 7, 2.5, True, None, ["sat"], {"c": 1}])
)
calls = st.lists(st.builds(lambda of: {"function": {"name": "f", "arguments": of}}, arguments), max_size=2)
answers_and_others = st.one_of(
    st.builds(message, st.sampled_from(["user", "user", "user", "tool", "developer"]), words),
    st.builds(message, st.just("assistant"), words),
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": words}, optional={"reasoning_content": words, "tool_calls": calls}
    ),
)


@pytest.mark.parametrize(
    "template",
    [THREE, BOTH, THINKS, DROPS],
    ids=["content only", "with tool calls", "with reasoning", "drops reasoning before calls"],
)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(messages=st.lists(answers_and_others, min_size=1, max_size=5))
def test_every_answer_of_an_accepted_conversation_is_learned_exactly_once(template, messages):
    made = OPENED.setdefault(template, tokenizer(template))
    try:
        found = encoded(made, {"messages": messages})
    except BadRecord as error:
        assert len(str(error)) > 20
        return
    found = found if isinstance(found, list) else [found]
    every = "".join(made.decode(row.ids) for row in found)
    said = "".join(made.decode(row.ids[row.learned]) for row in found)
    answers = [m for m in messages if m["role"] == "assistant"]
    blank = [
        m for m in answers if not (m["content"] + m.get("reasoning_content", "")).strip() and not m.get("tool_calls")
    ]
    assert said.count(END) == len(answers) - len(blank)
    last = max(i for i, m in enumerate(messages) if m["role"] == "assistant" and m not in blank)
    for one in messages[: last + 1]:  # messages after the last answer may be in no row
        learns = one["role"] == "assistant"
        assert one["content"].strip() in (said if learns else every)
        assert not learns or one.get("reasoning_content", "").strip() in said
        for called in one.get("tool_calls", ()):
            assert json.dumps(called["function"]["arguments"]) in said


OPENED: dict = {}  # tokenizers are slow to train
