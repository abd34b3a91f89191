"""The model of the papers in float64 numpy, one loop a layer, written apart from the library's."""

import numpy as np

from tests.recipes.masked_dense_ffn import activate


def forward(params, config, tokens):
    """Logits float64[B, S, V] of tokens int[B, S]."""
    params = to_float64(params)
    x = params["embed"]["embedding"][tokens]
    for i in range(config.layers):
        layer = {k: v for k, v in params["layers"].items() if not isinstance(v, dict)}
        weights = {k: v[i] for group in ("attention", "ffn") for k, v in params["layers"][group].items()}
        x = x + attention(rms_norm(x, layer["attention_norm"][i], config), weights, config)
        ffn = mixture if config.experts else dense_ffn
        x = x + ffn(rms_norm(x, layer["ffn_norm"][i], config), weights, config)
    x = rms_norm(x, params["norm"], config)
    return x @ params.get("unembed", params["embed"]["embedding"]).T


def loss(params, config, windows):
    """Mean next-token cross-entropy of windows int[B, S + 1]."""
    return cross_entropy(forward(params, config, windows[:, :-1]), windows[:, 1:]).mean()


def cross_entropy(logits, targets):
    """-log softmax(logits)[target], of logits [..., V] and targets [...]."""
    logits = logits - logits.max(-1, keepdims=True)
    log_probabilities = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return -np.take_along_axis(log_probabilities, targets[..., None], -1)[..., 0]


def to_float64(tree):
    return {k: to_float64(v) if isinstance(v, dict) else np.asarray(v, np.float64) for k, v in tree.items()}


def rms_norm(x, scale, config):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_epsilon) * scale


def attention(x, weights, config):
    """One query head at a time; query head n reads key-value head n * kv_heads // heads."""
    b, s = x.shape[:2]
    h = config.head_dim or config.dim // config.heads
    q, k, v = ((x @ weights[name].T).reshape(b, s, -1, h) for name in "qkv")
    if config.qk_norm:
        q, k = rms_norm(q, weights["q_norm"], config), rms_norm(k, weights["k_norm"], config)
    future = np.triu(np.ones((s, s), bool), 1)
    heads = []
    for n in range(config.heads):
        shared = n * config.kv_heads // config.heads
        scores = rotate(q[:, :, n], config) @ rotate(k[:, :, shared], config).transpose(0, 2, 1) / np.sqrt(h)
        scores = np.exp(np.where(future, -np.inf, scores))
        heads.append(scores / scores.sum(-1, keepdims=True) @ v[:, :, shared])
    return np.concatenate(heads, -1) @ weights["o"].T


def rotate(x, config):
    """Hugging Face's convention: x cos + rotate_half(x) sin, cos and sin repeated over the two halves."""
    s, h = x.shape[1:]
    inverse_frequencies = 1 / config.rope_theta ** (np.arange(0, h, 2) / h)
    angles = np.outer(np.arange(s), np.concatenate([inverse_frequencies] * 2))
    rotated_half = np.concatenate([-x[..., h // 2 :], x[..., : h // 2]], -1)
    return x * np.cos(angles) + rotated_half * np.sin(angles)


def dense_ffn(x, weights, config, prefix=""):
    return activate(x @ weights[f"{prefix}up"].T, config.activation)[0] @ weights[f"{prefix}down"]


def mixture(x, weights, config):
    """Every expert computes every token, with a gate that is zero where it was not chosen."""
    out = np.zeros_like(x)
    if config.shared_expert_dim:
        out += dense_ffn(x, weights, config, "shared_")
    score = scores(x @ weights["router"].T / np.sqrt(config.dim), config)
    least = np.sort(score + weights["router_bias"], -1)[..., [-config.experts_per_token]]
    gates = score * (score + weights["router_bias"] >= least)
    gates /= gates.sum(-1, keepdims=True)
    for expert in range(config.experts):
        own = {name: np.split(weights[name], config.experts)[expert] for name in ("up", "down")}
        out += gates[..., [expert]] * dense_ffn(x, own, config)
    return out


def scores(logits, config):
    if config.router_scores == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    exponents = np.exp(logits - logits.max(-1, keepdims=True))
    return exponents / exponents.sum(-1, keepdims=True)
