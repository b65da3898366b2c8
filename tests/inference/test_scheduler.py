"""The scheduler: who gets a slot, who loses one, who waits how long."""

import hypothesis
import pytest
from hypothesis import strategies as st

from maxmoe.inference.scheduler import QueueFullError, Scheduler, Ticket


def _ticket(priority=0, num_tokens=10, expires_at_s=None):
    return Ticket(num_tokens=num_tokens, priority=priority, expires_at_s=expires_at_s)


def _submit(scheduler, *tickets):
    for ticket in tickets:
        scheduler.submit(ticket)
    return scheduler.schedule()


def test_equal_requests_run_in_the_order_of_arrival():
    scheduler, tickets = Scheduler(2), [_ticket() for _ in range(4)]
    assert _submit(scheduler, *tickets) == ([], tickets[:2])
    assert [ticket.slot for ticket in tickets] == [0, 1, None, None]
    assert scheduler.schedule() == ([], [])
    scheduler.release(tickets[0])
    assert scheduler.schedule() == ([], [tickets[2]]) and tickets[2].slot == 0
    assert scheduler.waiting == [tickets[3]]


def test_the_more_urgent_goes_first_and_takes_the_slot_of_the_least_urgent():
    scheduler = Scheduler(2)
    early, late, idle = _ticket(priority=1), _ticket(priority=1), _ticket(priority=2)
    assert _submit(scheduler, early, idle, late).admitted == [early, late]
    urgent, more = _ticket(priority=0), _ticket(priority=0)
    assert _submit(scheduler, urgent) == ([late], [urgent])  # the later of two equals
    assert (late.num_preemptions, late.slot, urgent.slot) == (1, None, 1)
    assert _submit(scheduler, more) == ([early], [more])
    assert scheduler.waiting == [early, idle, late]  # at their old places
    assert _submit(scheduler, _ticket(priority=0)) == ([], [])  # nobody takes the slot of an equal


def test_release_frees_a_slot_or_a_place_in_the_queue():
    scheduler, first, second = Scheduler(1), _ticket(), _ticket()
    _submit(scheduler, first, second)
    scheduler.release(second)
    scheduler.release(first)
    assert not scheduler.has_work and first.slot is None


def test_tokens_of_running_requests_are_bounded_and_the_head_of_the_queue_is_not_passed():
    scheduler = Scheduler(4, max_tokens=100)
    small, large, other = _ticket(num_tokens=50), _ticket(num_tokens=60), _ticket(num_tokens=10)
    assert _submit(scheduler, small, large, other).admitted == [small]
    scheduler.release(small)
    assert scheduler.schedule().admitted == [large, other]
    urgent = _ticket(priority=-1, num_tokens=95)
    assert _submit(scheduler, urgent) == ([other, large], [urgent])  # both must go
    with pytest.raises(ValueError, match="request of 101 tokens.*never fits into max_tokens=100"):
        scheduler.submit(_ticket(num_tokens=101))


def test_the_queue_is_bounded_but_takes_back_whom_it_preempted():
    scheduler, tickets = Scheduler(1, max_waiting=2), [_ticket(), _ticket(), _ticket()]
    _submit(scheduler, tickets[0])
    _submit(scheduler, *tickets[1:])
    with pytest.raises(QueueFullError, match="2 requests wait already, and max_waiting is 2"):
        scheduler.submit(_ticket())
    scheduler.preempt(tickets[0])
    assert scheduler.waiting == tickets


def test_expired_names_waiting_and_running_requests_until_they_are_released():
    scheduler, tickets = Scheduler(1), [_ticket(expires_at_s=5.0), _ticket(expires_at_s=7.0), _ticket()]
    _submit(scheduler, *tickets)
    assert scheduler.expired(4.9) == [] and scheduler.expired(5.0) == tickets[:1]
    assert sorted(t.expires_at_s for t in scheduler.expired(9.0)) == [5.0, 7.0]
    scheduler.release(tickets[1])
    assert scheduler.expired(9.0) == tickets[:1]


@pytest.mark.parametrize("max_overtakes", [0, 1, 5])
def test_no_request_is_passed_by_more_than_max_overtakes_later_ones(max_overtakes):
    scheduler, idle = Scheduler(1, max_overtakes=max_overtakes), _ticket(priority=9)
    scheduler.submit(idle)
    served = []
    while idle.slot is None:
        served += _submit(scheduler, _ticket(priority=0)).admitted
        if idle.slot is None:
            scheduler.release(served[-1])
    assert len(served) - 1 == idle.num_overtakes == max_overtakes
    assert _submit(scheduler, _ticket(priority=0)) == ([], [])  # it is not preempted any more


def test_scheduler_refuses_sizes_that_mean_nothing():
    for name, value in (("num_slots", 0), ("max_tokens", 0), ("max_waiting", 0), ("max_overtakes", -1)):
        with pytest.raises(ValueError, match=f"{name}={value} must be at least"):
            Scheduler(**{"num_slots": 1, name: value})


@hypothesis.settings(max_examples=50)
@hypothesis.given(
    st.integers(1, 3),
    st.integers(0, 3),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30), st.booleans()), max_size=40),
)
def test_every_request_ends_and_limits_hold(num_slots, max_overtakes, arrivals):
    scheduler = Scheduler(num_slots, max_tokens=40, max_overtakes=max_overtakes)
    ended, submitted = [], []

    def check():
        preempted, admitted = scheduler.schedule()
        assert not set(preempted) & set(admitted) or all(ticket.slot is not None for ticket in admitted)
        assert len(scheduler.running) <= num_slots
        assert sum(ticket.num_tokens for ticket in scheduler.running.values()) <= 40
        assert all(scheduler.running[ticket.slot] is ticket for ticket in scheduler.running.values())

    for priority, num_tokens, ends in arrivals:
        submitted.append(_ticket(priority, num_tokens))
        scheduler.submit(submitted[-1])
        check()
        if ends and scheduler.running:
            ended.append(next(iter(scheduler.running.values())))
            scheduler.release(ended[-1])
    while scheduler.has_work:
        check()
        ended.append(next(iter(scheduler.running.values())))  # something always runs
        scheduler.release(ended[-1])
    assert sorted(ticket.number for ticket in ended) == list(range(len(submitted)))
    assert all(ticket.slot is None for ticket in submitted)
