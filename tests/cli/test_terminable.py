"""SIGTERM ends a command wherever its code is at that moment, also where Python drops
exceptions."""

import asyncio
import gc
import signal
import threading

import pytest

from kvactors.signals import STATUS, run_terminable, sigterm_ends

SLEEP = 5.0
"""Seconds after which a main task that was not cancelled goes on."""


class Finalized:
    """Its finalizer receives SIGTERM. An exception raised there is dropped."""

    def __del__(self):
        signal.raise_signal(signal.SIGTERM)


@pytest.fixture(
    params=[signal.default_int_handler, signal.SIG_IGN], ids=["foreground", "background"]
)
def _interrupts(request):
    before = signal.signal(signal.SIGINT, request.param)
    yield
    signal.signal(signal.SIGINT, before)


def end_of(main):
    with pytest.raises(SystemExit) as end, sigterm_ends():
        run_terminable(main)
    return end.value.code


@pytest.mark.usefixtures("_interrupts")
class TestRunTerminable:
    def test_sigterm_in_a_finalizer_cancels_the_main_task(self):
        reached = []

        async def main():
            try:
                Finalized()
                gc.collect()
                await asyncio.sleep(SLEEP)
                reached.append("after the sleep")
            finally:
                reached.append("cleanup")

        assert end_of(main()) == STATUS == 143
        assert reached == ["cleanup"]

    def test_sigterm_in_a_callback_of_the_loop_cancels_the_main_task(self):
        reached = []

        async def main():
            asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGTERM)
            await asyncio.sleep(SLEEP)
            reached.append("after the sleep")

        assert end_of(main()) == STATUS
        assert reached == []

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    def test_sigterm_in_a_finalizer_before_the_loop_cancels_the_main_task(self):
        reached = []

        async def main():
            await asyncio.sleep(SLEEP)
            reached.append("after the sleep")

        def command():
            with sigterm_ends():
                Finalized()
                gc.collect()
                run_terminable(main())

        with pytest.raises(SystemExit) as end:
            command()
        assert end.value.code == STATUS
        assert reached == []

    def test_a_result_does_not_hide_a_sigterm(self):
        async def main():
            signal.raise_signal(signal.SIGTERM)
            try:
                await asyncio.sleep(SLEEP)
            except asyncio.CancelledError:
                return 0

        assert end_of(main()) == STATUS

    def test_a_second_sigterm_interrupts_a_main_task_that_does_not_end(self):
        async def main():
            while True:
                signal.raise_signal(signal.SIGTERM)
                try:
                    await asyncio.sleep(SLEEP)
                except asyncio.CancelledError:
                    continue

        assert end_of(main()) == STATUS

    def test_without_sigterm_nothing_changes(self):
        async def main():
            return signal.getsignal(signal.SIGTERM)

        before = signal.getsignal(signal.SIGTERM)
        assert run_terminable(main()) is not before
        assert signal.getsignal(signal.SIGTERM) is before


def test_in_another_thread_it_is_asyncio_run():
    results = []

    async def main():
        return 5

    thread = threading.Thread(target=lambda: results.append(run_terminable(main())))
    thread.start()
    thread.join(60)
    assert results == [5]
