"""Rules for every key of a configuration, by itself and beside the others: one a line."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from sparse_lm.recipes import RECIPES
from sparse_lm.recipes.activations import ACTIVATIONS
from sparse_lm.recipes.base import PRECISIONS, Rule, Shape

if TYPE_CHECKING:
    from sparse_lm.config import Config, ModelConfig

IMPLEMENTATIONS = ("reference", "hopper", "triton")
SCHEDULES = ("cosine", "wsd")
OPTIMIZERS = ("adamw", "muon")
REMAT_POLICIES = ("none", "full", "save_dots", "save_attention")
DTYPES = ("float32", "bfloat16")
ROUTER_SCORES = ("softmax", "sigmoid")
_TINY, _HUGE = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
WEIGHT_TILE = 64  # rows of a 2:4 weight that are stored, and travel, together


def _positive(key: str, value: float) -> Rule:
    return key, value, value > 0, "must be positive"


def _not_negative(key: str, value: float) -> Rule:
    return key, value, value >= 0, "must not be negative"


def one_of(key: str, value: str, names: tuple[str, ...]) -> Rule:
    close = difflib.get_close_matches(str(value), names, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close and value not in names else ""
    return key, value, value in names, f"must be one of {', '.join(names)}{hint}"


def rules(c: Config) -> Iterator[Rule]:
    """Yields all of them, one a line; a rule may divide by what an earlier one has found positive."""
    yield from _run_rules(c)
    yield from _model_rules(c.model)
    yield _not_negative("data.eval_windows", c.data.eval_windows)
    yield from _optimizer_rules(c)
    yield from _sparsity_rules(c)
    yield from _mesh_rules(c)


def _run_rules(c: Config) -> Iterator[Rule]:
    yield "init_from", c.init_from, not (c.init_from and c.model.experts), "must be empty with model.experts"
    yield "seed", c.seed, 0 <= c.seed < 2**32, "must be in 0..2^32 - 1"
    for key in (
        "steps", "batch_size", "microbatches", "seq_len", "log_every", "eval_every", "checkpoint_every",
        "keep_checkpoints",
    ):  # fmt: skip
        yield _positive(key, getattr(c, key))
    yield "steps", c.steps, c.steps < 2**31, "must be under 2^31 (steps are counted in int32)"
    yield (
        "seq_len", c.seq_len, c.seq_len % 2 == 0 or c.model.document_separator < 0,
        "must be even with model.document_separator: cuDNN's attention takes masks of no other length",
    )  # fmt: skip
    for axis in ("data", "fsdp", "expert", "tensor"):
        yield _positive(f"mesh.{axis}", getattr(c.mesh, axis))
    yield (
        "batch_size", c.batch_size, c.batch_size % c.parts == 0,
        f"must be a multiple of {_parts(c)} = {c.parts}",
    )  # fmt: skip


def _model_rules(m: ModelConfig) -> Iterator[Rule]:
    for key in ("dim", "layers", "heads", "kv_heads", "ffn_dim", "rope_theta", "norm_epsilon", "loss_chunk"):
        yield _positive(f"model.{key}", getattr(m, key))
    yield "model.vocab_size", m.vocab_size, 0 < m.vocab_size <= 2**31, "must be in 1..2^31 (tokens are int32)"
    yield _not_negative("model.head_dim", m.head_dim)
    yield "model.head_dim", m.head_dim, m.head_dim % 2 == 0, "must be even (RoPE rotates pairs)"
    if not m.head_dim:
        yield "model.heads", m.heads, m.dim % m.heads == 0, f"must divide model.dim = {m.dim}, or set model.head_dim"
        yield (
            "model.heads", m.heads, m.head_width % 2 == 0,
            f"model.dim / model.heads = {m.head_width} must be even (RoPE rotates pairs)",
        )  # fmt: skip
    yield "model.kv_heads", m.kv_heads, m.heads % m.kv_heads == 0, f"must divide model.heads = {m.heads}"
    yield (
        "model.document_separator", m.document_separator, -1 <= m.document_separator < m.vocab_size,
        f"must be a token of the model.vocab_size = {m.vocab_size}, or -1",
    )  # fmt: skip
    yield one_of("model.activation", m.activation, ACTIVATIONS)
    yield one_of("model.dtype", m.dtype, DTYPES)
    yield one_of("model.precision", m.precision, PRECISIONS)
    yield one_of("model.remat", m.remat, REMAT_POLICIES)
    yield _not_negative("model.experts", m.experts)
    if m.experts:
        yield from _mixture_rules(m)


def _mixture_rules(m: ModelConfig) -> Iterator[Rule]:
    yield (
        "model.experts_per_token", m.experts_per_token, 2 <= m.experts_per_token <= m.experts,
        f"must be in 2..{m.experts} (of one expert the gate is 1, and its router learns nothing)",
    )  # fmt: skip
    yield _positive("model.expert_dim", m.expert_dim)
    yield _not_negative("model.shared_expert_dim", m.shared_expert_dim)
    yield one_of("model.router_scores", m.router_scores, ROUTER_SCORES)
    yield "model.precision", m.precision, m.precision == "bf16", "must be bf16 with model.experts: they have no FP8"
    squared = m.activation == "squared_relu"
    yield "model.activation", m.activation, squared, "must be squared_relu with model.experts: others have no experts"


def _optimizer_rules(c: Config) -> Iterator[Rule]:
    o = c.optimizer
    yield one_of("optimizer.name", o.name, OPTIMIZERS)
    whole = o.name != "muon" or not c.model.experts
    yield (
        "optimizer.name",
        o.name,
        whole,
        "must be adamw with model.experts, whose matrices are stored as one",
    )
    for key in ("learning_rate", "epsilon", "weight_decay", "clip_norm"):
        value = getattr(o, key)
        held = abs(value) <= _HUGE and (value == 0 or abs(value) >= _TINY)
        yield f"optimizer.{key}", value, held, f"must be 0 or in {_TINY:.0e}..{_HUGE:.0e}, as float32 is"
    yield _positive("optimizer.learning_rate", o.learning_rate)
    yield _not_negative("optimizer.warmup_steps", o.warmup_steps)
    yield "optimizer.warmup_steps", o.warmup_steps, o.warmup_steps < c.steps, f"must be under config.steps = {c.steps}"
    yield one_of("optimizer.schedule", o.schedule, SCHEDULES)
    yield _not_negative("optimizer.decay_steps", o.decay_steps)
    yield (
        "optimizer.decay_steps", o.decay_steps,
        o.schedule == "cosine" or 0 < o.decay_steps <= c.steps - o.warmup_steps,
        f"with schedule wsd must be in 1..{c.steps - o.warmup_steps} (steps - warmup_steps)",
    )  # fmt: skip
    yield "optimizer.final_fraction", o.final_fraction, 0 <= o.final_fraction <= 1, "must be in 0..1"
    yield one_of("optimizer.moments", o.moments, DTYPES)
    rounded = o.moments == "bfloat16"  # which swallows changes of less than 0.4%
    for key in ("beta1", "beta2"):
        beta = getattr(o, key)
        yield f"optimizer.{key}", beta, 0 <= beta < 1 and np.float32(beta) < 1, "must be in [0, 1), in float32, too"
        yield f"optimizer.{key}", beta, not rounded or beta <= 0.99, "must be at most 0.99 with moments in bfloat16"
    yield _positive("optimizer.epsilon", o.epsilon)
    yield _not_negative("optimizer.weight_decay", o.weight_decay)
    yield _positive("optimizer.clip_norm", o.clip_norm)
    yield _not_negative("optimizer.spike_deviations", o.spike_deviations)
    yield _positive("optimizer.max_skipped_steps", o.max_skipped_steps)


def _sparsity_rules(c: Config) -> Iterator[Rule]:
    m, s, recipe = c.model, c.sparsity, c.sparsity.recipe
    yield _not_negative("sparsity.start_step", s.start_step)
    yield _not_negative("sparsity.end_step", s.end_step)
    yield _positive("sparsity.refresh_every", s.refresh_every)
    yield "sparsity.dense_layers", s.dense_layers, 0 <= s.dense_layers < m.layers, f"must be in 0..{m.layers - 1}"
    if recipe.implementation is not None:
        yield one_of("sparsity.implementation", recipe.implementation, IMPLEMENTATIONS)
    if m.experts or s.phase:
        kind = "experts" if m.experts else m.activation
        able = [name for name, known in RECIPES.items() if kind in known.computes]
        yield (
            "sparsity.recipe", recipe.name, kind in recipe.computes,
            f"must be one of {', '.join(able)}, which compute FFNs with model.activation = {m.activation!r} and "
            f"model.experts = {m.experts}",
        )  # fmt: skip
    if not recipe.products:
        return
    yield "sparsity.end_step", s.end_step, s.start_step <= s.end_step, f"must be {s.start_step} (start_step) or more"
    yield "sparsity.end_step", s.end_step, s.end_step <= c.steps, f"must not be after config.steps = {c.steps}"
    if not s.phase:
        return
    yield (
        "sparsity.leave", s.leave, s.leave or s.end_step == c.steps,
        f"needs sparsity.end_step = config.steps = {c.steps} to be False: a run must end in the phase that it stays in",
    )  # fmt: skip
    width_key, width = ("model.expert_dim", m.expert_dim) if m.experts else ("model.ffn_dim", m.ffn_dim)
    if recipe.sparse_weights:
        yield "model.dim", m.dim, m.dim % 4 == 0, f"must be a multiple of 4 for recipe {recipe.name!r} (2:4 weights)"
    yield width_key, width, width % 4 == 0, f"must be a multiple of 4 for recipe {recipe.name!r}"
    tokens = c.tokens_per_part
    yield (
        "batch_size", c.batch_size, tokens % 4 == 0,
        f"times seq_len{_of_parts(c)} = {tokens} tokens must be a multiple of 4",
    )  # fmt: skip
    for key, value, ok, allowed in recipe.rules(Shape(m.dim, width, tokens)):
        yield f"sparsity.{key}", value, ok, allowed


def _mesh_rules(c: Config) -> Iterator[Rule]:
    """Yields the rules of meshes: shards must be as large as one another, and whole where a format has tiles."""
    m, s, fsdp, expert, tensor = c.model, c.sparsity, c.mesh.fsdp, c.mesh.expert, c.mesh.tensor

    of_ffn = "experts * model.expert_dim" if m.experts else "ffn_dim"

    def divides(axis: str, count: int, key: str, multiple: int = 1) -> Rule:
        name = of_ffn if key == "neurons" else key
        times = f"times {multiple} " if multiple > 1 else ""
        value = getattr(m, key)
        return f"mesh.{axis}", count, value % (count * multiple) == 0, f"{times}must divide model.{name} = {value}"

    if m.experts:
        yield "mesh.tensor", tensor, tensor == 1, "must be 1 with model.experts: mesh.expert splits them over devices"
        yield divides("expert", expert, "experts")
        shared = m.shared_expert_dim
        yield "mesh.fsdp", fsdp, shared % fsdp == 0, f"must divide model.shared_expert_dim = {shared}"
    yield "mesh.expert", expert, m.experts or expert == 1, "must be 1 without model.experts: there are none to split"
    yield divides("tensor", tensor, "heads")
    yield divides("tensor", tensor, "kv_heads")
    yield divides("tensor", tensor, "neurons")
    tokens = c.tokens_per_part
    yield "mesh.tensor", tensor, tokens % tensor == 0, f"must divide the {tokens} tokens of a part of a step"
    yield divides("fsdp", fsdp, "dim", tensor)
    yield divides("fsdp", fsdp, "vocab_size")
    kv_rows = m.kv_heads * m.head_width
    yield "mesh.fsdp", fsdp, kv_rows % (fsdp * tensor) == 0, f"times mesh.tensor must divide {kv_rows} rows of k and v"
    if fsdp > 1:
        compressed = s.phase and s.recipe.sparse_weights
        yield divides("fsdp", fsdp, "neurons", tensor * expert * (WEIGHT_TILE if compressed else 1))
    if tensor > 1 and s.phase:
        yield divides("tensor", tensor, "neurons", 4)
        local = Shape(m.dim, m.ffn_dim // tensor, tokens)
        for key, value, ok, allowed in s.recipe.rules(local):
            yield f"sparsity.{key}", value, ok, f"{allowed}, of which each device along mesh.tensor has a part"


def _of_parts(c: Config) -> str:
    return "" if c.parts == 1 else f" / {c.parts} parts ({_parts(c)})"


def _parts(c: Config) -> str:
    return f"mesh.data * mesh.fsdp *{' mesh.expert *' if c.model.experts else ''} microbatches"
