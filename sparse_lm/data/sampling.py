"""The second stage of a preparation, unless it is given a tokenizer: trains one on a sample of the text."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from sparse_lm.data import tokenizer as tokenizer_lib
from sparse_lm.data.corpus import Corpus, TextFiles
from sparse_lm.data.holdout import Split
from sparse_lm.data.tasks import Report
from sparse_lm.data.workspace import Workspace
from sparse_lm.files import replacing

FIELD = "text"


@dataclasses.dataclass(frozen=True)
class SampleTask:
    """Copies the documents of a corpus to a file of JSON lines."""

    path: Path
    corpus: Corpus

    @property
    def texts(self) -> Path:
        return self.path.with_suffix(".jsonl")

    def run(self, report: Report) -> dict[str, Any]:
        with replacing(self.texts) as partial, open(partial, "w") as file:
            file.writelines(json.dumps({FIELD: text}) + "\n" for text in self.corpus)
        report({"parts": 1})
        return {"parts": 1}


def train_tokenizer(split: Split, vocab_size: int, sample_size: int, workspace: Workspace) -> Tokenizer:
    """A tokenizer trained on about `sample_size` bytes of training documents, once for all runs."""
    path = workspace.path("tokenizer", split.sha256, split.train.stamp(), vocab_size, sample_size)
    if not path.exists():
        parts = split.sample(sample_size).parts()
        tasks = [SampleTask(workspace.path("sample", part.stamp()), part) for part in parts]
        workspace.run("sampling text for the tokenizer", tasks, "parts", len(tasks))
        texts = TextFiles(tuple(task.texts for task in tasks), FIELD)
        tokenizer = tokenizer_lib.train_tokenizer(texts, vocab_size)
        with replacing(path) as partial:
            tokenizer.save(str(partial))
        workspace.forget("sample")
    return tokenizer_lib.load_tokenizer(path)
