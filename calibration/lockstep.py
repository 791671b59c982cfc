"""Several forward passes in step: each runs until its next attention call and waits there for the answer.

A layer's windows are chosen from all samples before any of them may go on.  Passes are threads of which one
runs at a time, so the model's own code stays as it is, memory for activations is that of one pass, and the
order of all arithmetic is fixed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Ask = TypeVar("Ask")
Answer = TypeVar("Answer")
Result = TypeVar("Result")


class Stopped(BaseException):
    """Raised inside a pass that is not to be finished."""


class Suspended(Generic[Ask, Answer, Result]):
    """`function(ask)` in a thread of its own; `ask(x)` hands x to whoever calls `advance`, and returns the
    answer that the next `advance` brings."""

    def __init__(self, function: Callable[[Callable[[Ask], Answer]], Result]) -> None:
        self._function = function
        self._go, self._ready = threading.Semaphore(0), threading.Semaphore(0)
        self._asked: Ask | None = None
        self._answer: Answer | None = None
        self._stopping = False
        self._error: BaseException | None = None
        self.result: Result | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def advance(self, answer: Answer | None = None) -> Ask | None:
        """Run on until the next question, which is returned, or to the end: None, and `result` is set.

        Raises whatever the function raises.
        """
        self._asked, self._answer = None, answer
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._go.release()
        self._ready.acquire()
        if self._error is not None:
            raise self._error
        return self._asked

    def stop(self) -> None:
        """End the pass where it waits."""
        if self._thread.ident is not None and self._thread.is_alive():
            self._stopping = True
            self._go.release()
            self._thread.join()

    def _ask(self, question: Ask) -> Answer:
        self._asked = question
        self._ready.release()
        self._go.acquire()
        if self._stopping:
            raise Stopped
        answer, self._answer = self._answer, None
        assert answer is not None
        return answer

    def _run(self) -> None:
        try:
            self.result = self._function(self._ask)
        except Stopped:
            pass
        except BaseException as error:
            self._error = error
        self._ready.release()
