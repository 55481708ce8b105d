"""scripts.experiment: the file, the comparison of arms, and a tiny experiment from end to end."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from data.ruler import TASKS
from nanorove import hellaswag
from nanorove.checkpoint import SCHEMA, read_meta, resolve_step_dir
from nanorove.config import config_to_dict
from nanorove.errors import UserError
from scripts import eval_core, experiment, experiment_file, provenance
from scripts.experiment import Args, main, ruler_files
from scripts.experiment_file import Data, Ruler, arm_config, is_prepared, load_experiment
from scripts.jobs import only_one
from tests.conftest import REPO, TINY_TOML, toy_tokens, write_data_dir
from tests.core_bundle import write_folder
from tests.test_runlog import history, wandb_records

EXPERIMENT = """\
name = "tiny"
title = "Tiny"
seeds = [1]

[data]
dir = "shards"
command = ["data.text", "a.jsonl", "--out", "shards", "--tokenizer", "bytes", "--val-tokens", "400"]

[arms.rope]
config = "rope.toml"

[arms.rove]
config = "rove.toml"
overrides = ["--train.log_interval", "1"]

[perplexity]
lengths = [8, 16]
yarn = ["none", "auto"]
documents = 2

[samples]
prompts = ["ab", "c d"]
max_new_tokens = 3
"""


RULER = """\
[ruler]
data = "prompts"
tokenizer = "bytes"
lengths = [700]
samples = 3
tasks = ["fwe"]
yarn = ["none"]
[samples]"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with an experiment, its two configs and a text for its data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    write_experiment(tmp_path)
    return tmp_path


def write_experiment(folder: Path) -> None:
    (folder / "x.toml").write_text(EXPERIMENT)
    for arm in ("rope", "rove"):
        text = TINY_TOML.replace("DATA_DIR", "shards").replace('"rove"', f'"{arm}"')
        (folder / f"{arm}.toml").write_text(text)
    rng = np.random.RandomState(3)
    texts = (" ".join(rng.choice(["red", "green", "blue"], 12).tolist()) for _ in range(60))
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "a.jsonl").write_text(lines)


def edit(path: str, old: str, new: str) -> None:
    text = Path(path).read_text()
    assert text.count(old) == 1
    Path(path).write_text(text.replace(old, new))


