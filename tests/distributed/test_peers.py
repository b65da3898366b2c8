"""The roll call, comparing, and noticing who is gone: the processes are threads here, with real connections."""

import concurrent.futures
import contextlib
import socket
import threading
import time

import jax
import pytest

from maxmoe.distributed import peers
from maxmoe.distributed.environment import Job
from tests.distributed_job import free_port


@pytest.fixture
def ends(monkeypatch):
    """What would end the test's own process is written down instead: which process of the job would end."""
    calls, made = [], []
    original = peers.Peers.__init__

    def remember(self, job):
        original(self, job)
        made.append(self)

    monkeypatch.setattr(peers.Peers, "__init__", remember)
    monkeypatch.setattr(peers.Peers, "_end_after", lambda self, _: calls.append(self.job.process_id))
    monkeypatch.setattr(peers, "_COLLECT_S", 0.1)
    yield calls
    for one in made:
        if isinstance(one, peers.Coordinator):
            one._over, one._has_left = "", True
        elif hasattr(one, "_connection"):
            one._has_left = True
            _close(one)
    end = time.monotonic() + 10
    while any(thread.name == "maxmoe peers" for thread in threading.enumerate()):
        assert time.monotonic() < end, "a thread reads on although everyone has left"
        time.sleep(0.02)


def _close(member):
    """What the end of a member's process does."""
    with contextlib.suppress(OSError):  # it is closed
        member._connection.sock.shutdown(socket.SHUT_RDWR)


def _together(*work, timeout_s=30):
    """Runs the functions in threads; returns what each returned or raised."""
    with concurrent.futures.ThreadPoolExecutor(len(work)) as executor:
        running = [executor.submit(function) for function in work]
        return [future.exception(timeout_s) or future.result() for future in running]


def _join(port, process_id, num_processes, timeout_s=20.0):
    job = Job(f"127.0.0.1:{port}", num_processes, process_id, "test")
    return (peers.Coordinator if process_id == 0 else peers.Member)(job, timeout_s)


def _members(port, ids, num_processes, timeout_s=20.0):
    return _together(*(lambda i=i: _join(port, i, num_processes, timeout_s) for i in ids))


def test_roll_call_names_who_is_missing():
    began = time.monotonic()
    errors = _members(free_port(), [0, 2], 5, timeout_s=2)
    assert [type(error) for error in errors] == [TimeoutError] * 2
    for error in errors:
        assert "2 of 5 processes came within 2 s" in str(error) and "missing: 1, 3, 4" in str(error)
    assert time.monotonic() - began < 15


def test_roll_call_without_process_0_says_so():
    port = free_port()
    (error,) = _members(port, [1], 2, timeout_s=1)
    assert isinstance(error, TimeoutError)
    assert f"was not let in by process 0 at 127.0.0.1:{port} within 1 s" in str(error) and "refused" in str(error)


def test_roll_call_refuses_another_number_of_processes():
    port = free_port()
    errors = _together(lambda: _join(port, 0, 2), lambda: _join(port, 1, 4))
    for error in errors:
        assert isinstance(error, ValueError)
        assert "process 1 (" in str(error) and "was told of 4 processes, process 0 (" in str(error)


def test_roll_call_refuses_the_same_id_twice():
    errors = _members(free_port(), [0, 1, 1], 3)
    for error in errors:
        assert isinstance(error, ValueError) and "has the id of process 1 (" in str(error)


def test_roll_call_refuses_another_jax(monkeypatch):
    versions = iter(["0.10.2", "0.12.0", "0.12.0", "0.12.0"])
    monkeypatch.setattr(peers, "jax_version", lambda: next(versions))
    errors = _members(free_port(), [0, 1], 2)
    for error in errors:
        assert isinstance(error, ValueError) and "0.10.2" in str(error) and "0.12.0" in str(error)


def test_roll_call_says_that_the_port_is_taken():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on port {port}.*another --coordinator"):
            _join(port, 0, 2, timeout_s=1)


