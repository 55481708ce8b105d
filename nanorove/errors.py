"""Bad input ends in one clear line, not in a traceback."""

import sys
from collections.abc import Callable


class UserError(Exception):
    """Something the user can mend. The message is one line: the file, the value, the fix."""


def run_cli(main: Callable[[], object]) -> None:
    """Run a script's `main`; a UserError becomes `error: <line>` on stderr and exit code 2."""
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