# -----------------------------------------------------------------------------
# the file


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("seeds = [1]", "seed = [1]", "x.toml: unknown key seed; did you mean seeds"),
        ("lengths = ", "length = ", "unknown key perplexity.length; did you mean perplexity.leng"),
        (
            "[arms.rope]\nconfig",
            "[arms.rope]\nconfigs",
            "arms.rope.configs; did you mean arms.rope",
        ),
        ("max_new_tokens = 3\n", "", "samples.max_new_tokens is missing"),
        ("seeds = [1]", "seeds = [1, 1]", "seeds [1, 1]: each once"),
        ("seeds = [1]", 'seeds = [1]\nslots = "2"', "x.toml: slots must be int, not '2'"),
        (
            "seeds = [1]",
            'seeds = [1]\narms_differ_in = ["train.max_steps"]',
            "arms_differ_in: train.max_steps must be the same in all arms",
        ),
        ("[samples]", "[core]\nlimits = 5\n[samples]", "core.limits; did you mean core.limit?"),
        ("[samples]", '[core]\nlimit = "5"\n[samples]', "core.limit must be int, not '5'"),
        ("[samples]", "[core]\nyarn_factor = true\n[samples]", "core.yarn_factor must be float"),
        ("[samples]", "[ruler]\ndata = 'd'\n[samples]", "ruler.tokenizer is missing"),
        (
            "[samples]",
            "[ruler]\ndata = 'd'\ntokenizer = 'bytes'\nlengths = [0]\nsamples = 1\n"
            "yarn = ['none']\n[samples]",
            "x.toml: ruler: --lengths 0",
        ),
        ('config = "rope.toml"', 'from = "rove"\npos_emb = "none"', "arms.rope: the first arm is"),
        ('config = "rope.toml"', "", "arms.rope: needs config, or from and pos_emb"),
        ('"rope.toml"', '"rope.toml"\nfrom = "rove"', "arms.rope: needs config, or from and pos"),
        ('"rope.toml"', '"rope.toml"\npos_emb = "rove"', "arms.rope: pos_emb stands in its conf"),
        ("[perplexity]", "[arms.a]\nfrom = 'b'\n[perplexity]", "arms.a: from 'b' is not an arm"),
        (
            "[perplexity]",
            "[arms.a]\nfrom = 'rope'\npos_emb = 'learned'\n[perplexity]",
            "arms.a: pos_emb 'learned' must be one of rope, rove",
        ),
        (
            "[perplexity]",
            "[arms.a]\nfrom = 'rope'\npos_emb = 'rove'\noverrides = ['--x']\n[perplexity]",
            "arms.a: it is not trained, so it has no overrides",
        ),
        ("documents = 2", 'documents = "2"', "perplexity.documents must be int, not '2'"),
        ("documents = 2", "documents = true", "perplexity.documents must be int, not True"),
        ("lengths = [8, 16]", "lengths = [8, 1.5]", "perplexity.lengths must be list"),
        ("seeds = [1]", "seeds = []", "at least one arm and one seed"),
        ('"c d"', '"-c"', "a prompt cannot begin with '-': '-c'"),
        ("seeds = [1]", "seeds = [", "x.toml: not TOML"),
        ("[samples]", "[[samples]]", "samples must be a table"),
        ("lengths = [8, 16]", "lengths = [2, 16]", "x.toml: perplexity: --lengths 2,16"),
        ("lengths = [8, 16]", "lengths = []", "x.toml: perplexity: --lengths"),
        ('"auto"', '"of"', "x.toml: perplexity: --yarn none,of"),
        ("documents = 2", "documents = 1", "perplexity: documents 1: at least 2"),
        ('["--train.log_interval"', '["--run-name=x"', "arms.rove: --run-name=x is the experiment"),
        ('["--train.log_interval"', '["--seed"', "arms.rove: --seed is the experiment's to set"),
        ('name = "tiny"', 'name = ".."', "'..' names a folder: letters, digits and"),
        ('name = "tiny"', 'name = "a//b"', "'' names a folder"),
        ("[arms.rope]", '[arms."a b"]', "'a b' names a folder"),
        ("[arms.rope]", '[arms.".."]', "'..' names a folder"),
        ("documents = 2", 'quantities = ["lost"]', "perplexity: --quantities lost: 'lost' is none"),
        ("[samples]", "[core]\nlimit = 0\n[samples]", "core: limit 0: at least 1"),
        ("[samples]", "[core]\nmax_length = -1\n[samples]", "core: max_length -1: at least 2"),
        ("[samples]", "[core]\nmax_length = 99999\n[samples]", "core: max_length 99999: at most"),
        ("[samples]", "[core]\ntasks = ['cop']\n[samples]", "core: tasks cop: choose of hellasw"),
        ("[samples]", "[core]\ntasks = []\n[samples]", "core: tasks : choose of"),
        ("[samples]", "[core]\nbundle = 'no'\n[samples]", "core: bundle no: not there"),
        ("[samples]", "[core]\nbundle = 'a.jsonl'\n[samples]", "core: a.jsonl: not a zip"),
        ("[samples]", "[hellaswag]\ndata = 'no'\n[samples]", "hellaswag: data no: not there"),
        ("[samples]", "[hellaswag]\nlimit = -1\n[samples]", "hellaswag: limit -1: at least 1"),
        ("max_new_tokens = 3", "max_new_tokens = 0", "samples: max_new_tokens 0: at least 1"),
        ('["ab", "c d"]', "[]", "samples: prompts: at least one"),
        ("[samples]", RULER.replace("= 3", "= 0"), "ruler: samples 0: at least 1"),
        ("[samples]", RULER.replace("fwe", "few"), "ruler: --tasks few: choose of niah_single_1"),
        ("[samples]", RULER.replace("[700", "[131073"), "ruler: --lengths 131073: within 1..131,"),
        ("[samples]", RULER.replace("yarn", "squad = 'no'\nyarn"), "ruler: squad no: not there"),
        ('name = "tiny"', 'name = "-x"', "'-x' names a folder"),
        ('title = "Tiny"', 'title = "--help"', "title '--help': cannot begin with '-'"),
        ('title = "Tiny"', 'title = "a\\u0000b"', "title must be str, not 'a\\x00b'"),
        ('"c d"', '"a\\u0000b"', "samples.prompts must be list[str]"),
        (
            '"--out", "shards"',
            '"--out", "other"',
            "data.command writes to other, and data.dir is sh",
        ),
        ('["--train.log_interval"', '["--help"', "arms.rove: --help is no override"),
        ('config = "rope.toml"', 'config = "no.toml"', "arms.rope: config no.toml: no such file"),
        (
            "seeds = [1]",
            'seeds = [1]\narms_differ_in = ["model.block_size"]',
            "arms_differ_in: model.block_size must be the same",
        ),
    ],
)
def test_a_faulty_file_is_refused(folder, old, new, message):
    edit("x.toml", old, new)
    with pytest.raises(UserError) as caught:
        load_experiment(Path("x.toml"))
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("[samples]", "[core]\nyarn_factor = 0.5\n[samples]", r"core: arm rope: yarn_factor .0.5"),
        ("[samples]", RULER.replace("bytes", "gpt2"), "ruler.tokenizer gpt2: .* made with bytes$"),
        ('"auto"', '"1e300"', "x.toml: perplexity: arm rope: yarn_factor .1e.300. must be"),
        ("[8, 16]", "[8, 1000000000000]", "x.toml: perplexity: arm rope: yarn_factor .* below"),
        ("[samples]", RULER.replace("none", "1e300"), "x.toml: ruler: arm rope: yarn_factor"),
        ("seeds = [1]", "seeds = [-1]", "x.toml: .*seed"),
        (
            '["--train.log_interval"',
            '["--train.no"',
            "x.toml: arm rove, seed 1: train.py refuses it",
        ),
        (
            "seeds = [1]",
            'seeds = [1]\narms_differ_in = ["model.pos_em"]',
            "arms_differ_in: no key model.pos_em; did you mean model.pos_emb",
        ),
    ],
)
def test_what_the_models_cannot_take_is_refused(folder, old, new, message):
    edit("x.toml", old, new)
    with pytest.raises(UserError, match=message):
        main(Args(Path("x.toml"), dry_run=True))


def test_what_learned_positions_cannot_take_is_refused(folder):
    """They end at 8 tokens, and they are weights that no other arm has."""
    edit("rope.toml", '"rope"', '"learned"')
    edit("x.toml", "[samples]", "[core]\nmax_length = 8\n\n[samples]")
    edit("x.toml", "max_new_tokens = 3", "max_new_tokens = 7")
    main(Args(Path("x.toml"), dry_run=True))
    edit("x.toml", "max_length = 8", "max_length = 9")
    with pytest.raises(UserError, match="core.max_length: 9 positions, .* arm rope .* end at 8$"):
        main(Args(Path("x.toml"), dry_run=True))
    edit("x.toml", "[core]\nmax_length = 9\n", "")
    edit("x.toml", "max_new_tokens = 7", "max_new_tokens = 8")
    with pytest.raises(UserError, match="samples.max_new_tokens: 9 positions, .* end at 8$"):
        main(Args(Path("x.toml"), dry_run=True))
    edit("x.toml", "[perplexity]", "[arms.late]\nfrom = 'rope'\npos_emb = 'rove'\n[perplexity]")
    with pytest.raises(UserError, match="arm late: rope has learned positions"):
        main(Args(Path("x.toml"), dry_run=True))


def test_a_missing_file_is_refused(folder):
    with pytest.raises(UserError, match="y.toml.*see experiments/"):
        load_experiment(Path("y.toml"))


def test_the_shipped_experiments_can_be_read(monkeypatch):
    monkeypatch.chdir(REPO)
    for path in (REPO / "experiments").glob("*.toml"):
        experiment = load_experiment(path)
        assert experiment.dir == Path("runs") / path.stem


