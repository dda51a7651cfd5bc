"""`python -m kvactors`."""

import sys

from kvactors.unbuilt import explain

try:
    from kvactors.cli import main
except ImportError as error:
    print(explain(error), file=sys.stderr)
    sys.exit(2)
except KeyboardInterrupt:  # Ctrl-C during the imports
    sys.exit(130)

if __name__ == "__main__":
    main()
