"""To HuggingFace and back: weights bit for bit, and folders that work where this code is not."""

import json
import os
import shlex
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from data.tokenizer import get_tokenizer
from model import GPT, GPTConfig
from nanorove.checkpoint import load_model, read_meta, resolve_step_dir
from nanorove.config import config_from_dict
from nanorove.errors import UserError, run_cli
from nanorove.hf import from_hf_config, from_hf_state, load_hf, to_hf_config, to_hf_state
from scripts import export_hf, import_hf
from tests import reference
from tests.conftest import REPO, TINY_TOML
from tests.model_hub import ModelHub
from tests.test_sampling import draw, save_run

TEXT = "Ein naïver Text: 日本語 🙂\n\n  def f(x):\t return x**2 'tis don't 12345"
SHAPES = [
    dict(vocab_size=130, n_positions=40, n_embd=24, n_layer=3, n_head=4),
    dict(vocab_size=64, n_positions=7, n_embd=40, n_layer=1, n_head=1),
]


def run_main(monkeypatch, module, *args) -> None:
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, args)])
    module.main()


# -----------------------------------------------------------------------------
# weights and configs


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_huggingfaces_gpt2_comes_back_bit_for_bit(shape):
    from transformers import GPT2Config, GPT2LMHeadModel

    hf = reference.randomise(GPT2LMHeadModel(GPT2Config(**shape)).eval(), 0.2)
    config = from_hf_config(hf.config.to_dict(), "here")
    assert config == GPTConfig(
        shape["vocab_size"], shape["n_positions"], shape["n_layer"], shape["n_head"],
        shape["n_embd"], "learned",
    )  # fmt: skip
    state = {name: t for name, t in hf.state_dict().items() if name != "lm_head.weight"}
    ours = from_hf_state(state, config, "here")
    GPT(config).load_state_dict(ours, strict=True)
    back = to_hf_state(ours, config)
    assert set(back) == set(state)
    assert all(torch.equal(back[name], t) and back[name].is_contiguous()
               for name, t in state.items())  # fmt: skip
    values = to_hf_config(config, 5)
    again = GPT2LMHeadModel(GPT2Config(**values)).eval()
    assert not again.load_state_dict(back, strict=False).unexpected_keys
    ids = torch.randint(shape["vocab_size"], (2, 7), generator=torch.Generator().manual_seed(0))
    assert torch.equal(again(ids).logits, hf(ids).logits)


def test_openais_own_upload_has_no_prefix_and_has_masks():
    config = GPTConfig(70, 12, 2, 2, 16, "learned")
    state = to_hf_state(reference.randomise(GPT(config)).state_dict(), config)
    upload = {name.removeprefix("transformer."): t for name, t in state.items()}
    for l in range(2):
        upload[f"h.{l}.attn.bias"] = torch.ones(1, 1, 12, 12).tril()
        upload[f"h.{l}.attn.masked_bias"] = torch.tensor(-1e4)
    upload["lm_head.weight"] = upload["wte.weight"].clone()
    ours, expected = (from_hf_state(s, config, "here") for s in (upload, state))
    assert set(ours) == set(expected)
    assert all(torch.equal(ours[name], expected[name]) for name in ours)


@pytest.mark.parametrize("pos_emb", ["learned", "rope", "rove", "none"])
def test_our_own_weights_and_config_come_back(pos_emb):
    config = GPTConfig(70, 24, 2, 2, 32, pos_emb, rope_base=500.0)
    if config.rotary:
        config = GPTConfig(70, 24, 2, 2, 32, pos_emb, rope_base=500.0, yarn_factor=4.0)
    state = reference.randomise(GPT(config)).state_dict()
    values = json.loads(json.dumps(to_hf_config(config, 5)))
    read = from_hf_config(values, "here")
    back = from_hf_state(to_hf_state(state, config), read, "here")
    assert set(back) == set(state)
    if pos_emb == "learned":  # HuggingFace's GPT-2 keeps neither a base nor the padding
        assert read == GPTConfig(70, 24, 2, 2, 32, pos_emb)
        assert not back["transformer.wte.weight"][70:].any()
        state["transformer.wte.weight"][70:] = 0
    else:
        assert read == config
    assert all(torch.equal(back[name], state[name]) for name in state)


