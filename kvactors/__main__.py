"""`python -m kvactors`."""

from kvactors.cli import main

main()
