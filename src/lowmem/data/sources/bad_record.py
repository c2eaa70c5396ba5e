"""Defines `BadRecord`, the error for a record that cannot be used, and helpers that check values and write messages for
this error."""

from collections.abc import Mapping

from lowmem.config.values import shown


class BadRecord(ValueError):
    """Raised if a record cannot be used, or returned in place of the record's document. The message describes the
    error, without the location of the record and without a final period."""


def checked(value: object, name: str, empty: bool = False) -> str:
    """Returns a value unchanged if it is valid text.

    Args:
        name: name of the value in messages.
        empty: accept text without a visible character.

    Raises:
        BadRecord: the value is not text, has no visible character although `empty` is False, or contains a null
            character or an unpaired surrogate.
    """
    if not isinstance(value, str):
        raise BadRecord(f"{name} must be text, but is {kind(value)}")
    if not empty and not value.strip():
        raise BadRecord(f"{name} is empty")
    if "\0" in value:
        raise BadRecord(f"{name} contains a null character (U+0000)")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeError:
            raise BadRecord(f"{name} contains an unpaired surrogate (half a character)") from None
    return value


def no_field(fields: Mapping, name: str) -> BadRecord:
    """Returns the error for a record that lacks a field."""
    return BadRecord(f'field "{name}" is missing (fields: {names_of(fields)})')


def names_of(fields: Mapping) -> str:
    """Returns the names of the first five fields of a record or a message, for an error."""
    return ", ".join(f'"{shown(name)}"' for name in list(fields)[:5]) or "none"


def control(name: str, token: str) -> BadRecord:
    """Returns the error for a text that contains a control token, which could end a document or a message in the
    middle.

    Args:
        name: name of the text in messages.
        token: the control token.
    """
    return BadRecord(
        f"{name} contains {token}, which the tokenizer reads as a control token; write it differently, for example "
        "with a space inside"
    )


def kind(value: object) -> str:
    """Returns a description of a value that has the wrong type, such as "a list" or "the number 3", for messages."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"the number {str(value)[:20]}"
    return {list: "a list", dict: "an object", str: "text"}.get(type(value), f"a {type(value).__name__}")