GPT2_JSON = to_hf_config(GPTConfig(70, 12, 1, 2, 16, "learned"), 5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(model_type="llama"), "model_type 'llama'; only gpt2 and nanorove"),
        (dict(activation_function="relu"), "activation_function = 'relu', but ours is 'gelu_new'"),
        (dict(layer_norm_epsilon=1e-6), "layer_norm_epsilon = 1e-06"),
        (dict(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx = True"),
        (dict(tie_word_embeddings=False), "tie_word_embeddings = False"),
        (dict(n_inner=100), "n_inner = 100"),
        (dict(n_head=3), r"n_embd \(16\) must be a multiple of n_head \(3\)"),
        (dict(n_layer="two"), "not the config of a model of ours or GPT-2"),
        (dict(n_layer=1.5), r"n_layer \(1.5\) must be at least 1, an int"),
        (dict(n_positions=1e30), r"block_size \(1e\+30\) must be at least 1, an int"),
        (dict(model_type="nanorove"), "not the config of a model of ours"),
    ],
    ids=str,
)
def test_what_gpt_cannot_compute_is_refused(tmp_path, changes, message):
    (tmp_path / "config.json").write_text(json.dumps(GPT2_JSON | changes))
    with pytest.raises(UserError, match=message) as error:
        load_hf(tmp_path)
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_damaged_and_pickled_weights_are_refused(tmp_path):
    with pytest.raises(UserError, match="config.json: No such file"):
        load_hf(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(GPT2_JSON))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match="no .safetensors .pickled"):
        load_hf(tmp_path)
    config = from_hf_config(GPT2_JSON, "here")
    state = to_hf_state(GPT(config).state_dict(), config)
    path = tmp_path / "model.safetensors"
    missing = {name: t for name, t in state.items() if "ln_f" not in name}
    safetensors.torch.save_file(missing, path)
    with pytest.raises(UserError, match="do not fit config.json.*ln_f"):
        load_hf(tmp_path)
    untied = state | {"lm_head.weight": state["transformer.wte.weight"] + 1}
    safetensors.torch.save_file(untied, path)
    with pytest.raises(UserError, match="lm_head.weight is not wte.weight"):
        load_hf(tmp_path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(UserError, match="do not fit"):
        load_hf(tmp_path)
    too_large = GPT2_JSON | dict(n_positions=2**31 - 1, n_embd=2**20)
    (tmp_path / "config.json").write_text(json.dumps(too_large))
    with pytest.raises(UserError, match="config.json: no model can be made of it: .*memory"):
        load_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="config.json: not JSON"):
        load_hf(tmp_path)


def test_weights_in_parts(tmp_path):
    config = from_hf_config(GPT2_JSON, "here")
    model = reference.randomise(GPT(config))
    state = to_hf_state(model.state_dict(), config)
    (tmp_path / "config.json").write_text(json.dumps(GPT2_JSON))
    for part in range(2):
        names = sorted(state)[part::2]
        safetensors.torch.save_file(
            {name: state[name] for name in names}, tmp_path / f"model-{part}-of-2.safetensors"
        )
    ids = torch.arange(12)[None]
    assert torch.equal(load_hf(tmp_path)(ids), model(ids))


# -----------------------------------------------------------------------------
# an exported folder, in a process that cannot see this repository

