"""Words of others on their way to a terminal, a log or a page."""


def printable(words: str) -> str:
    r"""The words with an escape in place of each character that is not printable, e.g. \n or \x1b.

    A terminal acts on some of these: it changes its title, clears the screen, or shows a line of
    text as another one. In a log they begin lines of their own.
    """
    if words.isprintable():
        return words
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode()
        for char in words
    )
