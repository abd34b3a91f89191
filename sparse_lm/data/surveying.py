"""The first stage of a preparation: reads every part of a corpus once, for how much there is and what to hold out."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from sparse_lm.data.corpus import Corpus
from sparse_lm.data.holdout import Survey, measure
from sparse_lm.data.tasks import Report, save_json
from sparse_lm.data.workspace import Workspace
from sparse_lm.files import replacing


@dataclasses.dataclass(frozen=True)
class SurveyTask:
    """Measures a corpus and keeps the digests of its documents."""

    path: Path
    corpus: Corpus

    @property
    def digests(self) -> Path:
        """32 bytes a document, in order."""
        return self.path.with_suffix(".digests")

    def run(self, report: Report) -> dict[str, Any]:
        with replacing(self.digests) as partial, open(partial, "wb") as file:
            figures = measure(self.corpus, file.write)
        report({"parts": 1})
        return {"parts": 1, **figures}


def survey(corpus: Corpus, workspace: Workspace) -> Survey:
    """What `holdout.survey_corpus` finds, part by part, once for all runs."""
    path = workspace.path("surveyed", corpus.stamp())
    if not path.exists():
        parts = corpus.parts()
        tasks = [SurveyTask(workspace.path("survey", part.stamp()), part) for part in parts]
        figures = workspace.run("reading the text", tasks, "parts", len(tasks))
        digest = hashlib.sha256()
        for task in tasks:
            digest.update(task.digests.read_bytes())
        found = Survey(
            documents=sum(part["documents"] for part in figures),
            size=sum(part["size"] for part in figures),
            lowest=min(part["lowest"] for part in figures),
            highest=max(part["highest"] for part in figures),
            sha256=digest.hexdigest(),
        )
        save_json(path, dataclasses.asdict(found))
        workspace.forget("survey")
    return Survey(**json.loads(path.read_text()))
