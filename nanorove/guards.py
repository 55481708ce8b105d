"""What keeps a long run honest: a stop that waits for the step's end, and checks that stop it.

A step with a NaN or an infinity in its loss or gradient is not taken. Ranks whose weights are no
longer the same bits, or weights that are not numbers, end the run before they are saved.
"""

import contextlib
import fcntl
import signal
from pathlib import Path
from types import FrameType

import torch
import torch.nn as nn

from nanorove.distributed import DistInfo
from nanorove.errors import UserError

BAD_STEPS_LIMIT = 10  # skipped in a row; one may be bad luck, ten are a broken run


class StopSignal:
    """Remembers that SIGTERM, SIGINT, SIGUSR1 or SIGHUP asked the training to stop.

    The loop looks at `name` at the end of a step; nothing is interrupted. Repeats change nothing:
    at Ctrl-C under torchrun each process gets the signal twice. Ctrl-\\ (SIGQUIT) ends at once.
    SIGHUP (the terminal was closed) stays ignored where `nohup` has it so.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        self.before = {number: signal.signal(number, self._remember) for number in numbers}

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.name = signal.Signals(number).name

    def restore(self) -> None:
        """Give the signals back to whoever had them before."""
        for number, handler in self.before.items():
            signal.signal(number, handler)


def lock_run(run_dir: Path, at_the_end: contextlib.ExitStack) -> None:
    """Keep other trainings out of a run until `at_the_end`, or until this process dies.

    Raises UserError if another one has it. Processes that this one starts do not get the lock:
    Python opens files for itself alone (close-on-exec).
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    file = at_the_end.enter_context((run_dir / "lock").open("w"))
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(
            f"{run_dir} is being trained by another process; wait for it, or choose another"
            " --run_name"
        ) from None
    except OSError as error:  # some network file systems have no locks
        print(f"lock: {run_dir}: {error.strerror}; nothing stops a second training of this run")


def weight_sums(model: nn.Module) -> torch.Tensor:
    """(n parameters,) int64: the sum of each parameter's bits, read as int32. Any bit counts."""
    return torch.stack(
        [p.detach().view(torch.int32).sum(dtype=torch.int64) for p in model.parameters()]
    )


def check_weights(model: nn.Module, info: DistInfo, step: int) -> None:
    """Weights must be numbers and the same bits on all ranks. Raises UserError on every rank."""
    names = [name for name, _ in model.named_parameters()]
    sums = info.gather(weight_sums(model))  # (world_size, n parameters)
    other = (sums != sums[0]).nonzero().tolist()
    if other:
        rank, index = other[0]
        raise UserError(
            f"step {step}: the ranks train apart: {names[index]} of rank {rank} is not that of"
            " rank 0; nothing of this step was saved, go on from the last checkpoint with --resume"
        )
    finite = torch.stack([p.detach().isfinite().all() for p in model.parameters()]).tolist()
    if not all(finite):
        raise UserError(
            f"step {step}: {names[finite.index(False)]} has values that are not finite; nothing"
            " of this step was saved, go on from the last checkpoint with --resume"
        )


class BadSteps:
    """Counts the steps that were skipped for a loss or gradient that is not finite."""

    def __init__(self, total: int = 0) -> None:
        self.total, self.in_a_row = total, 0

    def good(self) -> None:
        self.in_a_row = 0

    def bad(self, step: int, loss: float, norm: float, lr: float) -> str:
        """Count optimizer step `step` as skipped; gives back the line to print.

        Raises UserError when it is the last of BAD_STEPS_LIMIT in a row.
        """
        self.total, self.in_a_row = self.total + 1, self.in_a_row + 1
        what = f"step {step}: loss {loss}, gradient norm {norm}, learning rate {lr:.3g}"
        if self.in_a_row == BAD_STEPS_LIMIT:
            raise UserError(
                f"{what}: not finite for {self.in_a_row} steps in a row, so the run stops;"
                " lower --train.learning_rate and go on from the last checkpoint with --resume"
            )
        return f"{what}: not finite, step skipped ({self.total} in this run)"
