"""The one class of errors that their reader can mend; every package raises it or a class made of it."""


class UserError(ValueError):
    """A mistake in a config, a file, an argument or a model: its message says what was given, the rule and the remedy.

    The command line prints the message alone and exits with `exit_code`. Every other error is one of ours: it is
    printed with its traceback.

    Attributes:
        exit_code: What the command line exits with.
    """

    exit_code = 2


class TooLateError(UserError, RuntimeError):
    """Something that JAX settles once was asked for after it had been settled."""
