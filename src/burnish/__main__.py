"""The ``burnish`` process: the console script and ``python -m burnish``.

Ctrl-C is handled before anything else is imported. Otherwise it would print a traceback from the middle of an import.
"""

import sys

from burnish.utils.sigint import exit_on_interrupt


def main() -> int:
    """Run the command in ``sys.argv`` and return its exit status."""
    exit_on_interrupt()
    from burnish.cli import command

    return command()


if __name__ == "__main__":
    sys.exit(main())