def dry_run(name: str, tmp_path: Path, capsys: pytest.CaptureFixture, **options: Any) -> str:
    """What a shipped experiment would do, in an empty folder that stays as it is."""
    for folder in ("configs", "experiments"):
        shutil.copytree(REPO / folder, tmp_path / folder)
    os.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    main(Args(Path(f"experiments/{name}.toml"), dry_run=True, **options))
    assert sorted(tmp_path.rglob("*")) == before
    return capsys.readouterr().out


def test_dry_run_of_the_demo(tmp_path, monkeypatch, capsys):
    """It says what `make demo` will do, in commands that can be typed, and does nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(experiment, "visible_gpus", list)
    out = dry_run("demo", tmp_path, capsys)
    assert "arms differ only in model.pos_emb" in out
    assert "$ python -m data.stdlib --tokenizer bytes --out data/stdlib_bytes" in out
    commands = [shlex.split(line) for line in out.splitlines() if line.startswith("$")]
    train = os.path.relpath(REPO / "train.py")  # in quotes where the path has a space
    for arm in ("rope", "rove"):
        run = f"runs/demo/{arm}-seed1337"
        options = ["--seed", "1337", "--run_name", run[5:], "--resume"]
        assert ["$", "python", train, f"configs/demo_{arm}.toml", *options] in commands
        assert f"$ python -m scripts.eval_perplexity {run} --lengths 256,512,1024,2048,4096" in out
    assert "--out runs/demo" in out and "8 steps to run" in out
    assert "hours of 2 trainings: not known on a CPU" in out


def test_dry_run_of_the_paper(tmp_path, monkeypatch, capsys):
    """354M on 8 GPUs, without data and without a GPU. Hours by hand: 6 N + 12 L C T FLOPs a token,
    989 TFLOP/s an H100; disk: two newest, the best and one being written, 12 bytes a parameter."""
    monkeypatch.chdir(tmp_path)
    out = dry_run("354m", tmp_path, capsys, gpus=8)
    n = 50304 * 1024 + 24 * (12 * 1024**2 + 13 * 1024) + 2 * 1024
    tokens = 18794 * 524288
    flops = 6 * tokens * (6 * n + 12 * 24 * 1024 * 1024)
    expected = [f"{flops / (share * 989e12 * 8) / 3600:.1f} h" for share in (0.3, 0.4, 0.5)]
    line = next(line for line in out.splitlines() if line.startswith("hours of 6 trainings"))
    assert re.findall(r"[\d.]+ h", line) == expected and "8 x h100" in line
    disk = next(line for line in out.splitlines() if line.startswith("disk: "))
    assert f"{6 * 4 * 12 * n / 2**30:.1f} GiB of checkpoints" in disk
    assert f"{2 * tokens / 2**30:.1f} GiB of data" in disk
    torchrun = "$ python -m torch.distributed.run --standalone --nproc_per_node=8"
    for seed in (1337, 1338, 1339):
        for arm in ("rope", "rove"):
            run = f"354m/{arm}-seed{seed}"
            options = f"configs/gpt2_354m_{arm}.toml --seed {seed} --run_name {run} --resume\n"
            assert re.search(rf"{re.escape(torchrun)} .*train\.py'? {re.escape(options)}", out)
            for script in ("perplexity", "core", "ruler", "hellaswag"):
                assert re.search(
                    f"{re.escape(torchrun)} .*-m scripts.eval_{script} runs/{run}", out
                )
    assert "-m data.ruler --tokenizer gpt2 --lengths 4096,8192 --samples 500 --out data/rul" in out
    assert "$ python -m scripts.log_report runs/354m" in out  # its configs log to wandb


def test_hours_on_a_cpu_are_those_of_a_run_that_is_done(folder, monkeypatch):
    """Of two trainings one is left, 6 steps of 64 tokens at 0.02 tokens/s: 19,200 s."""
    plan = make_plan()
    configs = list(plan.trained.values())
    metrics = configs[0].run_dir / "metrics.jsonl"
    metrics.parent.mkdir(parents=True)
    lines = [{"step": 1, "perf/tokens_per_s": s} for s in (0.01, 0.02, 9.0)]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"step": 1}]))
    one = experiment.make_slots(1, [])
    assert "1 trainings: 5:20:00 at 0 tokens/s each" in experiment.hours(
        configs[1:], configs, one, "h100"
    )
    assert "not known on a CPU" in experiment.hours(configs, configs, one, "h100")
    two = experiment.make_slots(2, [])  # one of them has nothing to do
    assert "5:20:00" in experiment.hours(configs[1:], configs, two, "h100")
    assert experiment.hours([], configs, one, "h100") == "hours: all trainings are done"


def test_gpus_are_planned_with_not_used(folder):
    with pytest.raises(UserError, match="--gpus is for --dry-run; CUDA_VISIBLE_DEVICES says"):
        main(Args(Path("x.toml"), gpus=8))
    with pytest.raises(UserError, match="slots 3: 8 GPUs cannot be shared evenly"):
        main(Args(Path("x.toml"), dry_run=True, gpus=8, slots=3))


def test_batches_that_do_not_fit_the_gpus_are_refused_first(folder):
    with pytest.raises(UserError, match="total_batch_size .64 tokens. is not a multiple of"):
        main(Args(Path("x.toml"), dry_run=True, gpus=3))


# -----------------------------------------------------------------------------
# the arms


def test_arms_that_differ_in_more_are_refused(folder, capsys):
    edit("rove.toml", "n_layer = 2", "n_layer = 3")
    with pytest.raises(UserError, match=r"differ in model.n_layer \(2 and 3\)"):
        main(Args(Path("x.toml"), dry_run=True))
    names = 'arms_differ_in = ["model.pos_emb", "model.n_layer"]'
    edit("x.toml", "seeds = [1]", f"seeds = [1]\n{names}")
    main(Args(Path("x.toml"), dry_run=True))
    assert "arms differ only in model.n_layer, model.pos_emb" in capsys.readouterr().out


def test_arms_with_other_data_are_refused(folder):
    edit("x.toml", '["--train.log_interval", "1"]', '["--data.dir", "elsewhere"]')
    with pytest.raises(UserError, match="data.dir is elsewhere"):
        main(Args(Path("x.toml"), dry_run=True))


def test_a_derived_arm(folder, capsys):
    """It is evaluated and not trained."""
    arm = "[arms.late]\nfrom = 'rope'\npos_emb = 'rove'\n\n[perplexity]"
    edit("x.toml", "[perplexity]", arm)
    main(Args(Path("x.toml"), dry_run=True))
    out = capsys.readouterr().out
    assert (
        "late-seed1 training" not in out and "scripts.eval_perplexity runs/tiny/late-seed1" in out
    )
    assert "late-seed1 is not trained: it has the weights of tiny/rope-seed1" in out
    runs = make_plan().runs
    found = {name: runs[f"{name}-seed1"].model.pos_emb for name in ("rope", "rove", "late")}
    assert found == {"rope": "rope", "rove": "rove", "late": "rove"}
    assert runs["late-seed1"].run_name == "tiny/late-seed1"
    edit("x.toml", "seeds = [1]", "seeds = [1]\narms_differ_in = []")
    with pytest.raises(UserError, match=r"rope and rove differ in model.pos_emb"):
        main(Args(Path("x.toml"), dry_run=True))


def test_only_the_evaluations_that_have_a_section(folder, capsys):
    write_folder(Path("b"))
    Path("s.json").touch()
    text = Path("x.toml").read_text()
    sections = text[text.index("[perplexity]") :]
    Path("x.toml").write_text(
        text.replace(sections, "")
        + "[hellaswag]\nlimit = 5\n[core]\nbundle = 'b'\ntasks = ['copa', 'boolq']\n"
        "max_length = 16\n[packed]\nlengths = [8]\nyarn = ['none']\nquantities = ['last']\n"
        "[ruler]\ndata = 'd'\ntokenizer = 'bytes'\nlengths = [700, 800]\nsamples = 3\n"
        "yarn = ['none', '4']\ntasks = ['fwe']\nsquad = 's.json'\n"
    )
    main(Args(Path("x.toml"), dry_run=True))
    out = capsys.readouterr().out
    run = "runs/tiny/rope-seed1"
    found = [line for line in out.splitlines() if run in line and "-m scripts.eval" in line]
    assert found == [
        f"$ python -m scripts.eval_perplexity {run} --text packed_stream --lengths 8 --yarn none"
        " --quantities last",
        f"$ python -m scripts.eval_core {run} --bundle b --tasks copa,boolq --max-length 16"
        f" --out {run}/eval/core.json",
        f"$ python -m scripts.eval_ruler {run} --data d --lengths 700,800 --tasks fwe"
        " --yarn none,4",
        f"$ python -m scripts.eval_hellaswag {run} --limit 5 --out {run}/eval/hellaswag.json",
    ]
    assert (
        "$ python -m data.ruler --tokenizer bytes --lengths 700,800 --samples 3 --tasks fwe"
        " --squad s.json --out d"
    ) in out
    assert "scripts.sample" not in out
    next(Path("b").rglob("copa.jsonl")).unlink()
    with pytest.raises(UserError, match="x.toml: core: --tasks copa: .*copa.jsonl is missing"):
        load_experiment(Path("x.toml"))


@pytest.mark.parametrize(
    ("what", "values"), [("initial_weights", "ab"), ("batches", [{"0": "a"}, {"0": "b"}])]
)
def test_unequal_starts_are_refused(folder, monkeypatch, what, values):
    """Both are computed for every arm and seed, and compared within a seed."""
    rest = iter(values)
    monkeypatch.setattr(provenance, "initial_weights", lambda config, names: "same")
    monkeypatch.setattr(provenance, "batches", lambda config, processes: {})
    monkeypatch.setattr(provenance, what, lambda *_: next(rest))
    plan = make_plan()
    word = what.removeprefix("initial_")
    with pytest.raises(UserError, match=f"seed 1: rope-seed1 and rove-seed1 start with .*{word}"):
        plan.check_starts()
    starts = json.loads(Path("runs/tiny/experiment.json").read_text())["starts"]
    assert [starts[f"{arm}-seed1"][word] for arm in ("rope", "rove")] == list(values)


def make_plan() -> experiment.Plan:
    file = load_experiment(Path("x.toml"))
    configs = {(arm, 1): arm_config(file, arm, 1) for arm in file.arms}
    ledger = provenance.Ledger(file.dir / "experiment.json")
    return experiment.Plan(file, configs, experiment.make_slots(1, []), ledger)


def test_trainings_by_different_code_are_not_mixed(folder, monkeypatch, capsys):
    """Refused if one is still to be trained or if they are of two codes; else said."""
    plan = make_plan()
    for name in plan.trained:
        path = Path("runs/tiny") / name / "ckpt" / "last"
        path.parent.mkdir(parents=True)
        path.write_text("step_00000006\n")
    now = {"code": provenance.code_of("train")}
    old = {"code": now["code"] | {"model.py": "0" * 64}}

    plan.ledger.trainings = {"rope-seed1": now, "rove-seed1": now}
    plan.ledger.check_code(plan.trained, to_train=True)
    plan.ledger.check_code(plan.trained, to_train=False)
    assert capsys.readouterr().out == ""

    plan.ledger.trainings = {"rope-seed1": old, "rove-seed1": old}
    plan.ledger.check_code(plan.trained, to_train=False)
    assert (
        "all by one code, and it is not the code there is now (model.py)" in capsys.readouterr().out
    )
    message = r"rope-seed1: trained by other code than the code there is now \(model.py\)"
    with pytest.raises(UserError, match=message):
        plan.ledger.check_code(plan.trained, to_train=True)
    with pytest.raises(UserError, match=message):  # also just before a training starts
        plan.sign_training("rove-seed1")

    plan.ledger.trainings = {"rope-seed1": old, "rove-seed1": now}
    with pytest.raises(UserError, match=r"rove-seed1: trained by other code than rope-seed1"):
        plan.ledger.check_code(plan.trained, to_train=False)

    plan.ledger.trainings = {"rope-seed1": now}
    plan.ledger.check_code(plan.trained, to_train=True)
    assert "trained by code that is not known: rove-seed1" in capsys.readouterr().out


def test_what_makes_a_result_unusable(folder, monkeypatch, capsys):
    """Another command, other inputs, other code, another output; and only those."""
    plan, output = make_plan(), Path("runs/tiny/r/eval/core.json")
    code = {"model.py": "a"}
    monkeypatch.setattr(provenance, "code_of", lambda module: dict(code))

    def step(arguments: str = "-m scripts.eval_core r", model: str = "m") -> experiment.Step:
        return plan.once("r core", arguments.split(), output, {"model": model})

    assert not step().done and step().why == ""
    journal = output.with_suffix(".journal")
    journal.mkdir(parents=True)
    prepared = step().job.prepare()
    assert not journal.exists()  # nobody knows by which code it was begun
    assert not step().done
    journal.mkdir()
    prepared = step().job.prepare()
    assert journal.exists()  # killed and started again, the same way: it goes on
    with pytest.raises(UserError, match="'r core' ended well, but .*core.json is not there"):
        step().job.finish(prepared)
    output.write_text("{}")
    assert not step().done  # of a killed one, maybe
    step().job.finish(prepared)
    assert step().done
    assert not step(model="n").done and step(model="n").why == "changed since: inputs"
    assert not step(arguments="-m scripts.eval_core r --limit 5").done
    monkeypatch.setattr(plan, "report", lambda: [step(model="n")])
    plan.show("h100")
    assert "[to run] r core: changed since: inputs\n$ " in capsys.readouterr().out
    code["model.py"] = "b"
    assert step().why == "changed since: code, model.py"
    step().job.prepare()
    assert not journal.exists()
    code["model.py"] = "a"
    step().job.prepare()
    assert not step().done  # begun anew and not finished
    step().job.finish(prepared)
    output.write_text("{ }")
    assert not step().done and step().why == "changed since: output"
    output.write_text("{}")
    assert step().done
    # a step of several files: each is looked at, and what is not its own is not
    options = {"also": ("*.csv",)}
    (output.parent / "a.csv").write_text("1")
    step_of = lambda: plan.once("r core", ["-m", "scripts.eval_core", "r"], output, {"model": "m"}, **options)  # noqa: E501, E731  # fmt: skip
    step_of().job.finish(step_of().job.prepare())
    (output.parent / "b.csv").write_text("mine")
    assert step_of().done
    (output.parent / "a.csv").unlink()
    assert step_of().why == "changed since: output"
    plan.ledger.receipts["r core"]["output"] = "of an earlier version"
    assert not step_of().done


def test_the_inputs_of_evaluations_at_their_default_places(folder, monkeypatch):
    """What is there by its hash; what will be downloaded by the hash that is checked then."""
    monkeypatch.setattr(hellaswag, "PATH", Path("questions"))
    monkeypatch.setattr(eval_core, "BUNDLE_PATH", Path("bundle"))
    edit("x.toml", "[samples]", "[core]\n[hellaswag]\n[samples]")
    plan = make_plan()

    def inputs() -> dict[str, Any]:
        found = plan.evaluations_of(plan.runs["rope-seed1"])
        return {name: these for name, _, these in found if name in ("core", "hellaswag")}

    wanted = {"bundle": eval_core.BUNDLE_SHA256}, {"items": hellaswag.SHA256}
    assert inputs() == dict(zip(("core", "hellaswag"), wanted, strict=True))
    Path("questions").write_bytes(b"abc")
    abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert inputs()["hellaswag"] == {"items": abc}
    Path("bundle").write_bytes(b"abc")
    assert inputs()["core"] == {"bundle": abc}


def test_ruler_data_that_are_complete(tmp_path):
    """With all tasks asked for each is there or was skipped; one that was skipped for want of a
    file is made when there is the file."""
    skipped = {"qa_1": "task qa_1 needs --squad a.json", "qa_2": "task qa_2: too long for 500"}
    names = [task for task in TASKS if task not in skipped]

    def complete(there: list[str] = names, **options: Any) -> bool:
        files = [{"length": 500, "task": task, "sha256": task} for task in there]
        manifest = {"tokenizer": {"name": "bytes"}, "samples": 3, "files": files}
        (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"skipped": skipped}))
        settings = {"lengths": [500], "samples": 3, "yarn": ["none"]} | options
        found = ruler_files(Ruler(str(tmp_path), "bytes", **settings))
        wanted = settings.get("tasks", there)
        assert found in (None, {f"500 {task}": task for task in wanted})
        return found is not None

    assert complete() and complete(tasks=["fwe"]) and complete(hotpot="h.json")
    assert not complete(squad="s.json") and complete([*names, "qa_1"], squad="s.json")
    assert not complete(["fwe"]) and not complete(lengths=[500, 600]) and not complete(samples=4)
    assert not complete(tasks=["fwe", "qa_1"]) and complete(["fwe", "vt"], tasks=["fwe"])


def test_edited_data_are_not_mixed_with_those_before(folder, capfd):
    """The manifest is the same, a shard is not: one line before anything runs, and again just
    before a training."""
    write_data_dir(Path("shards"), [toy_tokens(500, 1)], [toy_tokens(305, 2)])
    plan = make_plan()
    plan.sign_training("rope-seed1")
    path = Path("shards/tiny_train_000001.bin")
    path.write_bytes(path.read_bytes()[:-2] + b"a\0")
    with pytest.raises(UserError, match="train_000001.bin: sha256 .* but manifest.json says"):
        plan.sign_training("rove-seed1")
    with pytest.raises(UserError, match="train_000001.bin: sha256 .* but manifest.json says"):
        main(Args(Path("x.toml")))
    assert capfd.readouterr().out.splitlines()[-1] == "[done] data"


def test_other_threads_are_noted(folder, monkeypatch, capsys):
    """Runs with the bits of other thread counts; on GPUs they do not matter."""
    monkeypatch.setattr(experiment.Slots, "threads", 2)
    plan = make_plan()
    for name, threads in (("rope-seed1", 4), ("rove-seed1", 2)):
        path = Path("runs/tiny") / name / "meta.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"threads": threads}))
    plan.note_threads()
    out = capsys.readouterr().out
    assert "note: not trained with the 2 threads" in out and out.endswith(": rope-seed1\n")
    plan.slots = experiment.make_slots(1, ["0"])
    plan.note_threads()
    assert capsys.readouterr().out == ""


# -----------------------------------------------------------------------------
# from end to end


def run(capfd: pytest.CaptureFixture, dry_run: bool = False) -> str:
    """Run x.toml; what it and its steps printed."""
    capfd.readouterr()
    main(Args(Path("x.toml"), dry_run))
    return capfd.readouterr().out


def state() -> dict[str, tuple[int, bytes]]:
    return {
        str(p): (p.stat().st_mtime_ns, p.read_bytes())
        for top in ("runs", "shards")
        for p in sorted(Path(top).rglob("*"))
        if p.is_file()
    }


def test_a_failing_step_is_named(folder, capfd):
    edit("x.toml", '["data.text"', '["data.nothing"')
    with pytest.raises(UserError, match="step 'data' failed with exit code 1"):
        main(Args(Path("x.toml")))
    assert "No module named data.nothing" in capfd.readouterr().err  # its own words are shown


def finished(plan: experiment.Plan, name: str, val_loss: float | None = 1.0) -> Path:
    """A checkpoint of a run's last step, as far as its meta.json."""
    config = plan.trained[name]
    step_dir = config.run_dir / "ckpt" / "step_00000006"
    step_dir.mkdir(parents=True)
    (step_dir.parent / "last").write_text("step_00000006\n")
    meta = {
        "schema": SCHEMA, "step": config.train.max_steps, "val_loss": val_loss,
        "config": config_to_dict(config), "data": {"manifest_sha256": None},
        "files": {"model.safetensors": {"sha256": "a", "bytes": 1}},
    }  # fmt: skip
    (step_dir / "meta.json").write_text(json.dumps(meta))
    (step_dir / "model.safetensors").write_bytes(b"1")
    return step_dir


