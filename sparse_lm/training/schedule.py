"""Learning rate as a function of the step: a linear warm-up, then a cosine or a late decay."""

from __future__ import annotations

import optax

from sparse_lm.config import Config


def learning_rate(config: Config) -> optax.Schedule:
    """Makes the learning rate of each step, counted from 0.

    The warm-up rises linearly over `warmup_steps` and reaches the peak with its last step; no step
    is spent at a rate of zero. Then one of

    - `cosine`: half a cosine down to the final rate (1608.03983, without restarts);
    - `wsd` (warmup-stable-decay, 2404.06395): the peak until `decay_steps` before the end, then a
      straight line down to the final rate.

    The last step (`steps - 1`), and any after it, runs at the final rate, `final_fraction` of the peak.

    Returns:
      A function of the step (int or int32 array) that optax takes; the rate is float32.
    """
    options = config.optimizer
    peak, final = options.learning_rate, options.learning_rate * options.final_fraction
    after_warmup = config.steps - options.warmup_steps
    warmup = optax.linear_schedule(0.0, peak, options.warmup_steps)
    if options.schedule == "cosine":
        decay = optax.cosine_decay_schedule(peak, after_warmup, options.final_fraction)
    else:
        decay = optax.linear_schedule(peak, final, options.decay_steps, after_warmup - options.decay_steps)
    schedule = optax.join_schedules([warmup, decay], [options.warmup_steps])
    return lambda step: schedule(step + 1)  # rates are those reached at the end of a step
