import dataclasses
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from model import GPTConfig
from nanorove import config as C
from nanorove.errors import UserError, run_cli
from tests.conftest import REPO

CONFIGS = sorted((REPO / "configs").glob("*.toml"))

# every key there is, written by hand
KEYS = """run_name seed init_from
model.vocab_size model.block_size model.n_layer model.n_head model.n_embd model.pos_emb
model.rope_base model.yarn_factor
data.dir
train.total_batch_size train.micro_batch_size train.max_steps train.warmup_steps
train.learning_rate train.min_lr train.weight_decay train.beta1 train.beta2 train.grad_clip
train.eval_interval train.val_tokens train.checkpoint_interval train.keep_checkpoints
train.log_interval train.compile train.attn_backend train.schedule train.dtype
train.deterministic train.residual train.loss_chunk train.activation_checkpointing
train.hellaswag_interval
log.wandb log.project""".split()


def load(*argv: str) -> C.Config:
    return C.load_config(list(argv))[0]


def refused(capfd, *argv: str) -> str:
    """What a user sees when the command ends with exit code 2, with tyro's frame taken off."""
    with pytest.raises(SystemExit) as error:
        run_cli(lambda: C.load_config(list(argv)))
    assert error.value.code == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert "Traceback" not in err
    return " ".join(err.replace("│", " ").split())


def test_a_file_gives_what_stands_in_it(tiny_toml):
    config = load(tiny_toml())
    assert (config.run_name, config.seed, config.init_from) == ("tiny", 7, None)
    assert config.model == GPTConfig(257, 8, 2, 2, 16, "rove", 10000.0, 1.0)
    assert (config.train.learning_rate, config.train.compile) == (0.01, False)
    assert config.run_dir == Path("runs/tiny")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 8


def test_command_line_beats_file(tiny_toml):
    config, resume = C.load_config(
        [tiny_toml(), "--train.max_steps", "9", "--run_name=other", "--model.pos_emb", "rope",
         "--train.learning_rate", "1e-1", "--init_from", "runs/x", "--resume"]
    )  # fmt: skip
    assert (config.train.max_steps, config.run_name) == (9, "other")
    assert (config.model.pos_emb, config.train.learning_rate) == ("rope", 0.1)
    assert config.init_from == "runs/x"
    assert resume
    assert config.train.warmup_steps == 2  # the rest of the file stays
    assert C.load_config([tiny_toml()])[1] is False


@pytest.mark.parametrize(
    ("old", "new", "nearest"),
    [
        ("learning_rate =", "learning_rat =", "train.learning_rate"),
        ("n_layer =", "n_layers =", "model.n_layer"),
        ("seed = 7", "sede = 7", "seed"),
        ("[data]", "[dta]", "data.dir"),
    ],
)
def test_unknown_key_in_file(tiny_toml, capfd, old, new, nearest):
    message = refused(capfd, tiny_toml((old, new)))
    assert "tiny.toml" in message and "unknown" in message
    assert f"'{nearest}'" in message


def test_unknown_key_on_the_command_line(tiny_toml, capfd):
    message = refused(capfd, tiny_toml(), "--train.learning_rat", "1e-3")
    assert "--train.learning_rat" in message and "--train.learning-rate" in message
    assert "--model.n-layer" in refused(capfd, tiny_toml(), "--model.n_layers", "3")


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("n_layer = 2", "n_layer = 2.5", "n_layer"),
        ("n_layer = 2", 'n_layer = "2"', "n_layer"),
        ("n_layer = 2", "n_layer = true", "n_layer"),
        ("max_steps = 6", "max_steps = [6]", "max_steps"),
        ("learning_rate = 1e-2", 'learning_rate = "1e-2"', "learning_rate"),
        ("learning_rate = 1e-2", "learning_rate = true", "learning_rate"),
        ("compile = false", "compile = 0", "compile"),
        ("compile = false", 'compile = ""', "compile"),
        ("compile = false", 'compile = "False"', "compile"),
        ('pos_emb = "rove"', 'pos_emb = "yarn"', "pos_emb"),
        ('pos_emb = "rove"', "pos_emb = false", "pos_emb"),
        ('run_name = "tiny"', "run_name = 3", "run_name"),
        ('project = "nanorove"', "project = ['a', 'b']", "project"),
    ],
)
def test_wrong_type_in_file(tiny_toml, capfd, old, new, key):
    message = refused(capfd, tiny_toml((old, new)))
    assert key in message.replace("-", "_") and "tiny.toml" in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("--model.n_layer", "2.5"),
        ("--model.n_layer", "two"),
        ("--train.learning_rate", "fast"),
        ("--train.learning_rate", ""),
        ("--model.pos_emb", "yarn"),
        ("--train.attn_backend", "Flash"),
        ("--log.wandb", "True"),
        # a flag that takes any word for "on" has cost people a run (mace#429, nanoGPT#439)
        ("--train.compile", "0"),
        ("--train.compile", "no"),
        ("--train.compile", ""),
        ("--train.compile", "yes"),
    ],
)
def test_wrong_type_on_the_command_line(tiny_toml, capfd, key, value):
    assert key in refused(capfd, tiny_toml(), key, value).replace("-", "_").replace("__", "--")


