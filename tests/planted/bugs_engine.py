"""Planted bugs of the check at rest and of the reference engine."""

from __future__ import annotations

from mutation import Mutation

AT_REST = "tests/observe/test_invariants.py::test_work_that_no_actor_will_end_is_found_at_rest"
ENGINE = "tests/scenario/test_engine.py"

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "loads_left_open_at_rest",
        "observe/invariants.py",
        "    if loads := len(evictor.memory.loads):\n",
        "    if loads := 0:\n",
        "loads of the host tier that never end are not found by check()",
        (AT_REST,),
    ),
    Mutation(
        "calls_without_an_answer_at_rest",
        "observe/invariants.py",
        "    if asks and not (held or ",
        "    if held and not (asks or ",
        "calls of the index that are never answered are not found by check()",
        (AT_REST,),
    ),
    Mutation(
        "engine_verifies_device_hits_only",
        "scenario/engine.py",
        "            await self.verify(request, hits.device, sum(hits), ",
        "            await self.verify(request, 0, hits.device, ",
        "blocks loaded from a lower tier are not verified in runs and replays",
        (f"{ENGINE}::test_loaded_blocks_are_verified",),
    ),
    Mutation(
        "engine_trusts_what_it_computed",
        "scenario/engine.py",
        "                await self.verify(request, cached, request.full, ",
        "                await self.verify(request, cached, cached, ",
        "blocks of a request that change while it holds them are not found",
        (f"{ENGINE}::test_a_thorough_engine_verifies_what_a_request_holds",),
    ),
    Mutation(
        "faults_of_an_sdk_do_not_end",
        "testing/attentionstore_sdk/service.py",
        "        self.leaks = self.counts = None\n\n    def lose(",
        "        self.leaks = None\n\n    def lose(",
        "an SDK that miscounts goes on after its fault: later faults of a plan prove nothing",
        ("tests/testing/test_injectors.py::test_each_fault_of_an_sdk_begins_and_ends",),
    ),
    Mutation(
        "lost_objects_leave_the_index",
        "testing/attentionstore_sdk/service.py",
        "        return len(chosen)\n",
        "        self.resident -= chosen\n        return len(chosen)\n",
        "a service that loses its objects repairs its index, which no real one does",
        (
            "tests/testing/test_injectors.py::test_lost_objects_are_the_oldest_and_their_paths_stay_in_the_index",
        ),
    ),
)
