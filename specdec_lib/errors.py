"""Bad input, said once: what is wrong and how to mend it."""


class SpecdecError(ValueError):
    """Input that cannot be used.  The message is one line: what is wrong, then what to do.

    The shell doors print it and exit with status 2.
    """


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, for a message of ours; its type where it has none.

    >>> first_line(OSError("no such file\\nand more")), first_line(KeyboardInterrupt())
    ('no such file', 'KeyboardInterrupt')
    """
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
