"""Rules for every key of a configuration, by itself and beside the others: one a line."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from sparse_lm.files import NO_URL
from sparse_lm.ops import formats
from sparse_lm.ops.activations import ACTIVATIONS
from sparse_lm.recipes import RECIPES, Dense
from sparse_lm.recipes.base import PRECISIONS, Rule, Shape

if TYPE_CHECKING:
    from sparse_lm.config import Config

REMAT_POLICIES = ("none", "full", "save_dots")
DTYPES = ("float32", "bfloat16")
_POSITIVE = (
    "steps", "batch_size", "microbatches", "seq_len", "log_every", "eval_every", "checkpoint_every", "keep_checkpoints",
    "model.dim", "model.layers", "model.heads", "model.kv_heads", "model.ffn_dim", "model.expert_dim",
    "model.vocab_size", "model.rope_theta", "model.norm_epsilon", "model.loss_chunk", "optimizer.learning_rate",
    "optimizer.epsilon", "optimizer.clip_norm", "optimizer.max_skipped_steps", "sparsity.refresh_every", "mesh.data",
    "mesh.fsdp", "mesh.expert", "mesh.tensor",
)  # fmt: skip
_NOT_NEGATIVE = (
    "keep_every", "model.head_dim", "model.experts", "model.shared_expert_dim", "data.eval_windows",
    "optimizer.warmup_steps", "optimizer.decay_steps", "optimizer.weight_decay", "sparsity.start_step",
    "sparsity.end_step",
)  # fmt: skip
_ONE_OF = {
    "model.activation": ACTIVATIONS,
    "model.dtype": DTYPES,
    "model.precision": PRECISIONS,
    "model.remat": REMAT_POLICIES,
    "model.router_scores": ("softmax", "sigmoid"),
    "optimizer.name": ("adamw", "muon"),
    "optimizer.schedule": ("cosine", "wsd"),
    "optimizer.moments": DTYPES,
}


def one_of(key: str, value: str, names: tuple[str, ...]) -> Rule:
    close = difflib.get_close_matches(str(value), names, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close and value not in names else ""
    return key, value in names, f"must be one of {', '.join(names)}{hint}"


def rules(c: Config, values: Mapping[str, Any]) -> Iterator[Rule]:
    """Yields all of them; a rule may divide by what an earlier one has found positive. `values` are those of `c`."""
    for key in _POSITIVE:
        yield key, values[key] > 0, "must be positive"
    for key in _NOT_NEGATIVE:
        yield key, values[key] >= 0, "must not be negative"
    for key, names in _ONE_OF.items():
        yield one_of(key, values[key], names)
    for key in ("init_from", "data.path", "data.cache_dir", "data.tokenizer"):
        yield key, "://" not in values[key], NO_URL
    yield from _run_rules(c)
    yield from _model_rules(c)
    yield from _optimizer_rules(c, values)
    yield from _mesh_rules(c)
    yield from _sparsity_rules(c)


def _run_rules(c: Config) -> Iterator[Rule]:
    yield "init_from", not (c.init_from and c.model.experts), "must be empty with model.experts"
    yield "steps", c.steps < 2**31, "must be less than 2^31"
    yield "seed", 0 <= c.seed < 2**32, "must be in 0..2^32 - 1"
    multiple = f"must be 0, or a multiple of checkpoint_every = {c.checkpoint_every}"
    yield "keep_every", c.keep_every % c.checkpoint_every == 0, multiple
    masked = "must be even with model.document_separator: cuDNN's attention takes masks of no other length"
    yield "seq_len", c.seq_len % 2 == 0 or c.model.document_separator < 0, masked
    yield "batch_size", c.batch_size % c.parts == 0, f"must be a multiple of {_parts(c)} = {c.parts}"


def _model_rules(c: Config) -> Iterator[Rule]:
    m = c.model
    yield "model.head_dim", m.head_dim % 2 == 0, "must be even (RoPE rotates pairs)"
    if not m.head_dim:
        yield "model.heads", m.dim % m.heads == 0, f"must divide model.dim = {m.dim}, or set model.head_dim"
        even = f"model.dim / model.heads = {m.head_width} must be even (RoPE rotates pairs)"
        yield "model.heads", m.head_width % 2 == 0, even
    yield "model.kv_heads", m.heads % m.kv_heads == 0, f"must divide model.heads = {m.heads}"
    token = f"must be a token of the model.vocab_size = {m.vocab_size}, or -1"
    yield "model.document_separator", -1 <= m.document_separator < m.vocab_size, token
    if m.experts:
        yield "model.experts", m.experts > 1, "must be 0, for one FFN, or 2 or more"
        choices = f"must be in 2..{m.experts} (of one expert the gate is 1, and its router learns nothing)"
        yield "model.experts_per_token", 2 <= m.experts_per_token <= m.experts, choices
        whole = "must be adamw with model.experts, whose matrices are stored as one"
        yield "optimizer.name", c.optimizer.name == "adamw", whole


def _optimizer_rules(c: Config, values: Mapping[str, Any]) -> Iterator[Rule]:
    o = c.optimizer
    yield "optimizer.warmup_steps", o.warmup_steps < c.steps, f"must be under config.steps = {c.steps}"
    falling = c.steps - o.warmup_steps
    if o.schedule == "wsd":
        decay = f"with schedule wsd must be in 1..{falling} (steps - warmup_steps)"
        yield "optimizer.decay_steps", 0 < o.decay_steps <= falling, decay
    else:
        yield "optimizer.decay_steps", o.decay_steps == 0, "must be 0 with schedule cosine, which decays all along"
    yield "optimizer.final_fraction", 0 <= o.final_fraction <= 1, "must be in 0..1"
    for key in ("optimizer.beta1", "optimizer.beta2"):
        yield key, 0 <= values[key] < 1, "must be in [0, 1)"
        rounded = o.moments == "bfloat16"  # which swallows changes of less than 0.4%
        yield key, not rounded or values[key] <= 0.99, "must be at most 0.99 with moments in bfloat16"


def _mesh_rules(c: Config) -> Iterator[Rule]:
    """Yields the rules of meshes: shards must be as large as one another, and whole where a format has tiles."""
    m, s, fsdp, tensor = c.model, c.sparsity, c.mesh.fsdp, c.mesh.tensor

    def divides(axis: str, what: str, number: int, multiple: int = 1) -> Rule:
        times = f"times {multiple} " if multiple > 1 else ""
        ok = number % (getattr(c.mesh, axis) * multiple) == 0
        return f"mesh.{axis}", ok, f"{times}must divide {what} = {number}"

    if m.experts:
        yield "mesh.tensor", tensor == 1, "must be 1 with model.experts: mesh.expert splits them over devices"
        yield divides("expert", "model.experts", m.experts)
        yield divides("fsdp", "model.shared_expert_dim", m.shared_expert_dim)
    else:
        yield "mesh.expert", c.mesh.expert == 1, "must be 1 without model.experts: there are none to split"
    neurons = "model.experts * model.expert_dim" if m.experts else "model.ffn_dim", m.neurons
    yield divides("tensor", "model.heads", m.heads)
    yield divides("tensor", "model.kv_heads", m.kv_heads)
    yield divides("tensor", *neurons, multiple=4 if tensor > 1 and s.phase else 1)
    yield divides("tensor", "tokens of a part of a step", c.tokens_per_part)
    yield divides("fsdp", "model.dim", m.dim)
    yield divides("fsdp", "model.vocab_size", m.vocab_size)
    yield divides("fsdp", "rows of k and v", m.kv_heads * m.head_width, tensor)
    if fsdp > 1:
        tile = formats.TILE if s.phase and s.recipe.sparse_weights else 1  # rows that are stored, and travel, together
        yield divides("fsdp", *neurons, multiple=tensor * c.mesh.expert * tile)


def _sparsity_rules(c: Config) -> Iterator[Rule]:
    m, s, recipe = c.model, c.sparsity, c.sparsity.recipe
    yield "sparsity.dense_layers", 0 <= s.dense_layers < m.layers, f"must be in 0..{m.layers - 1}, below model.layers"
    if m.experts or s.phase:
        known = {name: r.computes_experts if m.experts else r.computes for name, r in RECIPES.items()}
        able = [name for name, activations in known.items() if m.activation in activations]
        of_model = f"model.activation = {m.activation!r} and model.experts = {m.experts}"
        allowed = f"must be one of {', '.join(able)}: no other computes FFNs with {of_model}"
        yield "sparsity.recipe", recipe.name in able, allowed
    if not recipe.products:
        needs_none = isinstance(recipe, Dense) or s.start_step >= s.end_step
        yield "sparsity.recipe", needs_none, "names no `products`, so that it has no sparse phase"
        return
    yield "sparsity.end_step", s.start_step <= s.end_step, f"must be {s.start_step} (start_step) or more"
    yield "sparsity.end_step", s.end_step <= c.steps, f"must not be after config.steps = {c.steps}"
    if not s.phase:
        return
    at_the_end = f"must be config.steps = {c.steps} with sparsity.leave = False: a run ends in the phase it stays in"
    yield "sparsity.end_step", s.leave or s.end_step == c.steps, at_the_end
    width_key, width = ("model.expert_dim", m.expert_dim) if m.experts else ("model.ffn_dim", m.ffn_dim)
    if recipe.sparse_weights:
        yield "model.dim", m.dim % 4 == 0, f"must be a multiple of 4 for recipe {recipe.name!r} (2:4 weights)"
    yield width_key, width % 4 == 0, f"must be a multiple of 4 for recipe {recipe.name!r}"
    tokens, tensor = c.tokens_per_part, c.mesh.tensor
    of_parts = "" if c.parts == 1 else f" / {c.parts} parts ({_parts(c)})"
    yield "batch_size", tokens % 4 == 0, f"times seq_len{of_parts} = {tokens} tokens must be a multiple of 4"
    of_device = "" if tensor == 1 else ", of which each device along mesh.tensor has a part"
    of_shape = {"dim": "model.dim", "neurons": width_key, "tokens": "batch_size"}
    for name, ok, allowed in recipe.rules(Shape(m.dim, width // tensor, tokens)):
        if name == "tokens":
            allowed = f"times seq_len{of_parts} = {tokens} tokens {allowed}"
        yield of_shape.get(name, f"sparsity.{name}"), ok, allowed + of_device * (name not in ("dim", "tokens"))


def _parts(c: Config) -> str:
    of_experts = " mesh.expert *" if c.model.experts or c.mesh.expert > 1 else ""
    return f"mesh.data * mesh.fsdp *{of_experts} microbatches"
