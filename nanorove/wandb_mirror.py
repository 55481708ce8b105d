"""wandb, in a process of its own that reads metrics.jsonl while the training writes it.

The training process never imports wandb and never waits for it: a dead network, a missing key or a
finish that hangs cannot touch it. What was sent is noted in <run>/wandb/sent.json, so that a
resumed run neither sends a step twice nor leaves one out. Started by train.py as
`python -m nanorove.wandb_mirror RUN_DIR WANDB_ID`; it ends when its standard input does, which also
happens when the training is killed.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path
from typing import Any

from nanorove.files import write_text_atomic

FINISH_S = 15  # longest wait for wandb at the end of a training
POLL_S = 0.5


def start(run_dir: Path, wandb_id: str) -> subprocess.Popen:
    """Start the process that sends the run's metrics.jsonl to wandb."""
    root = Path(__file__).resolve().parent.parent
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    # torchrun's variables would make wandb think that it is one of several writers
    env = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC_", "GROUP_"))}
    return subprocess.Popen(
        [sys.executable, "-m", "nanorove.wandb_mirror", str(run_dir), wandb_id],
        stdin=subprocess.PIPE,
        env=env | {"PYTHONPATH": path},
        start_new_session=True,  # Ctrl-C is for the training; this ends after it
    )


def finish(process: subprocess.Popen) -> None:
    """Let it send the rest, for FINISH_S seconds at most."""
    process.stdin.close()
    try:
        process.wait(FINISH_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # and what wandb started
        process.wait()
        print(
            f"wandb: not done after {FINISH_S} s, left; metrics.jsonl is complete"
            " (`wandb sync` sends what is in the run's wandb folder)"
        )


def wandb_options(config: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """Arguments of wandb.init. The arms of a comparison share a group and differ in job_type, so
    that "group by job type" puts RoPE's and RoVE's curves into the same panels."""
    pos_emb, name = config["model"]["pos_emb"], config["run_name"]
    return {
        "project": config["log"]["project"],
        "name": name,
        "group": name.rpartition("/")[0] or name.replace(pos_emb, "*"),
        "job_type": pos_emb,
        "tags": [pos_emb, f"seed {config['seed']}", Path(config["data"]["dir"]).name],
        "config": {**config, **facts},
    }


def wandb_row(record: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """A line of metrics.jsonl -> (wandb's own step, values). wandb wants its step to grow: training
    step k is 2k there and the validation after it 2k + 1; the x-axis of all panels is "step"."""
    return 2 * record["step"] + ("val/loss" in record), record


def open_run(wandb: Any, options: dict[str, Any], mode: str, folder: Path) -> Any:
    """wandb.init in the mode asked for; offline, and saying so, where online does not work."""
    if mode == "online" and not wandb.login(prompt=False, verify=False):
        print(f"wandb: no API key, so it logs offline into {folder}/wandb"
              " (`wandb login` before the run, or `wandb sync` after it)", flush=True)  # fmt: skip
        mode = "offline"
    settings = wandb.Settings(console="off", init_timeout=60)
    try:
        return wandb.init(mode=mode, settings=settings, dir=str(folder), **options)
    except wandb.Error as error:
        print(f"wandb: not reached ({' '.join(str(error).split())}), so it logs offline into"
              f" {folder}/wandb; `wandb sync` sends it later", flush=True)  # fmt: skip
        return wandb.init(mode="offline", settings=settings, dir=str(folder), **options)


def mirror(run_dir: Path, wandb_id: str, done: threading.Event) -> None:
    """Send each line of metrics.jsonl once, until `done` is set and the file is at its end."""
    import wandb  # in this process only

    config = tomllib.loads((run_dir / "config.toml").read_text(encoding="utf-8"))
    facts = json.loads((run_dir / "meta.json").read_text(encoding="utf-8"))
    note = run_dir / "wandb" / "sent.json"
    note.parent.mkdir(exist_ok=True)
    sent = json.loads(note.read_text()) if note.is_file() else {"id": wandb_id, "step": -1}
    if sent["id"] != wandb_id:  # the run was started over
        sent = {"id": wandb_id, "step": -1}
    options = wandb_options(config, facts) | {"id": wandb_id, "resume": "allow"}
    run = open_run(wandb, options, config["log"]["wandb"], run_dir)
    run.define_metric("*", step_metric="step")
    with (run_dir / "metrics.jsonl").open(encoding="utf-8") as file:
        line = ""
        while True:
            ending = done.is_set()  # asked before reading: then the rest below is all of it
            news = False
            while (line := line + file.readline()).endswith("\n"):
                step, values = wandb_row(json.loads(line))
                line = ""
                if step > sent["step"] and "event" not in values:
                    run.log(values, step=step)
                    sent["step"], news = step, True
            if news:
                write_text_atomic(note, json.dumps(sent) + "\n")
            if ending:
                break
            time.sleep(POLL_S)
    run.finish()


def main() -> None:
    done = threading.Event()

    def wait_for_the_end() -> None:
        while os.read(0, 1):  # until the training closes it or dies
            pass
        done.set()

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    try:
        mirror(Path(sys.argv[1]), sys.argv[2], done)
    except Exception as error:  # whatever it is, the training goes on and the user knows
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        print(f"wandb: ended ({what}); metrics.jsonl is complete", flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
