"""To HuggingFace and back: config.json and weights, without transformers.

Learned positions are HuggingFace's own GPT-2. The other modes have no class there, so their folder
carries remote_code/modeling_nanorove.py and a copy of model.py, the one truth about what they do.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
import torch.nn.functional as F

import model as model_file
from model import GPT, GPTConfig
from nanorove.errors import UserError

PREFIX = "model."  # of our names in NanoRoVEForCausalLM
RUN_JSON = "nanorove_run.json"  # in an exported folder: what makes a run of it again
REMOTE_CODE = Path(__file__).parent / "remote_code" / "modeling_nanorove.py"

# what HuggingFace's GPT-2 can do otherwise, and we do not
GPT2_FIXED = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False, True),  # the same numbers another way
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}


def code_files() -> list[Path]:
    """The Python files that a folder of a model without a class at HuggingFace needs."""
    return [Path(model_file.__file__), REMOTE_CODE]


def to_hf_config(config: GPTConfig, eot: int) -> dict[str, Any]:
    """The content of config.json for a model that ends documents with token `eot`."""
    common = {
        "bos_token_id": eot,
        "eos_token_id": eot,
        "dtype": "float32",
        "tie_word_embeddings": True,
    }
    if config.pos_emb == "learned":
        return common | {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "vocab_size": config.vocab_size,
            "n_positions": config.block_size,
            "n_layer": config.n_layer,
            "n_head": config.n_head,
            "n_embd": config.n_embd,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        }
    module = REMOTE_CODE.stem
    return common | {
        "architectures": ["NanoRoVEForCausalLM"],
        "model_type": "nanorove",
        "auto_map": {
            "AutoConfig": f"{module}.NanoRoVEConfig",
            "AutoModelForCausalLM": f"{module}.NanoRoVEForCausalLM",
        },
        **dataclasses.asdict(config),
    }


def from_hf_config(values: dict[str, Any], name: str) -> GPTConfig:
    """The inverse. Raises UserError, with `name` in it, for what GPT cannot compute."""
    kind = values.get("model_type")
    try:
        if kind == "nanorove":
            return GPTConfig(**{f.name: values[f.name] for f in dataclasses.fields(GPTConfig)})
        if kind != "gpt2":
            raise UserError(f"{name}: model_type {kind!r}; only gpt2 and nanorove can be imported")
        for key, allowed in GPT2_FIXED.items():
            if values.get(key, allowed[0]) not in allowed:
                raise UserError(f"{name}: {key} = {values[key]!r}, but ours is {allowed[0]!r}")
        if values.get("n_inner") not in (None, 4 * values["n_embd"]):
            raise UserError(f"{name}: n_inner = {values['n_inner']}, but ours is 4 * n_embd")
        return GPTConfig(
            vocab_size=values["vocab_size"],
            block_size=values["n_positions"],
            n_layer=values["n_layer"],
            n_head=values["n_head"],
            n_embd=values["n_embd"],
            pos_emb="learned",
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{name}: not the config of a model of ours or GPT-2 ({error!r})") from None


def to_hf_state(state: dict[str, torch.Tensor], config: GPTConfig) -> dict[str, torch.Tensor]:
    """A GPT's state dict -> what model.safetensors of the folder holds."""
    if config.pos_emb != "learned":
        return {PREFIX + name: t.contiguous() for name, t in state.items()}
    state = {name: _transposed(name, t) for name, t in state.items()}
    wte = state["transformer.wte.weight"][: config.vocab_size]  # they pad no vocabulary
    return state | {"transformer.wte.weight": wte.contiguous()}


def from_hf_state(
    state: dict[str, torch.Tensor], config: GPTConfig, name: str
) -> dict[str, torch.Tensor]:
    """The inverse; the rows that pad the vocabulary are zero if there were none.

    Raises UserError, with `name` in it, for an output head that is not the embedding.
    """
    if config.pos_emb != "learned":
        return {key.removeprefix(PREFIX): t for key, t in state.items()}
    ours = {}
    for key, t in state.items():
        key = key.removeprefix("transformer.")  # OpenAI's own upload has no prefix
        if key.endswith((".attn.bias", ".attn.masked_bias")):
            continue  # the causal mask, which older versions stored
        ours[f"transformer.{key}"] = _transposed(key, t)
    wte = ours.get("transformer.wte.weight")
    head = ours.pop("transformer.lm_head.weight", wte)
    tied = wte is not None and head.shape == wte.shape
    if not tied or not ((head == wte) | head.isnan()).all():  # NaN is said later
        raise UserError(f"{name}: lm_head.weight is not wte.weight, and ours are one matrix")
    padding = config.padded_vocab_size - config.vocab_size
    return ours | {"transformer.wte.weight": F.pad(wte, (0, 0, 0, padding))}


def _transposed(name: str, t: torch.Tensor) -> torch.Tensor:
    # HuggingFace's GPT-2 has (in, out) where nn.Linear has (out, in)
    return t.T.contiguous() if ".c_" in name and t.ndim == 2 else t


def load_hf(folder: Path) -> GPT:
    """A folder with config.json and safetensors weights -> the model, on the CPU, in eval mode.

    Raises UserError for what is missing, damaged or another model. Pickled weights are not read.
    """
    config_json = folder / "config.json"
    try:
        values = json.loads(config_json.read_text(encoding="utf-8"))
        config = from_hf_config(values, str(config_json))
    except OSError as error:
        raise UserError(f"{config_json}: {error.strerror}; a folder of a model has it") from None
    except (ValueError, AttributeError) as error:
        raise UserError(f"{config_json}: not JSON ({error}); download it again") from None
    whole = folder / "model.safetensors"
    paths = [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))  # its parts
    if not paths:
        raise UserError(f"{folder}: no .safetensors (pickled weights are not read: they run code)")
    try:
        model = GPT(config)
    except (ValueError, RuntimeError, OverflowError) as error:
        line = " ".join(str(error).split())
        raise UserError(f"{config_json}: no model can be made of it: {line}") from None
    try:
        state = {name: t for path in paths for name, t in safetensors.torch.load_file(path).items()}
        model.load_state_dict(from_hf_state(state, config, str(folder)), strict=True)
    except (RuntimeError, OSError, safetensors.SafetensorError) as error:
        lines = " ".join(str(error).split())
        raise UserError(f"{folder}: weights that do not fit config.json: {lines}") from None
    return model.eval()
