"""Bad input ends in one clear line, not in a traceback."""

import os
import sys
import time
from collections.abc import Callable


class UserError(Exception):
    """Something the user can mend. The message is one line: the file, the value, the fix."""


def run_cli(main: Callable[[], object]) -> None:
    """Run a script's `main`; a UserError becomes `error: <line>` on stderr and exit code 2.

    Under torchrun all ranks tend to meet the same mistake. Rank 0 tells it at once, and torchrun
    then ends the others; they wait for that, and speak only if the trouble is theirs alone.
    """
    try:
        main()
    except (UserError, SystemExit) as error:
        if int(os.environ.get("RANK", 0)) > 0:
            time.sleep(10)
        if isinstance(error, SystemExit):
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
