"""Shorten and escape text from other sources before it reaches a terminal, a log or a page."""


def shorten(words: str, sentences: int = 2) -> str:
    """Return the first sentences of a text, e.g. of an error with advice for programmers."""
    return ". ".join(words.split(". ")[:sentences])


def printable(words: str) -> str:
    r"""Replace each non-printable character by an escape, e.g. \n or \x1b.

    A terminal acts on some of these characters: it changes its title, clears the screen, or shows
    one line of text as another. In a log, some of them start new lines.
    """
    if words.isprintable():
        return words
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode()
        for char in words
    )
