"""Text: words of others, before they are shown."""

from __future__ import annotations


def printable(text: str) -> str:
    """In one line, without what a terminal would obey: names of files may have anything in them,
    and so may what jobs and agents say.
    """
    return "".join(sign if sign.isprintable() else "\ufffd" for sign in text.replace("\t", " "))
