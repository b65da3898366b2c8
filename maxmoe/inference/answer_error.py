"""What is raised in place of an answer. Free of JAX, so that commands can name it before they load any."""

from typing import Any


class AnswerError(RuntimeError):
    """An answer that cannot go on: its logits are no distribution, or its grammar cannot be followed.

    Attributes:
      completions: `Completion`s of the same call, in the order of its prompts; None for each that failed.
    """

    def __init__(self, message: str, completions: list[Any]):
        super().__init__(message)
        self.completions = completions
