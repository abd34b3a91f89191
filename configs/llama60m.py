"""59 M parameters: small enough for ablations with several seeds on one GPU.

    python -m sparse_lm.train --config=configs/llama60m.py --config.data.path=data/corpus

The data: `python -m sparse_lm.prepare_data` on a few hundred MB of text, with its default vocabulary of 32,768.

Hardware: one GPU. So narrow a model gains little or no time: with half of the steps sparse it takes 0.96 of the
time in which dense training has the same loss, or 1.02 by other text (one seed, half of this batch and vocabulary,
time_llama60m_h100.json in experiments/results).
Result: not measured at this batch and vocabulary. At half of each a run of 200 M tokens, with a quarter of the steps
sparse and the first layer dense as here, ends 0.003 nats below dense, the mean of three seeds. With half of the steps
sparse in all layers it ends 0.011 above (experiments/results/quality_long_wsd_h200.json).
"""

from sparse_lm import config as config_lib


def get_config():
    config = config_lib.default()
    config.steps = 4000
    config.batch_size = 64
    config.seq_len = 1024
    config.eval_every = 500
    config.checkpoint_every = 500

    config.model.dim = 512
    config.model.layers = 8
    config.model.heads = 8
    config.model.kv_heads = 8
    config.model.ffn_dim = 2048
    config.model.vocab_size = 32_768
    config.model.loss_chunk = 8192

    config.optimizer.learning_rate = 2e-3
    config.optimizer.warmup_steps = 200
    config.optimizer.schedule = "wsd"
    config.optimizer.decay_steps = 800

    config.sparsity.dense_layers = 1
    config.sparsity.start_step = 80
    config.sparsity.end_step = 1080
    return config
