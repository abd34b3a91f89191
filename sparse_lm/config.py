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
from typing import Any

import ml_collections
from flax.traverse_util import flatten_dict
from ml_collections import config_dict

from sparse_lm.config_rules import one_of, rules
from sparse_lm.errors import ConfigError
from sparse_lm.ops import backends
from sparse_lm.recipes import DENSE, RECIPES, Recipe, Slices, add_recipes_of_other_packages
from sparse_lm.recipes.base import Shape

add_recipes_of_other_packages()


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A Llama. The defaults are no published model's; configs/ has the shapes of 2602.06183."""

    dim: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 0  # H, of a query, key or value; 0 for dim / heads
    qk_norm: bool = False  # RMSNorm of each query and key before it rotates, as in Qwen3 (2505.09388)
    ffn_dim: int = 1024  # neurons, F, of a model without experts
    experts: int = 0  # E, of a mixture; 0 for one FFN
    experts_per_token: int = 2  # k
    expert_dim: int = 256  # neurons of an expert, Fe
    shared_expert_dim: int = 0  # neurons of a dense expert that computes every token; 0 for none
    router_scores: str = "softmax"  # or "sigmoid"
    vocab_size: int = 4096
    activation: str = "squared_relu"  # or, with a gate, "swiglu", "geglu", "gated_relu2"
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5
    tie_embeddings: bool = False
    document_separator: int = -1  # end-of-text token that attention does not look past; -1: it sees a whole window
    dtype: str = "bfloat16"  # of the computation; parameters are float32
    precision: str = "bf16"  # of dense products with weights but experts': dtype's, or "fp8" (e4m3, see ops/fp8.py)
    remat: str = "none"  # what the backward pass of a layer recomputes: REMAT_POLICIES, see model/remat.py
    unroll_layers: bool = False  # compile every layer for itself: steps are faster, compilation slower
    loss_chunk: int = 1024  # tokens whose logits exist at one time

    @property
    def head_width(self) -> int:
        """Returns H."""
        return self.head_dim or self.dim // self.heads

    @property
    def neurons(self) -> int:
        """Counts the rows of `up` and `down` of a layer: F, or E Fe of a mixture."""
        return self.experts * self.expert_dim if self.experts else self.ffn_dim


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Says where tokens come from."""

    path: str = ""  # what prepare_data wrote; empty: Python's own source;
    # or several of them with weights, mixed: data/a:0.7,data/b:0.3
    tokenizer: str = ""  # a tokenizer.json; empty: the one beside the data, or trained on the corpus
    cache_dir: str = "data"  # where Python's source is packed on first use
    eval_windows: int = 256  # held-out windows per evaluation; 0 for all


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, or Muon for the layers' matrices, with a warm-up and one of two decays."""

    name: str = "adamw"  # or "muon"
    learning_rate: float = 3e-3
    warmup_steps: int = 100
    schedule: str = "cosine"  # or "wsd": constant, then a straight line down
    decay_steps: int = 0  # wsd only: length of the final decay
    final_fraction: float = 0.1  # of the peak learning rate, at the last step
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    moments: str = "float32"  # what AdamW's are kept in; "bfloat16" takes 4 bytes a parameter less, and their time
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    max_skipped_steps: int = 10  # skipped steps in a row before the run stops


