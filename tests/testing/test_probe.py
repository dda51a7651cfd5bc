"""Probe: an actor that the test plays. Stepper: one actor, turn by turn."""

from __future__ import annotations

import asyncio
from typing import ClassVar

import pytest

from kvactors.actor import Actor, Ask, Control, Message, on
from kvactors.cpu_evictor.messages import Load, Loaded, Offload, Save
from kvactors.errors import NoRoom, NotReady, WiringError
from kvactors.flush_notifier.messages import PathCached
from kvactors.native import Path
from kvactors.prefix_index.actor import PrefixIndex
from kvactors.prefix_index.messages import Acquire, Commit, Finish, Ready
from kvactors.prefix_index.settings import IndexSettings, Roots
from kvactors.prefix_index.tree import BlockIndex
from kvactors.testing import simulate
from tests.support.deadline import deadline_after
from tests.support.probe import Probe, Unexpected
from tests.support.stepper import Stepper


class Note(Message, frozen=True, eq=False):
    text: str


class Urgent(Control, frozen=True, eq=False):
    pass


class Question(Ask[int], frozen=True, eq=False):
    number: int


class Woken(Control, frozen=True, eq=False):
    what: object


class Clerk(Actor):
    """Passes notes on, works on questions, and reminds itself."""

    ROLE = "clerk"
    SENDS: ClassVar = {"desk": (Note,)}

    def __init__(self, ref, desk):
        super().__init__(ref)
        self.desk, self.parked, self.timer = desk, None, None

    def started(self):
        self.tell(self.desk, Note("here"))

    async def work(self, number):
        return number + 1

    @on(Note)
    def note(self, message):
        if message.text == "remind me":
            self.timer = self.after(2.0, Woken("reminded"))
        elif message.text == "never mind":
            self.timer.cancel()
        elif message.text == "wrongly":
            self.tell(self.desk, Urgent())
        elif message.text == "to myself":
            self.to_self(Woken("myself"))
        else:
            self.tell(self.desk, message)

    @on(Question)
    def question(self, message, envelope):
        if message.number < 0:
            self.refuse(envelope, ValueError("negative"))
            return
        self.parked = envelope
        self.start_job(self.work(message.number), Woken, Woken)

    @on(Woken)
    def woken(self, message):
        if self.parked is None:
            self.tell(self.desk, Note(str(message.what)))
        elif isinstance(message.what, Exception):
            self.refuse(self.parked, message.what)
        else:
            self.answer(self.parked, message.what)


# -- Probe


def test_a_probe_returns_its_messages_and_answers_for_the_test():
    async def main():
        probe = Probe("desk")
        asked = asyncio.create_task(probe.ask(Question(20), deadline=deadline_after(5)))
        question = await probe.expect(Question)
        assert question.number == 20
        assert probe.answer(question, 21)
        assert await asked == 21
        with pytest.raises(LookupError, match="was not asked Question"):
            probe.answer(question, 22)
        asked = asyncio.create_task(probe.ask(Question(1), deadline=deadline_after(5)))
        probe.refuse(await probe.expect(Question), NoRoom(2, 1))
        with pytest.raises(NoRoom):
            await asked
        assert probe.in_flight.count == 0

    simulate(main)


def test_a_probe_reports_the_message_that_came_instead():
    async def main():
        probe = Probe("desk")
        probe.try_tell(Note("hello"))
        probe.try_tell(Note("again"))
        with pytest.raises(
            Unexpected,
            match=r"desk expected Question, and what came is Note\(text=hello\); after it: Note\(text=again\)",
        ):
            await probe.expect(Question)

    simulate(main)


def test_a_probe_waits_for_its_timeout_and_no_longer():
    async def main():
        loop = asyncio.get_running_loop()
        probe = Probe("desk")
        with pytest.raises(Unexpected, match=r"expected Note within 3600 s, and nothing came"):
            await probe.expect(Note, within=3600)
        assert loop.time() == 3600
        loop.call_later(60, probe.try_tell, Note("late"))
        await probe.expect_nothing(for_=59)
        with pytest.raises(
            Unexpected, match=r"expected nothing for 2 s, and what came is Note\(text=late\)"
        ):
            await probe.expect_nothing(for_=2)

    simulate(main)


def test_a_probe_skips_the_messages_that_it_should_ignore():
    async def main():
        probe = Probe("desk", ignored=(Urgent,))
        probe.try_tell(Note("seen"))
        probe.try_tell(Urgent())
        assert (await probe.expect(Note)).text == "seen"
        probe.try_tell(Urgent())
        await probe.expect_nothing(for_=1)

    simulate(main)


def test_a_full_probe_makes_its_sender_wait():
    async def main():
        probe = Probe("desk", bound=1)
        await probe.tell(Note("1"))
        second = asyncio.create_task(probe.tell(Note("2")))
        await asyncio.sleep(1)
        assert not second.done()
        await probe.expect(Note)
        await second

    simulate(main)


