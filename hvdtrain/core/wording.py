"""What a message says of a broken rule, and of a name that is close to a known one."""

import difflib
from collections.abc import Mapping
from typing import Any

from hvdtrain.untrusted import LONGEST

RULES = {  # pydantic's name of a broken rule: the text of our message after "must"
    "int_type": "be a whole number",
    "int_from_float": "be a whole number",
    "int_parsing": "be a whole number",
    "int_parsing_size": "have at most 4,300 digits",
    "float_parsing": "be a number",
    "float_type": "be a number",
    "finite_number": "be a finite number",
    "bool_type": "be true or false",
    "string_type": "be text",
    "path_type": "be a path",
    "tuple_type": "be a list",
    "literal_error": "be {expected}",
    "greater_than": "be greater than {gt:g}",
    "greater_than_equal": "be at least {ge:g}",
    "less_than": "be less than {lt:.19g}",
    "less_than_equal": "be at most {le:.19g}",
    "string_too_long": "have at most {max_length} characters",
    "too_short": "have at least {min_length} values",
    "too_long": "have at most {max_length} values",
    "dict_type": "map names to values",
    "arguments": "{error}",
}


def rule(error: Mapping[str, Any]) -> str:
    """The rule that a pydantic error reports as broken, worded to follow "must"."""
    return RULES.get(error["type"], "be valid ({error})").format(error=error["msg"], **error.get("ctx", {}))


def nearest(name: str, known: list[str]) -> str:
    """' Did you mean X?' for the closest of the known names, or nothing."""
    close = closest(name, known)
    return f" Did you mean {close}?" if close else ""


def closest(name: str, known: list[str]) -> str | None:
    """The closest of the known names; None where none is close."""
    # Comparing takes the product of the lengths, for each of the names.
    short = [one for one in known[:200] if len(one) <= LONGEST]
    close = difflib.get_close_matches(name, short, n=1, cutoff=0.5) if len(name) <= LONGEST else []
    return close[0] if close else None