# what transformers makes of a folder; asserts what needs no comparison with ours
ELSEWHERE = """
import importlib.util, json, sys
for name in ("nanorove", "model", "scripts", "data", "train"):
    assert importlib.util.find_spec(name) is None, name
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, StaticCache, pipeline

def refused(message, call):
    try:
        call()
    except ValueError as error:
        assert message in str(error), error
    else:
        raise AssertionError(f"not refused: {message}")

torch.set_num_threads(1)
found = {}
text, *folders = sys.argv[1:]
remote = dict(trust_remote_code=True)
greedy = dict(do_sample=False, max_new_tokens=6)
for folder in folders:
    model = AutoModelForCausalLM.from_pretrained(folder, **remote)
    tokenizer = AutoTokenizer.from_pretrained(folder, **remote)
    ids = torch.arange(20, 30)[None]
    cached, full = (model.generate(ids, use_cache=use, **greedy) for use in (True, False))
    beams = [model.generate(ids, num_beams=3, use_cache=use, **greedy) for use in (True, False)]
    assert torch.equal(*beams)
    write = pipeline("text-generation", model=model, tokenizer=tokenizer)
    found[folder] = {
        "class": type(model).__name__,
        "logits": model(ids).logits.tolist(),
        "loss": model(ids, labels=ids).loss.item(),
        "cached": cached.tolist(), "full": full.tolist(),
        "tokens": tokenizer(text).input_ids,
        "text": tokenizer.decode(tokenizer(text).input_ids),
        "written": write("ab", **greedy)[0]["generated_text"],
        "new": model.generation_config.max_new_tokens,
    }
    if found[folder]["class"] == "GPT2LMHeadModel":
        continue
    two = torch.stack((ids[0], ids[0] + 7))
    ones = torch.ones_like(two)
    left, right = ones.clone(), ones.clone()
    left[0, :3], right[0, -3:] = 0, 0
    last = model(two, attention_mask=ones, logits_to_keep=1).logits
    assert torch.allclose(last, model(two).logits[:, -1:], atol=1e-6)
    assert torch.equal(model(two, attention_mask=right).logits, model(two).logits)
    refused("left padding", lambda: model(two, attention_mask=left))
    refused("position_ids", lambda: model(two, position_ids=ones))
    refused("output_attentions", lambda: model(two, output_attentions=True))
    cache = StaticCache(config=model.config, max_cache_len=20)
    refused("StaticCache", lambda: model(two, cache=cache))
    refused("max_len", lambda: model(torch.zeros(1, 100, dtype=torch.int64)))
    assert model(ids, return_dict=False)[0].shape == model(ids).logits.shape
    eager = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", **remote)
    assert eager.model.transformer.h[0].attn.attn_backend == "eager"
    assert torch.allclose(eager(ids).logits, model(ids).logits, atol=1e-5)
    half = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **remote)
    assert half(ids).logits.dtype == torch.bfloat16
    long = AutoModelForCausalLM.from_pretrained(folder, max_len=100, **remote)
    assert long.config.max_position_embeddings == 100
    found[folder]["long"] = long(torch.arange(100)[None]).logits[0, -1].tolist()
    if model.config.pos_emb in ("rope", "rove"):
        assert half.model.cos.dtype == torch.float32  # the table, built late on the real device
        yarn = AutoModelForCausalLM.from_pretrained(folder, yarn_factor=4.0, **remote)
        assert yarn.config.max_position_embeddings == 64
        found[folder]["yarn"] = yarn(ids).logits.tolist()
    model.save_pretrained(folder + " saved")
    again = AutoModelForCausalLM.from_pretrained(folder + " saved", **remote)
    assert torch.equal(again(ids).logits, model(ids).logits)
print("RESULT" + json.dumps(found))
"""


