"""Ctrl-C that does not come between a step and its result.

A step gives the memory of the old state to the new one. An interrupt in the middle would leave neither, so it waits.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def interrupts_wait() -> Iterator[None]:
    """Lets Ctrl-C wait until the block is done; a second one does not wait."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield  # it does not come here
        return
    waiting = []

    def wait(number, frame):
        waiting.append(number)
        if len(waiting) > 1:
            handler(number, frame)

    signal.signal(signal.SIGINT, wait)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if waiting:
        handler(waiting[0], None)
