r"""Times the dense training step of `bench.step` in PyTorch: what a practitioner would run instead.

    python -m experiments.bench.step_torch --config=configs/llama1b.py \
        --output=experiments/results/step_torch_h200.json

The same model (squared ReLU, RMSNorm, rotary positions, untied unembedding), float32 master weights
under bfloat16 autocast, flash attention through `scaled_dot_product_attention`, a loss whose logits
exist a chunk at a time and are computed once, gradients clipped by global norm, fused AdamW, all of
the forward and backward under `torch.compile`. The output holds a row a model: this one is added.
"""

from __future__ import annotations

import datetime
import json
import pathlib
import statistics
import time

import torch
import torch.nn.functional as F
from absl import app, flags
from ml_collections import config_flags
from torch import Tensor, nn

from sparse_lm.config import Config, ModelConfig, parse
from sparse_lm.recipes import DENSE
from sparse_lm.training.telemetry import flops

config_flags.DEFINE_config_file("config", "configs/llama1b.py")
STEPS = flags.DEFINE_integer("steps", 30, "Timed steps.")
WARMUP = flags.DEFINE_integer("warmup", 5, "Steps before, the first of which compiles.")
MODE = flags.DEFINE_string("mode", "default", "Of torch.compile.")
OUTPUT = flags.DEFINE_string("output", None, "JSON file to write, or to add a row to.", required=True)


class Layer(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x))."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        width, kv_width = config.heads * config.head_width, config.kv_heads * config.head_width
        self.head_dim = config.head_width
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_epsilon)
        self.q = nn.Linear(config.dim, width, bias=False)
        self.k = nn.Linear(config.dim, kv_width, bias=False)
        self.v = nn.Linear(config.dim, kv_width, bias=False)
        self.o = nn.Linear(width, config.dim, bias=False)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_epsilon)
        self.up = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.down = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        q, k, v = (p(normed).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in (self.q, self.k, self.v))
        heads = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        x = x + self.o(heads.transpose(1, 2).flatten(-2))
        return x + self.down(F.relu(self.up(self.ffn_norm(x))).square())


class Llama(nn.Module):
    """Maps tokens [B, S] to the hidden states [B, S, D] that `unembed` turns into logits."""

    def __init__(self, config: ModelConfig, seq_len: int):
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList([Layer(config) for _ in range(config.layers)])
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_epsilon)
        self.unembed = nn.Parameter(torch.randn(config.vocab_size, config.dim) * config.dim**-0.5)
        half = config.head_width // 2
        frequencies = config.rope_theta ** (-torch.arange(half) / half)
        angles = torch.arange(seq_len)[:, None] * frequencies
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).bfloat16()
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.norm(x)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary positions, [B, heads, S, H]."""
    real, imaginary = x.float().chunk(2, dim=-1)
    return torch.cat([real * cos - imaginary * sin, imaginary * cos + real * sin], dim=-1).to(x.dtype)


class ChunkedCrossEntropy(torch.autograd.Function):
    """Mean cross entropy; gradients are made in the forward, a chunk of tokens at a time."""

    @staticmethod
    def forward(ctx, hidden: Tensor, matrix: Tensor, targets: Tensor, chunk: int) -> Tensor:
        weights = matrix.bfloat16()
        grad_hidden, grad_matrix = torch.empty_like(hidden), torch.zeros_like(matrix)
        loss = torch.zeros((), device=hidden.device)
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            chunk_loss, grad_logits = _loss_and_gradient(hidden[part] @ weights.T, targets[part], len(hidden))
            loss += chunk_loss
            grad_hidden[part] = grad_logits @ weights
            grad_matrix += grad_logits.T @ hidden[part]
        ctx.save_for_backward(grad_hidden, grad_matrix)
        return loss

    @staticmethod
    def backward(ctx, cotangent: Tensor):
        grad_hidden, grad_matrix = ctx.saved_tensors
        return grad_hidden * cotangent.to(grad_hidden.dtype), grad_matrix.mul_(cotangent), None, None


@torch.compile
def _loss_and_gradient(logits: Tensor, targets: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    logits = logits.float()
    log_normaliser = logits.logsumexp(-1, keepdim=True)
    losses = log_normaliser - logits.gather(1, targets[:, None])
    is_target = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    return losses.sum() / tokens, (((logits - log_normaliser).exp() - is_target.float()) / tokens).bfloat16()


def make_step(config: Config):
    """Makes the model's training step: windows int64[B, S + 1] -> loss."""
    model = Llama(config.model, config.seq_len).cuda()
    o = config.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(), o.learning_rate / o.warmup_steps, (o.beta1, o.beta2), o.epsilon, o.weight_decay, fused=True
    )
    compiled = torch.compile(model, mode=MODE.value)

    def step(windows: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            hidden = compiled(windows[:, :-1]).flatten(0, 1)
        targets = windows[:, 1:].flatten()
        loss = ChunkedCrossEntropy.apply(hidden.bfloat16(), model.unembed, targets, config.model.loss_chunk)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), o.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def main(_) -> None:
    config = parse(flags.FLAGS.config)
    for key in ("activation", "tie_embeddings", "qk_norm", "experts"):
        value, wanted = getattr(config.model, key), getattr(ModelConfig(), key)
        if value != wanted:
            raise app.UsageError(f"model.{key} = {value!r} must be {wanted!r}: this is the model here in PyTorch")
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    step = make_step(config)
    shape = (config.batch_size, config.seq_len + 1)
    batches = [torch.randint(config.model.vocab_size, shape, device="cuda") for _ in range(4)]
    times, losses, last = [], [], None
    begin = time.perf_counter()
    for number in range(WARMUP.value + STEPS.value):
        losses.append(step(batches[number % 4]))
        if number >= 1:  # the device has the next step to work on while the host waits for this one
            losses[number - 1].item()
            now = time.perf_counter()
            if number > WARMUP.value:
                times.append(now - last)
            last = now
        if number == 1:
            print(f"compiled in {now - begin:.0f} s", flush=True)
    seconds = statistics.median(times)
    device = torch.cuda.get_device_name()
    row = dict(
        device=device,
        date=datetime.date.today().isoformat(),
        torch=torch.__version__,
        batch_size=config.batch_size,
        seq_len=config.seq_len,
        dim=config.model.dim,
        layers=config.model.layers,
        vocab_size=config.model.vocab_size,
        mode=MODE.value,
        timed_steps=len(times),
        step_ms=1e3 * seconds,
        tokens_per_second=config.tokens_per_step / seconds,
        mfu=flops.utilisation(config, DENSE, config.tokens_per_step / seconds, device)["mfu"],
        peak_gib=torch.cuda.max_memory_allocated() / 2**30,
        loss=losses[-1].item(),
    )
    output = pathlib.Path(OUTPUT.value)
    rows = json.loads(output.read_text()) if output.exists() else []
    output.write_text(json.dumps([*rows, row], indent=1) + "\n")
    print(
        f"torch {row['step_ms']:.1f} ms, {row['tokens_per_second']:,.0f} tokens/s, MFU {row['mfu']:.1%}, "
        f"{row['peak_gib']:.1f} GiB, loss {row['loss']:.3f}"
    )


if __name__ == "__main__":
    app.run(main)
