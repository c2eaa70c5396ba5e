"""Checks values of the keys of conf/data, and formats names for messages. `check.py` calls the checks at the start of a
run, and data sources call them again where the values are used."""

from collections.abc import Collection, Mapping

from lowmem.system.errors import Refused

ON_ERROR = ("refuse", "replace", "skip")


def shown(name: object) -> str:
    """Returns a name as text for a message, with newlines and other unprintable characters replaced by U+FFFD."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in str(name))


def check_utf8(encoding: str) -> None:
    """Raises Refused for any encoding except UTF-8."""
    if encoding.lower().replace("_", "-") not in ("utf-8", "utf8"):
        raise Refused(
            f"data.encoding={encoding}: only UTF-8 is supported. Type iconv -f {encoding} -t utf-8 FILE > NEW, and "
            "train on NEW."
        )


def checked_on_error(on_error: str) -> str:
    if on_error not in ON_ERROR:
        raise Refused(f"data.on_error={on_error}: type {', '.join(ON_ERROR[:-1])} or {ON_ERROR[-1]}.")
    return on_error


def checked_fields(field: str | None, prompt: str | None, completion: str | None, messages: str | None) -> None:
    """Raises Refused if keys of several kinds of record are set, or only one of the keys `prompt` and `completion`."""
    kinds = [name for name, key in (("field", field), ("prompt", prompt or completion), ("messages", messages)) if key]
    if len(kinds) > 1:
        raise Refused(
            f"data.{kinds[0]} and data.{kinds[1]}: a record is either text (data.field), a prompt and a completion, or "
            "a conversation (data.messages). Leave the others null."
        )
    if bool(prompt) != bool(completion):
        key, missing = ("prompt", "completion") if prompt else ("completion", "prompt")
        raise Refused(f"data.{key}={prompt or completion}: data.{missing} is not set. Type data.{missing}=<a field>.")


def checked_shares(sources: Collection[str], shares: Mapping[str, float] | None) -> None:
    """Raises Refused for a mixture without sources, and for shares whose names differ from the names of the sources."""
    if not sources:
        raise Refused(
            "data=mix: no sources are set. Type +data@data.parts.<name>=text data.parts.<name>.path=<...> for each "
            "source."
        )
    if shares is not None and {*shares} != {*sources}:
        raise Refused(f"data.shares={dict(shares)}: give one share for each source ({', '.join(sources)}), or null.")


def no_such(key: str, path: str) -> Refused:
    return Refused(f"{key}={shown(path)}: there is no such file or folder. Give one that exists.")
