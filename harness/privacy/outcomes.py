"""Outcomes of replacing and restoring.  This module imports little: every broker imports it."""

from typing import Any, NamedTuple

from ...policies.errors import ToolResultInvalid

Counts = dict[str, int]  # kind -> count


class WithheldError(ToolResultInvalid):
    """A value cannot be replaced, or restored, at its place; the message has no value."""


class Replaced(NamedTuple):
    """Text for a model, and the number of replaced values of each kind."""

    value: Any
    counts: Counts


class Restored(NamedTuple):
    """The arguments of a call with their values.

    `written` are the arguments as they came; `values` are those that were restored, each with its
    token; `unknown` counts words in the form of tokens that are no tokens; they stay.
    """

    arguments: dict[str, Any]
    written: dict[str, Any]
    values: dict[str, str]
    counts: Counts
    unknown: int
