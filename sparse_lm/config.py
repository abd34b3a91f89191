"""Configuration: an ml_collections ConfigDict in, frozen dataclasses out.

Config files (`configs/*.py`) return a `ConfigDict`, because that is what command-line overrides
work on. `parse` turns it into the dataclasses below, which the rest of the library sees, and
refuses every bad value here, by name, before anything compiles.
"""

from __future__ import annotations

import dataclasses
import difflib
import sys
import typing
from collections.abc import Iterator
from typing import Any

import ml_collections

RECIPES = ("dense", "fst", "sste", "act24", "venom")
SELECTIONS = ("magnitude", "cluster_sets", "slices")
DISTANCES = ("l2", "cosine")
CENTRES = ("neurons", "tokens")
IMPLEMENTATIONS = ("reference", "hopper", "triton")
COLUMN_CHOICES = ("norm", "exhaustive")
DENSE_WEIGHTS = ("masked", "full")
WEIGHT_GRADIENTS = ("magnitude", "mvue")
MOMENTS = ("keep", "reset", "reset_first")
SCHEDULES = ("cosine", "wsd")
ACTIVATIONS = ("squared_relu", "swiglu")
REMAT_POLICIES = ("none", "full", "save_dots", "save_attention")
DTYPES = ("float32", "bfloat16")
WEIGHT_TILE = 64  # rows of a 2:4 weight that are stored, and travel, together


class ConfigError(ValueError):
    """A config value that cannot be used. The message names key, value and what is allowed."""

    def __init__(self, key: str, value: Any, allowed: str):
        super().__init__(f"config.{key} = {value!r}: {allowed}")
        self.key = key


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A Llama. The defaults are no published model's; configs/ has the shapes of 2602.06183."""

    dim: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 4
    ffn_dim: int = 1024  # neurons, F
    vocab_size: int = 4096
    activation: str = "squared_relu"  # or "swiglu": dense only, for baselines
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5
    tie_embeddings: bool = False
    dtype: str = "bfloat16"  # of the computation; parameters are float32
    remat: str = "none"  # what the backward pass of a layer recomputes: REMAT_POLICIES, see model/remat.py
    unroll_layers: bool = False  # compile every layer for itself: steps are faster, compilation slower
    loss_chunk: int = 1024  # tokens whose logits exist at one time

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where tokens come from."""

    path: str = ""  # what prepare_data wrote, or a TFDS directory of `text` or `tokens`; empty: Python's own source
    tokenizer: str = ""  # a tokenizer.json; empty: the one beside the data, or trained on the corpus
    cache_dir: str = "data"  # where Python's source, and TFDS directories of others, are packed on first use
    eval_windows: int = 256  # held-out windows per evaluation; 0 for all


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with a warm-up and one of two decays."""

    learning_rate: float = 3e-3
    warmup_steps: int = 100
    schedule: str = "cosine"  # or "wsd": constant, then a straight line down
    decay_steps: int = 0  # wsd only: length of the final decay
    final_fraction: float = 0.1  # of the peak learning rate, at the last step
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    spike_deviations: float = 0.0  # skip a step whose loss is so many over the mean of the last 128; 0: none
    max_skipped_steps: int = 10  # skipped steps in a row before the run stops


