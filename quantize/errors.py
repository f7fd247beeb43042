"""The errors a user can meet: what was found, what was expected, and what to run next."""


class ToolError(Exception):
    """A refusal or a failure that the user can act on; exit code 1.

    ``message`` names the file, the tensor, what was found and what was expected;
    ``hint`` is the next command or edit. `cli.py` is the one place that prints it.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class BadCheckpoint(ToolError):
    """A source checkpoint that cannot be read completely and safely."""


class BadPlan(ToolError):
    """Options or tensors for which no correct plan exists."""


class BadPair(ToolError):
    """A target and a draft that do not fit each other."""


class BadOutput(ToolError):
    """An output folder that may not be used, or could not be completed."""