def test_roll_call_passes_over_strangers_and_those_who_come_again(ends):
    port = free_port()
    hello = f'{{"process_id": 1, "num_processes": 3, "jax": "{jax.__version__}"}}\n'.encode()

    def stranger(text):
        end = time.monotonic() + 10
        while time.monotonic() < end:
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
                    sock.sendall(text)
                    time.sleep(0.3)
                    return None
            except ConnectionRefusedError:
                time.sleep(0.05)
        raise AssertionError("no one listens")

    def again():
        stranger(hello)
        time.sleep(0.5)  # until its end is noticed
        return _join(port, 1, 3)

    def last():
        time.sleep(2)
        return _join(port, 2, 3)

    strangers = [
        lambda text=text: stranger(text)
        for text in (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"5\n", b'{"process_id": []}\n', b"{}\n")
    ]
    joined = _together(again, lambda: _join(port, 0, 3), *strangers, last)
    assert [type(one) for one in joined] == [peers.Member, peers.Coordinator, *[type(None)] * 4, peers.Member], joined


def _compared(ends, values, timeout_s=10.0, what="config"):
    port = free_port()
    joined = _members(port, range(len(values)), len(values))
    assert all(isinstance(one, peers.Peers) for one in joined), joined
    asked = [(peer, value) for peer, value in zip(joined, values, strict=True) if value is not None]
    return _together(*(lambda p=p, v=v: p.agree(what, v, timeout_s) for p, v in asked))


def test_agree_passes_if_all_are_equal(ends):
    assert _compared(ends, ["a"] * 4) == [None] * 4
    assert ends == []


def test_agree_names_who_differs_and_both_values(ends):
    ours = "{'layers': 93, " + "'x': 1, " * 50 + "'heads': 96, " + "'y': 2, " * 50
    errors = _compared(ends, [ours, ours, ours.replace("96", "64")])
    assert [type(error) for error in errors] == [ValueError] * 3
    assert len({str(error) for error in errors}) == 1
    text = str(errors[0])
    assert "'heads': 96" in text and "'heads': 64" in text and len(text) < 500
    assert " on process 0 (" in text and " on process 2 (" in text and "process 1" not in text
    assert ends == [0]  # it sees to it that nobody hangs


def test_agree_names_who_gives_no_answer(ends):
    errors = _compared(ends, ["a", None, "a", None], timeout_s=0.5)
    for error in errors:
        assert isinstance(error, TimeoutError) and "config: no answer within 0.5 s from process 1 (" in str(error)
        assert "process 3 (" in str(error) and "process 2 (" not in str(error)


def test_agree_names_many_that_differ_once(ends):
    text = str(_compared(ends, ["a"] + ["b"] * 9)[0])
    assert "9 processes differ from process 0: 1, 2, 3, 4, 5, 6, 7, 8, 9" in text and text.count("config differs") == 4


def test_agree_says_that_something_else_is_compared(ends):
    joined = _members(free_port(), [0, 1], 2)
    errors = _together(lambda: joined[0].agree("config", "a", 5), lambda: joined[1].agree("weights", "a", 5))
    for error in errors:
        assert isinstance(error, ValueError)
        assert "compares 'weights' while process 0 (" in str(error) and "compares 'config'" in str(error)


def test_agree_ends_when_a_process_is_gone(ends):
    joined = _members(free_port(), [0, 1, 2], 3)
    _close(joined[2])
    errors = _together(lambda: joined[0].agree("x", "a", 20), lambda: joined[1].agree("x", "a", 20))
    for error in errors:
        assert isinstance(error, ConnectionError) and "process 2 (" in str(error) and "gone" in str(error)


def test_leaving_is_no_failure(ends):
    joined = _members(free_port(), [0, 1, 2], 3)
    joined[1].leave()
    _close(joined[1])
    joined[0].leave()
    time.sleep(1)
    joined[2].leave()
    assert ends == [] and not any(peer._over for peer in joined)
