import pytest
import structlog

from kvactors.cli import main


@pytest.fixture
def kvactors(capsys):
    """Call the command line. Returns the exit status, the output and the errors."""

    def call(*arguments):
        with pytest.raises(SystemExit) as exit_:
            main([*map(str, arguments)])
        out = capsys.readouterr()
        return exit_.value.code, out.out, out.err

    yield call
    structlog.reset_defaults()
