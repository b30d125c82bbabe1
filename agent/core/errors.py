"""Two families of errors, and nothing between them."""


class AgentError(Exception):
    """An error for people. ``reason`` is a CamelCase word for conditions; ``next_step`` says what to do."""

    def __init__(self, message: str, *, reason: str = "Error", next_step: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.next_step = next_step


class TransientError(AgentError):
    """May go away by itself: tried again with backoff and jitter."""


class TerminalError(AgentError):
    """Will not go away by itself: waits for a new spec, a reboot or the operator."""


class SpecError(TerminalError):
    """The spec cannot be accepted; the last good one stays in force. ``problems`` holds every problem found."""

    def __init__(self, problems: "tuple[str, ...]") -> None:
        super().__init__(
            "\n".join(problems), reason="SpecInvalid", next_step="correct the spec file and save it"
        )
        self.problems = problems
