"""Bad input ends in one clear line, not in a traceback."""

import errno
import os
import sys
import time
from collections.abc import Callable


class UserError(Exception):
    """Something the user can mend. The message is one line: the file, the value, the fix."""


def run_cli(main: Callable[[], object]) -> None:
    """Run a script's `main`; a UserError becomes `error: <line>` on stderr and exit code 2.

    So does a file that cannot be read or written; Ctrl-C is exit code 130, and a reader of the
    output that went away (`| head`) is no error. Under torchrun all ranks tend to meet the same
    mistake. Rank 0 tells it at once, and torchrun then ends the others; they wait for that, and
    speak only if the trouble is theirs alone.
    """
    try:
        main()
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # nor at exit, when it flushes
        sys.exit(0)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
    except (UserError, SystemExit, OSError) as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if isinstance(error, OSError) and error.filename is None and not full:
            raise  # no file of the user's: a fault of ours
        if int(os.environ.get("RANK", 0)) > 0:
            time.sleep(10)
        if isinstance(error, SystemExit):
            raise
        if isinstance(error, OSError):
            where = "" if error.filename is None else f"{error.filename}: "
            error = where + error.strerror + ("; make room and run it again" if full else "")
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