def test_a_training_that_diverged_is_named(folder):
    """A loss that is not finite is null in meta.json; going on would change nothing."""
    plan = make_plan()
    finished(plan, "rope-seed1", val_loss=None)
    step = plan.trainings()[0]
    assert not step.done
    with pytest.raises(UserError, match="rope-seed1: at its last step, and .* it diverged; move"):
        step.job.finish(None)


@pytest.mark.parametrize("damage", ["cut", "gone", "no weights"])
def test_a_damaged_last_checkpoint_is_for_the_training_to_heal(folder, capsys, damage):
    plan = make_plan()
    step_dir = finished(plan, "rope-seed1")
    assert plan.trainings()[0].done
    if damage == "cut":
        (step_dir / "meta.json").write_text("{")
    else:
        (step_dir / ("meta.json" if damage == "gone" else "model.safetensors")).unlink()
    assert not plan.trainings()[0].done
    assert plan.evaluations()  # to run, behind the training
    assert "note: runs/tiny/rope-seed1/ckpt" in capsys.readouterr().out


def test_what_was_begun_by_code_that_is_not_known_stays_so(folder, monkeypatch):
    plan = make_plan()
    monkeypatch.setattr(plan.ledger, "check_shards", lambda folder: None)
    plan.sign_training("rove-seed1")
    assert plan.ledger.trainings["rove-seed1"] == {"code": provenance.code_of("train")}
    finished(plan, "rope-seed1")  # by hand, or before experiment.json was lost
    plan.sign_training("rope-seed1")
    assert "rope-seed1" not in plan.ledger.trainings
    finished(plan, "rove-seed1")  # the experiment's own, stopped: it goes on
    plan.sign_training("rove-seed1")
    assert "rove-seed1" in plan.ledger.trainings


