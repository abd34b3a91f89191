"""Models in EleutherAI's evaluation harness, lm-eval.

    text_model.py a model with its tokenizer, and sequences of many lengths as batches of few shapes
    scoring.py    log-likelihoods of the ends of sequences
    adapter.py    the harness's interface on top of these
    tasks.py      tasks by name, and what a model scores in them

Only the last two import the harness, which is not installed everywhere: `sparse_lm.evaluate` imports
them when it is given tasks.
"""
