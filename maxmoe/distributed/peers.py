"""Who takes part in a job, and whether they are still there.

Before JAX starts, every process connects to process 0 on the coordinator's port and says who it is. So a process that
never comes, comes twice, or was told another number of processes is named, where JAX would wait and then abort. Process
0 then leaves the port to JAX's coordination service, and the connections stay open: one that ends without a farewell
tells at once that its process is gone, and every other process ends with a message that names it. A host that vanishes
without closing its connections is left to JAX's heartbeats.
"""

import dataclasses
import faulthandler
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Iterator

from absl import logging

from maxmoe.distributed.connection import SEND_TIMEOUT_S, Connection, listen
from maxmoe.distributed.environment import Job, host_and_port

GRACE_S = 5.0  # that a process has to end by itself, once the job has failed
_POLL_S = 0.2
_COLLECT_S = (
    0.5  # from the first sign of a failure until it is reported: the others' errors may arrive before the cause
)
_SHOWN_CHARACTERS = 60


@dataclasses.dataclass(frozen=True)
class _Verdict:
    """What process 0 found when it compared values: an error's kind and text, or none."""

    kind: str = ""
    text: str = ""

    def raise_error(self) -> None:
        if self.text:
            raise {"differ": ValueError, "missing": TimeoutError, "gone": ConnectionError}[self.kind](self.text)


class Peers:
    """The other processes, as this one knows them. Process 0 knows all of them, the rest know process 0.

    A thread reads what they say, and ends this process when the job has failed and the main thread does not end by
    itself: it may hang in a collective. The thread is there from the start, since Python makes none while it exits.
    """

    def __init__(self, job: Job):
        self.job = job
        self.titles = {job.process_id: f"process {job.process_id} ({socket.gethostname()}, pid {os.getpid()})"}
        self._selector = selectors.DefaultSelector()
        self._changed = threading.Condition()
        self._num_questions = 0
        self._has_left = False
        self._over = ""  # why the job has failed
        self._end_time: float | None = None

    def agree(self, what: str, value: str, timeout_s: float) -> None:
        """Returns if every process gave the same value; see `maxmoe.distributed.agree`."""
        question = self._num_questions
        self._num_questions += 1
        verdict = self._compare(question, what, value, timeout_s)
        self._over = self._over or verdict.text
        verdict.raise_error()

    def fail(self, reason: str) -> None:
        """Tells the others that this process cannot go on, and makes sure that it ends."""
        if not self._over and not self._has_left:
            self._over = reason  # which is no news here
            self._tell_failure(reason)
        self._end_after(GRACE_S + _COLLECT_S)

    def leave(self) -> None:
        """Says farewell: from now on the end of this process is no failure."""
        raise NotImplementedError

    def _compare(self, question: int, what: str, value: str, timeout_s: float) -> _Verdict:
        raise NotImplementedError

    def _tell_failure(self, reason: str) -> None:
        raise NotImplementedError

    def _read(self) -> bool:
        """Reads what has arrived, after a short wait at most; False once there is nothing more to hear."""
        raise NotImplementedError

    def _start_reading(self) -> None:
        threading.Thread(target=self._keep_reading, name="maxmoe peers", daemon=True).start()

    def _keep_reading(self) -> None:
        while self._read() or self._end_time is not None:
            if self._end_time is not None and time.monotonic() > self._end_time:
                self._end()
                return

    def _report(self, text: str) -> None:
        """Logs why the job ends; later reports are of the same end and only its consequences."""
        with self._changed:
            is_first = not self._over
            self._over = self._over or text
            self._changed.notify_all()
        if is_first:
            logging.error("%s: %s", self.titles[self.job.process_id], text)

    def _end_after(self, seconds: float) -> None:
        self._end_time = self._end_time or time.monotonic() + seconds

    def _end(self) -> None:
        """Ends this process, whatever its main thread does."""
        # Should whoever reads the output hang: this needs no lock of Python's and shows where the main thread is.
        faulthandler.dump_traceback_later(2, exit=True, file=2)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