def test_data_that_are_replaced_under_way_are_refused(folder, monkeypatch):
    plan = make_plan()
    monkeypatch.setattr(plan.ledger, "check_shards", lambda folder: None)
    Path("shards").mkdir()
    (Path("shards") / "manifest.json").write_text("{}")
    plan.sign_training("rope-seed1")
    (Path("shards") / "manifest.json").write_text("{ }")
    with pytest.raises(UserError, match="shards: other data than when the experiment was started"):
        plan.sign_training("rove-seed1")


@pytest.mark.parametrize(
    "content", ["[]", "{", '{"receipts": 5}', '{"receipts": null}', '{"starts": {"a": 1}}', "{}"]
)
def test_a_damaged_ledger_is_named(folder, content):
    path = Path("runs/tiny/experiment.json")
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.raises(UserError, match="experiment.json: damaged; move it away: evaluations are"):
        make_plan()


def test_a_training_that_stopped_is_not_evaluated(folder, monkeypatch):
    """train.py ends with 0 when it was told to stop, but there is nothing to compare yet."""
    plan = make_plan()
    monkeypatch.setattr(provenance, "is_trained", lambda config, data: False)
    for step in plan.trainings():
        assert not step.done
        with pytest.raises(UserError, match="-seed1 stopped before its last step; run the exp"):
            step.job.finish(None)