# -- Stepper


@pytest.fixture
def clerk():
    with Stepper(lambda ref: Clerk(ref, Probe("desk"))) as stepper:
        yield stepper


def test_a_turn_returns_the_messages_it_sent(clerk):
    assert [(told.receiver, told.message.text) for told in clerk.started.told] == [("desk", "here")]
    effects = clerk.turn(Note("pass it on"))
    assert [message.text for message in effects.to("desk")] == ["pass it on"]
    assert effects[1:] == ((), (), (), False)
    with pytest.raises(WiringError, match="does not declare"):
        clerk.turn(Note("wrongly"))
    with pytest.raises(TypeError, match="no handler for Urgent"):
        clerk.turn(Urgent())


def test_a_message_to_itself_is_an_effect_and_not_a_turn(clerk):
    (told,) = clerk.turn(Note("to myself")).told
    assert (told.receiver, told.message.what) == ("clerk", "myself")


def test_jobs_do_not_run_but_end_as_the_test_sets(clerk):
    question = Question(4)
    effects = clerk.turn(question)
    (job,) = effects.jobs
    assert (job.name, job.arguments, job.counted, effects.answered) == (
        "Clerk.work",
        {"number": 4},
        True,
        (),
    )
    (answered,) = clerk.finish(job, 5).answered
    assert answered == (question, 5, None)
    with pytest.raises(LookupError, match="is over"):
        clerk.finish(job, 5)
    (job,) = clerk.turn(Question(4)).jobs
    (answered,) = clerk.fail(job, OSError("disk")).answered
    assert isinstance(answered.error, OSError)
    (answered,) = clerk.turn(Question(-1)).answered
    assert isinstance(answered.error, ValueError)


def test_time_passes_only_when_the_test_advances_it(clerk):
    (timer,) = clerk.turn(Note("remind me")).timers
    assert timer.when == 2.0
    assert clerk.elapse(1.9).told == ()
    assert [message.text for message in clerk.elapse(0.2).to("desk")] == ["reminded"]
    assert clerk.now == pytest.approx(2.1)
    clerk.turn(Note("remind me"))
    clerk.turn(Note("never mind"))
    assert clerk.elapse(10).told == ()


def test_an_ask_that_was_given_up_is_skipped_and_answers_nothing(clerk):
    question = Question(1)
    (job,) = clerk.turn(question).jobs
    clerk.withdraw(question)
    assert clerk.finish(job, 2).answered == ()
    assert clerk.actor.statistics().late_replies == 1
    with pytest.raises(LookupError):
        clerk.withdraw(question)


async def test_it_works_inside_a_running_loop(clerk):
    outer = asyncio.get_running_loop()
    effects = clerk.turn(Note("pass it on"))
    assert effects.told
    assert asyncio.get_running_loop() is outer


# -- an actor of the package, alone

BLOCK = 4


@pytest.fixture
def index():
    def make(ref):
        return PrefixIndex(
            ref,
            index=BlockIndex(BLOCK, 8, 64, recompute_last_token=False),
            evictor=Probe("evictor", "cpu_evictor"),
            swapper=Probe("swapper", "gpu_swapper"),
            notifier=Probe("notifier", "flush_notifier"),
            roots=Roots("", "default", bytes(32)),
            settings=IndexSettings(exclusive=True, host_tier=True, fetch=True, announce=True),
        )

    with Stepper(make) as stepper:
        yield stepper


def path(first, tokens):
    made = Path(BLOCK, bytes(32))
    made.extend(list(range(first, first + tokens)))
    return made


def test_a_request_of_the_prefix_index_turn_by_turn(index):
    effects = index.turn(Acquire(1, "r1", path(0, 3 * BLOCK), 10.0))
    (load,) = effects.to("evictor")
    assert isinstance(load, Load)
    assert effects.answered[0].value.pending
    (answered,) = index.turn(Commit(1, BLOCK)).answered
    assert isinstance(answered.error, NotReady)
    ready = Ready(1)
    assert index.turn(ready).answered == ()
    (landed,) = index.turn(Loaded(load.op, 1, 1)).answered
    assert (landed.message, landed.value.cached_tokens, landed.value.host_hits) == (ready, BLOCK, 1)
    effects = index.turn(Commit(1, 3 * BLOCK))
    assert effects.answered[0].value.count == 3
    announced = [message for message in effects.to("notifier") if isinstance(message, PathCached)]
    assert [(message.start, message.count) for message in announced] == [(1, 2)]
    assert not [
        message for message in index.turn(Finish(1)).to("evictor") if isinstance(message, Save)
    ]
    effects = index.turn(Acquire(2, "r2", path(1000, 7 * BLOCK), 10.0))
    assert [type(message) for message in effects.to("evictor")] == [Load, Offload]
    assert effects.answered == ()
    index.actor.check()
