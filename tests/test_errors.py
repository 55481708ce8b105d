"""What a script's user sees when something is wrong: one line and the right exit code."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(body: str) -> subprocess.CompletedProcess:
    code = f"from nanorove.errors import UserError, run_cli\ndef main():\n    {body}\nrun_cli(main)"
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("body", "code", "stderr"),
    [
        ("raise UserError('f.toml: x is 1, use 2')", 2, "error: f.toml: x is 1, use 2\n"),
        ("open('no/such/file')", 2, "error: no/such/file: No such file or directory\n"),
        ("open('/')", 2, "error: /: Is a directory\n"),
        (
            "raise OSError(28, 'No space left on device')",
            2,
            "error: No space left on device; make room and run it again\n",
        ),
        ("raise KeyboardInterrupt", 130, "\ninterrupted\n"),
        ("raise SystemExit(7)", 7, ""),
    ],
)
def test_one_line_and_an_exit_code(body: str, code: int, stderr: str) -> None:
    done = run(body)
    assert (done.returncode, done.stderr) == (code, stderr)


def test_faults_of_ours_keep_their_traceback() -> None:
    for body in ("raise OSError('socket')", "raise ValueError('x')"):
        done = run(body)
        assert done.returncode == 1 and "Traceback" in done.stderr


def test_a_reader_that_went_away_is_no_error() -> None:
    code = (
        "from nanorove.errors import run_cli\n"
        "run_cli(lambda: [print('x' * 100, flush=True) for _ in range(100000)])"
    )
    first = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    first.stdout.readline()
    first.stdout.close()
    assert first.wait(60) == 0
    assert first.stderr.read() == b""
