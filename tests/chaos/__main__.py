"""`python -m tests.chaos`."""

import sys

import structlog
from cyclopts import run

from tests.chaos.run import run_chaos

structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
sys.exit(run(run_chaos, result_action="return_value"))