def test_booleans_need_their_word(tiny_toml, capfd):
    assert load(tiny_toml(), "--train.compile", "True").train.compile is True
    on = tiny_toml(("compile = false", "compile = true"))
    assert load(on).train.compile is True
    assert load(on, "--train.compile", "False").train.compile is False
    assert load(on, "--train.compile=False").train.compile is False
    refused(capfd, on, "--train.compile")
    refused(capfd, on, "--resume", "False")  # --resume takes no value and must not swallow one


@pytest.mark.parametrize(
    ("argument", "key", "value"),
    [
        ("--run_name=a=b", "run_name", "a=b"),
        ("--run_name=a-b_c/d.1", "run_name", "a-b_c/d.1"),
        ("--train.learning_rate=1e-3", "learning_rate", 0.001),
        ("--train.learning_rate=1", "learning_rate", 1.0),
        ("--train.weight_decay=0", "weight_decay", 0.0),
        ("--data.dir=my data/a_b=c-d", "dir", "my data/a_b=c-d"),
        ("--seed=0", "seed", 0),
        ("--seed=4294967295", "seed", 4294967295),
    ],
)
def test_values_arrive_as_given(tiny_toml, argument, key, value):
    config = load(tiny_toml(), argument)
    owner = next(o for o in (config, config.train, config.data) if hasattr(o, key))
    assert getattr(owner, key) == value
    assert type(getattr(owner, key)) is type(value)


def test_int_in_the_file_for_a_float(tiny_toml):
    config = load(tiny_toml(("rope_base = 10000.0", "rope_base = 10000")))
    assert config.model.rope_base == 10000.0 and isinstance(config.model.rope_base, float)


@pytest.mark.parametrize("key", [k for k in KEYS if k != "init_from"])
def test_missing_key(tiny_toml, capfd, key):
    """A forgotten pos_emb would train another method than its author believes."""
    name = key.split(".")[-1]
    path = Path(tiny_toml())
    lines = path.read_text().splitlines()
    kept = [line for line in lines if line.split(" =")[0] != name]
    assert len(kept) == len(lines) - 1
    path.write_text("\n".join(kept))
    message = refused(capfd, str(path)).replace("-", "_")
    assert key in message and "tiny.toml" in message


def test_missing_file_folder_and_broken_toml(tiny_toml, capfd, tmp_path):
    assert "nope.toml" in refused(capfd, "nope.toml")
    assert str(tmp_path) in refused(capfd, str(tmp_path))
    message = refused(capfd, tiny_toml(("seed = 7", "seed = ")))
    assert "tiny.toml" in message and "line 2" in message
    message = refused(capfd, tiny_toml(("seed = 7", "seed = 7\nseed = 8")))
    assert "tiny.toml" in message
    Path("binary.toml").write_bytes(b"\xff\xfe\x00")
    assert "binary.toml" in refused(capfd, "binary.toml")
    assert "configs/demo_rove.toml" in refused(capfd)
    assert "config" in refused(capfd, "--train.max_steps", "3")


