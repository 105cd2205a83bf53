"""argparse, imported without translations, when this module is imported.

Errors and help are in English, and `Parser.error` reads argparse's.  gettext takes a millisecond to
import, and looks for catalogues in the file system for every message.
"""

import sys


class _English:
    """As much of the module gettext as argparse calls."""

    @staticmethod
    def gettext(message: str) -> str:
        return message

    @staticmethod
    def ngettext(one: str, several: str, number: int) -> str:
        return one if number == 1 else several


def _import() -> None:
    if "argparse" not in sys.modules and "gettext" not in sys.modules:
        sys.modules["gettext"] = _English  # type: ignore[assignment]
        try:
            import argparse
        finally:
            del sys.modules["gettext"]
    import argparse

    argparse._ = _English.gettext  # type: ignore[attr-defined]


_import()