def elsewhere(home: Path, program: str, *args: object, **more: str) -> str:
    """Standard output of a fresh process without this repository on its path."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "PYTHON"))}
    env |= {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", **more}
    home.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, *map(str, args)],
        cwd=home, env=env, capture_output=True, encoding="utf-8", stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


RUNS = {"rope": "rope", "rove": "rove", "none": "none", "learned": "learned", "yarn": "rove",
        "gpt2": "rove"}  # fmt: skip


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """(folder with a run RUNS has and, as hf_*, what export_hf made of it; what transformers
    found in the folders)."""
    root = tmp_path_factory.mktemp("a place")
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, pos_emb in RUNS.items():
            save_run(root / name, pos_emb, tokenizer_name="gpt2" if name == "gpt2" else "bytes")
            factor = ("--yarn-factor", "4") if name == "yarn" else ()
            run_main(monkeypatch, export_hf, root / name, root / f"hf_{name}", *factor)
    folders = [root / f"hf_{name}" for name in RUNS]
    out = elsewhere(root / "home", ELSEWHERE, TEXT, *folders)
    found = json.loads(out.rpartition("RESULT")[2])
    return root, {name: found[str(root / f"hf_{name}")] for name in RUNS}


@pytest.mark.parametrize("name", RUNS)
def test_an_exported_folder_works_without_this_repository(exported, name):
    root, found = exported[0], exported[1][name]
    model, _ = load_model(root / name, yarn_factor=4.0 if name == "yarn" else None)
    ids = torch.arange(20, 30)[None]
    with torch.inference_mode():
        torch.testing.assert_close(
            torch.tensor(found["logits"]), model(ids), rtol=0, atol=1e-5 if name == "learned" else 0
        )
        loss = model(ids[:, :-1], ids[:, 1:])
    assert found["loss"] == pytest.approx(loss.item(), abs=1e-5)
    tokenizer = get_tokenizer("gpt2" if name == "gpt2" else "bytes")
    new = draw(model, 6, prompt=tuple(range(20, 30)), temperature=0.0, eot=tokenizer.eot)
    for how in ("cached", "full"):
        tokens = found[how][0][10:]
        assert tokens[: len(new)] == new and set(tokens[len(new) :]) <= {tokenizer.eot}
    assert found["class"] == ("GPT2LMHeadModel" if name == "learned" else "NanoRoVEForCausalLM")
    assert found["new"] == model.config.context // 2


@pytest.mark.parametrize("name", RUNS)
def test_the_exported_tokenizer_is_ours(exported, name):
    root, found = exported[0], exported[1][name]
    tokenizer = get_tokenizer("gpt2" if name == "gpt2" else "bytes")
    # a document begins with end-of-text
    assert found["tokens"] == [tokenizer.eot, *tokenizer.encode(TEXT).tolist()]
    assert found["text"] == "<|endoftext|>" + TEXT
    model, _ = load_model(root / name, yarn_factor=4.0 if name == "yarn" else None)
    prompt = (tokenizer.eot, *tokenizer.encode("ab").tolist())
    new = draw(model, 6, prompt=prompt, temperature=0.0, eot=tokenizer.eot)
    assert found["written"] == "ab" + tokenizer.decode(new)


@pytest.mark.parametrize("name", ["rope", "rove"])
def test_keys_of_the_config_can_be_given_at_loading(exported, name):
    root, found = exported[0], exported[1][name]
    with torch.inference_mode():
        yarn, _ = load_model(root / name, yarn_factor=4.0)
        assert torch.equal(torch.tensor(found["yarn"]), yarn(torch.arange(20, 30)[None]))
        long, _ = load_model(root / name, max_len=100)
        expected = long(torch.arange(100)[None])[0, -1]
    torch.testing.assert_close(torch.tensor(found["long"]), expected, rtol=0, atol=0)


def test_there_is_one_model_py(exported):
    root, _ = exported
    assert (root / "hf_rove" / "model.py").read_bytes() == (REPO / "model.py").read_bytes()
    assert not list((root / "hf_learned").glob("*.py"))


# -----------------------------------------------------------------------------
# import_hf


@pytest.mark.parametrize("name", RUNS)
def test_an_exported_folder_becomes_a_run_again(exported, name, tmp_path, monkeypatch):
    root, _ = exported
    monkeypatch.chdir(tmp_path)
    run_main(monkeypatch, import_hf, root / f"hf_{name}", "again")
    factor = 4.0 if name == "yarn" else None
    model, meta = load_model(root / name, yarn_factor=factor)
    again, meta_again = load_model("runs/again")
    assert again.config == model.config and meta_again["step"] == meta["step"]
    state, state_again = model.state_dict(), again.state_dict()
    if name == "learned":
        state["transformer.wte.weight"][257:] = 0
    assert all(torch.equal(state_again[key], t) for key, t in state.items())
    assert meta_again["data"] == meta["data"]
    config = config_from_dict(read_meta(resolve_step_dir("runs/again"))["config"])
    assert config.run_name == "again" and config.seed == 1
    facts = json.loads(Path("runs/again/meta.json").read_text())
    assert facts["imported_from"] == str(root / f"hf_{name}")
    with pytest.raises(UserError, match="runs/again: is there already"):
        run_main(monkeypatch, import_hf, root / f"hf_{name}", "again")
    with pytest.raises(UserError, match="brings its own"):
        run_main(monkeypatch, import_hf, root / f"hf_{name}", "b", "--config", "c.toml")
    assert not Path("runs/b").exists()


@pytest.fixture
def gpt2_folder(tmp_path) -> Path:
    """A GPT-2 that transformers saved, with GPT-2's own vocabulary."""
    from transformers import GPT2Config, GPT2LMHeadModel

    hf = GPT2LMHeadModel(GPT2Config(n_positions=16, n_embd=8, n_layer=1, n_head=2)).eval()
    reference.randomise(hf, 0.2).save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


