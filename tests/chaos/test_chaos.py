"""Each situation once, small. Failures are detected, reported with their seed, and fail the
command."""

from __future__ import annotations

import anyio
import msgspec
import pytest

from kvactors.errors import ConfigError
from tests.chaos import run
from tests.chaos.record import Setting, Tally
from tests.chaos.run import MODULES, one_round, run_chaos, situations

pytestmark = pytest.mark.filterwarnings("ignore:lease of .* was never finished:ResourceWarning")


@pytest.mark.parametrize("name", MODULES)
async def test_a_small_round(name):
    tally = await one_round(name, situations(name)[name], 7, small=True)
    if not tally.available:
        pytest.skip("; ".join(tally.notes))
    assert tally.errors == []
    assert tally.corrupt_blocks_served == 0
    assert min(tally.faults, tally.finished, tally.verified_blocks) > 0


def test_an_unknown_situation_is_named():
    with pytest.raises(ConfigError, match=r"no situation 'earthquake': use one of killed, stopped"):
        situations("earthquake")


async def works(setting: Setting, tally: Tally) -> None:
    tally.faults += 1
    tally.finished += 10
    tally.verified_blocks += setting.rng.randrange(1, 100)


async def breaks(setting: Setting, tally: Tally) -> None:
    await works(setting, tally)
    raise RuntimeError("planted error")


async def hangs(setting: Setting, tally: Tally) -> None:
    await works(setting, tally)
    await anyio.sleep_forever()


async def idles(setting: Setting, tally: Tally) -> None:
    return


async def lacks(setting: Setting, tally: Tally) -> None:
    tally.unavailable("there is no such machine")


@pytest.mark.parametrize(
    ("how", "what"),
    [
        (breaks, "RuntimeError: planted error"),
        (hangs, "hangs: the round"),
        (idles, "the round proves nothing"),
    ],
)
async def test_every_failure_is_a_violation(how, what, monkeypatch):
    monkeypatch.setattr(run, "ROUND", 0.2)
    tally = await one_round("some", how, 41)
    assert [violation.startswith(what) for violation in tally.errors] == [True]


async def test_a_seed_determines_what_happens():
    one, same, other = [(await one_round("w", works, seed)).verified_blocks for seed in (1, 1, 2)]
    assert one == same != other


@pytest.mark.parametrize(("how", "status"), [(works, 0), (breaks, 1), (lacks, 0)])
def test_the_command(how, status, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(run, "situations", lambda only: {"some": how})
    path = tmp_path / "out.json"
    assert run_chaos(0.0, 5, "", path) == status
    tally = msgspec.json.decode(path.read_bytes())["some"]
    assert tally["available"] is (how is not lacks)
    said = capsys.readouterr()
    repeat = "repeat: python -m tests.chaos --only some --seed 5 --minutes 0"
    assert (repeat in said.err) is bool(status)
    assert ("not available: there is no such machine" in said.out) is (how is lacks)
