"""Tasks of each of the harness's kinds on files that a test writes."""

import json

import numpy as np
import yaml

WORDS = ["def", "main", "return", "0", "\n", " ", ":", "ü", "xyz", "()"]
AGGREGATIONS = {"perplexity": "perplexity", "word_perplexity": "weighted_perplexity", "bits_per_byte": "bits_per_byte"}


def text(rng, least, most):
    """`least` to `most` words; a word is one to three tokens."""
    return "".join(rng.choice(WORDS, rng.integers(least, most + 1)))


def choices(rng, count, answer_words):
    """Questions with three answers each, for `multiple_choice`."""
    return [
        {"text": text(rng, 1, 60), "choices": [text(rng, 1, answer_words) for _ in range(3)], "gold": index % 3}
        for index in range(count)
    ]


def write_task(directory, name, documents, metrics, **config):
    """A task file and its data; each document is one question."""
    data = directory / f"{name}.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents), encoding="utf-8")
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(directory / "cache")},
        "test_split": "test",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{gold}}",
        "metric_list": [
            {"metric": metric, "aggregation": AGGREGATIONS.get(metric, "mean"), "higher_is_better": True}
            for metric in metrics
        ],
        **config,
    }
    (directory / f"{name}.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")


def write_choice_task(directory, name="choice", count=12, answer_words=8):
    options = dict(output_type="multiple_choice", doc_to_choice="{{choices}}", doc_to_target="gold")
    write_task(directory, name, choices(np.random.default_rng(0), count, answer_words), ["acc", "acc_norm"], **options)