@pytest.mark.parametrize(
    ("argv", "values"),
    [
        (["--model.n_embd", "17"], ["n_embd (17)", "n_head (2)"]),
        (["--model.n_head", "16"], ["even"]),  # a head of one number cannot be rotated
        (["--model.yarn_factor", "0.5"], ["yarn_factor (0.5)"]),
        (["--model.yarn_factor", "2", "--model.pos_emb", "learned"], ["yarn_factor (2.0)"]),
        (["--train.warmup_steps", "7"], ["warmup_steps (7)", "max_steps (6)"]),
        (["--train.warmup_steps=-1"], ["warmup_steps (-1)"]),
        (["--train.min_lr", "1"], ["min_lr (1.0)", "learning_rate (0.01)"]),
        (["--train.learning_rate", "nan"], ["learning_rate (nan)"]),
        (["--train.learning_rate", "inf"], ["learning_rate (inf)"]),
        (["--train.min_lr", "nan"], ["min_lr (nan)"]),
        (["--train.weight_decay", "nan"], ["weight_decay (nan)"]),
        (["--train.weight_decay", "inf"], ["weight_decay (inf)"]),
        (["--train.grad_clip", "nan"], ["grad_clip (nan)"]),
        (
            ["--train.deterministic", "True", "--train.attn_backend", "flash"],
            ["attn_backend (flash)", "deterministic (True)"],
        ),
        (["--train.residual", "bf16"], ["residual (bf16)", "dtype bf16, not fp32"]),
        (["--train.loss_chunk=-1"], ["loss_chunk (-1)"]),
        (["--train.hellaswag_interval=-3"], ["hellaswag_interval (-3)"]),
        (
            ["--train.hellaswag_interval", "4"],
            ["hellaswag_interval (4)", "multiple of eval_interval (3)"],
        ),
        (["--train.max_steps", "0"], ["max_steps (0)"]),
        (["--train.micro_batch_size", "0"], ["micro_batch_size (0)"]),
        (["--train.keep_checkpoints", "0"], ["keep_checkpoints (0)"]),
        (["--train.grad_clip", "0"], ["grad_clip (0.0)"]),
        (["--train.weight_decay=-0.1"], ["weight_decay (-0.1)"]),
        (["--train.beta2", "1"], ["beta2 (1.0)"]),
        (["--seed=-1"], ["seed (-1)"]),
        (["--seed=4294967296"], ["seed (4294967296)"]),
        (["--run_name", "../tiny"], ["run_name ('../tiny')"]),
        (["--run_name", "a/../../b"], ["run_name"]),
        (["--run_name", "/tmp/tiny"], ["run_name ('/tmp/tiny')"]),
        (["--run_name", "a b"], ["run_name ('a b')"]),
        (["--run_name", ""], ["run_name ('')"]),
        (["--run_name", "a/"], ["run_name ('a/')"]),
        (["--run_name", "."], ["run_name ('.')"]),
    ],
)
def test_impossible_values_are_refused_with_the_values(tiny_toml, capfd, argv, values):
    message = refused(capfd, tiny_toml(), *argv)
    for value in values:
        assert value in message


def test_help_lists_every_key_and_the_values_of_the_file(tiny_toml, capfd):
    for argv in ([], [tiny_toml()]):
        with pytest.raises(SystemExit) as done:
            C.load_config([*argv, "--help"])
        assert done.value.code == 0
        text = capfd.readouterr().out
        for key in [*KEYS, "resume"]:
            assert "--" + key.replace("_", "-") + " " in text, key
    shown = " ".join(text.replace("│", " ").split())  # without the frame and the line breaks
    assert "(default: 0.01)" in shown and "(default: rove)" in shown


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_round_trip_of_the_shipped_files(path):
    config = C.load_config_file(path)
    text = C.config_to_toml(config)
    assert tomllib.loads(text) == tomllib.loads(path.read_text())  # nothing lost, nothing added
    assert C.config_from_dict(tomllib.loads(text)) == config
    assert C.config_from_dict(C.config_to_dict(config)) == config


def test_round_trip_keeps_every_bit_of_a_float(tiny_toml):
    config = load(tiny_toml(), "--train.learning_rate", repr(0.1 + 0.2), "--train.min_lr", "1e-300")
    again = C.config_from_dict(tomllib.loads(C.config_to_toml(config)))
    assert again.train.learning_rate == 0.1 + 0.2
    assert again.train.min_lr == 1e-300


def test_the_keys_are_the_ones_of_the_dataclasses():
    def keys(kind, prefix=""):
        for f in dataclasses.fields(kind):
            nested = prefix == "" and f.name in ("model", "data", "train", "log")
            yield from keys(f.type, f.name + ".") if nested else [prefix + f.name]

    assert sorted(keys(C.Config)) == sorted(KEYS)


def test_config_differences(tiny_toml):
    a = load(tiny_toml())
    b = load(tiny_toml(), "--seed", "8", "--train.max_steps", "9", "--init_from", "runs/x")
    expected = {"seed": (7, 8), "train.max_steps": (6, 9), "init_from": (None, "runs/x")}
    assert C.config_differences(a, b) == expected
    assert C.config_differences(a, a) == {}


@pytest.mark.parametrize(
    "argv",
    [
        ["tiny.toml", "--train.max_stepz", "3"],
        ["tiny.toml", "--train.max_steps", "x"],
        ["tiny.toml", "--model.n_embd", "17"],
        ["tiny.toml", "--help"],
    ],
)
def test_other_ranks_are_quiet(tiny_toml, capfd, monkeypatch, argv):
    """Eight processes must not print one mistake eight times."""
    tiny_toml()
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        C.load_config(argv)
    assert capfd.readouterr() == ("", "")


def test_train_py_ends_with_one_line_and_exit_code_2(tiny_toml):
    path = tiny_toml(("n_layer =", "n_layers ="))
    done = subprocess.run(
        [sys.executable, str(REPO / "train.py"), path], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "error: tiny.toml: unknown key 'model.n_layers'; the nearest valid name is 'model.n_layer'"
    ]


def test_user_error_needs_run_cli():
    with pytest.raises(UserError):  # a library call raises; only a script's main exits
        C.load_config_file("nope.toml")