def test_data_of_another_tokenizer_are_not_what_the_command_makes(tmp_path, monkeypatch):
    (tmp_path / "manifest.json").touch()
    manifest = {"tokenizer": {"name": "gpt2"}}
    monkeypatch.setattr(experiment_file, "load_manifest", lambda folder: manifest)
    for name, done in (("gpt2", True), ("bytes", False)):
        assert is_prepared(Data(str(tmp_path), ["data.text", "--tokenizer", name])) is done
    assert is_prepared(Data(str(tmp_path), ["data.text"]))


@pytest.mark.slow
def test_from_end_to_end(folder, capfd):
    """Runs what is missing, nothing the second time, and after a change what that affects."""
    arm = "[arms.late]\nfrom = 'rope'\npos_emb = 'rove'\n\n[perplexity]"
    edit("x.toml", "[perplexity]", arm)

    # stopped by a failure behind the trainings, it goes on from there
    edit("x.toml", "documents = 2", "documents = 20")
    with pytest.raises(UserError, match="step 'rope-seed1 perplexity' failed with exit code 2"):
        main(Args(Path("x.toml")))
    assert "of >= 16 tokens" in capfd.readouterr().err
    edit("x.toml", "documents = 20", "documents = 2")
    out = run(capfd)
    for name in ("data", "rope-seed1 training", "rove-seed1 training"):
        assert f"[done] {name}\n" in out
    assert out.count("[run] ") == 7
    for arm in ("rope", "rove", "late"):
        folder = Path(f"runs/tiny/{arm}-seed1")
        record = json.loads((folder / "eval" / "perplexity.json").read_text())
        assert record["config"]["model"]["pos_emb"] == arm.replace("late", "rove")
        assert record["config"]["seed"] == 1
        samples = json.loads((folder / "eval" / "samples.json").read_text())
        assert [s["prompt"] for s in samples] == ["ab", "c d"]
    report = Path("runs/tiny/report.html").read_text()
    assert "<h1>Tiny</h1>" in report and "model.pos_emb" in report
    record = json.loads(Path("runs/tiny/experiment.json").read_text())
    starts = [record["starts"][f"{arm}-seed1"] for arm in ("rope", "rove")]
    for key in ("weights", "batches"):
        assert starts[0][key] == starts[1][key]
    assert len(starts[0]["batches"]) == 3 and starts[0]["shared_parameters"] == 27

    before = state()
    out = run(capfd)
    assert "nothing to do; the report is runs/tiny/report.html" in out and "[run]" not in out
    assert state() == before

    def to_run() -> list[str]:
        return re.findall(r"\[to run\] ([^:\n]*)", run(capfd, dry_run=True))

    # a result that is not the one it made, and other settings of an evaluation
    samples = Path("runs/tiny/rope-seed1/eval/samples.json")
    samples.write_text("[]")
    assert to_run() == ["rope-seed1 samples", "report"]
    samples.write_bytes(before[str(samples)][1])
    edit("x.toml", "lengths = [8, 16]", "lengths = [8, 12]")
    assert to_run() == [f"{arm}-seed1 perplexity" for arm in ("rope", "rove", "late")]
    edit("x.toml", "lengths = [8, 12]", "lengths = [8, 16]")
    assert to_run() == []

    # one more seed: what is done stays done
    edit("x.toml", "seeds = [1]", "seeds = [1, 2]")
    assert "report" in (missing := to_run())
    assert {name for name in missing if name.startswith(("rope", "rove", "late"))} == {
        *(f"{arm}-seed2 training" for arm in ("rope", "rove")),
        *(f"{arm}-seed2 {what}" for arm in ("rope", "rove", "late")
          for what in ("perplexity", "samples")),
    }  # fmt: skip
    edit("x.toml", "seeds = [1, 2]", "seeds = [1]")
    assert to_run() == []

    # a training that stopped before its end goes on; other weights are evaluated anew
    meta = Path("runs/tiny/rove-seed1/ckpt/step_00000006/meta.json")
    edit(str(meta), '"step": 6', '"step": 3')
    assert to_run() == [f"rove-seed1 {what}" for what in ("training", "perplexity", "samples")]
    meta.write_bytes(before[str(meta)][1])

    # so does one that was killed before its last evaluation
    values = json.loads(before[str(meta)][1])
    meta.write_text(json.dumps(values | {"val_loss": None}))
    assert "rove-seed1 training" in to_run()
    meta.write_bytes(before[str(meta)][1])

    # other settings of a training, or other data, are never mixed with what is there
    for arm in ("rope", "rove"):
        edit(f"{arm}.toml", "learning_rate = 1e-2", "learning_rate = 2e-2")
    with pytest.raises(
        UserError, match="rope-seed1: made with train.learning_rate 0.01, now it is"
    ):
        run(capfd)
    for arm in ("rope", "rove"):
        edit(f"{arm}.toml", "learning_rate = 2e-2", "learning_rate = 1e-2")
    shutil.rmtree("shards")
    Path("a.jsonl").write_text(Path("a.jsonl").read_text() + '{"text": "one more"}\n')
    with pytest.raises(UserError, match="rope-seed1: trained on other data than shards has now"):
        run(capfd)