class Coordinator(Peers):
    """Process 0: calls the roll, compares values, and tells everyone when someone is gone."""

    def __init__(self, job: Job, timeout_s: float):
        super().__init__(job)
        self._connections: dict[int, Connection] = {}
        self._values: dict[int, dict[int, tuple[str, str]]] = {}
        self._causes: list[tuple[int, str]] = []  # 0 for a process that is gone, 1 for one that gave a reason
        self._causes_end = 0.0
        try:
            self._call_roll(timeout_s)
        except (OSError, ValueError) as error:
            self._tell_all(error=str(error), is_timeout=isinstance(error, TimeoutError))
            raise
        self._start_reading()
        self._tell_all(go=True)

    def _call_roll(self, timeout_s: float) -> None:
        _, port = host_and_port(self.job.coordinator)
        deadline = time.monotonic() + timeout_s
        with listen(port) as listener:
            self._selector.register(listener, selectors.EVENT_READ, None)
            while len(self._connections) < self.job.num_processes - 1:
                if time.monotonic() > deadline:
                    missing = [i for i in range(1, self.job.num_processes) if i not in self._connections]
                    raise TimeoutError(
                        f"{len(self._connections) + 1} of {self.job.num_processes} processes came within "
                        f"{timeout_s:g} s to {self.job.coordinator}; missing: {_listed(missing)}"
                    )
                for connection, message in self._incoming():
                    self._admit(connection, message)
            self._selector.unregister(listener)

    def _incoming(self) -> Iterator[tuple[Connection, dict | None]]:
        """What has arrived, after a short wait at most; None for a connection that is over."""
        for key, _ in self._selector.select(_POLL_S):
            if key.data is None:
                sock, _ = key.fileobj.accept()
                sock.settimeout(SEND_TIMEOUT_S)
                self._selector.register(sock, selectors.EVENT_READ, Connection(sock))
                continue
            connection: Connection = key.data
            try:
                for message in connection.receive():
                    yield connection, message
            except (OSError, ValueError):  # also anything else that knocks at an open port
                self._selector.unregister(connection.sock)
                connection.sock.close()
                yield connection, None

    def _admit(self, connection: Connection, hello: dict | None) -> None:
        if hello is None:  # gone again; its scheduler may start it anew
            if self._connections.get(connection.process_id) is connection:
                del self._connections[connection.process_id]
            return
        process, count = hello.get("process_id"), hello.get("num_processes")
        if not isinstance(process, int):
            return
        title = f"process {process} ({hello.get('host')}, pid {hello.get('pid')})"
        problem = ""
        if count != self.job.num_processes:
            problem = f"{title} was told of {count} processes, {self.titles[0]} of {self.job.num_processes}"
        elif process in self._connections or process == 0:
            problem = (
                f"{title} has the id of {self.titles[process]}; ids must differ. In a JobSet of several replicated "
                "jobs JOB_COMPLETION_INDEX starts at 0 in each: give --process_id"
            )
        elif hello.get("jax") != jax_version():
            problem = f"{title} runs jax {hello.get('jax')}, {self.titles[0]} jax {jax_version()}"
        if problem:
            connection.send_if_there(error=problem)
            raise ValueError(problem)
        connection.process_id, connection.title = process, title
        self._connections[process] = connection
        self.titles[process] = title

    def _tell_all(self, **message: object) -> None:
        for connection in list(self._connections.values()):
            connection.send_if_there(**message)

    def _read(self) -> bool:
        for connection, message in self._incoming():
            if message is None:
                if self._connections.pop(connection.process_id, None) and not connection.is_excused:
                    self._add_cause(0, f"{connection.title} is gone without a word: killed, crashed or cut off")
            elif "value" in message:
                with self._changed:
                    given = self._values.setdefault(message["question"], {})
                    given[connection.process_id] = (message["what"], message["value"])
                    self._changed.notify_all()
            elif "failed" in message:
                connection.is_excused = True
                self._add_cause(1, f"{connection.title} failed: {message['failed']}")
            elif "left" in message:
                connection.is_excused = True
        if self._causes and time.monotonic() > self._causes_end:
            text = "; ".join(text for _, text in sorted(self._causes))
            self._causes = []
            self._report(text)
            self._tell_all(end=text)
            self._end_after(GRACE_S)
        return bool(self._connections or self._causes or not self._has_left)

    def _end(self) -> None:
        self._tell_all(end=self._over)  # to those who have not heard, since they hang elsewhere
        super()._end()

    def _add_cause(self, order: int, text: str) -> None:
        self._causes_end = self._causes_end or time.monotonic() + _COLLECT_S
        self._causes.append((order, text))

    def _compare(self, question: int, what: str, value: str, timeout_s: float) -> _Verdict:
        with self._changed:
            given = self._values.setdefault(question, {})
            given[0] = (what, value)
            self._changed.wait_for(lambda: len(given) == self.job.num_processes or self._over, timeout_s)
            verdict = _Verdict("gone", self._over) if self._over else self._judge(what, dict(given), timeout_s)
            del self._values[question]
        self._tell_all(verdict=question, kind=verdict.kind, text=verdict.text)
        if verdict.text:
            self._end_after(GRACE_S)
        return verdict

    def _judge(self, what: str, given: dict[int, tuple[str, str]], timeout_s: float) -> _Verdict:
        differing = {i: pair for i, pair in sorted(given.items()) if pair != given[0]}
        missing = [self.titles[i] for i in range(self.job.num_processes) if i not in given]
        texts = []
        for i in list(differing)[:4]:
            other, theirs = differing[i]
            if other != what:
                texts.append(f"{self.titles[i]} compares {other!r} while {self.titles[0]} compares {what!r}")
            else:
                ours, theirs = _shortened(given[0][1], theirs)
                texts.append(f"{what} differs: {ours} on {self.titles[0]}, {theirs} on {self.titles[i]}")
        if len(differing) > 4:
            texts.append(f"{len(differing)} processes differ from process 0: {_listed(list(differing))}")
        if missing:
            texts.append(f"{what}: no answer within {timeout_s:g} s from {', '.join(missing)}")
        return _Verdict("differ" if differing else "missing" if missing else "", "; ".join(texts))

    def _tell_failure(self, reason: str) -> None:
        self._add_cause(1, f"{self.titles[0]} failed: {reason}")

    def leave(self) -> None:
        """Says farewell to all."""
        if not self._over and not self._causes:
            self._has_left = True
            self._tell_all(left=True)