@dataclasses.dataclass(frozen=True)
class SparsityConfig:
    """Says which recipe computes the FFNs, and when.

    In a ConfigDict `recipe` is a name, and the recipe's knobs stand beside it: `sparsity.m`. A knob that is None has
    the recipe's default. One that the recipe does not have is refused.
    """

    recipe: Recipe = dataclasses.field(default_factory=Slices)
    start_step: int = 0
    end_step: int = 0  # sparse on start_step <= step < end_step
    leave: bool = True  # False: a run whose last step is sparse stays so, and its model computes sparsely for good
    dense_layers: int = 0  # the first layers, whose FFNs stay dense in the sparse phase
    refresh_every: int = 40  # steps between refreshes of what the recipe chooses anew: masks, centroids

    @property
    def phase(self) -> range:
        """Returns the steps of the sparse phase; range(0) if there are none, as with the dense recipe."""
        steps = range(self.start_step, self.end_step)
        return steps if steps and self.recipe.products else range(0)

    @property
    def stays(self) -> bool:
        """Returns True if the run ends in its sparse phase and does not leave it."""
        return bool(self.phase) and not self.leave


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis of the mesh."""

    data: int = 1  # each takes some of a batch's sequences
    fsdp: int = 1  # likewise, and stores some rows of each matrix
    expert: int = 1  # likewise, and stores and computes some experts of a mixture
    tensor: int = 1  # each computes some attention heads and FFN neurons

    @property
    def devices(self) -> int:
        return self.data * self.fsdp * self.expert * self.tensor


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
    keep_every: int = 0  # checkpoints after multiples of so many steps stay, too; 0 for none
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
        """Counts the parts of a step: microbatches over all devices but those along `mesh.tensor`, which share one.

        Tokens are routed within a part, a mixture's within those of all devices along `mesh.expert`.
        """
        return self.mesh.data * self.mesh.fsdp * self.mesh.expert * self.microbatches

    @property
    def tokens_per_part(self) -> int:
        return self.tokens_per_step // self.parts

    def phase(self, step: int) -> str:
        """Says how `step` (0-based) is trained, "sparse" or "dense"."""
        return "sparse" if step in self.sparsity.phase else "dense"

    def phase_after(self, steps: int) -> str:
        """Says how the state after so many steps computes: as their last one did, unless the run ends and leaves."""
        has_left = steps == self.steps and not self.sparsity.stays
        return "dense" if has_left else self.phase(steps - 1)

    def can_be_best(self, steps: int) -> bool:
        """Says whether a checkpoint after so many steps can be a run's best, by its held-out loss.

        One of a phase that is to be left was evaluated as another model than the dense one that is restored from it.
        One from before the phase does not show what the phase brings.
        """
        has_left = steps >= self.sparsity.phase.stop and self.phase_after(steps) == "dense"
        return has_left or self.sparsity.stays

    def recipe(self, phase: str) -> Recipe:
        return self.sparsity.recipe if phase == "sparse" else DENSE


_KEYS = {*Shape._fields, *(field.name for field in dataclasses.fields(SparsityConfig))}  # no knob may be named so


def default() -> ml_collections.ConfigDict:
    """Returns every key at its default, for config files to start from; knobs of recipes are typed placeholders.

    Raises:
      TypeError: a recipe has a knob of a type that no key has, of a name that means something else, or of another
        type than others'.
    """
    values, types = to_dict(Config()), {}
    for recipe in RECIPES.values():
        for knob, kind in _knobs(recipe).items():
            if kind not in (bool, int, float, str) or knob in _KEYS or types.setdefault(knob, kind) is not kind:
                allowed = "of type bool, int, float or str, as others', and not named as a key of `sparsity` or a size"
                raise TypeError(f"knob {knob!r} of recipe {recipe.name!r}, {kind}, must be {allowed}")
    values["sparsity"] |= {knob: config_dict.placeholder(kind) for knob, kind in types.items()}
    return ml_collections.ConfigDict(values)


def parse(config: ml_collections.ConfigDict) -> Config:
    """Returns the frozen, checked configuration.

    Raises:
      ConfigError: an unknown key, a value of the wrong type, or one that is not allowed.
    """
    values = config.to_dict()
    sparsity = values.pop("sparsity", {})
    parsed = _from_mapping(Config, values, prefix="")
    recipe_options = dict(shards=parsed.mesh.tensor, activation=parsed.model.activation)
    parsed = dataclasses.replace(parsed, sparsity=_parse_sparsity(sparsity, recipe_options))
    values = flatten_dict(to_dict(parsed), sep=".")
    for key, ok, allowed in rules(parsed, values):
        if not ok:
            raise ConfigError(key, values[key], allowed)
    return parsed


def with_tokenizer(config: Config, path: str) -> Config:
    """Returns the configuration with another `data.tokenizer`."""
    return dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=path))


def to_dict(config: Config) -> dict[str, Any]:
    """Returns the plain, JSON-ready form; `parse(ConfigDict(to_dict(c))) == c`."""
    plain, recipe = dataclasses.asdict(config), config.sparsity.recipe
    knobs = {name: getattr(recipe, name) for name in _knobs(type(recipe))}
    plain["sparsity"] |= {"recipe": recipe.name, "implementation": recipe.implementation or "", **knobs}
    return plain


def _from_mapping(cls: type, values: dict[str, Any], prefix: str, other_keys: tuple[str, ...] = ()) -> Any:
    """Makes a dataclass of its keys; `other_keys`, which the caller has taken out, are named where a key is unknown."""
    if not isinstance(values, dict):
        raise ConfigError(prefix[:-1], values, "must be a group of keys")
    types = typing.get_type_hints(cls)
    allowed = (*types, *other_keys)
    for key in values:
        if key not in types:
            close = difflib.get_close_matches(key, allowed, n=1)
            hint = f"; did you mean {prefix}{close[0]}?" if close else ""
            raise ConfigError(prefix + key, values[key], f"unknown key; allowed: {', '.join(allowed)}{hint}")
    return cls(**{key: _convert(prefix + key, value, types[key]) for key, value in values.items()})


def _convert(key: str, value: Any, wanted: type) -> Any:
    """Returns `value` as the annotated type; int counts as float, a group as its dataclass, nothing else converts."""
    if dataclasses.is_dataclass(wanted):
        return _from_mapping(wanted, value, prefix=f"{key}.")
    if wanted is float and type(value) in (int, float):
        if not -sys.float_info.max <= value <= sys.float_info.max:
            raise ConfigError(key, value, "must be a finite number")
        return float(value)
    if type(value) is not wanted:
        raise ConfigError(key, value, f"must be of type {wanted.__name__}, not {type(value).__name__}")
    return value


def _knobs(recipe: type[Recipe]) -> dict[str, type]:
    """Returns the type of each knob that a recipe has besides those of every recipe."""
    types = typing.get_type_hints(recipe)
    of_all = {field.name for field in dataclasses.fields(Recipe)}
    return {field.name: types[field.name] for field in dataclasses.fields(recipe) if field.name not in of_all}


def _one_of(key: str, value: str, names: tuple[str, ...]) -> str:
    key, ok, allowed = one_of(key, value, names)
    if not ok:
        raise ConfigError(key, value, allowed)
    return value


def _parse_sparsity(values: dict[str, Any], options: dict[str, Any]) -> SparsityConfig:
    """Reads the group `sparsity`: keys of `SparsityConfig`, the recipe by its name, and the recipe's knobs."""
    if not isinstance(values, dict):
        raise ConfigError("sparsity", values, "must be a group of keys")
    values = dict(values)
    name = _one_of("sparsity.recipe", values.pop("recipe", Slices.name), tuple(RECIPES))
    own = _knobs(RECIPES[name])
    for knob in sorted({knob for recipe in RECIPES.values() for knob in _knobs(recipe)}):
        if (value := values.pop(knob, None)) is None:
            continue
        if knob not in own:
            has = f"it has {', '.join(own)}" if own else "it has none"
            raise ConfigError(f"sparsity.{knob}", value, f"is no knob of recipe {name!r}; {has}")
        options[knob] = _convert(f"sparsity.{knob}", value, own[knob])
    implementation = _convert("sparsity.implementation", values.pop("implementation", ""), str) or None
    if implementation:
        _one_of("sparsity.implementation", implementation, backends.NAMES)
    sparsity = _from_mapping(SparsityConfig, values, "sparsity.", ("implementation", *own))
    return dataclasses.replace(sparsity, recipe=RECIPES[name](implementation=implementation, **options))