# -----------------------------------------------------------------------------
# killed, and finished all the same


def processes_of(pid: int) -> list[int]:
    """A process and all that it started, by /proc."""
    found = [pid]
    for pid in found:
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                found += map(int, path.read_text().split())
            except OSError:  # it ended just now
                pass
    return found


def run_program(
    cwd: Path, slots: int, lines: int | None = None, wait: float = 0, children: bool = True
) -> int:
    """Run x.toml as a user does; with `lines`, SIGKILL it `wait` seconds after it has printed so
    many, and with `children` what it started as well. Gives back how many it printed."""
    arguments = ["-u", "-m", "scripts.experiment", "x.toml", "--slots", str(slots)]
    process = subprocess.Popen([sys.executable, *arguments], cwd=cwd, stdout=subprocess.PIPE)
    printed = 0
    for _ in process.stdout:
        printed += 1
        if printed == lines:
            time.sleep(wait)
            for pid in processes_of(process.pid) if children else [process.pid]:
                os.kill(pid, signal.SIGKILL)
            break
    process.stdout.close()
    assert process.wait(600) == (-signal.SIGKILL if lines else 0)
    return printed


def results(runs: Path) -> dict[str, Any]:
    """What must not depend on stops: weights, moments, losses, evaluations, what was compared."""
    found = {}
    for path in sorted(runs.glob("*/ckpt/step_00000030/*.safetensors")):
        found[str(path.relative_to(runs))] = {
            name: (array.dtype.str, array.tobytes())
            for name, array in safetensors.numpy.load_file(path).items()
        }
    for path in sorted(runs.glob("*/metrics.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found[str(path.relative_to(runs))] = [
            {k: v for k, v in line.items() if not k.startswith(("perf/", "mem/"))}
            for line in lines
            if "event" not in line
        ]
    for path in sorted(runs.glob("*/eval/*.json")):
        found[str(path.relative_to(runs))] = json.loads(path.read_text())
    record = json.loads((runs / "experiment.json").read_text())
    for receipt in record["receipts"].values():
        receipt["output"] = None  # files with times in them
    del record["receipts"]["report"]  # its inputs are files with times in them
    del record["shards"]  # times
    return found | record


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the children in /proc")
def test_killed_three_times_equals_unbroken(tmp_path, monkeypatch):
    """One at a time and unbroken; two at a time and killed three times: twice with everything it
    had started, once alone, so that its jobs save and the next one waits for them."""
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    folders = tmp_path / "unbroken", tmp_path / "killed"
    for folder in folders:
        folder.mkdir()
        write_experiment(folder)
        monkeypatch.chdir(folder)
        edit("x.toml", "seeds = [1]", "seeds = [1, 2]")
        for arm in ("rope", "rove"):
            edit(f"{arm}.toml", "max_steps = 6", "max_steps = 30")
    unbroken, killed = folders
    total = run_program(unbroken, 1)
    rng = np.random.RandomState(int(os.environ.get("KILL_SEED", "8")))
    for i, lines in enumerate(sorted(rng.randint(8, 32, 3))):
        run_program(killed, 2, int(lines) - 4 * i, rng.uniform(0, 4), children=i != 1)
    assert total > 60
    run_program(killed, 2)
    a, b = (results(folder / "runs" / "tiny") for folder in (unbroken, killed))
    assert list(a) == list(b)
    assert sum(name.endswith("model.safetensors") for name in a) == 4
    assert sum(name.endswith("perplexity.json") for name in a) == 4
    for name in a:
        assert a[name] == b[name], name
    assert (killed / "runs/tiny/report.html").is_file()
    logs = {path.name for path in (killed / "runs/tiny/logs").iterdir()}
    assert {"rope-seed1-training.log", "rove-seed2-perplexity.log"} <= logs


# as on a machine with two GPUs: without any the processes meet over gloo
TWO_GPUS = """
from pathlib import Path
from nanorove.errors import run_cli
from scripts import experiment
experiment.visible_gpus = lambda: ["0", "1"]
run_cli(lambda: experiment.main(experiment.Args(Path("x.toml"))))
"""


@pytest.mark.slow
def test_under_torchrun(folder):
    """Trainings and evaluations in two processes each; the experiment killed on the way, which
    reaches the workers behind torchrun: they save, and the next start goes on from there."""
    for arm in ("rope", "rove"):
        edit(f"{arm}.toml", "max_steps = 6", "max_steps = 400")
        edit(f"{arm}.toml", "checkpoint_interval = 3", "checkpoint_interval = 400")
        edit(f"{arm}.toml", "eval_interval = 3", "eval_interval = 400")
    first = subprocess.Popen([sys.executable, "-c", TWO_GPUS], stdout=subprocess.DEVNULL)
    run_dir = Path("runs/tiny/rope-seed1")
    end = time.monotonic() + 300
    while time.monotonic() < end:
        path = run_dir / "metrics.jsonl"
        if path.is_file() and "train/loss" in path.read_text():
            break
        time.sleep(0.05)
    first.kill()
    first.wait()
    if sys.platform == "linux":
        with only_one(Path("runs/tiny")):  # waits
            assert "by SIGTERM" in (run_dir / "PREEMPTED").read_text()
        assert 0 < read_meta(resolve_step_dir(run_dir))["step"] < 400
    done = subprocess.run([sys.executable, "-c", TWO_GPUS], stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0
    command = "$ python -m torch.distributed.run --standalone --nproc_per_node=2"
    assert done.stdout.count(command) == 4  # two trainings, two evaluations
    assert "resume: goes on at step" in done.stdout
    for arm in ("rope", "rove"):
        facts = json.loads(Path(f"runs/tiny/{arm}-seed1/meta.json").read_text())
        assert facts["world_size"] == 2
        assert Path(f"runs/tiny/{arm}-seed1/eval/perplexity.json").is_file()
    starts = json.loads(Path("runs/tiny/experiment.json").read_text())["starts"]
    assert {start["processes"] for start in starts.values()} == {2}


@pytest.mark.slow
def test_the_report_goes_to_wandb(folder, capfd, monkeypatch):
    """Offline, the real file read back: a run of its own in the experiment's group, with the page,
    the figures and the tables."""
    monkeypatch.setenv("HOME", str(folder))
    Path("runs/tiny").mkdir(parents=True)
    Path("runs/tiny/report.html").write_text("<h1>Tiny</h1>")
    shutil.copy(REPO / "docs" / "figures" / "demo_perplexity.png", "runs/tiny/perplexity.png")
    Path("runs/tiny/perplexity.csv").write_text("arm,length,ppl\nrope,8,90.5\nrove,8,\n")
    command = [sys.executable, "-m", "scripts.log_report", "runs/tiny", "--project", "p"]
    subprocess.run([*command, "--group", "tiny", "--mode", "offline"], check=True, timeout=120)
    (path,) = Path("runs/tiny/wandb").glob("offline-run-*/run-*.wandb")
    records = wandb_records(path)
    (started,) = [r.run for r in records if r.WhichOneof("record_type") == "run"]
    assert (started.run_group, started.job_type, started.project) == ("tiny", "report", "p")
    assert started.display_name == "tiny/report"
    (row,) = history(records)
    assert row["report._type"] == "html-file" if "report._type" in row else row["report"]
    media = {p.suffix: p for p in path.parent.joinpath("files/media").rglob("*") if p.is_file()}
    assert media[".png"].read_bytes() == Path("runs/tiny/perplexity.png").read_bytes()
    assert "<h1>Tiny</h1>" in media[".html"].read_text()
    table = json.loads(media[".json"].read_text())
    assert table["columns"] == ["arm", "length", "ppl"]
    assert table["data"] == [["rope", 8.0, 90.5], ["rove", 8.0, None]]
    assert json.loads(Path("runs/tiny/wandb/report.json").read_text())["id"] == started.run_id


def test_wandb_is_asked_for_by_the_configs(folder, capsys):
    main(Args(Path("x.toml"), dry_run=True))
    assert "log_report" not in capsys.readouterr().out
    for arm in ("rope", "rove"):
        edit(f"{arm}.toml", 'wandb = "disabled"', 'wandb = "offline"')
    main(Args(Path("x.toml"), dry_run=True))
    assert (
        "$ python -m scripts.log_report runs/tiny --project nanorove --group tiny --mode offline\n"
        in capsys.readouterr().out
    )