class Member(Peers):
    """Any other process: answers the roll call, and hears from process 0."""

    def __init__(self, job: Job, timeout_s: float):
        super().__init__(job)
        self._verdicts: dict[int, _Verdict] = {}
        self._connection, early = self._answer_roll_call(timeout_s)
        self._connection.title = self.titles[0] = f"process 0 (at {job.coordinator})"
        self._selector.register(self._connection.sock, selectors.EVENT_READ)
        for message in early:
            self._hear(message)
        self._start_reading()

    def _answer_roll_call(self, timeout_s: float) -> tuple[Connection, list[dict]]:
        """The connection with process 0, and the messages that came with its answer."""
        address = host_and_port(self.job.coordinator)
        deadline = time.monotonic() + timeout_s
        problem = ""
        while (left_s := deadline - time.monotonic()) > 0:
            sock = None
            try:
                sock = socket.create_connection(address, timeout=min(5.0, left_s))
                connection = Connection(sock)
                connection.send(
                    process_id=self.job.process_id,
                    num_processes=self.job.num_processes,
                    host=socket.gethostname(),
                    pid=os.getpid(),
                    jax=jax_version(),
                )
                problem = "it waits for others"
                sock.settimeout(deadline + SEND_TIMEOUT_S - time.monotonic())  # it may have begun later
                answer, *early = connection.receive()
            except (OSError, ValueError) as error:  # not there yet, or there and no process 0 of maxmoe
                if sock is not None:
                    sock.close()
                problem = problem if isinstance(error, TimeoutError) and problem else str(error) or repr(error)
                time.sleep(min(_POLL_S, max(deadline - time.monotonic(), 0)))
                continue
            if "error" in answer:
                sock.close()
                raise (TimeoutError if answer.get("is_timeout") else ValueError)(answer["error"])
            sock.settimeout(SEND_TIMEOUT_S)
            return connection, early
        raise TimeoutError(
            f"{self.titles[self.job.process_id]} was not let in by process 0 at {self.job.coordinator} within "
            f"{timeout_s:g} s: {problem}. Process 0 must run on that host and have that port free"
        )

    def _read(self) -> bool:
        try:
            messages = self._connection.receive() if self._selector.select(_POLL_S) else []
        except (OSError, ValueError):
            self._selector.unregister(self._connection.sock)
            if not (self._has_left or self._connection.is_excused):
                self._hear({"end": f"{self.titles[0]} is gone without a word: killed, crashed or cut off"})
            return False
        for message in messages:
            self._hear(message)
        return True

    def _hear(self, message: dict) -> None:
        if "verdict" in message:
            with self._changed:
                self._verdicts[message["verdict"]] = _Verdict(message["kind"], message["text"])
                self._changed.notify_all()
        elif "end" in message:
            self._report(message["end"])
            self._end_after(GRACE_S)
        elif "left" in message:
            self._connection.is_excused = True

    def _compare(self, question: int, what: str, value: str, timeout_s: float) -> _Verdict:
        self._connection.send_if_there(question=question, what=what, value=value)
        with self._changed:
            # Process 0 may have come later, and waits as long.
            self._changed.wait_for(lambda: question in self._verdicts or self._over, timeout_s + SEND_TIMEOUT_S)
            verdict = self._verdicts.pop(question, None)
        if verdict is None and self._over:
            return _Verdict("gone", self._over)
        return verdict or _Verdict("missing", f"{what}: no answer within {timeout_s:g} s from {self.titles[0]}")

    def _tell_failure(self, reason: str) -> None:
        self._connection.send_if_there(failed=reason)

    def leave(self) -> None:
        """Says farewell to process 0."""
        self._has_left = True
        self._connection.send_if_there(left=True)


def _shortened(ours: str, theirs: str) -> tuple[str, str]:
    """Both from shortly before they first differ."""
    shorter = min(len(ours), len(theirs))
    first = next((i for i in range(shorter) if ours[i] != theirs[i]), shorter)
    start = max(0, first - _SHOWN_CHARACTERS // 3) if max(len(ours), len(theirs)) > _SHOWN_CHARACTERS else 0

    def show(text: str) -> str:
        end = start + _SHOWN_CHARACTERS
        return "..." * (start > 0) + repr(text[start:end]) + "..." * (end < len(text))

    return show(ours), show(theirs)


def _listed(ids: list[int]) -> str:
    """Ids, of many only the first."""
    return ", ".join(map(str, ids[:16])) + (f" and {len(ids) - 16} more" if len(ids) > 16 else "")


def jax_version() -> str:
    """The version that all processes must have."""
    import jax

    return jax.__version__
