"""nanoRoVE for transformers: a thin shell around model.py, which lies beside this file.

Load with AutoModelForCausalLM.from_pretrained(..., trust_remote_code=True). Any key of the config
can be given there too: yarn_factor=4.0 stretches the context by YaRN, max_len=8192 makes the rotary
table longer than the context that the model is meant for.

There are no attention masks in here: a batch is of prompts of one length, or padded on the right
to be scored. Left padding is refused, not ignored.
"""

import dataclasses

import torch
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .model import GPT, GPTConfig

# transformers renamed it in 5.x
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


class NanoRoVEConfig(PretrainedConfig):
    """GPTConfig's keys, and max_len: tokens the rotary table covers (default: the context)."""

    model_type = "nanorove"
    attribute_map = {
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }

    def __init__(self, max_len: int | None = None, **kwargs) -> None:
        for field in dataclasses.fields(GPTConfig):
            setattr(self, field.name, kwargs.pop(field.name, field.default))
        self.max_len = max_len
        super().__init__(**kwargs)

    def gpt_config(self) -> GPTConfig:
        names = (field.name for field in dataclasses.fields(GPTConfig))
        return GPTConfig(**{name: getattr(self, name) for name in names})

    @property
    def max_position_embeddings(self) -> int:
        return self.max_len or self.gpt_config().context


class CacheShell:
    """transformers' cache as model.py's KVCache: keys and values are stored rotated."""

    def __init__(self, cache: DynamicCache) -> None:
        self.cache, self.pos = cache, cache.get_seq_length()

    def append(
        self, layer: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cache.update(k, v, layer)


class NanoRoVEForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = NanoRoVEConfig
    base_model_prefix = "model"
    _supports_sdpa = True
    _no_split_modules = ["Block"]

    def __init__(self, config: NanoRoVEConfig) -> None:
        super().__init__(config)
        backend = "eager" if config._attn_implementation == "eager" else "sdpa"
        self.model = GPT(config.gpt_config(), max_len=config.max_len, attn_backend=backend)
        self.post_init()

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.model.transformer.wte

    def set_input_embeddings(self, value: torch.nn.Module) -> None:
        self.model.transformer.wte = value

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: DynamicCache | None = None,
        past_key_values: DynamicCache | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        return_dict: bool | None = None,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """input_ids (B, T) -> logits over the real vocabulary; labels as in other causal models."""
        for name in ("inputs_embeds", "output_attentions", "output_hidden_states"):
            if kwargs.pop(name, None) not in (None, False):
                raise ValueError(f"{name} is not supported")
        cache = past_key_values if cache is None else cache
        if use_cache and cache is None:
            cache = DynamicCache()
        if not (cache is None or isinstance(cache, DynamicCache)):
            raise ValueError(f"{type(cache).__name__}: only a DynamicCache is supported")
        start = 0 if cache is None else cache.get_seq_length()
        here = torch.arange(start, start + input_ids.size(1), device=input_ids.device)
        if position_ids is not None and not (position_ids == here).all():
            raise ValueError("position_ids: tokens stand one after the other, from 0; no padding")
        mask = attention_mask
        if mask is not None and (mask.ndim != 2 or (mask[:, 1:] > mask[:, :-1]).any()):
            raise ValueError("left padding is not supported: batch prompts of one length")
        if self.model.cos is not None and self.model.cos.device != input_ids.device:
            # transformers builds models on the meta device and does not know this table
            self.model._build_rotary_table(input_ids.device)
        hidden = self.model.hidden(input_ids, None if cache is None else CacheShell(cache))
        if isinstance(logits_to_keep, int):
            hidden = hidden[:, -logits_to_keep:]  # 0 keeps all
        else:
            hidden = hidden[:, logits_to_keep]
        logits = self.model.head(hidden)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        output = CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: cache})
        return output.to_tuple() if return_dict is False else output