def test_a_gpt2_of_others_becomes_a_run(gpt2_folder, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(tmp_path)
    Path("rest.toml").write_text(TINY_TOML.replace("DATA_DIR", "some data"))
    with pytest.raises(UserError, match="name a config file for the rest"):
        run_main(monkeypatch, import_hf, gpt2_folder, "gpt2")
    run_main(monkeypatch, import_hf, gpt2_folder, "gpt2", "--config", "rest.toml")
    model, meta = load_model("runs/gpt2")
    assert meta["data"]["tokenizer"]["name"] == "gpt2" and model.config.pos_emb == "learned"
    config = config_from_dict(meta["config"])
    assert config.data.dir == "some data" and config.model.block_size == 16
    hf = AutoModelForCausalLM.from_pretrained(gpt2_folder)
    ids = torch.randint(50257, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(model(ids), hf(ids).logits, rtol=0, atol=1e-5)
    # and out again: the weights that came in, and no claim to have made them
    run_main(monkeypatch, export_hf, "runs/gpt2", "out")
    card = Path("out/README.md").read_text()
    assert f"imported from `{gpt2_folder}`, not trained with nanoRoVE" in card
    assert "Not known here" in card and "AdamW" not in card and "seed |" not in card
    theirs, ours = (
        safetensors.torch.load_file(folder / "model.safetensors")
        for folder in (gpt2_folder, Path("out"))
    )
    theirs.pop("lm_head.weight", None)
    assert set(theirs) == set(ours)
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)


WHOLE = {"step": 1, "val_loss": None, "best_val_loss": 1.5, "config": {}, "data": {
    "manifest_sha256": None, "tokenizer": {"name": "bytes", "sha256": "0"}}}  # fmt: skip


@pytest.mark.parametrize(
    "content",
    [
        {}, [], 3, "x",
        *({k: v for k, v in WHOLE.items() if k != gone} for gone in WHOLE),
        WHOLE | {"step": "1"}, WHOLE | {"step": True}, WHOLE | {"step": 1.0}, WHOLE | {"step": -1},
        WHOLE | {"config": []}, WHOLE | {"val_loss": "low"}, WHOLE | {"data": None},
        WHOLE | {"data": {"manifest_sha256": None, "tokenizer": "bytes"}},
        WHOLE | {"data": {"manifest_sha256": None, "tokenizer": {"name": 3, "sha256": "0"}}},
        WHOLE | {"data": {"manifest_sha256": None, "tokenizer": {"name": "bytes"}}},
        WHOLE | {"data": {"tokenizer": {"name": "bytes", "sha256": "0"}}},
    ],
    ids=str,
)  # fmt: skip
def test_what_export_hf_did_not_write_is_refused(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    Path("f").mkdir()
    Path("f/config.json").write_text(json.dumps(GPT2_JSON))
    config = from_hf_config(GPT2_JSON, "here")
    safetensors.torch.save_file(to_hf_state(GPT(config).state_dict(), config), "f/m.safetensors")
    Path("f/nanorove_run.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="f/nanorove_run.json: not what export_hf writes") as error:
        run_main(monkeypatch, import_hf, "f", "x")
    assert "\n" not in str(error.value) and not Path("runs").exists()


def test_a_vocabulary_that_nobody_knows_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "config.json").write_text(json.dumps(GPT2_JSON))
    config = from_hf_config(GPT2_JSON, "here")
    safetensors.torch.save_file(to_hf_state(GPT(config).state_dict(), config), "f/m.safetensors")
    Path("rest.toml").write_text(TINY_TOML.replace("DATA_DIR", "some data"))
    with pytest.raises(UserError, match="a vocabulary of 70: only GPT-2's"):
        run_main(monkeypatch, import_hf, "f", "x", "--config", "rest.toml")
    assert not Path("runs").exists()


# -----------------------------------------------------------------------------
# the model card, and the Hub


def test_the_card_says_what_the_run_says(tmp_path, monkeypatch):
    run = save_run(tmp_path / "run", "rove")
    step_dir = resolve_step_dir(run)
    meta = json.loads((step_dir / "meta.json").read_text())
    data = tmp_path / "data"
    data.mkdir()
    manifest = {
        "name": "corpus", "source": {"kind": "test"}, "documents": {"train": 1234},
        "shards": [{"split": "train", "tokens": 40_000}, {"split": "val", "tokens": 7}],
    }  # fmt: skip
    (data / "manifest.json").write_text(json.dumps(manifest))
    meta["config"]["data"]["dir"] = str(data)
    meta["data"]["manifest_sha256"] = export_hf.sha256_file(data / "manifest.json")
    meta["val_loss"] = 1.23456
    (step_dir / "meta.json").write_text(json.dumps(meta))
    entry = {"quantity": "last", "length": 16, "nll": 1.0, "factor": 1.0}
    perplexity = {
        "model_sha256": meta["files"]["model.safetensors"]["sha256"], "last_k": 8,
        "results": [entry | {"yarn": "none", "ppl": 2.5}, entry | {"yarn": "auto", "ppl": 3.25},
                    entry | {"yarn": "none", "ppl": 77.125, "length": 64},
                    entry | {"yarn": "none", "ppl": 99.0, "quantity": "disjoint"}],
    }  # fmt: skip
    (run / "eval").mkdir()
    (run / "eval" / "perplexity.json").write_text(json.dumps(perplexity))

    run_main(monkeypatch, export_hf, run, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    for part in (
        "`corpus` (kind test): 40,000 training tokens in 1,234 documents, tokenizer `bytes`",
        "Validation loss 1.2346 nats per byte, as trained",
        "16 = 1 steps of 16",
        "betas 0.9 and 0.95",
        "| without YaRN | 2.50 | 77.12 |",
        "| with YaRN fitted to each length | 3.25 |  |",
        "of kind RoVE, trained with nanoRoVE: step 1 of run `tiny`",
        f'AutoModelForCausalLM.from_pretrained("{tmp_path}/out", trust_remote_code=True)',
        f'AutoTokenizer.from_pretrained("{tmp_path}/out", trust_remote_code=True)',
        "\n# out\n",
        "torch 9.9",
        "| seed | 1 |",
    ):
        assert part in card, part
    assert "99.00" not in card

    # numbers of other weights or another data set are not this model's
    perplexity["model_sha256"] = "0" * 64
    (run / "eval" / "perplexity.json").write_text(json.dumps(perplexity))
    (data / "manifest.json").write_text("{}")
    run_main(monkeypatch, export_hf, run, tmp_path / "other", "--yarn-factor", "2.5")
    card = (tmp_path / "other" / "README.md").read_text()
    assert "Perplexity" not in card and "40,000" not in card and "`data`, tokenizer `bytes`" in card
    assert "16 trained, stretched to 40 by YaRN (factor 2.5), which it was not trained with" in card


def test_nothing_is_overwritten(tmp_path, monkeypatch, capsys):
    run = save_run(tmp_path / "run", "rope")
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(sys, "argv", ["export_hf", str(run), str(tmp_path / "out")])
    with pytest.raises(SystemExit) as exit:
        run_cli(export_hf.main)
    error = capsys.readouterr().err
    assert exit.value.code == 2 and "is there already" in error and error.count("\n") == 1
    assert list((tmp_path / "out").iterdir()) == []


def test_a_folder_of_the_users_is_left_alone(tmp_path, monkeypatch):
    run = save_run(tmp_path / "run", "rope")
    (tmp_path / "out.tmp").mkdir()
    (tmp_path / "out.tmp" / "mine").write_text("mine")
    before = set(tmp_path.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(export_hf, "model_card", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run_main(patch, export_hf, run, tmp_path / "out")
    assert set(tmp_path.iterdir()) == before  # nothing of a failure stays
    run_main(monkeypatch, export_hf, run, tmp_path / "out")
    assert set(tmp_path.iterdir()) == before | {tmp_path / "out"}
    assert (tmp_path / "out.tmp" / "mine").read_text() == "mine"
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out", tmp_path / "out.tmp")}
    assert len(modes) == 1  # open to whom other folders are open


def test_a_long_context_is_exported_without_its_table(tmp_path, monkeypatch):
    run = save_run(tmp_path / "run", "rove")
    run_main(monkeypatch, export_hf, run, tmp_path / "out", "--yarn-factor", "1e8")
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert config["model_max_length"] == 16 * 10**8
    with pytest.raises(UserError, match=r"yarn_factor \(1e\+30\)"):
        run_main(monkeypatch, export_hf, run, tmp_path / "no", "--yarn-factor", "1e30")


@pytest.mark.parametrize(
    ("repo", "message"),
    [("a/b/c", "--push a/b/c: Repo id"), ("me/ü", "--push me/ü: "), ("tiny", "whose.*USER/tiny")],
)
def test_a_name_that_the_hub_cannot_have_is_refused_first(tmp_path, monkeypatch, repo, message):
    run = save_run(tmp_path / "run", "rope")
    with pytest.raises(UserError, match=message) as error:
        run_main(monkeypatch, export_hf, run, tmp_path / "out", "--push", repo)
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


def test_without_a_network(tmp_path):
    run = save_run(tmp_path / "run", "rove")
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"  # nobody is there when it is closed
    env = os.environ | {"PYTHONPATH": str(REPO), "HF_ENDPOINT": url, "HF_TOKEN": "good",
                        "HF_HOME": str(tmp_path / "home"), "NO_PROXY": "127.0.0.1"}  # fmt: skip
    for command, ends in (
        (["export_hf", str(run), "an out", "--push", "me/tiny"], "--private me/tiny 'an out'\n"),
        (["import_hf", "me/tiny", "x"], "\n"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", f"scripts.{command[0]}", *command[1:]],
            cwd=tmp_path, env=env, capture_output=True, encoding="utf-8",
        )  # fmt: skip
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert "me/tiny: " in done.stderr.splitlines()[-1] and done.stderr.endswith(ends)
    assert (tmp_path / "an out" / "model.safetensors").is_file()


def test_push_and_pull(tmp_path):
    """The commands against a loopback hub, then transformers and import_hf by the name there."""
    run = save_run(tmp_path / "run", "rove")
    command = [sys.executable, "-m", "scripts.export_hf", str(run)]
    with ModelHub() as hub:

        def call(*args: str, token: str | None = "good", module: str = "") -> tuple[int, str]:
            env = os.environ | {"PYTHONPATH": str(REPO)} | hub.environment(tmp_path / "home", token)
            start = [sys.executable, "-m", module] if module else command
            done = subprocess.run(
                [*start, *args], cwd=tmp_path, env=env, capture_output=True, encoding="utf-8"
            )
            return done.returncode, done.stdout + done.stderr

        code, said = call("refused", "--push", "me/tiny", token="bad")
        assert code == 2 and "error: --push me/tiny: " in said and "hf auth login" in said
        assert "Traceback" not in said and not hub.repos
        again = "refused is written; to try again: hf upload --private me/tiny refused\n"
        assert said.endswith(again)
        hf = str(Path(sys.executable).with_name("hf"))
        env = os.environ | hub.environment(tmp_path / "home")
        done = subprocess.run([hf, *shlex.split(again)[-4:]], cwd=tmp_path, env=env)
        files = {p.name: p.read_bytes() for p in (tmp_path / "refused").iterdir()}
        assert done.returncode == 0 and len(files) > 5
        assert hub.repos.pop("me/tiny") == files and hub.private.pop("me/tiny") is True
        hub.large.clear()

        code, said = call("out", "--push", "me/tiny")
        assert code == 0 and f"pushed to {hub.url}/me/tiny" in said, said
        card = (tmp_path / "out" / "README.md").read_text()
        assert card.count('from_pretrained("me/tiny", ') == 2 and "\n# tiny\n" in card
        files = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
        assert hub.repos == {"me/tiny": files} and hub.private == {"me/tiny": True}
        assert len(hub.large) == 1  # the weights

        program = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("me/tiny", trust_remote_code=True)
print("RESULT", model(torch.arange(9)[None]).logits.sum().item())
"""
        env = hub.environment(tmp_path / "another home") | {"HF_HUB_OFFLINE": "0"}
        out = elsewhere(tmp_path / "another home", program, **env)
        model, _ = load_model(run)
        expected = model(torch.arange(9)[None]).sum().item()
        assert float(out.rpartition("RESULT")[2]) == pytest.approx(expected, rel=1e-5)

        code, said = call("me/tiny", "pulled", module="scripts.import_hf")
        assert code == 0, said
        pulled, _ = load_model(tmp_path / "runs" / "pulled")
        for key, t in model.state_dict().items():
            assert torch.equal(pulled.state_dict()[key], t)
        code, said = call("me/nothing", "x", module="scripts.import_hf")
        assert code == 2 and "me/nothing: no such folder, and the Hub says: 404" in said
