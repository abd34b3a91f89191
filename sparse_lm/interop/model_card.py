"""README.md of an exported model: what it is, how it was trained, how to load it."""

from __future__ import annotations

from sparse_lm.config import Config
from sparse_lm.interop.hf_config import architecture

_TEMPLATE = """\
---
library_name: transformers
pipeline_tag: text-generation
tags: [sparse_lm]
---

# {architecture}, {parameters} parameters

Pre-trained with sparse_lm; float32 weights.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/to/this/directory")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/directory")
```

| | |
|---|---|
{rows}
"""


def model_card(config: Config, step: int, parameters: int, eval_loss: float | None) -> str:
    """Writes Markdown with the front matter that model hubs read.

    `parameters` counts the model's numbers. `eval_loss` is in nats per token, None if the step was not evaluated.
    """
    model, sparsity = config.model, config.sparsity
    trained = range(sparsity.phase.start, min(sparsity.phase.stop, step))  # sparsely
    phase = f"sparse in steps {trained.start}..{trained.stop - 1}"
    shared = f", and {model.shared_expert_dim} of all tokens" if model.shared_expert_dim else ""
    experts = f"{model.experts} experts of {model.expert_dim}, {model.experts_per_token} a token{shared}"
    neurons = experts if model.experts else model.ffn_dim
    but = f", but for the FFNs of the first {sparsity.dense_layers} layers" if sparsity.dense_layers else ""
    of_windows = f" over at most {windows} windows" if (windows := config.data.eval_windows) else ""
    rows = {
        "layers, width, neurons": f"{model.layers}, {model.dim}, {neurons} ({model.activation})",
        "heads, key-value heads": f"{model.heads}, {model.kv_heads}",
        "vocabulary": model.vocab_size,
        "training sequence": f"{config.seq_len} tokens",
        "steps": f"{step} of {config.steps}",
        "tokens seen": step * config.tokens_per_step,
        "recipe": f"{sparsity.recipe.name}, {phase}{but}" if trained else "dense",
        "started from": config.init_from or "random weights",
        "held-out loss": None if eval_loss is None else f"{eval_loss:.4f} nats per token{of_windows}",
    }
    return _TEMPLATE.format(
        architecture=architecture(model)["architectures"][0],
        parameters=f"{parameters:,}",
        rows="\n".join(f"| {name} | {value} |" for name, value in rows.items() if value is not None),
    )
