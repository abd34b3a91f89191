"""Models in EleutherAI's evaluation harness, lm-eval.

    text_model.py a model with its tokenizer, which scores sequences of many lengths in batches of few shapes
    adapter.py    the harness's interface on top of it
    tasks.py      tasks by name, and what a model scores in them

Only the last two import the harness, which is not installed everywhere: `sparse_lm.evaluate` imports
them when it is given tasks.
"""
