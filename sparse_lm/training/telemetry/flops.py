"""FLOPs of a training step, and what share of the chip's peak they come to.

Conventions. A multiply-add is two FLOPs. Counted are the matrix products of the forward pass and, at twice the forward,
of the backward; nothing for recomputation (remat), element-wise work, norms, the optimizer, or the embedding look-up,
which is a gather. So per token a dense step costs 6 N for the N weights that multiply (attention projections, FFN,
unembedding: also when it is tied to the embedding), plus 6 times the multiply-adds of attention's two score products.
Of a mixture's experts those count that a token chose. Attention is causal: a query meets (seq_len + 1) / 2 keys on
average, and only those count, of whichever documents. (Counting all seq_len of them, as 2204.02311 does, would about
double that term.)

Two utilisations, each with its own denominator:

- `mfu`, dense-equivalent: the dense model's FLOPs over the chip's *dense* peak, whatever ran. Sparse
  steps may well exceed what dense ones can reach; that is the point of the number.
- `executed_utilisation`: the FLOPs that the recipe leaves, over the chip's *sparse* peak. That
  peak is advertised with the zeros that 2:4 skips counted as work, and executed FLOPs leave them
  out: dense or sparse, a step that never let the tensor cores wait would read 50 %.

Peaks are those of bfloat16 for every step, so that a step with FP8 may have more than 100 %.
"""

from __future__ import annotations

import statistics

from sparse_lm.config import Config, ModelConfig
from sparse_lm.ops.activations import matrices, rows_per_neuron
from sparse_lm.recipes import Recipe

_OF_W1 = ("up", "grad_input", "grad_up")
_A100 = 312e12  # A100 Tensor Core GPU data sheet, all form factors
_H100_SXM = 989e12  # H100 Tensor Core GPU data sheet, 1,979 with sparsity
PEAKS: dict[str, float] = {
    "NVIDIA A100-SXM4-40GB": _A100,
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA A100-PCIE-40GB": _A100,
    "NVIDIA A100 80GB PCIe": _A100,
    "NVIDIA A10": 125e12,  # A10 data sheet
    "NVIDIA A10G": 70e12,  # A10G data sheet
    "NVIDIA A30": 165e12,  # A30 data sheet
    "NVIDIA A40": 149.7e12,  # A40 data sheet
    "NVIDIA RTX A6000": 154.8e12,  # Ampere GA102 white paper, appendix
    "NVIDIA GeForce RTX 3090": 71e12,  # Ampere GA102 white paper: half rate with fp32 accumulation
    "NVIDIA L4": 121e12,  # L4 data sheet, 242 with sparsity
    "NVIDIA L40": 181e12,  # L40 data sheet
    "NVIDIA L40S": 362e12,  # L40S data sheet
    "NVIDIA RTX 6000 Ada Generation": 364.2e12,  # Ada white paper, appendix
    "NVIDIA GeForce RTX 4090": 165.2e12,  # Ada white paper, appendix: fp32 accumulation
    "NVIDIA H100 80GB HBM3": _H100_SXM,
    "NVIDIA H100 PCIe": 756e12,  # H100 PCIe data sheet, 1,513 with sparsity
    "NVIDIA H100 NVL": 835e12,  # H100 data sheet, 1,671 with sparsity
    "NVIDIA H200": _H100_SXM,  # H200 data sheet: the same die as the H100 SXM
    "NVIDIA H200 NVL": 835e12,  # H200 data sheet, 1,671 with sparsity
    "NVIDIA GH200 480GB": _H100_SXM,  # GH200 data sheet, 1,979 with sparsity
    "NVIDIA B200": 2250e12,  # Blackwell architecture brief (HGX B200), 4,500 with sparsity
}
"""FLOP/s of one chip for dense bfloat16 products with float32 accumulation, at boost clock.

By JAX's `device_kind`, which is the driver's product name. Data sheets print twice as much in large type ("1,979
teraFLOPS, with sparsity"): 2:4 doubles the rate of every tensor core listed here, and the zeros it skips count as work.
"""


def dense_flops_per_token(config: Config) -> float:
    """Counts the FLOPs of a dense training step, per token; of a mixture's FFN those of what a token meets."""
    model = config.model
    projections = 2 * model.dim * (model.heads + model.kv_heads) * model.head_width  # query, output; key, value
    scores = 2 * model.heads * model.head_width * (config.seq_len + 1) / 2  # queries x keys; weights x values
    shared_and_router = matrices(model.activation) * model.shared_expert_dim + model.experts if model.experts else 0
    ffn = _recipes_weights(model) + shared_and_router * model.dim
    return 6 * (model.layers * (projections + scores + ffn) + model.vocab_size * model.dim)


def executed_flops_per_token(config: Config, recipe: Recipe) -> float:
    """Counts the FLOPs of a training step whose sparse FFNs a recipe computes, per token."""
    work = recipe.work()
    # When dense, products of W1 are as large as those of W2, and with a gate twice as large.
    rows = rows_per_neuron(config.model.activation)
    share = statistics.fmean(work.values(), [rows if product in _OF_W1 else 1 for product in work])
    dense_share = config.sparsity.dense_layers / config.model.layers
    saved = (1 - dense_share) * (1 - share) * 6 * config.model.layers * _recipes_weights(config.model)
    return dense_flops_per_token(config) - saved


def utilisation(
    config: Config, recipe: Recipe, tokens_per_second: float | None, device_kind: str
) -> dict[str, float | None]:
    """Computes both utilisations of a run's devices, with their denominators in FLOP/s, as the metrics name them.

    `tokens_per_second` is that of all devices together, None if not known yet; `device_kind` is JAX's name of each.
    """
    peak = PEAKS.get(device_kind)
    if tokens_per_second is None or peak is None:
        return {"mfu": None, "executed_utilisation": None}
    speed_of_device = tokens_per_second / config.mesh.devices
    return {
        "mfu": speed_of_device * dense_flops_per_token(config) / peak,
        "mfu_peak": peak,
        "executed_utilisation": speed_of_device * executed_flops_per_token(config, recipe) / (2 * peak),
        "executed_peak": 2 * peak,
    }


def _recipes_weights(model: ModelConfig) -> int:
    """Counts the weights of a layer that a token meets and whose products a recipe computes."""
    neurons = model.experts_per_token * model.expert_dim if model.experts else model.ffn_dim
    return matrices(model.activation) * neurons * model.dim
