"""Bad input, said once: what is wrong and how to mend it."""


class SpecdecError(ValueError):
    """Input that cannot be used.  The message is one line: what is wrong, then what to do.

    The shell doors print it and exit with status 2.
    """
