"""`python -m kvactors`."""

import sys


def explain(error: ImportError) -> str:
    """One line for an import that failed when the command line was started."""
    missing = error.name or ""
    if isinstance(error, ModuleNotFoundError) and not missing.startswith("kvactors"):
        return (
            f"kvactors: the command line needs the package {missing!r}, which is not installed for "
            f"{sys.executable}: pip install '/path/to/kvactors[cli]'"
        )
    return f"kvactors: {' '.join(str(error).split())}"


try:
    from kvactors.cli import main
except ImportError as error:
    print(explain(error), file=sys.stderr)
    sys.exit(2)
except KeyboardInterrupt:  # Ctrl-C during the imports
    sys.exit(130)

if __name__ == "__main__":
    main()