@dataclasses.dataclass(frozen=True)
class SparsityConfig:
    """Which products are sparse, when, and how the patterns are chosen."""

    recipe: str = "dense"
    start_step: int = 0
    end_step: int = 0  # sparse on start_step <= step < end_step
    extra_windows: tuple[tuple[int, int], ...] = ()  # further (start, end) windows, ascending
    dense_layers: int = 0  # the first layers, whose FFNs stay dense in the sparse phase
    implementation: str = ""  # empty: the best one that this machine supports
    moments: str = "keep"  # what both edges do to the optimizer moments of the FFN weights: MOMENTS
    # Steps between refreshes of masks, neuron sets, token centres; none in a shorter phase. Of `fst` also the length of
    # the trials that choose its masked decay, up to 40.
    refresh_every: int = 40
    dense_weights: str = "masked"  # "masked" or "full": weight read where the activation is sparse
    # venom
    selection: str = "magnitude"  # of the neurons that a block of tokens shares: SELECTIONS, see ops/plan.py
    v: int = 128  # tokens of a block
    m: int = 16  # a block keeps 4 of every m neurons, and each token 2 of these
    columns: str = "norm"  # how magnitude picks 4 of m: COLUMN_CHOICES
    clusters: int = 16  # token clusters
    neuron_run: int = 1  # cluster_sets choose this many neighbouring neurons at a time; kernels like 128
    distance: str = "cosine"  # of tokens and neurons from the clusters' centres, or "l2"
    weight_gradients: str = "magnitude"  # how these choose 2 of 4 tokens; "mvue" draws them, without bias (2203.10991)
    centres: str = "neurons"  # what k-means makes the clusters' centres of: rows of the up projection, or "tokens"
    # act24
    dense_features: float = 0.05  # busiest share of neurons whose weight gradients stay dense
    shuffle_tokens: bool = True
    # fst
    mask_decay: float | None = None  # None: searched when the sparse phase starts

    @property
    def windows(self) -> tuple[tuple[int, int], ...]:
        """All sparse windows, (start, end), ascending; none for the dense recipe."""
        if self.recipe == "dense" or self.start_step == self.end_step:
            return ()
        return ((self.start_step, self.end_step), *self.extra_windows)

    @property
    def chosen_in_runs(self) -> bool:
        """The neurons of a set are runs of neighbours, as many on each device along mesh.tensor."""
        return self.recipe == "venom" and (self.selection == "slices" or self.neuron_run > 1)


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis of the mesh."""

    data: int = 1  # each takes some of a batch's sequences
    fsdp: int = 1  # likewise, and stores some rows of each matrix
    tensor: int = 1  # each computes some attention heads and FFN neurons

    @property
    def devices(self) -> int:
        return self.data * self.fsdp * self.tensor


@dataclasses.dataclass(frozen=True)
class Config:
    """One run."""

    seed: int = 0
    steps: int = 1000
    batch_size: int = 16  # sequences per step, over all devices
    microbatches: int = 1  # a device takes its sequences in this many parts, one after the other
    seq_len: int = 256
    log_every: int = 10
    eval_every: int = 100
    checkpoint_every: int = 100
    keep_checkpoints: int = 2  # the newest, and besides these the best
    deterministic: bool = False  # on a GPU: the same bits from each run, at some cost in speed
    init_from: str = ""  # a directory of a transformers model to start from; empty for random weights
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    sparsity: SparsityConfig = SparsityConfig()
    mesh: MeshConfig = MeshConfig()

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.seq_len

    @property
    def parts(self) -> int:
        """Of a step: microbatches over all devices. Tokens are routed within a part."""
        return self.mesh.data * self.mesh.fsdp * self.microbatches

    @property
    def tokens_per_part(self) -> int:
        return self.tokens_per_step // self.parts

    def phase(self, step: int) -> str:
        """ "sparse" or "dense": how `step` (0-based) is trained."""
        return "sparse" if any(a <= step < b for a, b in self.sparsity.windows) else "dense"


def default() -> ml_collections.ConfigDict:
    """Every key at its default, for config files to start from."""
    return _to_config_dict(Config())


def parse(config_dict: ml_collections.ConfigDict) -> Config:
    """Frozen, checked configuration.

    Raises:
      ConfigError: an unknown key, a value of the wrong type, or one that is not allowed.
    """
    config = _from_mapping(Config, config_dict.to_dict(), prefix="")
    check(config)
    return config


def with_tokenizer(config: Config, path: str) -> Config:
    """The configuration with another `data.tokenizer`."""
    return dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=path))


def to_dict(config: Config) -> dict[str, Any]:
    """Plain, JSON-ready form; `parse(ConfigDict(to_dict(c))) == c`."""
    return dataclasses.asdict(config)


def check(config: Config) -> None:
    """Refuses a value or a combination of values that cannot train."""
    for key, value, ok, allowed in _rules(config):
        if not ok:
            raise ConfigError(key, value, allowed)
    _check_windows(config)


Rule = tuple[str, Any, bool, str]
"""(key, value, is it allowed, what is allowed)."""


def _positive(key: str, value: float) -> Rule:
    return key, value, value > 0, "must be positive"


def _not_negative(key: str, value: float) -> Rule:
    return key, value, value >= 0, "must not be negative"


def _one_of(key: str, value: str, names: tuple[str, ...]) -> Rule:
    close = difflib.get_close_matches(str(value), names, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close and value not in names else ""
    return key, value, value in names, f"must be one of {', '.join(names)}{hint}"


def _rules(c: Config) -> Iterator[Rule]:
    """All of them, one a line; a rule may divide by what an earlier one has found positive."""
    yield from _run_rules(c)
    yield from _model_rules(c.model)
    yield _not_negative("data.eval_windows", c.data.eval_windows)
    yield from _optimizer_rules(c)
    yield from _sparsity_rules(c)
    yield from _mesh_rules(c)


def _run_rules(c: Config) -> Iterator[Rule]:
    yield "seed", c.seed, 0 <= c.seed < 2**32, "must be in 0..2^32 - 1"
    for key in (
        "steps", "batch_size", "microbatches", "seq_len", "log_every", "eval_every", "checkpoint_every",
        "keep_checkpoints",
    ):  # fmt: skip
        yield _positive(key, getattr(c, key))
    yield "steps", c.steps, c.steps < 2**31, "must be under 2^31 (steps are counted in int32)"
    for axis in ("data", "fsdp", "tensor"):
        yield _positive(f"mesh.{axis}", getattr(c.mesh, axis))
    yield (
        "batch_size", c.batch_size, c.batch_size % c.parts == 0,
        f"must be a multiple of mesh.data * mesh.fsdp * microbatches = {c.parts}",
    )  # fmt: skip


def _model_rules(m: ModelConfig) -> Iterator[Rule]:
    for key in ("dim", "layers", "heads", "kv_heads", "ffn_dim", "rope_theta", "norm_epsilon", "loss_chunk"):
        yield _positive(f"model.{key}", getattr(m, key))
    yield "model.vocab_size", m.vocab_size, 0 < m.vocab_size <= 2**31, "must be in 1..2^31 (tokens are int32)"
    yield "model.heads", m.heads, m.dim % m.heads == 0, f"must divide model.dim = {m.dim}"
    yield (
        "model.heads",
        m.heads,
        m.head_dim % 2 == 0,
        f"model.dim / model.heads = {m.head_dim} must be even (RoPE rotates pairs)",
    )
    yield "model.kv_heads", m.kv_heads, m.heads % m.kv_heads == 0, f"must divide model.heads = {m.heads}"
    yield _one_of("model.activation", m.activation, ACTIVATIONS)
    yield _one_of("model.dtype", m.dtype, DTYPES)
    yield _one_of("model.remat", m.remat, REMAT_POLICIES)


def _optimizer_rules(c: Config) -> Iterator[Rule]:
    o = c.optimizer
    yield _positive("optimizer.learning_rate", o.learning_rate)
    yield _not_negative("optimizer.warmup_steps", o.warmup_steps)
    yield "optimizer.warmup_steps", o.warmup_steps, o.warmup_steps < c.steps, f"must be under config.steps = {c.steps}"
    yield _one_of("optimizer.schedule", o.schedule, SCHEDULES)
    yield _not_negative("optimizer.decay_steps", o.decay_steps)
    yield (
        "optimizer.decay_steps", o.decay_steps,
        o.schedule == "cosine" or 0 < o.decay_steps <= c.steps - o.warmup_steps,
        f"with schedule wsd must be in 1..{c.steps - o.warmup_steps} (steps - warmup_steps)",
    )  # fmt: skip
    yield "optimizer.final_fraction", o.final_fraction, 0 <= o.final_fraction <= 1, "must be in 0..1"
    for key in ("beta1", "beta2"):
        yield f"optimizer.{key}", getattr(o, key), 0 <= getattr(o, key) < 1, "must be in [0, 1)"
    yield _positive("optimizer.epsilon", o.epsilon)
    yield _not_negative("optimizer.weight_decay", o.weight_decay)
    yield _positive("optimizer.clip_norm", o.clip_norm)
    yield _not_negative("optimizer.spike_deviations", o.spike_deviations)
    yield _positive("optimizer.max_skipped_steps", o.max_skipped_steps)


def _sparsity_rules(c: Config) -> Iterator[Rule]:
    m, s = c.model, c.sparsity
    yield from _sparsity_ranges(s)
    yield "sparsity.dense_layers", s.dense_layers, 0 <= s.dense_layers < m.layers, f"must be in 0..{m.layers - 1}"
    yield (
        "sparsity.dense_layers", s.dense_layers, s.dense_layers == 0 or s.recipe != "fst",
        "must be 0 with recipe 'fst', whose masked decay is of all layers",
    )  # fmt: skip
    yield (
        "sparsity.recipe", s.recipe, s.recipe == "dense" or m.activation == "squared_relu",
        f"needs model.activation = 'squared_relu'; {m.activation!r} trains with recipe 'dense' only",
    )  # fmt: skip
    if s.recipe in ("fst", "sste", "venom"):
        yield "model.dim", m.dim, m.dim % 4 == 0, f"must be a multiple of 4 for recipe {s.recipe!r} (2:4 weights)"
    if s.recipe != "dense":
        yield "model.ffn_dim", m.ffn_dim, m.ffn_dim % 4 == 0, f"must be a multiple of 4 for recipe {s.recipe!r}"
        tokens = c.tokens_per_part
        yield (
            "batch_size", c.batch_size, tokens % 4 == 0,
            f"times seq_len{_of_parts(c)} = {tokens} tokens must be a multiple of 4",
        )  # fmt: skip
    if s.recipe == "venom":
        yield from _venom_rules(c)


def _sparsity_ranges(s: SparsityConfig) -> Iterator[Rule]:
    """What each key may be by itself, whether or not the recipe reads it."""
    yield _one_of("sparsity.recipe", s.recipe, RECIPES)
    yield _not_negative("sparsity.start_step", s.start_step)
    yield _not_negative("sparsity.end_step", s.end_step)
    if s.implementation:
        yield _one_of("sparsity.implementation", s.implementation, IMPLEMENTATIONS)
    yield _one_of("sparsity.moments", s.moments, MOMENTS)
    yield _positive("sparsity.refresh_every", s.refresh_every)
    yield _one_of("sparsity.dense_weights", s.dense_weights, DENSE_WEIGHTS)
    yield _one_of("sparsity.selection", s.selection, SELECTIONS)
    in_tiles = s.v >= 4 and (WEIGHT_TILE % s.v == 0 or s.v % WEIGHT_TILE == 0)
    yield "sparsity.v", s.v, in_tiles, f"must be 4 or more, and divide {WEIGHT_TILE} or be a multiple of it"
    yield "sparsity.m", s.m, s.m >= 4 and s.m % 4 == 0, "must be a multiple of 4"
    yield _one_of("sparsity.columns", s.columns, COLUMN_CHOICES)
    yield _positive("sparsity.clusters", s.clusters)
    yield "sparsity.neuron_run", s.neuron_run, s.neuron_run >= 1, "must be 1 or more"
    yield _one_of("sparsity.distance", s.distance, DISTANCES)
    yield _one_of("sparsity.weight_gradients", s.weight_gradients, WEIGHT_GRADIENTS)
    yield _one_of("sparsity.centres", s.centres, CENTRES)
    yield "sparsity.dense_features", s.dense_features, 0 <= s.dense_features <= 1, "must be in 0..1"
    if s.mask_decay is not None:
        yield _not_negative("sparsity.mask_decay", s.mask_decay)


def _mesh_rules(c: Config) -> Iterator[Rule]:
    """Every shard must be as large as every other, and whole where a format has tiles."""
    m, s, fsdp, tensor = c.model, c.sparsity, c.mesh.fsdp, c.mesh.tensor

    def divides(axis: str, count: int, key: str, multiple: int = 1) -> Rule:
        times = f"times {multiple} " if multiple > 1 else ""
        value = dict(heads=m.heads, kv_heads=m.kv_heads, ffn_dim=m.ffn_dim, dim=m.dim, vocab_size=m.vocab_size)[key]
        return f"mesh.{axis}", count, value % (count * multiple) == 0, f"{times}must divide model.{key} = {value}"

    yield divides("tensor", tensor, "heads")
    yield divides("tensor", tensor, "kv_heads")
    yield divides("tensor", tensor, "ffn_dim")
    tokens = c.tokens_per_part
    yield "mesh.tensor", tensor, tokens % tensor == 0, f"must divide the {tokens} tokens of a part of a step"
    yield divides("fsdp", fsdp, "dim", tensor)
    yield divides("fsdp", fsdp, "vocab_size")
    kv_rows = m.kv_heads * m.head_dim
    yield "mesh.fsdp", fsdp, kv_rows % (fsdp * tensor) == 0, f"times mesh.tensor must divide {kv_rows} rows of k and v"
    if fsdp > 1:
        compressed = s.recipe in ("fst", "sste", "venom")
        yield divides("fsdp", fsdp, "ffn_dim", tensor * (WEIGHT_TILE if compressed else 1))
    if tensor > 1 and s.recipe != "dense":
        yield divides("tensor", tensor, "ffn_dim", 4)
    if tensor > 1 and s.recipe == "venom":
        yield divides("tensor", tensor, "ffn_dim", s.m)
        kept = 4 * m.ffn_dim // s.m // tensor
        yield (
            "mesh.tensor", tensor, kept % s.neuron_run == 0,
            f"leaves each device {kept} neurons of a set, which sparsity.neuron_run = {s.neuron_run} must divide",
        )  # fmt: skip


def _of_parts(c: Config) -> str:
    return "" if c.parts == 1 else f" / {c.parts} parts (mesh.data * mesh.fsdp * microbatches)"


def _venom_rules(c: Config) -> Iterator[Rule]:
    m, s, tokens = c.model, c.sparsity, c.tokens_per_part
    yield (
        "sparsity.clusters", s.clusters, s.centres == "neurons" or s.clusters <= tokens,
        f"must be at most the {tokens} tokens of a part of a step with sparsity.centres = 'tokens'",
    )  # fmt: skip
    yield "sparsity.m", s.m, m.ffn_dim % s.m == 0, f"must divide model.ffn_dim = {m.ffn_dim}"
    yield (
        "sparsity.columns",
        s.columns,
        s.columns != "exhaustive" or s.m <= 32,
        f"must be 'norm' for m = {s.m} (over 32)",
    )
    yield (
        "sparsity.v", s.v, tokens % s.v == 0,
        f"must divide the {tokens} tokens of a part of a step (batch_size * seq_len{_of_parts(c)})",
    )  # fmt: skip
    yield "sparsity.clusters", s.clusters, s.clusters <= m.ffn_dim, f"must be in 1..{m.ffn_dim} (model.ffn_dim)"
    yield (
        "sparsity.clusters", s.clusters, s.selection != "slices" or s.clusters == s.m // 4,
        f"must be m / 4 = {s.m // 4} with selection 'slices': each cluster owns F * 4 / m neurons",
    )  # fmt: skip
    set_size = 4 * m.ffn_dim // s.m
    yield (
        "sparsity.neuron_run", s.neuron_run, set_size % s.neuron_run == 0,
        f"must divide the {set_size} neurons of a set (4 * model.ffn_dim / sparsity.m)",
    )  # fmt: skip
    yield (
        "sparsity.neuron_run", s.neuron_run, s.neuron_run == 1 or s.selection == "cluster_sets",
        f"must be 1 with selection {s.selection!r}: only cluster_sets are chosen in runs",
    )  # fmt: skip


def _check_windows(c: Config) -> None:
    s = c.sparsity
    if s.recipe == "dense":
        return
    if s.end_step < s.start_step:
        raise ConfigError("sparsity.end_step", s.end_step, f"must not be before sparsity.start_step = {s.start_step}")
    if s.extra_windows and s.start_step == s.end_step:
        needs = "needs a first window: sparsity.start_step < sparsity.end_step"
        raise ConfigError("sparsity.extra_windows", s.extra_windows, needs)
    end = s.end_step
    for window in s.extra_windows:
        if len(window) != 2 or not end < window[0] < window[1]:
            raise ConfigError(
                "sparsity.extra_windows", s.extra_windows, f"must be ascending (start, end) pairs after step {end}"
            )
        end = window[1]
    if end > c.steps:
        key = "sparsity.extra_windows" if s.extra_windows else "sparsity.end_step"
        raise ConfigError(key, end, f"must not be after config.steps = {c.steps}")


def _from_mapping(cls: type, values: dict[str, Any], prefix: str) -> Any:
    types = typing.get_type_hints(cls)
    for key in values:
        if key not in types:
            close = difflib.get_close_matches(key, types, n=1)
            hint = f"; did you mean {prefix}{close[0]}?" if close else ""
            raise ConfigError(prefix + key, values[key], f"unknown key; allowed: {', '.join(types)}{hint}")
    kwargs = {}
    for key, value in values.items():
        if dataclasses.is_dataclass(types[key]):
            if not isinstance(value, dict):
                raise ConfigError(prefix + key, value, "must be a group of keys")
            kwargs[key] = _from_mapping(types[key], value, prefix=f"{prefix}{key}.")
        else:
            kwargs[key] = _convert(prefix + key, value, types[key])
    return cls(**kwargs)


def _convert(key: str, value: Any, wanted: Any) -> Any:
    """`value` as the annotated type; int counts as float, a list as a tuple, nothing else converts."""
    optional = type(None) in typing.get_args(wanted)
    if optional and value is None:
        return None
    if wanted in (float, float | None) and isinstance(value, (int, float)) and not isinstance(value, bool):
        if not -sys.float_info.max <= value <= sys.float_info.max:
            raise ConfigError(key, value, "must be a finite number")
        return float(value)
    if typing.get_origin(wanted) is tuple and isinstance(value, (list, tuple)):
        windows = tuple(tuple(pair) if isinstance(pair, (list, tuple)) else pair for pair in value)
        if all(isinstance(p, tuple) and all(type(step) is int for step in p) for p in windows):
            return windows
        raise ConfigError(key, value, "must be pairs of steps, such as ((100, 200), (300, 400))")
    if isinstance(wanted, type) and type(value) is wanted:
        return value
    name = wanted.__name__ if isinstance(wanted, type) else str(wanted)
    raise ConfigError(key, value, f"must be of type {name}, not {type(value).__name__}")


def _to_config_dict(node: Any) -> ml_collections.ConfigDict:
    """ConfigDict with one key per dataclass field; an optional float becomes a typed placeholder."""
    result = ml_collections.ConfigDict()
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        if dataclasses.is_dataclass(value):
            value = _to_config_dict(value)
        elif value is None:
            value = ml_collections.config_dict.placeholder(float)
        result[field.name] = value
    return result
